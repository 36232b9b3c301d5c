// A model's blocks of experts against their definition: every activation, latent projections, shared experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "replayssm/model/language_model.h"
#include "tests/arrays.h"
#include "tests/ref/experts.h"
#include "tests/ref/linear.h"
#include "tests/ref/norm.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

constexpr int kHidden = 24, kVocabulary = 37, kExperts = 10;

Matrix random_matrix(std::mt19937_64& random, int64_t outputs, int64_t inputs) {
  Matrix matrix{.outputs = outputs, .inputs = inputs, .bf16 = {}, .f32 = Buffer<float>(outputs * inputs)};
  const float scale = 1.5f / std::sqrt(static_cast<float>(inputs));
  std::ranges::copy(random_normal(random, outputs * inputs, scale), matrix.f32.begin());
  return matrix;
}

Buffer<float> random_vector(std::mt19937_64& random, int64_t size, float scale, float mean) {
  Buffer<float> vector(size);
  std::ranges::copy(random_normal(random, size, scale, mean), vector.begin());
  return vector;
}

FeedForwardWeights random_feed_forward(std::mt19937_64& random, Activation activation, int size, int width) {
  return {random_matrix(random, activation == Activation::kSwiGlu ? 2 * size : size, width),
          random_matrix(random, width, size)};
}

std::vector<double> multiply(const MatrixRows& matrix, const std::vector<double>& x) {
  return ref::linear(matrix.f32, x, 1, matrix.inputs, matrix.outputs);
}

// What is one expert's of a matrix of all.
MatrixRows rows_of(const Matrix& matrix, int expert) {
  return matrix.rows(expert * (matrix.outputs / kExperts), matrix.outputs / kExperts);
}

void add(std::vector<double>& sum, double weight, const std::vector<double>& x) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += weight * x[i];
}

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

std::vector<double> feed_forward(Activation activation, const MatrixRows& up, const MatrixRows& down,
                                 const std::vector<double>& x) {
  const std::vector<double> sums = multiply(up, x);
  std::vector<double> inner(down.inputs);
  for (size_t i = 0; i < inner.size(); ++i)
    inner[i] = activation == Activation::kSwiGlu ? sums[i] * sigmoid(sums[i]) * sums[inner.size() + i]
                                                 : std::pow(std::max(0.0, sums[i]), 2);
  return multiply(down, inner);
}

// An attention block that adds nothing (a model must keep some state), then one of experts.
struct TinyModel {
  explicit TinyModel(const ExpertsConfig& experts, uint64_t seed = 1) {
    config.vocabulary = kVocabulary;
    config.hidden_size = kHidden;
    config.layers = 2;
    config.blocks = {{0, AttentionConfig{.query_heads = 1, .kv_heads = 1, .head_size = 4}}, {1, experts}};
    config.norm_epsilon = 1e-5;
    config.context_tokens = 100;
    std::mt19937_64 random(seed);
    const int width = experts.latent_size > 0 ? experts.latent_size : kHidden;
    ExpertsWeights own;
    own.router = random_matrix(random, kExperts, kHidden);
    if (experts.router.has_correction) own.correction = random_vector(random, kExperts, 0.2f, 0);
    own.experts = {
        random_matrix(random, kExperts * (experts.activation == Activation::kSwiGlu ? 2 : 1) * experts.size, width),
        random_matrix(random, kExperts * width, experts.size)};
    if (experts.latent_size > 0) {
      own.latent_down = random_matrix(random, width, kHidden);
      own.latent_up = random_matrix(random, kHidden, width);
    }
    if (experts.shared_size > 0)
      own.shared = random_feed_forward(random, experts.activation, experts.shared_size, kHidden);
    if (experts.has_shared_gate) own.shared_gate = random_matrix(random, 1, kHidden);
    AttentionWeights attention;
    attention.in_proj = random_matrix(random, 12, kHidden);
    attention.out_proj = random_matrix(random, kHidden, 4);
    std::ranges::fill(attention.out_proj.f32, 0.0f);
    weights.embedding = random_matrix(random, kVocabulary, kHidden);
    weights.lm_head = random_matrix(random, kVocabulary, kHidden);
    weights.norm = random_vector(random, kHidden, 0.2f, 1);
    weights.blocks.push_back({random_vector(random, kHidden, 0.2f, 1), std::move(attention)});
    weights.blocks.push_back({random_vector(random, kHidden, 0.2f, 1), std::move(own)});
  }

  ExpertsWeights& experts() { return std::get<ExpertsWeights>(weights.blocks[1].body); }

  std::vector<float> run(const std::vector<int32_t>& token, int threads = 1) const {
    Device device(threads);
    const StateLayout layout = state_layout(config, "", 4, 1, 16);
    StatePool pool(layout, pool_size(layout, 1, 100), {.max_rows = 1, .is_poisoned = true});
    LanguageModel model(config, weights, layout, 64, device);
    const Handle row = pool.allocate(100);
    const int count = static_cast<int>(token.size());
    const StepPlan& plan = pool.begin_step(StepKind::kPrefill, {{row}}, {{count}});
    std::vector<int32_t> wanted(token.size());
    for (int n = 0; n < count; ++n) wanted[n] = n;
    std::vector<float> logits = poisoned(token.size() * kVocabulary);
    model.forward({.plan = &plan, .token = token.data(), .logit_token = wanted, .logits = logits.data()}, pool);
    pool.commit();
    return logits;
  }

