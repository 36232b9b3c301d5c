// Generating with whole models: a sequence depends on its own request alone, endings, refusals, decoders side by side.
#include "replayssm/model/generation.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "replayssm/model/comparison.h"
#include "tests/arrays.h"
#include "tests/bad_input.h"
#include "tests/tokenizer_fixture.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

// A tiny random model that never ends by itself. (Its 187 tokens are fewer than a tokenizer needs, and nothing here
// turns tokens into text. Its logits are far apart: at temperature 1 it repeats itself.)
Model tiny_model(const std::string& name = "qwen3_5-tiny") {
  const std::string directory = std::string(REPLAYSSM_SOURCE_DIR) + "/tests/fixtures/models/" + name;
  ModelConfig config = read_config(directory);
  config.end_tokens.clear();
  Weights weights = load_weights(Checkpoint(directory), config);
  return {std::move(config), Tokenizer(small_tokenizer().dump(), "tokenizer.json"), std::move(weights)};
}

const Model& shared_model() {
  static const Model model = tiny_model();
  return model;
}

GenerationRequest request(int prompt_tokens, int64_t new_tokens, uint64_t seed, float temperature) {
  GenerationRequest made;
  for (int i = 0; i < prompt_tokens; ++i) made.prompt.push_back(static_cast<int32_t>((seed * 31 + 17 * i) % 187));
  made.max_new_tokens = new_tokens;
  made.sampling = {.temperature = temperature, .seed = seed};
  made.sampling.repetition_penalty = seed % 2 == 0 ? 1.0f : 1.3f;
  made.sequence = seed;
  return made;
}

std::vector<GenerationRequest> mixed_requests() {
  return {request(5, 40, 1, 10), request(600, 7, 2, 0), request(1, 1, 3, 5), request(9, 0, 4, 0),
          request(33, 25, 5, 10)};
}

std::vector<std::vector<int32_t>> generate(const Model& model, const std::vector<GenerationRequest>& requests,
                                           const GenerationOptions& options, int threads = 1) {
  Device device(threads);
  Generation generation(model, device, requests, options);
  while (generation.prefill()) continue;
  while (generation.step()) continue;
  std::vector<std::vector<int32_t>> tokens;
  for (int i = 0; i < generation.sequences(); ++i)
    tokens.emplace_back(generation.tokens(i).begin(), generation.tokens(i).end());
  return tokens;
}

TEST(Generation, ASequenceDependsOnItsOwnRequestAlone) {
  const std::vector<GenerationRequest> requests = mixed_requests();
  for (const Decoder decoder : {Decoder::kConventional, Decoder::kReplay, Decoder::kExact}) {
    const GenerationOptions options{.decoder = decoder, .window = 5};
    const auto together = generate(shared_model(), requests, options, 3);
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(static_cast<int64_t>(together[i].size()), requests[i].max_new_tokens);
      EXPECT_EQ(generate(shared_model(), {requests[i]}, options)[0], together[i]) << decoder_name(decoder) << " " << i;
    }
    const std::vector<GenerationRequest> reversed(requests.rbegin(), requests.rend());
    const auto backwards = generate(shared_model(), reversed, options, 2);
    for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(backwards[requests.size() - 1 - i], together[i]);
  }
}

TEST(Generation, ExactAndConventionalDrawTheSameTokens) {
  const std::vector<GenerationRequest> requests = mixed_requests();
  const auto conventional = generate(shared_model(), requests, {.decoder = Decoder::kConventional});
  for (const int window : {1, 2, 7, 16})
    EXPECT_EQ(generate(shared_model(), requests, {.decoder = Decoder::kExact, .window = window}), conventional);
}

TEST(Generation, CountsTokensFlushesAndBytes) {
  Device device(1);
  Generation generation(shared_model(), device, {request(20, 12, 1, 0), request(3, 30, 2, 0)}, {.window = 4});
  while (generation.prefill()) continue;
  while (generation.step()) continue;
  EXPECT_EQ(generation.counts().prompt_tokens, 23);
  EXPECT_EQ(generation.counts().sampled_tokens, 42);
  EXPECT_EQ(generation.counts().decoded_tokens, 40);
  EXPECT_EQ(generation.counts().flushes, (11 - 1) / 4 + (29 - 1) / 4);
  const int64_t checkpoint_bytes = 3 * 6 * 20 * 32 * 4;
  EXPECT_GT(generation.counts().traffic.read_bytes, static_cast<size_t>(40 * checkpoint_bytes));
  EXPECT_LT(generation.counts().traffic.written_bytes, static_cast<size_t>(40 * checkpoint_bytes));
}

