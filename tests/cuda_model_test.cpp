// Whole models on a GPU: transformers' logits in FP32, the decoders' bits, batches, captured steps, BF16, generation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "replayssm/core/error.h"
#include "replayssm/model/generation.h"
#include "replayssm/model/random_weights.h"
#include "tests/bad_input.h"
#include "tests/cuda_model_rig.h"
#include "tests/tolerance.h"
#include "tests/walks.h"

namespace replayssm {
namespace {

using namespace replayssm::test;
using test::Decoder;

class CudaModelTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped()) device_ = std::make_unique<CudaDevice>();
  }

  CudaDevice& device() { return *device_; }

  // A fixture's config and its weights in the GPU's memory, of Bf16 or float matrices.
  struct Loaded {
    ModelConfig config;
    CudaWeights weights;
  };
  Loaded load(const std::string& directory, Dtype element) {
    WeightStore<DeviceBuffer> store(device(), element);
    ModelConfig config = read_config(directory);
    CudaWeights weights = load_weights(Checkpoint(directory), config, store);
    device().synchronize();
    return {std::move(config), std::move(weights)};
  }

 private:
  std::unique_ptr<CudaDevice> device_;
};

TEST_F(CudaModelTest, PrefillHasTheLogitsOfTransformers) {
  for (const char* name : kModels) {
    const ExpectedLogits expected(name);
    const Loaded model = load(fixture_directory(name), Dtype::kF32);
    CudaModelRig<float> rig(model.config, model.weights, device(), {.max_tokens = 200});
    expect_prefill(rig, expected, name);
  }
}

TEST_F(CudaModelTest, DecodingHasTheLogitsOfTransformers) {
  for (const char* name : kModels) {
    const ExpectedLogits expected(name);
    const Loaded model = load(fixture_directory(name), Dtype::kF32);
    for (const DecodeCase& c : kDecodeCases) {
      CudaModelRig<float> rig(model.config, model.weights, device(), {.window = c.window});
      EXPECT_LE(relative_error(decode_text(rig, expected, c),
                               expected.rows(kPrompt, static_cast<int64_t>(expected.token.size()))),
                kModelBound)
          << name << " window " << c.window << " tokens " << c.tokens;
    }
  }
}

// In the model's own type, too: what differs from decoder to decoder is the recurrence alone.
TEST_F(CudaModelTest, ExactDecodingHasTheBitsOfConventionalDecoding) {
  for (const char* name : kModels) {
    const ExpectedLogits text(name);
    const auto check = [&]<typename T>(T, Dtype element) {
      const Loaded model = load(fixture_directory(name), element);
      std::vector<float> conventional;
      {
        CudaModelRig<T> rig(model.config, model.weights, device());
        conventional = decode_text(rig, text, {Decoder::kConventional, 1, 8});
      }
      for (const int window : {1, 5, 16}) {
        CudaModelRig<T> rig(model.config, model.weights, device(), {.window = window, .max_step_tokens = 1});
        EXPECT_TRUE(same_bits(decode_text(rig, text, {Decoder::kExact, 1, window}), conventional))
            << name << " window " << window;
      }
      // A captured step has the bits of one that was not.
      CudaModelRig<T> rig(model.config, model.weights, device());
      EXPECT_TRUE(same_bits(decode_text(rig, text, {Decoder::kExact, 1, 8}, true), conventional)) << name;
    };
    check(float(), Dtype::kF32);
    check(Bf16(), Dtype::kBF16);
  }
}

// Rows of one batch size: each has the bits that it has among other rows, in another place, beside padding rows.
TEST_F(CudaModelTest, ARowDoesNotDependOnTheOthers) {
  for (const char* name : kKinds) {
    const ExpectedLogits text(name);
    const Loaded model = load(fixture_directory(name), Dtype::kBF16);
    const int64_t vocabulary = text.vocabulary;
    CudaModelRig<Bf16> rig(model.config, model.weights, device());
    // Row b of the first run reads the text from token 3 b on.
    const auto run = [&](const std::vector<int>& order) {
      std::vector<Handle> rows;
      for (const int b : order) {
        if (b < 0) {
          rows.push_back(kPaddingRow);
          continue;
        }
        rows.push_back(rig.pool.allocate(200));
        rig.prefill(rows.back(), std::span(text.token).subspan(3 * b, 20));
      }
      std::map<int, std::vector<float>> logits;
      for (int step = 0; step < 12; ++step) {
        std::vector<int32_t> token;
        for (const int b : order) token.push_back(b < 0 ? 0 : text.token[3 * b + 20 + step]);
        const std::vector<float> all = rig.decode(Decoder::kDirect, rows, token);
        for (size_t i = 0; i < order.size(); ++i)
          logits[order[i]].insert(logits[order[i]].end(), all.begin() + i * vocabulary,
                                  all.begin() + (i + 1) * vocabulary);
      }
      for (const Handle& row : rows)
        if (!(row == kPaddingRow)) rig.pool.free(row);
      return logits;
    };
    auto first = run({0, 1, 2, 3}), other = run({3, 2, 0, 5}), padded = run({-1, 2, -1, -1});
    for (const int b : {0, 2, 3}) EXPECT_TRUE(same_bits(first[b], other[b])) << name << " row " << b;
    EXPECT_TRUE(same_bits(first[2], padded[2])) << name;
  }
}