  std::vector<double> expected(const std::vector<int32_t>& token) {
    const ExpertsConfig& sizes = std::get<ExpertsConfig>(config.blocks[1].config);
    const ExpertsWeights& own = experts();
    std::vector<double> logits;
    for (int32_t one : token) {
      const std::span<const float> row(weights.embedding.f32.data() + one * kHidden, kHidden);
      std::vector<double> hidden(row.begin(), row.end());
      const auto norm = [&](const std::vector<double>& x, const Buffer<float>& weight) {
        const std::vector<float> rounded(x.begin(), x.end());
        return ref::rms_norm(rounded, {weight.data(), weight.size()}, false, config.norm_epsilon);
      };
      const std::vector<double> x = norm(hidden, weights.blocks[1].norm);
      std::vector<float> scores;
      for (double logit : multiply(own.router, x)) scores.push_back(static_cast<float>(logit));
      const std::vector<double> input = sizes.latent_size > 0 ? multiply(own.latent_down, x) : x;
      std::vector<double> sum(input.size());
      for (const auto& [expert, weight] :
           ref::route(scores, {own.correction.data(), own.correction.size()}, sizes.router, sizes.top_k))
        add(sum, weight,
            feed_forward(sizes.activation, rows_of(own.experts.up, expert), rows_of(own.experts.down, expert), input));
      add(hidden, 1, sizes.latent_size > 0 ? multiply(own.latent_up, sum) : sum);
      if (sizes.shared_size > 0)
        add(hidden, sizes.has_shared_gate ? sigmoid(multiply(own.shared_gate, x)[0]) : 1.0,
            feed_forward(sizes.activation, own.shared.up, own.shared.down, x));
      for (double logit : multiply(weights.lm_head, norm(hidden, weights.norm))) logits.push_back(logit);
    }
    return logits;
  }

  ModelConfig config;
  Weights weights;
};

const ExpertsConfig kCases[] = {
    {.experts = kExperts, .top_k = 3, .size = 9, .shared_size = 13, .has_shared_gate = true},
    {.experts = kExperts, .top_k = 3, .router = {.is_normalised = false, .scale = 3}, .size = 9},
    // Inner widths below and above the number of experts; a latent space narrower and wider than the hidden state.
    {.experts = kExperts,
     .top_k = 4,
     .router = {.scores = RouterScores::kSigmoid, .has_correction = true, .groups = 5, .top_groups = 3, .scale = 2.5},
     .size = 7,
     .activation = Activation::kRelu2,
     .latent_size = 11,
     .shared_size = 6},
    {.experts = kExperts,
     .top_k = 2,
     .router = {.scores = RouterScores::kSigmoid},
     .size = 40,
     .activation = Activation::kRelu2,
     .latent_size = 50,
     .shared_size = 45,
     .has_shared_gate = true},
    {.experts = kExperts, .top_k = kExperts, .size = 9, .activation = Activation::kRelu2, .shared_size = 8},
};

std::vector<int32_t> some_tokens() {
  std::vector<int32_t> token;
  for (int n = 0; n < 50; ++n) token.push_back(n * 11 % kVocabulary);
  return token;
}

TEST(ExpertsBlock, MatchesItsDefinition) {
  for (const ExpertsConfig& experts : kCases) {
    TinyModel model(experts);
    const std::vector<float> logits = model.run(some_tokens());
    EXPECT_LE(relative_error(logits, model.expected(some_tokens())), kFloat32Bound) << "case " << &experts - kCases;
    for (int threads : {2, 3}) EXPECT_TRUE(same_bits(model.run(some_tokens(), threads), logits));
  }
}

TEST(ExpertsBlock, EveryWeightIsSeen) {
  for (const ExpertsConfig& experts : kCases) {
    TinyModel original(experts);
    const std::vector<double> expected = original.expected(some_tokens());
    const auto error_of = [&](const std::function<Buffer<float>*(ExpertsWeights&)>& array, int part = 0,
                              int parts = 1) {
      TinyModel model(experts);
      Buffer<float>* values = array(model.experts());
      if (values->size() == 0) return 1.0;
      const size_t count = values->size() / parts;
      for (size_t i = part * count; i < (part + 1) * count; ++i) (*values)[i] = -(*values)[i];
      return relative_error(model.run(some_tokens()), expected);
    };
    // The correction of one expert may change no choice; all of them do.
    EXPECT_GT(error_of([](ExpertsWeights& w) { return &w.router.f32; }), kFaultBound);
    EXPECT_GT(error_of([](ExpertsWeights& w) { return &w.correction; }), kFaultBound);
    EXPECT_GT(error_of([](ExpertsWeights& w) { return &w.latent_down.f32; }), kFaultBound);
    EXPECT_GT(error_of([](ExpertsWeights& w) { return &w.latent_up.f32; }), kFaultBound);
    EXPECT_GT(error_of([](ExpertsWeights& w) { return &w.shared.up.f32; }), kFaultBound);
    EXPECT_GT(error_of([](ExpertsWeights& w) { return &w.shared.down.f32; }), kFaultBound);
    EXPECT_GT(error_of([](ExpertsWeights& w) { return &w.shared_gate.f32; }), kFaultBound);
    for (int e = 0; e < kExperts; ++e) {
      EXPECT_GT(error_of([](ExpertsWeights& w) { return &w.experts.up.f32; }, e, kExperts), kFaultBound);
      EXPECT_GT(error_of([](ExpertsWeights& w) { return &w.experts.down.f32; }, e, kExperts), kFaultBound);
    }
  }
}

}  // namespace
}  // namespace replayssm
