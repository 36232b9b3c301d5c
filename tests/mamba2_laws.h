// What Mamba-2 must keep beyond recurrence_laws.h, for its family in any memory: the z gate, D, strides.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tests/mamba2_rig.h"
#include "tests/recurrence_laws.h"

namespace replayssm::test {

// With and without D and z: each way to compute the outputs against the oracle, the exact readout with the step's bits.
template <typename Family>
void skip_and_gate_match_oracle() {
  auto device = Family::Memory::device(2);
  const Mamba2Shape shape = {6, 2, 24, 32};
  for (const bool use_d : {false, true})
    for (const bool use_z : {false, true}) {
      SCOPED_TRACE(testing::Message() << "d " << use_d << " z " << use_z);
      std::mt19937_64 random(21);
      typename Family::Rig rig(shape, 4, 4, 2, device, {.use_d = use_d});
      const typename Family::Inputs inputs(shape, 70, random, -0.3f, 0.0f, use_z, use_d);
      ref::Mamba2Sequence oracle = Family::oracle(shape);
      const std::vector<double> expected = oracle_outputs(inputs, oracle, 0, 70);
      std::vector<float> outs[3], exact;
      for (int t = 0; t < 70; t += 2) {
        for (int i : {0, 1}) append(outs[0], rig.step({0}, inputs.tokens(t + i)));
        append(outs[1], rig.decode({1}, 2, inputs.tokens(t), Readout::kDirect));
        append(exact, rig.decode({2}, 2, inputs.tokens(t), Readout::kExact));
        for (int slot : {1, 2}) rig.commit(slot, 2);
      }
      outs[2] = rig.prefill({3}, {0, 70}, inputs.tokens());
      for (const std::vector<float>& out : outs) EXPECT_LE(relative_error(out, expected), Family::Memory::kOutBound);
      EXPECT_TRUE(same_bits(exact, outs[0]));
      if (Family::Memory::kPrefillSteps) {
        EXPECT_TRUE(same_bits(outs[2], outs[0]));
      }
    }
}

// Inputs that lie in rows of one projection, and a checkpoint that a row reads but does not write.
template <typename Family>
void strides_and_separate_checkpoints() {
  auto device = Family::Memory::device(2);
  const Mamba2Shape shape = {4, 2, 16, 32};
  constexpr int kTokens = 9;
  std::mt19937_64 random(22);
  const typename Family::Inputs inputs(shape, kTokens, random, -0.5f, 0.0f, /*use_z=*/true);
  constexpr int kInner = 64, kKeys = 64, kRow = 2 * kInner + 2 * kKeys + 5;
  std::vector<float> row = poisoned(kTokens * kRow);
  for (int t = 0; t < kTokens; ++t) {
    std::copy_n(&inputs.z[t * kInner], kInner, &row[t * kRow]);
    std::copy_n(&inputs.x[t * kInner], kInner, &row[t * kRow + kInner]);
    std::copy_n(&inputs.b[t * kKeys], kKeys, &row[t * kRow + 2 * kInner]);
    std::copy_n(&inputs.c[t * kKeys], kKeys, &row[t * kRow + 2 * kInner + kKeys]);
  }
  const Mamba2Tokens strided = {
      &row[kInner], &row[2 * kInner], &row[2 * kInner + kKeys], inputs.dt.data(), row.data(), kRow, kRow, kRow, kRow};
  typename Family::Rig dense(shape, 2, 4, 1, device), rig(shape, 2, 4, 1, device);
  EXPECT_TRUE(same_bits(dense.prefill({0}, {0, kTokens}, inputs.tokens()), rig.prefill({0}, {0, kTokens}, strided)));
  EXPECT_TRUE(same_bits(dense.slot_state(0), rig.slot_state(0)));
  const std::vector<float> source(rig.slot_state(0).begin(), rig.slot_state(0).end());
  rig.checkpoint_out[0] = 1;
  EXPECT_TRUE(same_bits(dense.step({0}, inputs.tokens()), rig.step({0}, strided)));
  EXPECT_TRUE(same_bits(rig.slot_state(0), source));
  EXPECT_TRUE(same_bits(dense.slot_state(0), rig.slot_state(1)));
  EXPECT_TRUE(same_bits(dense.decode({0}, 1, inputs.tokens(), Readout::kDirect),
                        rig.decode({0}, 1, strided, Readout::kDirect)));
}

}  // namespace replayssm::test
