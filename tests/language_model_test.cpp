// Whole models: transformers' logits, decoders against each other, batches, threads, splits, refusals.
#include "replayssm/model/language_model.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <map>
#include <span>
#include <vector>

#include "replayssm/core/error.h"
#include "tests/allocation.h"
#include "tests/model_rig.h"
#include "tests/tolerance.h"
#include "tests/walks.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

const ModelFixture& fixture(const std::string& name) {
  static std::map<std::string, std::unique_ptr<ModelFixture>> fixtures;
  std::unique_ptr<ModelFixture>& one = fixtures[name];
  if (one == nullptr) one = std::make_unique<ModelFixture>(fixture_directory(name));
  return *one;
}

TEST(LanguageModel, PrefillHasTheLogitsOfTransformers) {
  for (const char* name : kModels) {
    const ExpectedLogits expected(name);
    ModelRig rig(fixture(name), {.max_tokens = 200});
    expect_prefill(rig, expected, name);
  }
}

TEST(LanguageModel, DecodingHasTheLogitsOfTransformers) {
  for (const char* name : kModels) {
    const ExpectedLogits expected(name);
    for (const DecodeCase& c : kDecodeCases) {
      ModelRig rig(fixture(name), {.window = c.window});
      const std::vector<float> logits = decode_text(rig, expected, c);
      EXPECT_LE(relative_error(logits, expected.rows(kPrompt, static_cast<int64_t>(expected.token.size()))),
                kModelBound)
          << name << " T " << c.tokens << " L " << c.window;
      EXPECT_EQ(rig.flushes > 0, c.decoder != Decoder::kConventional);
    }
  }
}

// Rejected tokens leave no trace: each window ends in tokens that are not the text's.
void expect_no_trace_of_rejected_tokens(const std::string& name) {
  const ExpectedLogits expected(name);
  for (Decoder decoder : {Decoder::kDirect, Decoder::kExact}) {
    ModelRig rig(fixture(name), {.window = 9, .max_step_tokens = 4});
    const Handle row = rig.pool.allocate(200);
    rig.prefill(row, std::span(expected.token).first(kPrompt));
    std::mt19937_64 random(3);
    for (size_t n = kPrompt; n + 4 <= expected.token.size();) {
      const int accepted = static_cast<int>(random() % 5);
      std::vector<int32_t> token(expected.token.begin() + n, expected.token.begin() + n + 4);
      for (int t = accepted; t < 4; ++t) token[t] = static_cast<int32_t>(random() % expected.vocabulary);
      const std::vector<float> logits = rig.decode(decoder, {row}, token, {accepted});
      EXPECT_LE(relative_error(std::span(logits).first(accepted * expected.vocabulary),
                               expected.rows(static_cast<int64_t>(n), static_cast<int64_t>(n) + accepted)),
                kModelBound);
      n += accepted;
    }
  }
}

TEST(LanguageModel, RejectedTokensChangeNothing) {
  for (const char* name : kKinds) expect_no_trace_of_rejected_tokens(name);
}

// The first layer of attention, or of the others, in the model's pool.
int first_layer(const std::string& name, bool is_attention) {
  const std::vector<StateLayer> layers = state_layout(fixture(name).config, "", 1, 1, 16).layers;
  return static_cast<int>(std::ranges::find_if(layers,
                                               [&](const StateLayer& layer) {
                                                 return std::holds_alternative<AttentionLayer>(layer) == is_attention;
                                               }) -
                          layers.begin());
}

