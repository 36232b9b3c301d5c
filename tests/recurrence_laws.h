// The numbers' laws, which every recurrence must keep, as one list of cases: replay is exact, exponents are not
// positive, heads map right, every length works, batches do not matter. A family says how it is run:
//
//   struct Family {
//     using Memory;                                                where the states lie: HostMemory or CudaMemory
//     using Shape, Inputs, Rig, Oracle;                            as in delta_rig.h, mamba2_rig.h and tests/ref
//     static constexpr int kValueUnit;                             what value sizes are multiples of, at most 8
//     static std::vector<NamedShape<Shape>> shapes();              what every law that walks shapes walks
//     static Shape shape(int heads, int groups, int key_size, int value_size);
//     static Oracle oracle(const Shape&);                          its member `state` is [heads, values, keys]
//     static std::vector<Corruption<Rig>> corruptions();           of one stored number of slot 0 each
//   };
//   INSTANTIATE_TYPED_TEST_SUITE_P(Name, RecurrenceLaws, Family);
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "replayssm/ops/rows.h"
#include "tests/arrays.h"
#include "tests/recurrent_rig.h"
#include "tests/tolerance.h"
#include "tests/walks.h"

namespace replayssm::test {

inline std::span<const float> row_of(std::span<const float> out, size_t row, size_t size) {
  return out.subspan(row * size, size);
}

inline bool is_finite(std::span<const float> values) {
  return std::ranges::all_of(values, [](float x) { return std::isfinite(x); });
}

inline bool is_positive_zero(std::span<const float> values) {
  return std::ranges::all_of(values, [](float x) { return std::bit_cast<uint32_t>(x) == 0; });
}

inline void append(std::vector<float>& all, std::span<const float> values) {
  all.insert(all.end(), values.begin(), values.end());
}

// The oracle's outputs for tokens begin .. end-1 of `inputs`, one after the other.
template <typename Inputs, typename Oracle>
std::vector<double> oracle_outputs(const Inputs& inputs, Oracle& oracle, int begin, int end) {
  std::vector<double> expected;
  for (int t = begin; t < end; ++t) {
    const std::vector<double> token = inputs.step(oracle, t);
    expected.insert(expected.end(), token.begin(), token.end());
  }
  return expected;
}

// A walk of replay_beside_step: `tokens` tokens by windows of 1 .. max_tokens.
struct ReplayWalk {
  int window = 0;
  int max_tokens = 1;
  int tokens = 0;
  uint64_t seed = 0;
  int look_every = 1;       // windows between looks at the checkpoints
  bool has_oracle = true;   // without: direct outputs are held to the conventional ones
  bool has_limits = false;  // rows have flush limits, which change
  RigOptions options = {};  // of the rigs that replay
};

// Replay with random windows, acceptances and orders of the rows, a padding row among them, beside conventional
// decoding of what was accepted: checkpoints after flushes and exact outputs have conventional bits, direct outputs the
// oracle's bound.
template <typename Family>
class ReplayBesideStep {
 public:
  ReplayBesideStep(const typename Family::Shape& shape, const ReplayWalk& walk)
      : shape_(shape),
        walk_(walk),
        device_(Family::Memory::device(2)),
        random_(walk.seed),
        window_(std::min(walk.window, Family::Memory::kMaxRecords - walk.max_tokens)),
        direct_(shape, kRows, window_, walk.max_tokens, device_, walk.options),
        exact_(shape, kRows, window_, walk.max_tokens, device_, walk.options),
        conventional_(shape, kRows + 1, window_, walk.max_tokens, device_),
        oracles_(kRows, Family::oracle(walk.has_oracle ? shape : Family::shape(1, 1, 16, 8))) {}

  void run() {
    const double bound = walk_.options.form == CheckpointForm::kPlanes ? kBf16Bound : Family::Memory::kOutBound;
    std::vector<int> slots = {0, 1, 2, kPaddingSlot};
    int64_t flushes = 0;
    for (int done = 0, windows = 0; done < walk_.tokens; ++windows) {
      const int T = std::uniform_int_distribution<int>(1, walk_.max_tokens)(random_);
      std::ranges::shuffle(slots, random_);
      if (walk_.has_limits) draw_limits();
      const Inputs draft(shape_, static_cast<int64_t>(slots.size()) * T, random_, -0.4f, 0.0f);
      const bool is_looked_at = windows % walk_.look_every == 0;
      std::vector<float> before;
      if (is_looked_at) append(before, view_of(direct_).checkpoint);
      std::vector<bool> flushed;
      for (int slot = 0; slot < kRows; ++slot) flushed.push_back(direct_.will_flush(slot, T));
      flushes += std::ranges::count(flushed, true);
      const std::vector<float> out = direct_.decode(slots, T, draft.tokens(), Readout::kDirect);
      const std::vector<float> exact_out = exact_.decode(slots, T, draft.tokens(), Readout::kExact);
      if (is_looked_at) {
        ASSERT_NO_FATAL_FAILURE(check_states(before, flushed));
      }
      // Of a whole call: a single token's output may be small against what it is summed from.
      std::vector<double> expected;
      for (size_t b = 0; b < slots.size(); ++b) {
        const int accepted = std::uniform_int_distribution<int>(0, T)(random_);
        const std::vector<float> conventional = step(draft, static_cast<int>(b) * T, T, slots[b], accepted, expected);
        ASSERT_TRUE(same_bits(row_of(exact_out, b, conventional.size()), conventional)) << "token " << done;
        if (slots[b] == kPaddingSlot) continue;
        direct_.commit(slots[b], accepted);
        exact_.commit(slots[b], accepted);
        if (slots[b] == 0) done += std::max(accepted, 1);
      }
      ASSERT_LE(relative_error(out, expected), bound) << "token " << done;
    }
    EXPECT_GT(flushes, 0);
  }

