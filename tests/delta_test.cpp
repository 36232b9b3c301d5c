// The delta rule: the laws that all recurrences keep, for one gate a head (GDN) and for a gate a channel (KDA), and
// what is its own: its door.
#include <gtest/gtest.h>

#include <memory>

#include "replayssm/core/error.h"
#include "tests/delta_rig.h"
#include "tests/recurrence_laws.h"

namespace replayssm::test {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(Gdn, RecurrenceLaws, DeltaFamily<false>);
INSTANTIATE_TYPED_TEST_SUITE_P(Kda, RecurrenceLaws, DeltaFamily<true>);

// Law 8: a slot whose offsets, in elements, pass 2^31 in every large array. The memory is mapped and never filled.
void offsets_past_2_to_31(const DeltaShape& shape) {
  Device device(2);
  constexpr int kWindow = 1000, kSlot = 4200;
  DeltaRig rig(shape, 1, kWindow, 1, device);
  DeltaState far = rig.state();
  far.slots = far.checkpoints = kSlot + 1;
  std::vector<std::unique_ptr<SparseFloats>> arrays;
  rig.visit(far, [&](const HostArray<float>& one_slot, float*& pointer) {
    if (one_slot.size() == 0) return;
    arrays.push_back(std::make_unique<SparseFloats>(one_slot.size() * (kSlot + 1)));
    pointer = arrays.back()->data();
  });
  std::mt19937_64 random(19);
  const DeltaInputs inputs(shape, 4, random);
  const int32_t slot = kSlot;
  for (int t = 0; t < 4; ++t) {
    const int64_t base = rig.cursors[0].base;
    const int32_t history = rig.cursors[0].history;
    std::vector<float> out = poisoned(rig.out_size());
    const StateRows rows = {1, &slot, &base, &history, &slot, &slot};
    if (t == 3)
      delta_step({far, rows, inputs.tokens(t), out.data()}, device, rig.memory.workspace());
    else
      delta_decode({far, rows, 1, inputs.tokens(t), Readout::kDirect, out.data()}, device, rig.memory.workspace());
    EXPECT_TRUE(same_bits(
        out, t == 3 ? rig.step({0}, inputs.tokens(t)) : rig.decode({0}, 1, inputs.tokens(t), Readout::kDirect)));
    rig.commit(0, 1);
  }
  EXPECT_TRUE(same_bits(rig.slot_state(0), {far.checkpoint + kSlot * rig.state_size(), rig.state_size()}));
}

TEST(Delta, OffsetsPast2To31) {
  for (int gate_size : {1, 256}) {
    SCOPED_TRACE(gate_size);
    offsets_past_2_to_31({2, 2, 256, 1024, gate_size});
  }
}

TEST(Delta, RefusesWhatTheContractForbids) {
  Device device(1);
  const DeltaShape shape = {2, 1, 32, 8, 1};
  std::mt19937_64 random(17);
  DeltaRig rig(shape, 2, 4, 2, device);
  const DeltaInputs inputs(shape, 8, random);
  std::vector<float> out(8 * 16);
  const auto decode = [&](int T, std::vector<int> slots = {0}) {
    delta_decode({rig.state(), rig.rows(slots), T, inputs.tokens(), Readout::kExact, out.data()}, device,
                 rig.memory.workspace());
  };
  EXPECT_THROW(decode(0), Error);
  EXPECT_THROW(decode(3), Error);  // more than the ring has room for
  EXPECT_THROW(decode(5), Error);  // more than the window
  EXPECT_THROW(decode(1, {2}), Error);
  EXPECT_THROW(decode(1, {-2}), Error);
  EXPECT_NO_THROW(decode(1, {kPaddingSlot}));
  rig.cursors[0].history = 5;
  EXPECT_THROW(decode(1), Error);
  rig.cursors[0] = {0, 0};
  rig.flush_limits = {0, 1};
  EXPECT_THROW(decode(1), Error);
  EXPECT_NO_THROW(decode(2, {1})) << "a limit under the tokens of a step is none too small";
  rig.flush_limits.clear();
  rig.cursors[0] = {-1, 0};
  EXPECT_THROW(decode(1), Error);
  for (const DeltaShape& bad :
       {DeltaShape{3, 2, 32, 8, 1}, DeltaShape{2, 1, 24, 8, 1}, DeltaShape{2, 1, 272, 8, 1}, DeltaShape{2, 1, 32, 6, 1},
        DeltaShape{0, 0, 32, 8, 1}, DeltaShape{2, 1, 32, 8, 16}, DeltaShape{2, 1, 32, 8, 0}})
    EXPECT_THROW(check_shape(bad), Error);
  const DeltaStep small = {rig.state(), rig.rows({1}), inputs.tokens(), out.data()};
  EXPECT_THROW(delta_step(small, device, rig.memory.workspace().first(64)), Error);
}

}  // namespace
}  // namespace replayssm::test