TEST(LanguageModel, CorruptedStateIsSeen) {
  for (const char* name : kModels) {
    const ExpectedLogits expected(name);
    const int recurrent = first_layer(name, false), attention = first_layer(name, true);
    const std::function<void(ModelRig&, Handle)> faults[] = {
        [&](ModelRig& rig, Handle row) {
          const int64_t size = rig.pool.arrays(recurrent)->checkpoint_floats();
          float* state = rig.pool.checkpoint(recurrent) + rig.pool.ledger().checkpoint(row) * size;
          for (int64_t i = 0; i < size; ++i) state[i] *= -1;
        },
        [&](ModelRig& rig, Handle row) {  // what one record writes into the state, all heads
          const std::vector<RingArray>& arrays = rig.pool.arrays(recurrent)->ring;
          const size_t index = static_cast<size_t>(
              std::ranges::find_if(arrays,
                                   [](const RingArray& a) { return a.name == "ring_v" || a.name == "ring_x"; }) -
              arrays.begin());
          ASSERT_LT(index, arrays.size());
          const int64_t capacity = rig.pool.layout().ring_capacity(), size = arrays[index].size;
          const int64_t last = (rig.pool.cursor(row).tokens() - 1) % capacity;
          for (int64_t h = 0; h < arrays[index].heads; ++h)
            for (int64_t i = 0; i < size; ++i)
              rig.pool.ring(recurrent, index)[((row.slot * arrays[index].heads + h) * capacity + last) * size + i] *=
                  -1;
        },
        [&](ModelRig& rig, Handle row) {
          Conv1dState state = rig.pool.conv_state(recurrent);
          for (int64_t i = 0; i < state.capacity * state.channels; ++i)
            state.window[row.slot * state.capacity * state.channels + i] *= -1;
        },
        [&](ModelRig& rig, Handle) {
          KvCache cache = rig.pool.kv_cache(attention);
          float* values = cache.latent_size > 0 ? cache.k : cache.v;
          for (int64_t i = 0; i < cache.pages * cache.kv_heads * cache.page_tokens * cache.head_size; ++i)
            values[i] *= -1;
        },
    };
    for (size_t f = 0; f <= std::size(faults); ++f) {
      ModelRig rig(fixture(name), {.window = 16});
      const Handle row = rig.pool.allocate(200);
      rig.prefill(row, std::span(expected.token).first(kPrompt));
      for (int n = kPrompt; n < kPrompt + 3; ++n) rig.decode(Decoder::kDirect, {row}, {expected.token[n]});
      if (f < std::size(faults)) faults[f](rig, row);
      const auto logits = rig.decode(Decoder::kDirect, {row}, {expected.token[kPrompt + 3]});
      const double error = relative_error(logits, expected.rows(kPrompt + 3, kPrompt + 4));
      if (f < std::size(faults))
        EXPECT_GT(error, kFaultBound) << name << " fault " << f;
      else
        EXPECT_LE(error, kModelBound);
    }
  }
}

// A sequence of the long runs: its tokens are a function of its number, so that every run feeds the same.
struct LongRow {
  Handle handle;
  int number = 0;
  int64_t length = 0;
};

int32_t token_of(int number, int64_t position, int64_t vocabulary) {
  std::mt19937_64 random(static_cast<uint64_t>(number) * 100003 + static_cast<uint64_t>(position));
  return static_cast<int32_t>(random() % vocabulary);
}

// Steps of up to four rows that start at different times and lengths, leave, and come back in other places.
void run_long(ModelRig& rig, Decoder decoder, int steps,
              const std::function<void(int, const std::vector<float>&)>& see) {
  std::mt19937_64 random(11);
  std::vector<LongRow> rows;
  int number = 0;
  const int64_t vocabulary = rig.model.config().vocabulary;
  for (int step = 0; step < steps; ++step) {
    if (rows.size() < 4 && (rows.empty() || random() % 20 == 0)) {
      LongRow row{rig.pool.allocate(1500), number++, static_cast<int64_t>(1 + random() % 60)};
      std::vector<int32_t> prompt;
      for (int64_t p = 0; p < row.length; ++p) prompt.push_back(token_of(row.number, p, vocabulary));
      rig.prefill(row.handle, prompt);
      rows.insert(rows.begin() + static_cast<std::ptrdiff_t>(random() % (rows.size() + 1)), row);
    }
    if (rows.size() > 1 && random() % 40 == 0) {
      const auto gone = rows.begin() + static_cast<std::ptrdiff_t>(random() % rows.size());
      rig.pool.free(gone->handle);
      rows.erase(gone);
    }
    if (random() % 10 == 0) std::shuffle(rows.begin(), rows.end(), random);
    std::vector<Handle> handles;
    std::vector<int32_t> token;
    for (LongRow& row : rows) {
      handles.push_back(row.handle);
      token.push_back(token_of(row.number, row.length++, vocabulary));
    }
    see(step, rig.decode(decoder, handles, token));
  }
}