// One graph for any slots, cursors and tokens; capturing it leaves all state alone.
TEST_F(CudaModelTest, AGraphServesAnyStepAndCapturingIsNoStep) {
  for (const char* name : kKinds) {
    const ExpectedLogits text(name);
    const Loaded model = load(fixture_directory(name), Dtype::kBF16);
    CudaModelRig<Bf16> rig(model.config, model.weights, device()), plain(model.config, model.weights, device());
    std::vector<Handle> rows, plain_rows;
    for (int b = 0; b < 4; ++b) {
      for (auto [of, list] : {std::pair(&rig, &rows), std::pair(&plain, &plain_rows)}) {
        list->push_back(of->pool.allocate(200));
        of->prefill(list->back(), std::span(text.token).subspan(5 * b, 11 + b));
      }
    }
    const std::vector<std::byte> before = rig.state();
    const auto graph = rig.capture(2, StepKind::kReplay, Readout::kDirect);
    EXPECT_EQ(rig.state(), before) << name;
    for (int step = 0; step < 20; ++step) {
      const int first = step % 3, second = (step * 5 + 1) % 3 == first ? 3 : (step * 5 + 1) % 3;
      const std::vector<int32_t> token = {text.token[step], text.token[step + 7]};
      const std::vector<float> logits = rig.launch(*graph, StepKind::kReplay, {rows[first], rows[second]}, token);
      ASSERT_TRUE(same_bits(logits, plain.decode(Decoder::kDirect, {plain_rows[first], plain_rows[second]}, token)))
          << name << " step " << step;
    }
  }
}

TEST_F(CudaModelTest, Bf16IsCloseToFp32) {
  for (const char* name : kModels) {
    const ExpectedLogits text(name);
    const Loaded model = load(fixture_directory(name), Dtype::kBF16);
    CudaModelRig<Bf16> rig(model.config, model.weights, device(), {.max_tokens = 200});
    const std::vector<float> logits = rig.prefill(rig.pool.allocate(200), text.token);
    // Roundings of every op of every block add up, and a choice of experts may change.
    EXPECT_LE(relative_error(logits, text.logits), kBf16ModelBound) << name;
  }
}

std::vector<std::vector<int32_t>> run_to_end(Generation& generation) {
  while (generation.prefill()) continue;
  while (generation.step()) continue;
  std::vector<std::vector<int32_t>> tokens;
  for (int i = 0; i < generation.sequences(); ++i)
    tokens.emplace_back(generation.tokens(i).begin(), generation.tokens(i).end());
  return tokens;
}

constexpr const char* kShipped[] = {"gdn-tiny", "mamba2-tiny", "kda-tiny"};
constexpr replayssm::Decoder kDecoders[] = {replayssm::Decoder::kConventional, replayssm::Decoder::kReplay,
                                            replayssm::Decoder::kExact};

std::string shipped_directory(const char* name) {
  return std::string(REPLAYSSM_SOURCE_DIR) + "/models/" + name;
}

// Greedy, five prompts in a batch, of which the last steps have fewer rows.
std::vector<GenerationRequest> shipped_requests(const Tokenizer& tokenizer) {
  std::vector<GenerationRequest> requests;
  for (const char* prompt : {"The scheduler of the Linux kernel", "If you want to", "Returns the", "When the device is",
                             "In general, the kernel"}) {
    GenerationRequest request;
    request.prompt = tokenizer.encode(prompt);
    request.max_new_tokens = are_walks_short() ? 64 : 256;
    request.sequence = requests.size();
    if (requests.size() > 2) request.max_new_tokens /= 2;
    requests.push_back(request);
  }
  requests.back().sampling.repetition_penalty = 1.1f;
  return requests;
}

TEST_F(CudaModelTest, ShippedModelsInFp32WriteWhatTheyWriteOnTheCpu) {
  for (const char* name : kShipped) {
    const Model model = load_model(shipped_directory(name));
    const CudaModel cuda_model = load_cuda_model(shipped_directory(name), Dtype::kF32, device());
    const std::vector<GenerationRequest> requests = shipped_requests(model.tokenizer);
    Device host(2);
    for (const auto decoder : kDecoders) {
      const GenerationOptions options{.decoder = decoder, .window = 8};
      Generation here(model, host, requests, options), there(cuda_model, device(), requests, options);
      EXPECT_EQ(run_to_end(there), run_to_end(here)) << name << " " << decoder_name(decoder);
    }
  }
}

