// Mamba-2: the laws that all recurrences keep, and what is its own: the z gate, D, the time step's limits, its door.
#include "replayssm/ops/mamba2.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "replayssm/core/error.h"
#include "tests/bad_input.h"
#include "tests/mamba2_rig.h"
#include "tests/recurrence_laws.h"

namespace replayssm::test {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(Mamba2, RecurrenceLaws, Mamba2Family<>);

// With and without D and z: each way to compute the outputs against the oracle, the exact readout with the step's bits.
TEST(Mamba2, SkipAndGateMatchOracle) {
  Device device(2);
  const Mamba2Shape shape = {6, 2, 24, 32};
  for (const bool use_d : {false, true})
    for (const bool use_z : {false, true}) {
      SCOPED_TRACE(testing::Message() << "d " << use_d << " z " << use_z);
      std::mt19937_64 random(21);
      Mamba2Rig rig(shape, 4, 4, 2, device, {.use_d = use_d});
      const Mamba2Inputs inputs(shape, 70, random, -0.3f, 0.0f, use_z, use_d);
      ref::Mamba2Sequence oracle = Mamba2Family<>::oracle(shape);
      const std::vector<double> expected = oracle_outputs(inputs, oracle, 0, 70);
      std::vector<float> outs[3], exact;
      for (int t = 0; t < 70; t += 2) {
        for (int i : {0, 1}) {
          const std::vector<float> out = rig.step({0}, inputs.tokens(t + i));
          outs[0].insert(outs[0].end(), out.begin(), out.end());
        }
        const std::vector<float> out = rig.decode({1}, 2, inputs.tokens(t), Readout::kDirect);
        outs[1].insert(outs[1].end(), out.begin(), out.end());
        const std::vector<float> exact_out = rig.decode({2}, 2, inputs.tokens(t), Readout::kExact);
        exact.insert(exact.end(), exact_out.begin(), exact_out.end());
        for (int slot : {1, 2}) rig.commit(slot, 2);
      }
      outs[2] = rig.prefill({3}, {0, 70}, inputs.tokens());
      for (const std::vector<float>& out : outs) EXPECT_LE(relative_error(out, expected), kFloat32Bound);
      EXPECT_TRUE(same_bits(exact, outs[0]));
    }
}

// Inputs that lie in rows of one projection, and a checkpoint that a row reads but does not write.
TEST(Mamba2, StridesAndSeparateCheckpoints) {
  Device device(2);
  const Mamba2Shape shape = {4, 2, 16, 32};
  constexpr int kTokens = 9;
  std::mt19937_64 random(22);
  const Mamba2Inputs inputs(shape, kTokens, random, -0.5f, 0.0f, /*use_z=*/true);
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
  Mamba2Rig dense(shape, 2, 4, 1, device), rig(shape, 2, 4, 1, device);
  EXPECT_TRUE(same_bits(dense.prefill({0}, {0, kTokens}, inputs.tokens()), rig.prefill({0}, {0, kTokens}, strided)));
  EXPECT_TRUE(same_bits(dense.slot_state(0), rig.slot_state(0)));
  const std::vector<float> source(rig.slot_state(0).begin(), rig.slot_state(0).end());
  const int32_t slot = 0, history = 0, checkpoint_out = 1;
  const int64_t base = kTokens;
  std::vector<float> out = poisoned(rig.out_size());
  mamba2_step({rig.state(), {1, &slot, &base, &history, &slot, &checkpoint_out}, rig.heads(), strided, out.data()},
              device, rig.memory.workspace());
  EXPECT_TRUE(same_bits(rig.slot_state(0), source));
  EXPECT_TRUE(same_bits(dense.step({0}, inputs.tokens()), out));
  EXPECT_TRUE(same_bits(dense.slot_state(0), rig.slot_state(1)));
}

// Law 8: the byte and element offsets of the last slots pass 2^31; the pool is a mapping of which a few pages exist.
TEST(Mamba2, SlotsBeyond2To31Elements) {
  Device device(2);
  const Mamba2Shape shape = {128, 8, 64, 128};
  constexpr int kSlots = 2200, kWindow = 127, kCapacity = 128, kSlot = 2199;
  const int64_t state_floats = int64_t{128} * 64 * 128, x_floats = int64_t{128} * kCapacity * 64;
  const int64_t b_floats = int64_t{8} * kCapacity * 128, dt_floats = int64_t{128} * kCapacity;
  const int64_t bytes = 4 * kSlots * (state_floats + x_floats + b_floats + 2 * dt_floats);
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, /*fd=*/-1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no " << bytes << " bytes of addresses";
  Mamba2State state = {shape,   kSlots,  kSlots,  kWindow, kCapacity, static_cast<float*>(memory),
                       nullptr, nullptr, nullptr, nullptr};
  state.ring_x = state.checkpoint + kSlots * state_floats;
  state.ring_b = state.ring_x + kSlots * x_floats;
  state.ring_dt = state.ring_b + kSlots * b_floats;
  state.ring_decay = state.ring_dt + kSlots * dt_floats;
  std::mt19937_64 random(23);
  const Mamba2Inputs inputs(shape, 3, random);
  Mamba2Rig small(shape, 1, kWindow, 1, device);
  const int32_t slot = kSlot;
  int32_t history = 0;
  const int64_t base = 0;
  const StateRows rows = {1, &slot, &base, &history, &slot, &slot};
  std::vector<float> out = poisoned(small.out_size());
  for (; history < 3; ++history) {
    mamba2_decode({state, rows, small.heads(), 1, inputs.tokens(history), Readout::kDirect, out.data()}, device,
                  small.memory.workspace());
    EXPECT_TRUE(same_bits(small.decode({0}, 1, inputs.tokens(history), Readout::kDirect), out));
    small.commit(0, 1);
  }
  mamba2_materialise({state, rows}, device, small.memory.workspace());
  small.materialise(0, 0, 3);
  EXPECT_TRUE(same_bits(small.slot_state(0), {state.checkpoint + kSlot * state_floats, size_t(state_floats)}));
  munmap(memory, bytes);
}

TEST(Mamba2, GatesMatchTheFormula) {
  Device device(2);
  std::mt19937_64 random(16);
  constexpr int kTokens = 40, kHeads = 19, kStride = 23;
  const std::vector<float> projected = random_normal(random, kTokens * kStride, 12.0f);
  const std::vector<float> dt_bias = random_normal(random, kHeads);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const auto& [least, most] : {std::pair(0.0f, infinity), std::pair(0.01f, 5.0f), std::pair(0.0f, 0.1f)}) {
    std::vector<float> dt = poisoned(kTokens * kHeads);
    mamba2_gates({kTokens, kHeads, projected.data(), kStride, dt_bias.data(), least, most, dt.data()}, device);
    std::vector<double> expected;
    for (int t = 0; t < kTokens; ++t)
      for (int h = 0; h < kHeads; ++h) {
        expected.push_back(ref::mamba2_gate(projected[t * kStride + h], dt_bias[h], least, most));
        // One by one too: the small ones, which make the slow heads, vanish in a norm.
        EXPECT_LE(relative_error(std::vector(1, dt[t * kHeads + h]), std::vector(1, expected.back())), kFloat32Bound)
            << projected[t * kStride + h] + dt_bias[h];
      }
    EXPECT_LE(relative_error(dt, expected), kFloat32Bound);
  }
}