 private:
  using Rig = typename Family::Rig;
  using Inputs = typename Family::Inputs;
  static constexpr int kRows = 3;

  static const Rig& view_of(const Rig& rig) { return rig; }

  // From one record, which is under a step's tokens, to more than the ring may hold.
  void draw_limits() {
    direct_.flush_limits.resize(kRows, window_);
    for (int32_t& limit : direct_.flush_limits)
      if (random_() % 2 == 0) limit = std::uniform_int_distribution<int32_t>(1, window_ + walk_.max_tokens)(random_);
    exact_.flush_limits = direct_.flush_limits;
  }

  // Law 3: bit-identical after a flush, untouched between flushes.
  void check_states(const std::vector<float>& before, const std::vector<bool>& flushed) {
    for (int slot = 0; slot < kRows; ++slot) {
      const std::span<const float> now = view_of(direct_).slot_state(slot);
      const std::span<const float> then =
          flushed[slot] ? view_of(conventional_).slot_state(slot) : row_of(before, slot, now.size());
      ASSERT_TRUE(same_bits(now, then)) << "slot " << slot;
      ASSERT_TRUE(same_bits(view_of(exact_).slot_state(slot), now)) << "slot " << slot;
    }
  }

  // Conventional decoding of a row's window on a copy of its slot, of which the first `accepted` tokens are for good.
  // Returns its outputs, which for a padding row are zeros, and appends what is expected of direct ones.
  std::vector<float> step(const Inputs& draft, int first, int count, int slot, int accepted,
                          std::vector<double>& expected) {
    std::vector<float> outs;
    if (slot == kPaddingSlot) {
      outs.resize(count * conventional_.out_size(), 0.0f);
      expected.insert(expected.end(), outs.begin(), outs.end());
      return outs;
    }
    conventional_.materialise(slot, kRows, 0);
    auto trial = oracles_[slot];
    for (int t = 0; t < count; ++t) {
      append(outs, conventional_.step({kRows}, draft.tokens(first + t)));
      if (walk_.has_oracle) {
        const std::vector<double> out = draft.step(trial, first + t);
        expected.insert(expected.end(), out.begin(), out.end());
      }
      if (t + 1 != accepted) continue;
      oracles_[slot] = trial;
      conventional_.materialise(kRows, slot, 0);
    }
    if (!walk_.has_oracle) expected.insert(expected.end(), outs.begin(), outs.end());
    return outs;
  }