// In BF16 a sequence may leave the CPU's where two logits are nearly equal, and only there.
TEST_F(CudaModelTest, ShippedModelsInBf16LeaveTheCpuOnlyWhereLogitsAreClose) {
  for (const char* name : kShipped) {
    const Model model = load_model(shipped_directory(name));
    const CudaModel cuda_model = load_cuda_model(shipped_directory(name), Dtype::kBF16, device());
    std::vector<GenerationRequest> requests = shipped_requests(model.tokenizer);
    requests.back().sampling.repetition_penalty = 1;
    Device host(2);
    const GenerationOptions options{.decoder = replayssm::Decoder::kReplay, .window = 8};
    Generation here(model, host, requests, options), there(cuda_model, device(), requests, options);
    const std::vector<std::vector<int32_t>> tokens = run_to_end(there);
    while (here.prefill()) continue;
    std::vector<bool> is_apart(requests.size(), false);
    for (size_t step = 0;; ++step) {
      std::vector<std::vector<float>> logits(requests.size());
      for (size_t i = 0; i < requests.size(); ++i)
        if (here.ending(static_cast<int>(i)) == Ending::kNone) {
          const std::span<const float> row = here.logits(static_cast<int>(i));
          logits[i].assign(row.begin(), row.end());
        }
      if (!here.step()) break;
      for (size_t i = 0; i < requests.size(); ++i) {
        const std::span<const int32_t> own = here.tokens(static_cast<int>(i));
        if (is_apart[i] || step >= own.size() || step >= tokens[i].size() || own[step] == tokens[i][step]) continue;
        is_apart[i] = true;
        const float gap = logits[i][own[step]] - logits[i][tokens[i][step]];
        const float largest = *std::ranges::max_element(logits[i]);
        std::printf("%s, prompt %zu: another token from %zu on, whose logit is %.3g lower than the largest, %.3g\n",
                    name, i, step, static_cast<double>(gap), static_cast<double>(largest));
        EXPECT_LE(gap, kBf16ModelBound * std::abs(largest)) << name << " prompt " << i << " token " << step;
      }
    }
  }
}

TEST_F(CudaModelTest, RandomWeightsAreTheCpusAndGiveFiniteLogits) {
  const ModelConfig config = read_config(fixture_directory("qwen3_5_moe-tiny"));
  WeightStore<DeviceBuffer> store(device(), Dtype::kF32);
  WeightStore<Buffer> host_store;
  const CudaWeights weights = random_weights(config, 7, false, store);
  const Weights expected = random_weights(config, 7, false, host_store);
  const auto* there = std::get_if<BasicDeltaWeights<DeviceBuffer>>(&weights.blocks[0].body);
  const auto* here = std::get_if<DeltaWeights>(&expected.blocks[0].body);
  ASSERT_NE(there, nullptr);
  const std::vector<float> values = there->in_proj.f32.download(device());
  EXPECT_TRUE(same_bits(values, std::span(here->in_proj.f32.data(), here->in_proj.f32.size())));
  CudaModelRig<float> rig(config, weights, device());
  const ExpectedLogits text("qwen3_5_moe-tiny");
  for (const float logit : rig.prefill(rig.pool.allocate(200), std::span(text.token).first(kPrompt)))
    ASSERT_TRUE(std::isfinite(logit));
}

TEST_F(CudaModelTest, RefusesWhatItCannotRun) {
  const Loaded model = load(fixture_directory("qwen3_5-tiny"), Dtype::kF32);
  expect_refusal(
      [&] {
        CudaLanguageModel<Bf16>(model.config, model.weights, {.tokens = 8, .rows = 1, .page_tokens = 16}, device());
      },
      "another type");
  expect_refusal(
      [&] {
        CudaLanguageModel<float>(model.config, model.weights, {.tokens = 1, .rows = 2, .page_tokens = 16}, device());
      },
      "no more rows than tokens");
  expect_refusal([&] { CudaLanguageModel<float>(model.config, model.weights, {.tokens = 1, .rows = 1}, device()); },
                 "pages of at least 1 token");
  CudaModelRig<float> rig(model.config, model.weights, device(), {.max_tokens = 8, .slots = 2});
  const std::vector<int32_t> token(9, 1);
  const Handle row = rig.pool.allocate(100);
  expect_refusal([&] { rig.prefill(row, token); }, "at most 8 tokens");
  rig.pool.abort_step();
  // Of longer sequences than the model has room for.
  CudaLanguageModel<float> small(model.config, model.weights,
                                 {.tokens = 8, .rows = 2, .sequence_tokens = 100, .page_tokens = 16}, device());
  const DeviceBuffer<float> logits(2 * model.config.vocabulary, device());
  const DeviceBuffer<int32_t> tokens(2, device());
  expect_refusal(
      [&] {
        small.forward({.rows = rig.pool.rows(2), .tokens = 2, .token = tokens.data(), .logits = logits.data()},
                      rig.pool);
      },
      "at most 112 tokens");
}

}  // namespace
}  // namespace replayssm