TEST(Mamba2, GatesKeepWhatIsNoNumber) {
  Device device(1);
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> dt = {nan, infinity, -infinity, 1.0f, 88.0f, -200.0f, 20.5f}, dt_bias(dt.size(), 0.0f);
  std::vector<float> out = poisoned(dt.size());
  mamba2_gates({1, int(dt.size()), dt.data(), int64_t(dt.size()), dt_bias.data(), 0.0f, infinity, out.data()}, device);
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], infinity);
  EXPECT_EQ(out[2], 0.0f);
  EXPECT_GT(out[3], 1.0f);
  EXPECT_EQ(out[4], 88.0f);
  EXPECT_GE(out[5], 0.0f);
  EXPECT_EQ(out[6], 20.5f);
  mamba2_gates({1, int(dt.size()), dt.data(), int64_t(dt.size()), dt_bias.data(), 0.5f, 2.0f, out.data()}, device);
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], 2.0f);
  EXPECT_EQ(out[2], 0.5f);
}

TEST(Mamba2, RefusesWhatTheContractForbids) {
  Device device(1);
  const Mamba2Shape shape = {2, 1, 8, 32};
  std::mt19937_64 random(17);
  Mamba2Rig rig(shape, 2, 4, 2, device);
  const Mamba2Inputs inputs(shape, 8, random);
  std::vector<float> out(8 * 16);
  const auto decode = [&](int T, std::vector<int> slots = {0}) {
    mamba2_decode({rig.state(), rig.rows(slots), rig.heads(), T, inputs.tokens(), Readout::kExact, out.data()}, device,
                  rig.memory.workspace());
  };
  expect_refusal([&] { decode(0); }, "mamba2_decode", "1 to 4 tokens", "got 0");
  expect_refusal([&] { decode(3); }, "at most 2 tokens a row");
  expect_refusal([&] { decode(5); }, "got 5");
  expect_refusal([&] { decode(1, {2}); }, "slot of 0 to 1", "got 2");
  expect_refusal([&] { decode(1, {-2}); }, "got -2");
  EXPECT_NO_THROW(decode(1, {kPaddingSlot}));
  rig.cursors[0].history = 5;
  expect_refusal([&] { decode(1); }, "history", "got 5");
  rig.cursors[0] = {-1, 0};
  expect_refusal([&] { decode(1); }, "base", "got -1");
  for (const Mamba2Shape& bad : {Mamba2Shape{3, 2, 8, 32}, Mamba2Shape{0, 0, 8, 32}})
    expect_refusal([&] { check_shape(bad); }, "heads to be a multiple of groups");
  for (const Mamba2Shape& bad : {Mamba2Shape{2, 1, 12, 32}, Mamba2Shape{2, 1, 0, 32}, Mamba2Shape{2, 1, 1032, 32}})
    expect_refusal([&] { check_shape(bad); }, "head size of 8 to 1024, a multiple of 8");
  for (const Mamba2Shape& bad : {Mamba2Shape{2, 1, 8, 24}, Mamba2Shape{2, 1, 8, 272}, Mamba2Shape{2, 1, 8, 0}})
    expect_refusal([&] { check_shape(bad); }, "state size of 16 to 256, a multiple of 16");
  const auto step = [&](const Mamba2Heads& heads, const Mamba2Tokens& tokens, std::span<std::byte> workspace) {
    mamba2_step({rig.state(), rig.rows({1}), heads, tokens, out.data()}, device, workspace);
  };
  expect_refusal([&] { step(rig.heads(), inputs.tokens(), rig.memory.workspace().first(64)); }, "workspace", "got 64");
  expect_refusal([&] { step({}, inputs.tokens(), rig.memory.workspace()); }, "mamba2_step", "a_log");
  Mamba2Tokens tokens = inputs.tokens();
  tokens.dt = nullptr;
  expect_refusal([&] { step(rig.heads(), tokens, rig.memory.workspace()); }, "null pointer");
  tokens = inputs.tokens();
  tokens.z = tokens.x;
  tokens.z_stride = 15;
  expect_refusal([&] { step(rig.heads(), tokens, rig.memory.workspace()); }, "stride of at least 16 elements for z",
                 "got 15");
  tokens = inputs.tokens();
  tokens.c_stride = 31;
  expect_refusal([&] { step(rig.heads(), tokens, rig.memory.workspace()); }, "strides", "31");
  const std::vector<int32_t> falling = {0, 2, 1}, late = {1, 2, 3};
  for (const std::vector<int32_t>* begin : {&falling, &late})
    expect_refusal(
        [&] {
          mamba2_prefill(
              {rig.state(), rig.rows({kPaddingSlot, 1}), rig.heads(), begin->data(), inputs.tokens(), out.data()},
              device, rig.memory.workspace());
        },
        "mamba2_prefill", "token_begin");
  const auto gates = [&](float least, float most) {
    mamba2_gates({1, 2, inputs.dt.data(), 2, inputs.dt.data(), least, most, out.data()}, device);
  };
  expect_refusal([&] { gates(1.0f, 0.5f); }, "time_step_min <= time_step_max", "got 1 and 0.5");
  expect_refusal([&] { gates(-1.0f, 0.5f); }, "time_step_min");
  expect_refusal([&] { gates(std::numeric_limits<float>::quiet_NaN(), 0.5f); }, "time_step_min");
}

}  // namespace
}  // namespace replayssm::test