  typename Family::Shape shape_;
  ReplayWalk walk_;
  typename Family::Memory::Device device_;
  std::mt19937_64 random_;
  int window_;
  Rig direct_, exact_, conventional_;
  std::vector<typename Family::Oracle> oracles_;
};

template <typename Family>
void replay_beside_step(const typename Family::Shape& shape, const ReplayWalk& walk) {
  ReplayBesideStep<Family>(shape, walk).run();
}

// The checkpoints and rings of two rigs, bit for bit.
template <typename Rig>
bool same_memory(const Rig& a, const Rig& b) {
  return same_bits(a.checkpoint, b.checkpoint) && same_bits(a.rings(), b.rings());
}

// Steps, prefills, folds, materialised states and exact outputs have the bits that they have with words; direct outputs
// are near, and do not depend on what the first plane lacks.
template <typename Family>
void planes_are_words(const typename Family::Shape& shape) {
  using Rig = typename Family::Rig;
  const RigOptions in_planes = {.form = CheckpointForm::kPlanes};
  for (const bool has_limits : {false, true})
    replay_beside_step<Family>(
        shape,
        {.window = 9, .max_tokens = 4, .tokens = 40, .seed = 33, .has_limits = has_limits, .options = in_planes});
  auto device = Family::Memory::device(2);
  std::mt19937_64 random(34);
  Rig words(shape, 4, 6, 2, device), planes(shape, 4, 6, 2, device, in_planes);
  const typename Family::Inputs inputs(shape, 40, random, -0.4f, 0.0f);
  std::vector<float> outs[2];
  for (Rig* rig : {&words, &planes}) {
    std::vector<float>& out = outs[rig == &planes];
    append(out, rig->prefill({0, 1}, {0, 20, 33}, inputs.tokens()));
    append(out, rig->step({1, 0}, inputs.tokens(33)));
    append(out, rig->decode({0, kPaddingSlot}, 2, inputs.tokens(35), Readout::kExact));
    rig->commit(0, 2);
    rig->materialise(0, 2, 1);
    rig->materialise(0, 3, 2);
  }
  EXPECT_TRUE(same_bits(outs[0], outs[1]));
  EXPECT_TRUE(same_memory(words, planes));
  const std::vector<float> near = planes.decode({1}, 1, inputs.tokens(37), Readout::kDirect);
  EXPECT_LE(relative_error(near, words.decode({1}, 1, inputs.tokens(37), Readout::kDirect)), kBf16Bound);
  for (float& value : planes.slot_state(1)) {
    const uint32_t word = std::bit_cast<uint32_t>(value) + 0x8000u;
    value = std::bit_cast<float>((word & 0xFFFF0000u) + 0x1234u);  // the same first plane
  }
  EXPECT_TRUE(same_bits(near, planes.decode({1}, 1, inputs.tokens(37), Readout::kDirect)));
}

template <typename Family>
class RecurrenceLaws : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* missing = Family::Memory::missing()) GTEST_SKIP() << missing;
  }
};
TYPED_TEST_SUITE_P(RecurrenceLaws);

TYPED_TEST_P(RecurrenceLaws, StepMatchesOracle) {
  auto device = TypeParam::Memory::device(2);
  for (const auto& c : TypeParam::shapes()) {
    std::mt19937_64 random(1);
    typename TypeParam::Rig rig(c.shape, 2, 4, 1, device);
    auto oracle = TypeParam::oracle(c.shape);
    const typename TypeParam::Inputs inputs(c.shape, 100, random);
    for (int begin = 0; begin < 100; begin += 10) {
      std::vector<float> out;
      for (int t = begin; t < begin + 10; ++t) append(out, rig.step({1}, inputs.tokens(t)));
      EXPECT_LE(relative_error(out, oracle_outputs(inputs, oracle, begin, begin + 10)), kFloat32Bound)
          << c.name << " from token " << begin;
    }
    EXPECT_LE(relative_error(rig.slot_state(1), oracle.state), kFloat32Bound) << c.name;
  }
}

// Error must be flat in the length: the same bound at 512 and at 8,192 tokens, for all three ways to decode.
TYPED_TEST_P(RecurrenceLaws, ErrorDoesNotGrowWithLength) {
  auto device = TypeParam::Memory::device(2);
  const auto shape = TypeParam::shape(2, 1, 64, 16);
  std::mt19937_64 random(2);
  typename TypeParam::Rig rig(shape, 3, 16, 1, device);
  auto oracle = TypeParam::oracle(shape);
  const int tokens = walk_length(8192);
  const typename TypeParam::Inputs inputs(shape, tokens, random, -0.05f, -1e-4f);
  std::vector<float> outs[3];
  std::vector<double> expected;
  for (int t = 0; t < tokens; ++t) {
    const std::vector<double> token = inputs.step(oracle, t);
    const std::vector<float> step = rig.step({0}, inputs.tokens(t));
    const std::vector<float> direct = rig.decode({1}, 1, inputs.tokens(t), Readout::kDirect);
    const std::vector<float> exact = rig.decode({2}, 1, inputs.tokens(t), Readout::kExact);
    rig.commit(1, 1);
    rig.commit(2, 1);
    if (t < 500 || (t >= 512 && t < tokens - 12)) continue;
    expected.insert(expected.end(), token.begin(), token.end());
    append(outs[0], step);
    append(outs[1], direct);
    append(outs[2], exact);
    if (t != 511 && t != tokens - 1) continue;
    for (int way : {0, 1}) EXPECT_LE(relative_error(outs[way], expected), kFloat32Bound) << t << " way " << way;
    EXPECT_TRUE(same_bits(outs[2], outs[0])) << t;
    expected.clear();
    for (std::vector<float>& out : outs) out.clear();
  }
}

TYPED_TEST_P(RecurrenceLaws, ReplayIsExactOver10000Tokens) {
  replay_beside_step<TypeParam>(TypeParam::shape(2, 1, 32, 8), {12, 8, walk_length(10000), 3});
}

TYPED_TEST_P(RecurrenceLaws, ReplayMatchesOracleForEveryShape) {
  for (const auto& c : TypeParam::shapes()) {
    SCOPED_TRACE(c.name);
    replay_beside_step<TypeParam>(c.shape, {16, 4, 40, 4});
  }
}

