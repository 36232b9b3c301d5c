// The numbers' laws, which every recurrence must keep, as one list of cases: replay is exact, exponents are not
// positive, heads map right, every length works, batches do not matter. A family says how it is run:
//
//   struct Family {
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
#include "tests/tolerance.h"
#include "tests/walks.h"

namespace replayssm::test {

template <typename Shape>
struct NamedShape {
  const char* name;
  Shape shape;
};

template <typename Rig>
struct Corruption {
  const char* name;
  void (*corrupt)(Rig&);
};

inline std::span<const float> row_of(std::span<const float> out, size_t row, size_t size) {
  return out.subspan(row * size, size);
}

inline bool is_finite(std::span<const float> values) {
  return std::ranges::all_of(values, [](float x) { return std::isfinite(x); });
}

inline bool is_positive_zero(std::span<const float> values) {
  return std::ranges::all_of(values, [](float x) { return std::bit_cast<uint32_t>(x) == 0; });
}

// The oracle's outputs for all `count` tokens of `inputs`, one after the other.
template <typename Inputs, typename Oracle>
std::vector<double> oracle_outputs(const Inputs& inputs, Oracle& oracle, int count) {
  std::vector<double> expected;
  for (int t = 0; t < count; ++t) {
    const std::vector<double> token = inputs.step(oracle, t);
    expected.insert(expected.end(), token.begin(), token.end());
  }
  return expected;
}

template <typename Family>
class RecurrenceLaws : public testing::Test {
 protected:
  // Replay for `tokens` tokens with random windows and acceptances beside conventional decoding of what was accepted:
  // checkpoints after flushes and exact outputs have conventional bits, direct outputs the oracle's bound.
  void replay_beside_step(const typename Family::Shape& shape, int window, int max_tokens, int tokens, uint64_t seed) {
    using Inputs = typename Family::Inputs;
    using Rig = typename Family::Rig;
    using Oracle = typename Family::Oracle;
    Device device(2);
    std::mt19937_64 random(seed);
    constexpr int kRows = 3;
    Rig direct(shape, kRows, window, max_tokens, device), exact(shape, kRows, window, max_tokens, device);
    Rig conventional(shape, kRows + 1, window, max_tokens, device);
    std::vector<Oracle> oracles(kRows, Family::oracle(shape));
    const size_t out_size = direct.out_size();
    int64_t flushes = 0;
    for (int done = 0; done < tokens;) {
      const int T = std::uniform_int_distribution<int>(1, max_tokens)(random);
      const Inputs draft(shape, kRows * T, random, -0.4f, 0.0f);
      std::vector<std::vector<float>> before;
      for (int b = 0; b < kRows; ++b) before.emplace_back(direct.slot_state(b).begin(), direct.slot_state(b).end());
      std::vector<bool> flushed;
      for (int b = 0; b < kRows; ++b) flushed.push_back(direct.will_flush(b, T));
      const std::vector<float> out = direct.decode({0, 1, 2}, T, draft.tokens(), Readout::kDirect);
      const std::vector<float> exact_out = exact.decode({0, 1, 2}, T, draft.tokens(), Readout::kExact);
      for (int b = 0; b < kRows; ++b) {
        flushes += flushed[b];
        // Law 3: bit-identical after a flush, untouched between flushes.
        ASSERT_TRUE(same_bits(direct.slot_state(b), flushed[b] ? std::span<const float>(conventional.slot_state(b))
                                                               : std::span<const float>(before[b])));
        ASSERT_TRUE(same_bits(exact.slot_state(b), direct.slot_state(b)));
        const int accepted = std::uniform_int_distribution<int>(0, T)(random);
        // Conventional decoding of the whole window on a copy, then the accepted tokens for good.
        std::ranges::copy(conventional.slot_state(b), conventional.slot_state(kRows).begin());
        Oracle trial = oracles[b];
        for (int t = 0; t < T; ++t) {
          const std::vector<float> step = conventional.step({kRows}, draft.tokens(b * T + t));
          ASSERT_TRUE(same_bits(row_of(exact_out, b * T + t, out_size), step)) << "token " << done + t;
          const std::vector<double> expected = draft.step(trial, b * T + t);
          ASSERT_LE(relative_error(row_of(out, b * T + t, out_size), expected), kFloat32Bound);
          if (t + 1 != accepted) continue;
          oracles[b] = trial;
          std::ranges::copy(conventional.slot_state(kRows), conventional.slot_state(b).begin());
        }
        direct.commit(b, accepted);
        exact.commit(b, accepted);
        if (b == 0) done += std::max(accepted, 1);
      }
    }
    EXPECT_GT(flushes, 0);
  }
};
TYPED_TEST_SUITE_P(RecurrenceLaws);

TYPED_TEST_P(RecurrenceLaws, StepMatchesOracle) {
  Device device(2);
  for (const auto& c : TypeParam::shapes()) {
    std::mt19937_64 random(1);
    typename TypeParam::Rig rig(c.shape, 2, 4, 1, device);
    auto oracle = TypeParam::oracle(c.shape);
    const typename TypeParam::Inputs inputs(c.shape, 100, random);
    for (int t = 0; t < 100; ++t)
      EXPECT_LE(relative_error(rig.step({1}, inputs.tokens(t)), inputs.step(oracle, t)), kFloat32Bound)
          << c.name << " token " << t;
    EXPECT_LE(relative_error(rig.slot_state(1), oracle.state), kFloat32Bound) << c.name;
  }
}

// Error must be flat in the length: the same bound at 512 and at 8,192 tokens, for all three ways to decode.
TYPED_TEST_P(RecurrenceLaws, ErrorDoesNotGrowWithLength) {
  Device device(2);
  const auto shape = TypeParam::shape(2, 1, 64, 16);
  std::mt19937_64 random(2);
  typename TypeParam::Rig rig(shape, 3, 16, 1, device);
  auto oracle = TypeParam::oracle(shape);
  const int tokens = walk_length(8192);
  const typename TypeParam::Inputs inputs(shape, tokens, random, -0.05f, -1e-4f);
  for (int t = 0; t < tokens; ++t) {
    const std::vector<double> expected = inputs.step(oracle, t);
    const std::vector<float> step = rig.step({0}, inputs.tokens(t));
    const std::vector<float> direct = rig.decode({1}, 1, inputs.tokens(t), Readout::kDirect);
    const std::vector<float> exact = rig.decode({2}, 1, inputs.tokens(t), Readout::kExact);
    rig.commit(1, 1);
    rig.commit(2, 1);
    if (t < 500 || (t >= 512 && t < tokens - 12)) continue;
    EXPECT_LE(relative_error(step, expected), kFloat32Bound) << t;
    EXPECT_LE(relative_error(direct, expected), kFloat32Bound) << t;
    EXPECT_TRUE(same_bits(exact, step)) << t;
  }
}

TYPED_TEST_P(RecurrenceLaws, ReplayIsExactOver10000Tokens) {
  this->replay_beside_step(TypeParam::shape(2, 1, 32, 8), 12, 8, walk_length(10000), 3);
}

TYPED_TEST_P(RecurrenceLaws, ReplayMatchesOracleForEveryShape) {
  for (const auto& c : TypeParam::shapes()) {
    SCOPED_TRACE(c.name);
    this->replay_beside_step(c.shape, 16, 4, 40, 4);
  }
}

TYPED_TEST_P(RecurrenceLaws, ReplayIsExactForEveryWindow) {
  for (int window : {1, 2, 3, 4, 7, 8, 16, 31, 64}) {
    SCOPED_TRACE(window);
    this->replay_beside_step(TypeParam::shape(2, 1, 32, 8), window, std::min(window, 8), 3 * window + 20, 5 + window);
  }
}

// Law 5. Gates of one speed, of all speeds, and at last such that turn from fast to slow in the middle of a prefill's
// chunk.
TYPED_TEST_P(RecurrenceLaws, EveryDecayIsFiniteAndRight) {
  Device device(1);
  const auto shape = TypeParam::shape(2, 1, 32, 8);
  using Inputs = typename TypeParam::Inputs;
  constexpr int kTokens = 150;
  constexpr float kSlow = -1e-4f, kFast = -20.0f, kTurning = 0.0f;
  const std::pair<float, float> ranges[] = {{kSlow, kSlow}, {-1e-2f, -1e-2f}, {-0.7f, -0.7f},      {-5.0f, -5.0f},
                                            {kFast, kFast}, {kFast, kSlow},   {kTurning, kTurning}};
  for (const auto& [low, high] : ranges) {
    for (int window : {1, 8, 64}) {
      SCOPED_TRACE(testing::Message() << low << " to " << high << " window " << window);
      std::mt19937_64 random(6);
      typename TypeParam::Rig rig(shape, 3, window, 1, device);
      auto oracle = TypeParam::oracle(shape);
      Inputs inputs(shape, kTokens, random, low, high);
      if (low == kTurning) {
        const Inputs fast(shape, kTokens, random, kFast, kFast), slow(shape, kTokens, random, -1e-2f, -1e-2f);
        for (int t = 0; t < kTokens; ++t) inputs.copy(t, t % 64 < 45 ? fast : slow, t);
      }
      std::vector<float> outs[3];
      const std::vector<double> expected = oracle_outputs(inputs, oracle, kTokens);
      for (int t = 0; t < kTokens; ++t) {
        const std::vector<float> direct = rig.decode({0}, 1, inputs.tokens(t), Readout::kDirect);
        const std::vector<float> step = rig.step({1}, inputs.tokens(t));
        rig.commit(0, 1);
        outs[0].insert(outs[0].end(), direct.begin(), direct.end());
        outs[1].insert(outs[1].end(), step.begin(), step.end());
      }
      outs[2] = rig.prefill({2}, {0, kTokens}, inputs.tokens());
      for (int way : {0, 1, 2}) EXPECT_LE(relative_error(outs[way], expected), kFloat32Bound) << "way " << way;
      EXPECT_LE(relative_error(rig.slot_state(2), oracle.state), kFloat32Bound);
    }
  }
}

TYPED_TEST_P(RecurrenceLaws, LaterTokensDoNotReachEarlierOutputs) {
  Device device(1);
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
  Device device(2);
  std::mt19937_64 random(8);
  for (const auto& shape : {TypeParam::shape(2, 1, 32, 8), TypeParam::shape(3, 1, 48, 16 + TypeParam::kValueUnit)}) {
    typename TypeParam::Rig rig(shape, 3, 8, 4, device);
    for (int T = 1; T <= 130; ++T) {
      const typename TypeParam::Inputs inputs(shape, T, random, -0.3f, 0.0f);
      auto oracle = TypeParam::oracle(shape);
      const std::vector<double> expected = oracle_outputs(inputs, oracle, T);
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
  Device device(2);
  for (const auto& c : TypeParam::shapes()) {
    std::mt19937_64 random(9);
    const typename TypeParam::Inputs inputs(c.shape, 77, random, -0.3f, 0.0f);
    auto oracle = TypeParam::oracle(c.shape);
    const std::vector<double> expected = oracle_outputs(inputs, oracle, 77);
    typename TypeParam::Rig rig(c.shape, 1, 8, 4, device);
    EXPECT_LE(relative_error(rig.prefill({0}, {0, 77}, inputs.tokens()), expected), kFloat32Bound) << c.name;
    EXPECT_LE(relative_error(rig.slot_state(0), oracle.state), kFloat32Bound) << c.name;
  }
}

// A batch of different lengths, one of them empty and one padding, gives each row's own bits; rings are folded first.
TYPED_TEST_P(RecurrenceLaws, VarlenPrefillFoldsRings) {
  Device device(3), alone_device(1);
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
      Device one(1), two(2), three(3);
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
  Device one(1), two(2);
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
  Device device(2);
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
  Device device(2);
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
  Device device(2);
  const auto shape = TypeParam::shape(4, 2, 32, 16);
  for (Readout readout : {Readout::kDirect, Readout::kExact}) {
    std::mt19937_64 random(14);
    typename TypeParam::Rig good(shape, 3, 4, 1, device), bad(shape, 3, 4, 1, device);
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
  Device device(1);
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
  Device device(1);
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
    double worst = 0;
    for (int t = 0; t < 14; ++t) {
      if (t == 12) kind.corrupt(rig);
      const std::vector<double> expected = inputs.step(oracle, t);
      const double error = relative_error(rig.decode({0}, 1, inputs.tokens(t), Readout::kDirect), expected);
      rig.commit(0, 1);
      worst = std::max(worst, error);
    }
    if (std::string(kind.name) == "nothing")
      EXPECT_LE(worst, kFloat32Bound);
    else
      EXPECT_GT(worst, kFaultBound) << kind.name;
  }
}

REGISTER_TYPED_TEST_SUITE_P(RecurrenceLaws, StepMatchesOracle, ErrorDoesNotGrowWithLength, ReplayIsExactOver10000Tokens,
                            ReplayMatchesOracleForEveryShape, ReplayIsExactForEveryWindow, EveryDecayIsFiniteAndRight,
                            LaterTokensDoNotReachEarlierOutputs, PrefillOfEveryLengthAndSplit,
                            PrefillMatchesOracleForEveryShape, VarlenPrefillFoldsRings,
                            BatchOrderThreadsAndPaddingAreNothing, StepsOfABatchAreItsRowsAlone,
                            RollbackMovesNoStateBytes, MaterialiseAtEveryPositionLeavesTheSource, ABadNumberStaysHome,
                            ABadGateIsSeen, ACorruptedRecordIsSeen);

}  // namespace replayssm::test