TEST(LanguageModel, ExactDecodingHasTheBitsOfConventionalDecoding) {
  for (const char* name : walked(kModels, kKinds.size())) {
    ModelRig conventional(fixture(name), {.threads = 2}), exact(fixture(name), {.threads = 2, .window = 7});
    ModelRig planes(fixture(name), {.threads = 2, .window = 7, .form = CheckpointForm::kPlanes});
    std::vector<std::vector<float>> expected;
    const int steps = walk_length(1000);
    run_long(conventional, Decoder::kConventional, steps,
             [&](int, const std::vector<float>& logits) { expected.push_back(logits); });
    int differing = 0;
    const auto compare = [&](int step, const std::vector<float>& logits) {
      differing += !same_bits(logits, expected[step]);
    };
    run_long(exact, Decoder::kExact, steps, compare);
    run_long(planes, Decoder::kExact, steps / 4, compare);
    EXPECT_EQ(differing, 0) << name;
    EXPECT_GT(exact.flushes, steps / 10);
  }
}

// Prompts of several lengths in one step, then windows: each row's bits are those of the row alone on one thread.
TEST(LanguageModel, ARowsBitsDependOnNeitherBatchNorPlaceNorThreads) {
  for (const char* name : walked(kModels, kKinds.size())) {
    const int64_t vocabulary = fixture(name).config.vocabulary;
    const std::vector<int> lengths = {1, 17, 64, 65, 130};
    const auto tokens_of = [&](int row, int64_t begin, int64_t count) {
      std::vector<int32_t> token;
      for (int64_t p = begin; p < begin + count; ++p) token.push_back(token_of(row, p, vocabulary));
      return token;
    };
    const std::vector<DecodeCase> all = {kDecodeCases[3], kDecodeCases[0], kDecodeCases[5]};
    for (const DecodeCase& c : walked(all, 1)) {
      constexpr int kWindows = 12;
      std::vector<std::vector<float>> alone(lengths.size());
      for (size_t r = 0; r < lengths.size(); ++r) {
        ModelRig rig(fixture(name), {.window = c.window, .max_tokens = 512});
        const Handle row = rig.pool.allocate(400);
        alone[r] = rig.prefill(row, tokens_of(static_cast<int>(r), 0, lengths[r]));
        for (int w = 0; w < kWindows; ++w) {
          const auto logits =
              rig.decode(c.decoder, {row}, tokens_of(static_cast<int>(r), lengths[r] + w * c.tokens, c.tokens));
          alone[r].insert(alone[r].end(), logits.begin(), logits.end());
        }
      }
      for (int threads : {1, 2, 3}) {
        ModelRig rig(fixture(name), {.threads = threads, .window = c.window, .max_tokens = 512});
        std::vector<size_t> order = {3, 0, 4, 2, 1};
        std::vector<Handle> handles(lengths.size());
        for (size_t r : order) handles[r] = rig.pool.allocate(400);
        std::vector<size_t> seen(lengths.size(), 0);
        const auto run = [&](StepKind kind, int count) {
          std::vector<Handle> rows;
          std::vector<int> counts;
          std::vector<int32_t> token;
          for (size_t r : order) {
            const int64_t at = static_cast<int64_t>(seen[r]) / vocabulary;
            rows.push_back(handles[r]);
            counts.push_back(kind == StepKind::kPrefill ? lengths[r] : count);
            const auto more = tokens_of(static_cast<int>(r), at, counts.back());
            token.insert(token.end(), more.begin(), more.end());
          }
          rows.push_back(kPaddingRow);
          counts.push_back(kind == StepKind::kPrefill ? 3 : count);
          token.insert(token.end(), counts.back(), 0);
          const auto logits =
              kind == StepKind::kPrefill ? rig.step(kind, rows, counts, token) : rig.decode(c.decoder, rows, token);
          size_t at = 0;
          for (size_t i = 0; i < order.size(); ++i) {
            const size_t size = static_cast<size_t>(counts[i] * vocabulary);
            EXPECT_TRUE(same_bits(std::span(logits).subspan(at, size),
                                  std::span(alone[order[i]]).subspan(seen[order[i]], size)))
                << name << " threads " << threads << " row " << order[i] << " at " << seen[order[i]] / vocabulary;
            at += size;
            seen[order[i]] += size;
          }
        };
        run(StepKind::kPrefill, 0);
        for (int w = 0; w < kWindows; ++w) {
          std::rotate(order.begin(), order.begin() + 1 + w % 2, order.end());
          run(StepKind::kReplay, c.tokens);
        }
      }
    }
  }
}