TYPED_TEST_P(RecurrenceLaws, ReplayIsExactForEveryWindow) {
  for (int window : {1, 2, 3, 4, 7, 8, 16, 31, 64}) {
    SCOPED_TRACE(window);
    const uint64_t seed = 5 + window;
    ReplayWalk walk = {window, std::min(window, 8), 3 * window + 20, seed};
    replay_beside_step<TypeParam>(TypeParam::shape(2, 1, 32, 8), walk);
    walk.has_limits = true;
    replay_beside_step<TypeParam>(TypeParam::shape(2, 1, 32, 8), walk);
  }
  replay_beside_step<TypeParam>(TypeParam::shape(2, 1, 32, 8), {48, 16, 200, 4});
}

// Law 5. Gates of one speed, of all speeds, and at last such that turn from fast to slow in the middle of a prefill's
// chunk.
TYPED_TEST_P(RecurrenceLaws, EveryDecayIsFiniteAndRight) {
  auto device = TypeParam::Memory::device(1);
  const auto shape = TypeParam::shape(2, 1, 32, 8);
  using Inputs = typename TypeParam::Inputs;
  constexpr int kTokens = 100;
  constexpr float kSlow = -1e-4f, kFast = -20.0f, kTurning = 0.0f;
  const std::pair<float, float> ranges[] = {{kSlow, kSlow}, {-1e-2f, -1e-2f}, {-0.7f, -0.7f},      {-5.0f, -5.0f},
                                            {kFast, kFast}, {kFast, kSlow},   {kTurning, kTurning}};
  for (const auto& [low, high] : ranges) {
    for (int window : {1, 8, 64}) {
      SCOPED_TRACE(testing::Message() << low << " to " << high << " window " << window);
      std::mt19937_64 random(6);
      typename TypeParam::Rig rig(shape, 3, std::min(window, TypeParam::Memory::kMaxRecords - 1), 1, device);
      auto oracle = TypeParam::oracle(shape);
      Inputs inputs(shape, kTokens, random, low, high);
      if (low == kTurning) {
        const Inputs fast(shape, kTokens, random, kFast, kFast), slow(shape, kTokens, random, -1e-2f, -1e-2f);
        for (int t = 0; t < kTokens; ++t) inputs.copy(t, t % 64 < 45 ? fast : slow, t);
      }
      std::vector<float> outs[3];
      const std::vector<double> expected = oracle_outputs(inputs, oracle, 0, kTokens);
      for (int t = 0; t < kTokens; ++t) {
        const std::vector<float> direct = rig.decode({0}, 1, inputs.tokens(t), Readout::kDirect);
        const std::vector<float> step = rig.step({1}, inputs.tokens(t));
        rig.commit(0, 1);
        append(outs[0], direct);
        append(outs[1], step);
      }
      outs[2] = rig.prefill({2}, {0, kTokens}, inputs.tokens());
      for (int way : {0, 1, 2}) EXPECT_LE(relative_error(outs[way], expected), kFloat32Bound) << "way " << way;
      // (The decays of that many steps, rounded one by one, may take a slow state further than the bound.)
      if (!TypeParam::Memory::kPrefillSteps) {
        EXPECT_LE(relative_error(rig.slot_state(2), oracle.state), kFloat32Bound);
      }
    }
  }
}

TYPED_TEST_P(RecurrenceLaws, LaterTokensDoNotReachEarlierOutputs) {
  auto device = TypeParam::Memory::device(1);
  const auto shape = TypeParam::shape(4, 2, 32, 8);
  for (Readout readout : {Readout::kDirect, Readout::kExact})
    for (float later : {3.0f, std::numeric_limits<float>::quiet_NaN()})
      for (int token : {1, 2, 37, 66}) {
        std::mt19937_64 random(7);
        typename TypeParam::Inputs inputs(shape, 70, random);
        std::vector<float> decoded[2], prefilled[2];
        for (int run = 0; run < 2; ++run) {
          typename TypeParam::Rig rig(shape, 2, 8, 4, device);
          decoded[run] = rig.decode({0}, 4, inputs.tokens(token < 4 ? 0 : token - 3), readout);
          prefilled[run] = rig.prefill({1}, {0, 70}, inputs.tokens());
          inputs.fill(token, later);
        }
        const size_t size = 4 * 8, before = token < 4 ? token : 3;
        EXPECT_TRUE(same_bits(row_of(decoded[0], 0, before * size), row_of(decoded[1], 0, before * size)));
        EXPECT_TRUE(same_bits(row_of(prefilled[0], 0, token * size), row_of(prefilled[1], 0, token * size)));
        EXPECT_FALSE(same_bits(decoded[0], decoded[1]));
        EXPECT_FALSE(same_bits(prefilled[0], prefilled[1]));
      }
}

