// Mamba-2: the laws that all recurrences keep, and what is its own: the z gate, D, its door.
#include "replayssm/ops/mamba2.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "replayssm/core/error.h"
#include "tests/bad_input.h"
#include "tests/mamba2_laws.h"

namespace replayssm::test {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(Mamba2, RecurrenceLaws, Mamba2Family<>);

TEST(Mamba2, SkipAndGateMatchOracle) {
  skip_and_gate_match_oracle<Mamba2Family<>>();
}

TEST(Mamba2, StridesAndSeparateCheckpoints) {
  strides_and_separate_checkpoints<Mamba2Family<>>();
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
  rig.cursors[0] = {0, 0};
  rig.flush_limits = {0, 1};
  expect_refusal([&] { decode(1); }, "flush limit", "got 0");
  EXPECT_NO_THROW(decode(2, {1})) << "a limit under the tokens of a step is none too small";
  rig.flush_limits.clear();
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
}

}  // namespace
}  // namespace replayssm::test