TEST(LanguageModel, AnySplitOfAPromptGivesTheSameLogits) {
  for (const char* name : walked(kModels, kKinds.size())) {
    const ExpectedLogits expected(name);
    const std::vector<int> all = {3, 67, 1, 64, 133, 134};
    for (int max_tokens : walked(all, 2)) {
      for (int threads : {1, 2}) {
        ModelRig rig(fixture(name), {.threads = threads, .max_tokens = max_tokens});
        const Handle row = rig.pool.allocate(200);
        std::vector<float> logits = poisoned(expected.vocabulary);
        const std::span<const int32_t> prompt = expected.token;
        rig.model.prefill({&row, 1}, {&prompt, 1}, logits.data(), rig.pool);
        EXPECT_LE(relative_error(logits, expected.rows(133, 134)), kModelBound) << name << " " << max_tokens;
        EXPECT_EQ(rig.pool.cursor(row).tokens(), 134);
      }
    }
    // Several prompts at once, in pieces that end anywhere.
    ModelRig rig(fixture(name), {.max_tokens = 50});
    const std::vector<int> lengths = {1, 70, 49, 134};
    std::vector<Handle> rows;
    std::vector<std::span<const int32_t>> prompts;
    for (int length : lengths) {
      rows.push_back(rig.pool.allocate(200));
      prompts.push_back(std::span(expected.token).first(length));
    }
    std::vector<float> logits = poisoned(lengths.size() * expected.vocabulary);
    rig.model.prefill(rows, prompts, logits.data(), rig.pool);
    for (size_t r = 0; r < lengths.size(); ++r)
      EXPECT_LE(relative_error(std::span(logits).subspan(r * expected.vocabulary, expected.vocabulary),
                               expected.rows(lengths[r] - 1, lengths[r])),
                kModelBound);
  }
}

int last_recurrent_layer(const StatePool& pool) {
  int layer = static_cast<int>(pool.layout().layers.size()) - 1;
  while (pool.arrays(layer) == nullptr) --layer;
  return layer;
}

// A NaN in one sequence's state ends in that sequence's logits alone.
void expect_bad_number_in_its_row(const std::string& name) {
  const ExpectedLogits expected(name);
  for (Decoder decoder : {Decoder::kConventional, Decoder::kDirect, Decoder::kExact}) {
    ModelRig good(fixture(name), {.threads = 2}), bad(fixture(name), {.threads = 2});
    std::vector<Handle> rows[2];
    ModelRig* rigs[] = {&good, &bad};
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < 3; ++r) {
        rows[i].push_back(rigs[i]->pool.allocate(200));
        rigs[i]->prefill(rows[i].back(), std::span(expected.token).first(5 + 7 * r));
      }
    }
    const int layer = last_recurrent_layer(bad.pool);
    const int64_t size = bad.pool.arrays(layer)->checkpoint_floats();
    bad.pool.checkpoint(layer)[bad.pool.ledger().checkpoint(rows[1][1]) * size + 77] =
        std::numeric_limits<float>::quiet_NaN();
    for (int step = 0; step < 20; ++step) {
      const std::vector<int32_t> token = {1, 2, 3};
      const auto clean = good.decode(decoder, rows[0], token), given = bad.decode(decoder, rows[1], token);
      for (int r : {0, 2})
        EXPECT_TRUE(same_bits(std::span(given).subspan(r * expected.vocabulary, expected.vocabulary),
                              std::span(clean).subspan(r * expected.vocabulary, expected.vocabulary)));
      EXPECT_FALSE(std::isfinite(given[expected.vocabulary]));
    }
  }
}