// Law 7.
TYPED_TEST_P(RecurrenceLaws, PrefillOfEveryLengthAndSplit) {
  auto device = TypeParam::Memory::device(2);
  std::mt19937_64 random(8);
  for (const auto& shape : {TypeParam::shape(2, 1, 32, 8), TypeParam::shape(3, 1, 48, 16 + TypeParam::kValueUnit)}) {
    typename TypeParam::Rig rig(shape, 3, 8, 4, device);
    for (int T = 1; T <= 130; ++T) {
      const typename TypeParam::Inputs inputs(shape, T, random, -0.3f, 0.0f);
      auto oracle = TypeParam::oracle(shape);
      const std::vector<double> expected = oracle_outputs(inputs, oracle, 0, T);
      for (int slot : {0, 1}) rig.clear(slot);
      EXPECT_LE(relative_error(rig.prefill({0}, {0, T}, inputs.tokens()), expected), kFloat32Bound) << T;
      EXPECT_LE(relative_error(rig.slot_state(0), oracle.state), kFloat32Bound) << T;
      const int split = std::uniform_int_distribution<int>(0, T)(random);
      rig.prefill({1}, {0, split}, inputs.tokens());
      if (split < T) rig.prefill({1}, {0, T - split}, inputs.tokens(split));
      EXPECT_LE(relative_error(rig.slot_state(1), oracle.state), kFloat32Bound) << T << " split at " << split;
    }
  }
}

TYPED_TEST_P(RecurrenceLaws, PrefillMatchesOracleForEveryShape) {
  auto device = TypeParam::Memory::device(2);
  for (const auto& c : TypeParam::shapes()) {
    std::mt19937_64 random(9);
    const typename TypeParam::Inputs inputs(c.shape, 77, random, -0.3f, 0.0f);
    auto oracle = TypeParam::oracle(c.shape);
    const std::vector<double> expected = oracle_outputs(inputs, oracle, 0, 77);
    typename TypeParam::Rig rig(c.shape, 1, 8, 4, device);
    EXPECT_LE(relative_error(rig.prefill({0}, {0, 77}, inputs.tokens()), expected), kFloat32Bound) << c.name;
    EXPECT_LE(relative_error(rig.slot_state(0), oracle.state), kFloat32Bound) << c.name;
  }
}

// A batch of different lengths, one of them empty and one padding, gives each row's own bits; rings are folded first.
TYPED_TEST_P(RecurrenceLaws, VarlenPrefillFoldsRings) {
  auto device = TypeParam::Memory::device(3), alone_device = TypeParam::Memory::device(1);
  const auto shape = TypeParam::shape(4, 2, 64, 32);
  using Rig = typename TypeParam::Rig;
  std::mt19937_64 random(10);
  const std::vector<int32_t> begin = {0, 33, 33, 40, 140};
  const std::vector<int> slots = {2, 0, kPaddingSlot, 1};
  const typename TypeParam::Inputs early(shape, 5, random), inputs(shape, 140, random);
  Rig batch(shape, 3, 8, 4, device), alone(shape, 3, 8, 4, alone_device);
  for (Rig* rig : {&batch, &alone})
    for (int slot = 0; slot < 3; ++slot) {
      rig->decode({slot}, 4, early.tokens(), Readout::kDirect);
      rig->commit(slot, slot + 1);
    }
  const std::vector<float> out = batch.prefill(slots, begin, inputs.tokens());
  for (int b = 0; b < 4; ++b) {
    const int count = begin[b + 1] - begin[b];
    const std::span<const float> part(out.data() + begin[b] * 128, count * 128);
    if (slots[b] == kPaddingSlot) {
      EXPECT_TRUE(is_positive_zero(part));
      continue;
    }
    EXPECT_TRUE(same_bits(alone.prefill({slots[b]}, {0, count}, inputs.tokens(begin[b])), part));
    EXPECT_TRUE(same_bits(alone.slot_state(slots[b]), batch.slot_state(slots[b])));
  }
  // The empty row held its folded ring only.
  Rig folded(shape, 1, 8, 4, device);
  folded.step({0}, early.tokens());
  EXPECT_TRUE(same_bits(folded.slot_state(0), batch.slot_state(0)));
}