TEST(Generation, AnEndTokenEndsItsSequenceAlone) {
  Model model = tiny_model();
  const std::vector<GenerationRequest> requests = {request(5, 20, 2, 10), request(8, 20, 4, 10)};
  const auto endless = generate(model, requests, {});
  size_t cut = 1;
  const auto occurs = [&](int32_t token, std::span<const int32_t> in) {
    return std::find(in.begin(), in.end(), token) != in.end();
  };
  while (cut < 20 && (occurs(endless[0][cut], std::span(endless[0]).first(cut)) || occurs(endless[0][cut], endless[1])))
    ++cut;
  ASSERT_LT(cut, 20u) << "no token that marks a place in the first text alone";
  model.config.end_tokens = {endless[0][cut]};
  Device device(1);
  Generation generation(model, device, requests, {});
  while (generation.prefill()) continue;
  while (generation.step()) continue;
  EXPECT_EQ(generation.ending(0), Ending::kEndToken);
  EXPECT_TRUE(std::ranges::equal(generation.tokens(0), std::span(endless[0]).first(cut)));
  EXPECT_EQ(generation.ending(1), Ending::kLength);
  EXPECT_TRUE(std::ranges::equal(generation.tokens(1), endless[1]));
}

TEST(Generation, ABadNumberEndsItsSequenceAlone) {
  Model model = tiny_model("qwen3_next-tiny");  // its head is not its embedding
  std::vector<GenerationRequest> requests = {request(5, 12, 2, 0), request(8, 12, 4, 0)};
  requests[1].prompt.assign(8, 3);
  requests[0].prompt.assign(5, 4);
  const auto healthy = generate(model, requests, {});
  for (int i = 0; i < model.config.hidden_size; ++i) {
    const size_t element = static_cast<size_t>(5) * model.config.hidden_size + i;
    if (model.weights.embedding.is_bf16())
      model.weights.embedding.bf16[element] = Bf16{0x7FC0};
    else
      model.weights.embedding.f32[element] = kPoison;
  }
  ASSERT_EQ(std::count(healthy[0].begin(), healthy[0].end(), 5), 0);
  requests[1].prompt.back() = 5;
  Device device(1);
  Generation generation(model, device, requests, {});
  while (generation.prefill()) continue;
  while (generation.step()) continue;
  EXPECT_EQ(generation.ending(0), Ending::kLength);
  EXPECT_TRUE(std::ranges::equal(generation.tokens(0), healthy[0]));
  EXPECT_EQ(generation.ending(1), Ending::kBadNumber);
  EXPECT_TRUE(generation.tokens(1).empty());
}

TEST(Generation, RefusesWhatCannotRun) {
  Device device(1);
  const auto start = [&](GenerationRequest asked, GenerationOptions options = {}) {
    Generation generation(shared_model(), device, {asked}, options);
  };
  expect_refusal([&] { Generation(shared_model(), device, {}, {}); }, "at least one prompt");
  expect_refusal([&] { start(request(0, 5, 1, 0)); }, "prompt 1", "at least one token");
  expect_refusal([&] { start(request(4096, 1, 1, 0)); }, "4096", "1 new");
  expect_refusal([&] { start(request(1, INT64_MAX, 1, 0)); }, "context");
  expect_refusal([&] { start(request(1, -1, 1, 0)); }, "new tokens", "-1");
  expect_refusal([&] { start(request(1, 5, 1, -1)); }, "temperature", "-1");
  expect_refusal([&] { start(request(1, 5, 1, 0), {.window = 0}); }, "window", "0");
  GenerationRequest foreign = request(3, 5, 1, 0);
  foreign.prompt[1] = 187;
  expect_refusal([&] { start(foreign); }, "186", "187");
  expect_refusal([] { parse_decoder("fast"); }, "conventional", "fast");
  Generation early(shared_model(), device, {request(3, 5, 1, 0)}, {});
  expect_refusal([&] { early.step(); }, "prompts");
}

bool never() {
  return false;
}

TEST(Comparison, ExactHasConventionalBitsAndReplayIsClose) {
  Device device(2);
  const std::vector<DecoderRun> runs = compare_decoders(
      shared_model(), device, {request(5, 40, 2, 0), request(70, 20, 4, 0), request(9, 1, 6, 0)}, 6, never);
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[0].largest_logit_difference, 0);
  EXPECT_EQ(runs[2].largest_logit_difference, 0);
  EXPECT_TRUE(runs[2].is_identical);
  EXPECT_GT(runs[1].largest_logit_difference, 0);
  EXPECT_LT(runs[1].largest_logit_difference, kModelBound);
  for (const DecoderRun& run : runs) EXPECT_EQ(run.counts.sampled_tokens, 61);
}

TEST(Comparison, StopsWhenAsked) {
  Device device(1);
  EXPECT_TRUE(compare_decoders(shared_model(), device, {request(5, 4, 2, 0)}, 6, [] { return true; }).empty());
}

}  // namespace
}  // namespace replayssm
