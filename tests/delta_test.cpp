// The delta rule against its float64 oracle, and the numbers' laws: replay is exact, exponents are not positive, heads
// map right, every length works, batches do not matter.
#include <gtest/gtest.h>

#include <memory>

#include "replayssm/core/error.h"
#include "tests/delta_rig.h"
#include "tests/tolerance.h"

namespace replayssm::test {
namespace {

std::span<const float> row_of(const std::vector<float>& out, size_t row, size_t size) {
  return std::span<const float>(out).subspan(row * size, size);
}

// Every law holds for one gate a head and for a gate a channel.
class DeltaLaws : public testing::TestWithParam<DeltaGate> {
 protected:
  DeltaShape with_gate(const DeltaShape& shape) const { return gated(shape, GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Gates, DeltaLaws, testing::Values(DeltaGate::kHead, DeltaGate::kChannel),
                         [](const auto& given) { return given.param == DeltaGate::kHead ? "PerHead" : "PerChannel"; });

TEST_P(DeltaLaws, StepMatchesOracle) {
  Device device(2);
  for (const DeltaCase& c : delta_cases(GetParam())) {
    std::mt19937_64 random(1);
    DeltaRig rig(c.shape, 2, 4, 1, device);
    ref::DeltaSequence oracle = oracle_of(c.shape);
    const DeltaInputs inputs(c.shape, 100, random);
    for (int t = 0; t < 100; ++t)
      EXPECT_LE(relative_error(rig.step({1}, inputs.tokens(t)), inputs.step(oracle, t)), kFloat32Bound)
          << c.name << " token " << t;
    EXPECT_LE(relative_error(rig.slot_state(1), oracle.state), kFloat32Bound) << c.name;
  }
}

// Error must be flat in the length: the same bound at 512 and at 8,192 tokens, for all three ways to decode.
TEST_P(DeltaLaws, ErrorDoesNotGrowWithLength) {
  Device device(2);
  const DeltaShape shape = with_gate({2, 1, 64, 16});
  std::mt19937_64 random(2);
  DeltaRig rig(shape, 3, 16, 1, device);
  ref::DeltaSequence oracle = oracle_of(shape);
  const DeltaInputs inputs(shape, 8192, random, -0.05f, -1e-4f);
  for (int t = 0; t < 8192; ++t) {
    const std::vector<double> expected = inputs.step(oracle, t);
    const std::vector<float> step = rig.step({0}, inputs.tokens(t));
    const std::vector<float> replay = rig.decode({1}, 1, inputs.tokens(t), Readout::kDirect);
    const std::vector<float> exact = rig.decode({2}, 1, inputs.tokens(t), Readout::kExact);
    rig.commit(1, 1);
    rig.commit(2, 1);
    if (t < 500 || (t >= 512 && t < 8180)) continue;
    EXPECT_LE(relative_error(step, expected), kFloat32Bound) << t;
    EXPECT_LE(relative_error(replay, expected), kFloat32Bound) << t;
    EXPECT_TRUE(same_bits(exact, step)) << t;
  }
}

// Replay for `tokens` tokens with random windows and acceptances beside conventional decoding of what was accepted:
// checkpoints after flushes and exact outputs have conventional bits, pulled-back outputs the oracle's bound.
void replay_beside_step(const DeltaShape& shape, int window, int max_tokens, int tokens, uint64_t seed) {
  Device device(2);
  std::mt19937_64 random(seed);
  constexpr int kRows = 3;
  DeltaRig pulled(shape, kRows, window, max_tokens, device), exact(shape, kRows, window, max_tokens, device);
  DeltaRig conventional(shape, kRows + 1, window, max_tokens, device);
  std::vector<ref::DeltaSequence> oracles(kRows, oracle_of(shape));
  const size_t out_size = pulled.out_size();
  int64_t flushes = 0;
  for (int done = 0; done < tokens;) {
    const int T = std::uniform_int_distribution<int>(1, max_tokens)(random);
    const DeltaInputs draft(shape, kRows * T, random, -0.4f, 0.0f);
    std::vector<std::vector<float>> before;
    for (int b = 0; b < kRows; ++b) before.emplace_back(pulled.slot_state(b).begin(), pulled.slot_state(b).end());
    std::vector<bool> flushed;
    for (int b = 0; b < kRows; ++b) flushed.push_back(pulled.will_flush(b, T));
    const std::vector<float> out = pulled.decode({0, 1, 2}, T, draft.tokens(), Readout::kDirect);
    const std::vector<float> exact_out = exact.decode({0, 1, 2}, T, draft.tokens(), Readout::kExact);
    for (int b = 0; b < kRows; ++b) {
      flushes += flushed[b];
      // Law 3: bit-identical after a flush, untouched between flushes.
      ASSERT_TRUE(same_bits(pulled.slot_state(b), flushed[b] ? std::span<const float>(conventional.slot_state(b))
                                                             : std::span<const float>(before[b])));
      ASSERT_TRUE(same_bits(exact.slot_state(b), pulled.slot_state(b)));
      const int accepted = std::uniform_int_distribution<int>(0, T)(random);
      // Conventional decoding of the whole window on a copy, then the accepted tokens for good.
      std::ranges::copy(conventional.slot_state(b), conventional.slot_state(kRows).begin());
      ref::DeltaSequence trial = oracles[b];
      for (int t = 0; t < T; ++t) {
        const std::vector<float> step = conventional.step({kRows}, draft.tokens(b * T + t));
        ASSERT_TRUE(same_bits(row_of(exact_out, b * T + t, out_size), step)) << "token " << done + t;
        const std::vector<double> expected = draft.step(trial, b * T + t);
        ASSERT_LE(relative_error(row_of(out, b * T + t, out_size), expected), kFloat32Bound);
        if (t + 1 == accepted) oracles[b] = trial;
        if (t + 1 == accepted) std::ranges::copy(conventional.slot_state(kRows), conventional.slot_state(b).begin());
      }
      pulled.commit(b, accepted);
      exact.commit(b, accepted);
      if (b == 0) done += std::max(accepted, 1);
    }
  }
  EXPECT_GT(flushes, 0);
}

TEST_P(DeltaLaws, ReplayIsExactOver10000Tokens) {
  replay_beside_step(with_gate({2, 1, 32, 8}), 12, 8, 10000, 3);
}

TEST_P(DeltaLaws, ReplayMatchesOracleForEveryShape) {
  for (const DeltaCase& c : delta_cases(GetParam())) {
    SCOPED_TRACE(c.name);
    replay_beside_step(c.shape, 16, 4, 40, 4);
  }
}

TEST_P(DeltaLaws, ReplayIsExactForEveryWindow) {
  for (int window : {1, 2, 3, 4, 7, 8, 16, 31, 64}) {
    SCOPED_TRACE(window);
    replay_beside_step(with_gate({2, 1, 32, 8}), window, std::min(window, 8), 3 * window + 20, 5 + window);
  }
}

// Law 5.
TEST_P(DeltaLaws, EveryDecayIsFiniteAndRight) {
  Device device(1);
  const DeltaShape shape = with_gate({2, 1, 32, 8});
  const float slow = -1e-4f, fast = -20.0f;
  const std::pair<float, float> ranges[] = {{slow, slow},   {-1e-2f, -1e-2f}, {-0.7f, -0.7f},
                                            {-5.0f, -5.0f}, {fast, fast},     {fast, slow}};
  for (const auto& [low, high] : ranges) {
    for (int window : {1, 8, 64}) {
      std::mt19937_64 random(6);
      DeltaRig rig(shape, 3, window, 1, device);
      ref::DeltaSequence oracle = oracle_of(shape);
      const DeltaInputs inputs(shape, 150, random, low, high);
      std::vector<float> outs[3];
      std::vector<double> expected;
      for (int t = 0; t < 150; ++t) {
        const std::vector<float> replay = rig.decode({0}, 1, inputs.tokens(t), Readout::kDirect);
        const std::vector<float> step = rig.step({1}, inputs.tokens(t));
        rig.commit(0, 1);
        outs[0].insert(outs[0].end(), replay.begin(), replay.end());
        outs[1].insert(outs[1].end(), step.begin(), step.end());
        const std::vector<double> token = inputs.step(oracle, t);
        expected.insert(expected.end(), token.begin(), token.end());
      }
      outs[2] = rig.prefill({2}, {0, 150}, inputs.tokens());
      for (const std::vector<float>& out : outs)
        EXPECT_LE(relative_error(out, expected), kFloat32Bound) << low << " to " << high;
    }
  }
}

TEST_P(DeltaLaws, LaterTokensDoNotReachEarlierOutputs) {
  Device device(1);
  const DeltaShape shape = with_gate({4, 2, 32, 8});
  for (Readout readout : {Readout::kDirect, Readout::kExact})
    for (float later : {3.0f, std::numeric_limits<float>::quiet_NaN()}) {
      std::mt19937_64 random(7);
      DeltaInputs inputs(shape, 70, random);
      std::vector<float> decoded[2], prefilled[2];
      for (int run = 0; run < 2; ++run) {
        DeltaRig rig(shape, 2, 8, 4, device);
        decoded[run] = rig.decode({0}, 4, inputs.tokens(), readout);
        prefilled[run] = rig.prefill({1}, {0, 70}, inputs.tokens());
        std::fill_n(&inputs.v[2 * 4 * 8], 32, later);
        std::fill_n(&inputs.k[2 * 2 * 32], 64, later);
        std::fill_n(&inputs.q[2 * 2 * 32], 64, later);
        std::fill_n(&inputs.g[2 * 4 * shape.gate_size], 4 * shape.gate_size, -later);
      }
      EXPECT_TRUE(same_bits(row_of(decoded[0], 0, 64), row_of(decoded[1], 0, 64)));
      EXPECT_TRUE(same_bits(row_of(prefilled[0], 0, 64), row_of(prefilled[1], 0, 64)));
      EXPECT_FALSE(same_bits(decoded[0], decoded[1]));
    }
}

// Law 7.
TEST_P(DeltaLaws, PrefillOfEveryLengthAndSplit) {
  Device device(2);
  std::mt19937_64 random(8);
  for (const DeltaShape& shape : {with_gate({2, 1, 32, 8}), with_gate({3, 1, 48, 20})}) {
    DeltaRig rig(shape, 3, 8, 4, device);
    for (int T = 1; T <= 130; ++T) {
      const DeltaInputs inputs(shape, T, random, -0.3f, 0.0f);
      ref::DeltaSequence oracle = oracle_of(shape);
      std::vector<double> expected;
      for (int t = 0; t < T; ++t) {
        const std::vector<double> token = inputs.step(oracle, t);
        expected.insert(expected.end(), token.begin(), token.end());
      }
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

TEST_P(DeltaLaws, PrefillMatchesOracleForEveryShape) {
  Device device(2);
  for (const DeltaCase& c : delta_cases(GetParam())) {
    std::mt19937_64 random(9);
    const DeltaInputs inputs(c.shape, 77, random, -0.3f, 0.0f);
    ref::DeltaSequence oracle = oracle_of(c.shape);
    std::vector<double> expected;
    for (int t = 0; t < 77; ++t) {
      const std::vector<double> token = inputs.step(oracle, t);
      expected.insert(expected.end(), token.begin(), token.end());
    }
    DeltaRig rig(c.shape, 1, 8, 4, device);
    EXPECT_LE(relative_error(rig.prefill({0}, {0, 77}, inputs.tokens()), expected), kFloat32Bound) << c.name;
    EXPECT_LE(relative_error(rig.slot_state(0), oracle.state), kFloat32Bound) << c.name;
  }
}

// A batch of different lengths, one of them empty and one padding, gives each row's own bits; rings are folded first.
TEST_P(DeltaLaws, VarlenPrefillFoldsRings) {
  Device device(3), alone_device(1);
  const DeltaShape shape = with_gate({4, 2, 64, 32});
  std::mt19937_64 random(10);
  const std::vector<int32_t> begin = {0, 33, 33, 40, 140};
  const std::vector<int> slots = {2, 0, kPaddingSlot, 1};
  const DeltaInputs early(shape, 5, random), inputs(shape, 140, random);
  DeltaRig batch(shape, 3, 8, 4, device), alone(shape, 3, 8, 4, alone_device);
  for (DeltaRig* rig : {&batch, &alone})
    for (int slot = 0; slot < 3; ++slot) {
      rig->decode({slot}, 4, early.tokens(), Readout::kDirect);
      rig->commit(slot, slot + 1);
    }
  const std::vector<float> out = batch.prefill(slots, begin, inputs.tokens());
  for (int b = 0; b < 4; ++b) {
    const int count = begin[b + 1] - begin[b];
    const std::span<const float> part(out.data() + begin[b] * 128, count * 128);
    if (slots[b] == kPaddingSlot) {
      EXPECT_TRUE(std::ranges::all_of(part, [](float x) { return std::bit_cast<uint32_t>(x) == 0; }));
      continue;
    }
    EXPECT_TRUE(same_bits(alone.prefill({slots[b]}, {0, count}, inputs.tokens(begin[b])), part));
    EXPECT_TRUE(same_bits(alone.slot_state(slots[b]), batch.slot_state(slots[b])));
  }
  // The empty row held its folded ring only.
  DeltaRig folded(shape, 1, 8, 4, device);
  folded.step({0}, early.tokens());
  EXPECT_TRUE(same_bits(folded.slot_state(0), batch.slot_state(0)));
}

// Laws 11 and 17.
TEST_P(DeltaLaws, BatchOrderThreadsAndPaddingAreNothing) {
  const DeltaShape shape = with_gate({6, 2, 64, 20});
  constexpr int T = 3;
  for (Readout readout : {Readout::kDirect, Readout::kExact}) {
    Device one(1), two(2), three(3);
    DeltaRig a(shape, 5, 7, T, one), b(shape, 5, 7, T, two), c(shape, 5, 7, T, three);
    std::mt19937_64 random(11);
    for (int step = 0; step < 40; ++step) {
      const DeltaInputs inputs(shape, 6 * T, random);
      DeltaInputs shuffled = inputs;
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
      for (float x : row_of(mixed, 2, size)) EXPECT_EQ(std::bit_cast<uint32_t>(x), 0u);
      for (int slot : {1, 3}) b.decode({slot}, T, inputs.tokens(slot * T), readout);
      for (int slot = 0; slot < 5; ++slot)
        EXPECT_TRUE(same_bits(row_of(in_order, slot, size), c.decode({slot}, T, inputs.tokens(slot * T), readout)));
      for (DeltaRig* rig : {&a, &b, &c})
        for (int slot = 0; slot < 5; ++slot) rig->commit(slot, (step + slot) % (T + 1));
    }
    EXPECT_TRUE(same_bits(a.checkpoint, b.checkpoint));
    EXPECT_TRUE(same_bits(a.checkpoint, c.checkpoint));
  }
}

// Law 13: a rejected window leaves no trace in anything that a committed record or the checkpoint owns.
TEST_P(DeltaLaws, RollbackMovesNoStateBytes) {
  Device device(2);
  const DeltaShape shape = with_gate({4, 2, 32, 16});
  std::mt19937_64 random(12);
  DeltaRig rejecting(shape, 1, 8, 4, device), plain(shape, 1, 8, 4, device);
  for (int step = 0; step < 30; ++step) {
    const DeltaInputs draft(shape, 4, random), token(shape, 1, random);
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
TEST_P(DeltaLaws, MaterialiseAtEveryPositionLeavesTheSource) {
  Device device(2);
  const DeltaShape shape = with_gate({4, 2, 32, 16});
  std::mt19937_64 random(13);
  DeltaRig rig(shape, 2, 8, 1, device), conventional(shape, 1, 8, 1, device);
  const DeltaInputs inputs(shape, 14, random);
  for (int t = 0; t < 6; ++t) {
    rig.decode({0}, 1, inputs.tokens(t), Readout::kDirect);
    rig.commit(0, 1);
  }
  const std::vector<float> source(rig.slot_state(0).begin(), rig.slot_state(0).end()), ring = rig.ring_k;
  for (int records = 0; records <= 6; ++records) {
    std::ranges::fill(rig.slot_state(1), kPoison);
    rig.materialise(0, 1, records);
    EXPECT_TRUE(same_bits(rig.slot_state(1), conventional.slot_state(0))) << records;
    EXPECT_TRUE(same_bits(rig.slot_state(0), source));
    if (records < 6) conventional.step({0}, inputs.tokens(records));
  }
  EXPECT_EQ(std::memcmp(ring.data(), rig.ring_k.data(), ring.size() * sizeof(float)), 0);
}

// Law 8: a slot whose offsets, in elements, pass 2^31 in every large array. The memory is mapped and never filled.
TEST_P(DeltaLaws, OffsetsPast2To31) {
  Device device(2);
  const DeltaShape shape = with_gate({2, 2, 256, 1024});
  constexpr int kWindow = 1000, kSlot = 4200;
  DeltaRig rig(shape, 1, kWindow, 1, device);
  DeltaState far = rig.state;
  far.slots = far.checkpoints = kSlot + 1;
  std::vector<std::unique_ptr<SparseFloats>> arrays;
  const auto map = [&](const std::vector<float>& one_slot) {
    arrays.push_back(std::make_unique<SparseFloats>(one_slot.size() * (kSlot + 1)));
    return arrays.back()->data();
  };
  far.checkpoint = map(rig.checkpoint);
  far.ring_k = map(rig.ring_k);
  far.ring_k_scale = map(rig.ring_k_scale);
  if (!rig.ring_gram.empty()) far.ring_gram = map(rig.ring_gram);
  far.ring_v = map(rig.ring_v);
  far.ring_decay = map(rig.ring_decay);
  far.ring_beta = map(rig.ring_beta);
  std::mt19937_64 random(19);
  const DeltaInputs inputs(shape, 4, random);
  const int32_t slot = kSlot;
  for (int t = 0; t < 4; ++t) {
    const int64_t base = rig.cursors[0].base;
    const int32_t history = rig.cursors[0].history;
    std::vector<float> out = poisoned(rig.out_size());
    const StateRows rows = {1, &slot, &base, &history, &slot, &slot};
    if (t == 3)
      delta_step({far, rows, inputs.tokens(t), out.data()}, device, rig.workspace());
    else
      delta_decode({far, rows, 1, inputs.tokens(t), Readout::kDirect, out.data()}, device, rig.workspace());
    EXPECT_TRUE(same_bits(
        out, t == 3 ? rig.step({0}, inputs.tokens(t)) : rig.decode({0}, 1, inputs.tokens(t), Readout::kDirect)));
    rig.commit(0, 1);
  }
  EXPECT_TRUE(same_bits(rig.slot_state(0), {far.checkpoint + kSlot * rig.state_size(), rig.state_size()}));
}

// Law 20.
TEST_P(DeltaLaws, ABadNumberStaysHome) {
  Device device(2);
  const DeltaShape shape = with_gate({4, 2, 32, 16});
  for (Readout readout : {Readout::kDirect, Readout::kExact}) {
    std::mt19937_64 random(14);
    DeltaRig good(shape, 3, 4, 1, device), bad(shape, 3, 4, 1, device);
    for (int t = 0; t < 12; ++t) {
      DeltaInputs inputs(shape, 3, random);
      const std::vector<float> expected = good.decode({0, 1, 2}, 1, inputs.tokens(), readout);
      if (t == 3) inputs.v[1 * 64] = std::numeric_limits<float>::infinity();
      if (t == 5) inputs.k[1 * 64] = std::numeric_limits<float>::quiet_NaN();
      const std::vector<float> out = bad.decode({0, 1, 2}, 1, inputs.tokens(), readout);
      for (int b : {0, 2}) EXPECT_TRUE(same_bits(row_of(out, b, 64), row_of(expected, b, 64)));
      if (t > 3) {
        EXPECT_FALSE(std::isfinite(relative_error(row_of(out, 1, 64), row_of(expected, 1, 64))));
      }
      for (int b = 0; b < 3; ++b) {
        good.commit(b, 1);
        bad.commit(b, 1);
      }
    }
  }
}

// A gate that is no number must show in that row's outputs, whichever way they are computed.
TEST_P(DeltaLaws, ABadGateIsSeen) {
  Device device(1);
  const DeltaShape shape = with_gate({2, 1, 32, 8});
  std::mt19937_64 random(18);
  DeltaRig rig(shape, 4, 8, 1, device);
  DeltaInputs inputs(shape, 3, random);
  const int replayed = 0, exact = 1, stepped = 2, prefilled = 3;
  for (int t = 0; t < 3; ++t) {
    if (t == 1) inputs.g[1 * 2 * shape.gate_size] = std::numeric_limits<float>::quiet_NaN();
    const bool is_good = t == 0;
    const auto is_finite = [](const std::vector<float>& out) {
      return std::ranges::count_if(out, [](float x) { return !std::isfinite(x); }) == 0;
    };
    EXPECT_EQ(is_finite(rig.decode({replayed}, 1, inputs.tokens(t), Readout::kDirect)), is_good) << t;
    EXPECT_EQ(is_finite(rig.decode({exact}, 1, inputs.tokens(t), Readout::kExact)), is_good) << t;
    EXPECT_EQ(is_finite(rig.step({stepped}, inputs.tokens(t))), is_good) << t;
    EXPECT_EQ(is_finite(rig.prefill({prefilled}, {0, 1}, inputs.tokens(t))), is_good) << t;
    rig.commit(replayed, 1);
    rig.commit(exact, 1);
  }
}

// Law 2's teeth: every kind of stored number is needed, and one wrong record leaves the bound by far.
TEST_P(DeltaLaws, ACorruptedRecordIsSeen) {
  Device device(1);
  const DeltaShape shape = with_gate({2, 1, 32, 8});
  struct Kind {
    const char* name;
    void (*corrupt)(DeltaRig&);
  };
  const Kind kinds[] = {
      {"nothing", [](DeltaRig&) {}},
      {"checkpoint", [](DeltaRig& rig) { rig.checkpoint[5] += 1.0f; }},
      {"ring k", [](DeltaRig& rig) { rig.ring_k[(rig.cursors[0].base + 1) % rig.capacity * 32] += 2.0f; }},
      {"ring k scale", [](DeltaRig& rig) { rig.ring_k_scale[(rig.cursors[0].base + 1) % rig.capacity] *= 1.5f; }},
      {"ring gram",
       [](DeltaRig& rig) {
         const int row = int((rig.cursors[0].base + 2) % rig.capacity);
         rig.ring_gram[row * rig.capacity + (rig.cursors[0].base + 1) % rig.capacity] += 0.5f;
       }},
      {"ring v", [](DeltaRig& rig) { rig.ring_v[(rig.cursors[0].base + 1) % rig.capacity * 8] += 2.0f; }},
      {"ring decay",
       [](DeltaRig& rig) {
         rig.ring_decay[(rig.cursors[0].base + 1) % rig.capacity * rig.state.shape.gate_size] -= 0.5f;
       }},
      {"ring beta", [](DeltaRig& rig) { rig.ring_beta[(rig.cursors[0].base + 1) % rig.capacity] *= 0.5f; }},
      {"cursor base", [](DeltaRig& rig) { rig.cursors[0].base += 1; }},
      {"cursor history", [](DeltaRig& rig) { rig.cursors[0].history -= 1; }},
  };
  for (const Kind& kind : kinds) {
    if (kind.name == std::string("ring gram") && GetParam() == DeltaGate::kChannel) continue;  // it keeps none
    std::mt19937_64 random(15);
    DeltaRig rig(shape, 1, 8, 1, device);
    ref::DeltaSequence oracle = oracle_of(shape);
    const DeltaInputs inputs(shape, 14, random, -0.2f, 0.0f);
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
      EXPECT_GT(worst, 100 * kFloat32Bound) << kind.name;
  }
}

TEST(Delta, GatesMatchTheFormula) {
  Device device(2);
  std::mt19937_64 random(16);
  constexpr int kTokens = 40, kHeads = 6;
  for (const int gate_size : {1, 16, 48})
    for (const float lower_bound : {0.0f, -5.0f}) {
      const int gates = kHeads * gate_size, stride = gates + kHeads + 2;
      std::vector<float> projected = random_normal(random, kTokens * stride, 12.0f);
      const std::vector<float> a_log = random_normal(random, kHeads), dt_bias = random_normal(random, gates);
      std::vector<float> g = poisoned(kTokens * gates), beta = poisoned(kTokens * kHeads);
      DeltaGates args = {.tokens = kTokens,
                         .heads = kHeads,
                         .gate_size = gate_size,
                         .a = projected.data(),
                         .b = projected.data() + gates + 1,
                         .a_stride = stride,
                         .b_stride = stride,
                         .a_log = a_log.data(),
                         .dt_bias = dt_bias.data(),
                         .lower_bound = lower_bound,
                         .g = g.data(),
                         .beta = beta.data()};
      delta_gates(args, device);
      std::vector<double> expected_g, expected_beta;
      for (int t = 0; t < kTokens; ++t) {
        const float* token = &projected[t * stride];
        for (int i = 0; i < gates; ++i)
          expected_g.push_back(ref::delta_gate(token[i], dt_bias[i], a_log[i / gate_size], lower_bound));
        for (int h = 0; h < kHeads; ++h) expected_beta.push_back(1 / (1 + std::exp(-double(token[gates + 1 + h]))));
      }
      EXPECT_LE(relative_error(g, expected_g), kFloat32Bound) << gate_size << " bound " << lower_bound;
      EXPECT_LE(relative_error(beta, expected_beta), kFloat32Bound);
      EXPECT_TRUE(std::ranges::all_of(g, [&](float x) { return x <= 0 && (lower_bound == 0 || x >= lower_bound); }));
      // A token's gates have the same bits alone, and a NaN stays where it is.
      const std::vector<float> batch = g;
      args.tokens = 1;
      args.a += 17 * stride;
      args.b += 17 * stride;
      projected[17 * stride + gates - 1] = std::numeric_limits<float>::quiet_NaN();
      delta_gates(args, device);
      EXPECT_TRUE(same_bits(row_of(g, 0, gates).first(gates - 1), row_of(batch, 17, gates).first(gates - 1)));
      EXPECT_TRUE(std::isnan(g[gates - 1]));
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
    delta_decode({rig.state, rig.rows(slots), T, inputs.tokens(), Readout::kExact, out.data()}, device,
                 rig.workspace());
  };
  EXPECT_THROW(decode(0), Error);
  EXPECT_THROW(decode(3), Error);  // more than the ring has room for
  EXPECT_THROW(decode(5), Error);  // more than the window
  EXPECT_THROW(decode(1, {2}), Error);
  EXPECT_THROW(decode(1, {-2}), Error);
  EXPECT_NO_THROW(decode(1, {kPaddingSlot}));
  rig.cursors[0].history = 5;
  EXPECT_THROW(decode(1), Error);
  rig.cursors[0] = {-1, 0};
  EXPECT_THROW(decode(1), Error);
  for (const DeltaShape& bad :
       {DeltaShape{3, 2, 32, 8, 1}, DeltaShape{2, 1, 24, 8, 1}, DeltaShape{2, 1, 272, 8, 1}, DeltaShape{2, 1, 32, 6, 1},
        DeltaShape{0, 0, 32, 8, 1}, DeltaShape{2, 1, 32, 8, 16}, DeltaShape{2, 1, 32, 8, 0}})
    EXPECT_THROW(check_shape(bad), Error);
  const std::vector<float> zeros(2);
  std::vector<float> g(2), beta(2);
  const auto gates = [&](float lower_bound, int64_t a_stride) {
    delta_gates({1, 1, 2, zeros.data(), zeros.data(), a_stride, 1, zeros.data(), zeros.data(), lower_bound, g.data(),
                 beta.data()},
                device);
  };
  EXPECT_NO_THROW(gates(-5.0f, 2));
  EXPECT_THROW(gates(5.0f, 2), Error);
  EXPECT_THROW(gates(std::numeric_limits<float>::quiet_NaN(), 2), Error);
  EXPECT_THROW(gates(0.0f, 1), Error);
  DeltaStep small = {rig.state, rig.rows({1}), inputs.tokens(), out.data()};
  EXPECT_THROW(delta_step(small, device, rig.workspace().first(64)), Error);
}

}  // namespace
}  // namespace replayssm::test