// Laws 11 and 17.
TYPED_TEST_P(RecurrenceLaws, BatchOrderThreadsAndPaddingAreNothing) {
  constexpr int T = 3;
  using Rig = typename TypeParam::Rig;
  using Inputs = typename TypeParam::Inputs;
  for (const auto& shape : {TypeParam::shape(6, 2, 64, 16 + TypeParam::kValueUnit), TypeParam::shape(20, 1, 32, 8)})
    for (Readout readout : {Readout::kDirect, Readout::kExact}) {
      auto one = TypeParam::Memory::device(1), two = TypeParam::Memory::device(2), three = TypeParam::Memory::device(3);
      Rig a(shape, 5, 7, T, one), b(shape, 5, 7, T, two), c(shape, 5, 7, T, three);
      std::mt19937_64 random(11);
      for (int step = 0; step < 20; ++step) {
        const Inputs inputs(shape, 6 * T, random);
        Inputs shuffled = inputs;
        for (int t = 0; t < T; ++t) {
          shuffled.copy(0 * T + t, inputs, 4 * T + t);
          shuffled.copy(1 * T + t, inputs, 0 * T + t);
          shuffled.copy(2 * T + t, inputs, 5 * T + t);
          shuffled.copy(3 * T + t, inputs, 2 * T + t);
        }
        const std::vector<float> in_order = a.decode({0, 1, 2, 3, 4}, T, inputs.tokens(), readout);
        std::vector<float> untouched(b.slot_state(3).begin(), b.slot_state(3).end());
        const std::vector<float> mixed = b.decode({4, 0, kPaddingSlot, 2}, T, shuffled.tokens(), readout);
        EXPECT_TRUE(same_bits(untouched, b.slot_state(3)));
        const size_t size = T * a.out_size();
        EXPECT_TRUE(same_bits(row_of(in_order, 4, size), row_of(mixed, 0, size)));
        EXPECT_TRUE(same_bits(row_of(in_order, 0, size), row_of(mixed, 1, size)));
        EXPECT_TRUE(same_bits(row_of(in_order, 2, size), row_of(mixed, 3, size)));
        EXPECT_TRUE(is_positive_zero(row_of(mixed, 2, size)));
        for (int slot : {1, 3}) b.decode({slot}, T, inputs.tokens(slot * T), readout);
        for (int slot = 0; slot < 5; ++slot)
          EXPECT_TRUE(same_bits(row_of(in_order, slot, size), c.decode({slot}, T, inputs.tokens(slot * T), readout)));
        for (Rig* rig : {&a, &b, &c})
          for (int slot = 0; slot < 5; ++slot) rig->commit(slot, (step + slot) % (T + 1));
      }
      EXPECT_TRUE(same_bits(a.checkpoint, b.checkpoint));
      EXPECT_TRUE(same_bits(a.checkpoint, c.checkpoint));
    }
}

// Law 17 for the two ops that write every checkpoint they read.
TYPED_TEST_P(RecurrenceLaws, StepsOfABatchAreItsRowsAlone) {
  auto one = TypeParam::Memory::device(1), two = TypeParam::Memory::device(2);
  const auto shape = TypeParam::shape(12, 1, 32, 16);
  using Rig = typename TypeParam::Rig;
  Rig batch(shape, 3, 4, 1, two), alone(shape, 3, 4, 1, one);
  std::mt19937_64 random(20);
  for (int step = 0; step < 10; ++step) {
    const typename TypeParam::Inputs inputs(shape, 4, random);
    const std::vector<float> out = batch.step({2, kPaddingSlot, 0, 1}, inputs.tokens());
    EXPECT_TRUE(is_positive_zero(row_of(out, 1, batch.out_size())));
    for (int b : {0, 2, 3}) {
      const int slot = b == 0 ? 2 : b - 2;
      EXPECT_TRUE(same_bits(alone.step({slot}, inputs.tokens(b)), row_of(out, b, batch.out_size())));
    }
  }
  EXPECT_TRUE(same_bits(batch.checkpoint, alone.checkpoint));
}

// Law 13: a rejected window leaves no trace in anything that a committed record or the checkpoint owns.
TYPED_TEST_P(RecurrenceLaws, RollbackMovesNoStateBytes) {
  auto device = TypeParam::Memory::device(2);
  const auto shape = TypeParam::shape(4, 2, 32, 16);
  std::mt19937_64 random(12);
  typename TypeParam::Rig rejecting(shape, 1, 8, 4, device), plain(shape, 1, 8, 4, device);
  for (int step = 0; step < 30; ++step) {
    const typename TypeParam::Inputs draft(shape, 4, random), token(shape, 1, random);
    if (!rejecting.will_flush(0, 4)) {
      rejecting.decode({0}, 4, draft.tokens(), Readout::kDirect);
      rejecting.commit(0, 0);
    }
    const std::vector<float> a = rejecting.decode({0}, 1, token.tokens(), Readout::kDirect);
    const std::vector<float> b = plain.decode({0}, 1, token.tokens(), Readout::kDirect);
    rejecting.commit(0, 1);
    plain.commit(0, 1);
    EXPECT_TRUE(same_bits(a, b));
    EXPECT_TRUE(same_bits(rejecting.checkpoint, plain.checkpoint));
  }
}