TEST(LanguageModel, ABadNumberStaysInItsRow) {
  for (const char* name : kKinds) expect_bad_number_in_its_row(name);
}

// A step asks for no memory: neither the plan, nor the forward pass, nor the commit, in any of the decoders.
void expect_steps_without_allocations(const std::string& name) {
  ModelRig rig(fixture(name), {.threads = 2, .window = 4, .max_tokens = 32});
  const std::vector<Handle> rows = {rig.pool.allocate(200), rig.pool.allocate(200)};
  const std::vector<int> prompt = {20, 7}, one = {1, 1};
  const std::vector<int32_t> token(27, 3), wanted = {0, 1};
  std::vector<float> logits = poisoned(2 * 187);
  const auto run = [&](StepKind kind, const std::vector<int>& counts, Readout readout) {
    const StepPlan& plan = rig.pool.begin_step(kind, rows, counts);
    rig.model.forward(
        {.plan = &plan, .token = token.data(), .readout = readout, .logit_token = wanted, .logits = logits.data()},
        rig.pool);
    rig.pool.commit();
  };
  run(StepKind::kPrefill, prompt, Readout::kExact);  // the pool's array of positions may grow once
  const AllocationLimit limit(0);
  run(StepKind::kPrefill, prompt, Readout::kExact);
  for (int step = 0; step < 12; ++step) {
    run(StepKind::kReplay, one, step % 2 == 0 ? Readout::kDirect : Readout::kExact);
    run(StepKind::kConventional, one, Readout::kExact);
  }
  EXPECT_EQ(limit.used_bytes(), 0u);
}

TEST(LanguageModel, StepsAllocateNothing) {
  for (const char* name : kKinds) expect_steps_without_allocations(name);
}

TEST(LanguageModel, RefusesWrongSteps) {
  ModelRig rig(fixture(kModels[0]), {.max_tokens = 8});
  const Handle row = rig.pool.allocate(100);
  const std::vector<int32_t> token(9, 1);
  std::vector<float> logits(9 * 187, kPoison);
  const std::vector<int32_t> wanted = {0};
  const auto refused = [&](int count, auto change) {
    const StepPlan& plan = rig.pool.begin_step(StepKind::kPrefill, {{row}}, {{count}});
    ModelStep step{.plan = &plan, .token = token.data(), .logit_token = wanted, .logits = logits.data()};
    change(step);
    EXPECT_THROW(rig.model.forward(step, rig.pool), Error);
    rig.pool.abort_step();
    rig.pool.reset(row);
  };
  refused(9, [](ModelStep&) {});
  refused(1, [](ModelStep& s) { s.plan = nullptr; });
  refused(1, [](ModelStep& s) { s.token = nullptr; });
  refused(1, [](ModelStep& s) { s.logits = nullptr; });
  const std::vector<int32_t> past = {1}, before = {-1}, large = {187};
  refused(1, [&](ModelStep& s) { s.logit_token = past; });
  refused(1, [&](ModelStep& s) { s.logit_token = before; });
  refused(1, [&](ModelStep& s) { s.token = large.data(); });
  refused(1, [&](ModelStep& s) { s.token = before.data(); });
  ModelRig other(fixture("qwen3_next-tiny"));
  const StepPlan& plan = rig.pool.begin_step(StepKind::kPrefill, {{row}}, {{1}});
  EXPECT_THROW(other.model.forward({.plan = &plan, .token = token.data(), .logit_token = {}}, rig.pool), Error);
  rig.pool.abort_step();
  rig.pool.reset(row);
  const std::span<const int32_t> none;
  EXPECT_THROW(rig.model.prefill({&row, 1}, {&none, 1}, logits.data(), rig.pool), Error);
  EXPECT_THROW(rig.model.prefill({&row, 1}, {}, logits.data(), rig.pool), Error);
  const std::span<const int32_t> good = token;
  rig.model.prefill({&row, 1}, {&good, 1}, logits.data(), rig.pool);
  EXPECT_TRUE(std::isfinite(logits[186]));
}

}  // namespace
}  // namespace replayssm