// Law 15.
TYPED_TEST_P(RecurrenceLaws, MaterialiseAtEveryPositionLeavesTheSource) {
  auto device = TypeParam::Memory::device(2);
  const auto shape = TypeParam::shape(4, 2, 32, 16);
  std::mt19937_64 random(13);
  typename TypeParam::Rig rig(shape, 2, 8, 1, device), conventional(shape, 1, 8, 1, device);
  const typename TypeParam::Inputs inputs(shape, 14, random);
  for (int t = 0; t < 6; ++t) {
    rig.decode({0}, 1, inputs.tokens(t), Readout::kDirect);
    rig.commit(0, 1);
  }
  const std::vector<float> source(rig.slot_state(0).begin(), rig.slot_state(0).end()), rings = rig.rings();
  for (int records = 0; records <= 6; ++records) {
    std::ranges::fill(rig.slot_state(1), kPoison);
    rig.materialise(0, 1, records);
    EXPECT_TRUE(same_bits(rig.slot_state(1), conventional.slot_state(0))) << records;
    EXPECT_TRUE(same_bits(rig.slot_state(0), source));
    if (records < 6) conventional.step({0}, inputs.tokens(records));
  }
  EXPECT_TRUE(same_bits(rings, rig.rings()));
}

// Law 20.
TYPED_TEST_P(RecurrenceLaws, ABadNumberStaysHome) {
  auto device = TypeParam::Memory::device(2);
  const auto shape = TypeParam::shape(4, 2, 32, 16);
  for (const auto& [readout, form] : {std::pair{Readout::kDirect, CheckpointForm::kWords},
                                      {Readout::kDirect, CheckpointForm::kPlanes},
                                      {Readout::kExact, CheckpointForm::kWords}}) {
    std::mt19937_64 random(14);
    const RigOptions options = {.form = form};
    typename TypeParam::Rig good(shape, 3, 4, 1, device, options), bad(shape, 3, 4, 1, device, options);
    for (int t = 0; t < 12; ++t) {
      typename TypeParam::Inputs inputs(shape, 3, random);
      const std::vector<float> expected = good.decode({0, 1, 2}, 1, inputs.tokens(), readout);
      if (t == 3) inputs.set_value(1, std::numeric_limits<float>::infinity());
      if (t == 5) inputs.set_key(1, std::numeric_limits<float>::quiet_NaN());
      if (t == 7) inputs.set_gate(1, std::numeric_limits<float>::quiet_NaN());
      const std::vector<float> out = bad.decode({0, 1, 2}, 1, inputs.tokens(), readout);
      for (int b : {0, 2}) EXPECT_TRUE(same_bits(row_of(out, b, 64), row_of(expected, b, 64)));
      EXPECT_EQ(is_finite(row_of(out, 1, 64)), t < 3) << t;
      for (int b = 0; b < 3; ++b) {
        good.commit(b, 1);
        bad.commit(b, 1);
      }
    }
    typename TypeParam::Inputs inputs(shape, 60, random);
    const std::vector<float> expected = good.prefill({0, 1, 2}, {0, 20, 40, 60}, inputs.tokens());
    inputs.set_key(25, std::numeric_limits<float>::infinity());
    const std::vector<float> out = bad.prefill({0, 1, 2}, {0, 20, 40, 60}, inputs.tokens());
    for (int b : {0, 2}) EXPECT_TRUE(same_bits(row_of(out, b, 20 * 64), row_of(expected, b, 20 * 64)));
    EXPECT_FALSE(is_finite(row_of(out, 1, 20 * 64)));
  }
}

// A gate that is no number must show in that row's outputs from its token on, whichever way they are computed.
TYPED_TEST_P(RecurrenceLaws, ABadGateIsSeen) {
  auto device = TypeParam::Memory::device(1);
  const auto shape = TypeParam::shape(2, 1, 32, 8);
  std::mt19937_64 random(18);
  typename TypeParam::Rig rig(shape, 4, 8, 1, device);
  typename TypeParam::Inputs inputs(shape, 3, random);
  inputs.set_gate(1, std::numeric_limits<float>::quiet_NaN());
  const int replayed = 0, exact = 1, stepped = 2, prefilled = 3;
  for (int t = 0; t < 3; ++t) {
    const bool is_good = t == 0;
    EXPECT_EQ(is_finite(rig.decode({replayed}, 1, inputs.tokens(t), Readout::kDirect)), is_good) << t;
    EXPECT_EQ(is_finite(rig.decode({exact}, 1, inputs.tokens(t), Readout::kExact)), is_good) << t;
    EXPECT_EQ(is_finite(rig.step({stepped}, inputs.tokens(t))), is_good) << t;
    EXPECT_EQ(is_finite(rig.prefill({prefilled}, {0, 1}, inputs.tokens(t))), is_good) << t;
    rig.commit(replayed, 1);
    rig.commit(exact, 1);
  }
  typename TypeParam::Inputs prompt(shape, 70, random);
  prompt.set_gate(37, std::numeric_limits<float>::quiet_NaN());
  rig.clear(prefilled);
  const std::vector<float> out = rig.prefill({prefilled}, {0, 70}, prompt.tokens());
  for (int t = 0; t < 70; ++t) EXPECT_EQ(is_finite(row_of(out, t, rig.out_size())), t < 37) << t;
}

// Law 2's teeth: every kind of stored number is needed, and one wrong record leaves the bound by far.
TYPED_TEST_P(RecurrenceLaws, ACorruptedRecordIsSeen) {
  auto device = TypeParam::Memory::device(1);
  const auto shape = TypeParam::shape(2, 1, 32, 8);
  using Rig = typename TypeParam::Rig;
  std::vector<Corruption<Rig>> kinds = TypeParam::corruptions();
  kinds.push_back({"cursor base", [](Rig& rig) { rig.cursors[0].base += 1; }});
  kinds.push_back({"cursor history", [](Rig& rig) { rig.cursors[0].history -= 1; }});
  kinds.push_back({"nothing", [](Rig&) {}});
  for (const Corruption<Rig>& kind : kinds) {
    std::mt19937_64 random(15);
    Rig rig(shape, 1, 8, 1, device);
    auto oracle = TypeParam::oracle(shape);
    const typename TypeParam::Inputs inputs(shape, 14, random, -0.2f, 0.0f);
    std::vector<float> out;
    for (int t = 0; t < 14; ++t) {
      if (t == 12) kind.corrupt(rig);
      append(out, rig.decode({0}, 1, inputs.tokens(t), Readout::kDirect));
      rig.commit(0, 1);
    }
    const double error = relative_error(out, oracle_outputs(inputs, oracle, 0, 14));
    if (std::string(kind.name) == "nothing")
      EXPECT_LE(error, kFloat32Bound);
    else
      EXPECT_GT(error, kFaultBound) << kind.name;
  }
}

TYPED_TEST_P(RecurrenceLaws, PlanesAreWords) {
  for (const auto& c : TypeParam::shapes()) {
    SCOPED_TRACE(c.name);
    planes_are_words<TypeParam>(c.shape);
  }
}

// All upper halves with several lower ones, through a step that changes no finite word: as planes they come out as they
// do as words. The first row has a factor of -0, which keeps the zeros' signs.
TYPED_TEST_P(RecurrenceLaws, PlanesKeepEveryWord) {
  auto device = TypeParam::Memory::device(2);
  const auto shape = TypeParam::shape(25, 1, 128, 128);
  constexpr uint32_t kLower[] = {0x0, 0x1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
  std::vector<float> state(size_t{25} * 128 * 128, -0.0f);
  for (uint32_t i = 128; i < state.size(); ++i) state[i] = std::bit_cast<float>((i - 128) / 6 << 16 | kLower[i % 6]);
  state[1] = 0.0f;
  state[2] = std::numeric_limits<float>::denorm_min();
  std::mt19937_64 random(19);
  typename TypeParam::Inputs inputs(shape, 1, random);
  inputs.fill(0, 0.0f);
  inputs.set_value(0, -0.0f);
  typename TypeParam::Rig words(shape, 1, 4, 1, device);
  typename TypeParam::Rig planes(shape, 1, 4, 1, device, {.form = CheckpointForm::kPlanes});
  for (auto* rig : {&words, &planes}) {
    std::ranges::copy(state, rig->slot_state(0).begin());
    rig->step({0}, inputs.tokens());
  }
  const std::span<const float> expected = words.slot_state(0), given = planes.slot_state(0);
  for (size_t i = 0; i < state.size(); ++i) {
    if (std::isfinite(state[i]) && std::isfinite(expected[i])) {
      ASSERT_TRUE(i >= 128 || same_bits({&expected[i], 1}, {&state[i], 1})) << i;
    }
    ASSERT_TRUE(same_bits({&given[i], 1}, {&expected[i], 1}) || (std::isnan(given[i]) && std::isnan(expected[i]))) << i;
  }
}

REGISTER_TYPED_TEST_SUITE_P(RecurrenceLaws, StepMatchesOracle, ErrorDoesNotGrowWithLength, ReplayIsExactOver10000Tokens,
                            ReplayMatchesOracleForEveryShape, ReplayIsExactForEveryWindow, EveryDecayIsFiniteAndRight,
                            LaterTokensDoNotReachEarlierOutputs, PrefillOfEveryLengthAndSplit,
                            PrefillMatchesOracleForEveryShape, VarlenPrefillFoldsRings,
                            BatchOrderThreadsAndPaddingAreNothing, StepsOfABatchAreItsRowsAlone,
                            RollbackMovesNoStateBytes, MaterialiseAtEveryPositionLeavesTheSource, ABadNumberStaysHome,
                            ABadGateIsSeen, ACorruptedRecordIsSeen, PlanesAreWords, PlanesKeepEveryWord);

}  // namespace replayssm::test
