#include "replayssm/model/language_model.h"

#include <algorithm>
#include <optional>

#include "replayssm/core/error.h"
#include "replayssm/ops/embed.h"
#include "replayssm/ops/linear.h"
#include "replayssm/ops/norm.h"
#include "replayssm/ops/rope.h"

namespace replayssm {

namespace {

struct StateOf {
  std::optional<StateLayer> operator()(const DeltaConfig& delta) const {
    return DeltaLayer{delta.shape, delta.conv_channels(), delta.conv_width};
  }
  std::optional<StateLayer> operator()(const Mamba2Config& mamba) const {
    return Mamba2Layer{mamba.shape, mamba.conv_channels(), mamba.conv_width};
  }
  std::optional<StateLayer> operator()(const AttentionConfig& attention) const {
    return AttentionLayer{attention.kv_heads, attention.head_size};
  }
  std::optional<StateLayer> operator()(const LatentAttentionConfig& attention) const {
    return AttentionLayer{1, attention.key_size(), attention.latent_size};
  }
  std::optional<StateLayer> operator()(const FeedForwardConfig&) const { return {}; }
  std::optional<StateLayer> operator()(const ExpertsConfig&) const { return {}; }
};

}  // namespace

std::vector<int> state_indices(const ModelConfig& config) {
  std::vector<int> indices;
  int next = 0;
  for (const Block& block : config.blocks) indices.push_back(std::visit(StateOf(), block.config) ? next++ : -1);
  return indices;
}

StateLayout state_layout(const ModelConfig& config, const std::string& fingerprint, int window, int max_step_tokens,
                         int page_tokens) {
  StateLayout layout;
  layout.model = fingerprint;
  for (const Block& block : config.blocks)
    if (auto layer = std::visit(StateOf(), block.config)) layout.layers.push_back(*layer);
  layout.window = window;
  layout.max_step_tokens = max_step_tokens;
  layout.page_tokens = page_tokens;
  layout.context_tokens = config.context_tokens;
  check_layout(layout);
  return layout;
}

void BlockWidths::widen(const BlockWidths& other) {
  projection = std::max(projection, other.projection);
  convolved = std::max(convolved, other.convolved);
  gate = std::max(gate, other.gate);
  beta = std::max(beta, other.beta);
  mixed = std::max(mixed, other.mixed);
  workspace_bytes = std::max(workspace_bytes, other.workspace_bytes);
}

LanguageModel::LanguageModel(const ModelConfig& config, const Weights& weights, const StateLayout& layout,
                             int max_tokens, Device& device)
    : config_(config),
      weights_(weights),
      layout_(layout),
      state_(state_indices(config)),
      max_tokens_(max_tokens),
      device_(device),
      pieces_(std::max(max_tokens, 0)) {
  require(max_tokens > 0, "max_tokens: expected 1 or more, got {}", max_tokens);
  // The logits' wanted rows lie in projection, too, and experts have rows of the hidden size.
  BlockWidths widths{.projection = config.hidden_size, .convolved = config.hidden_size, .mixed = config.hidden_size};
  for (const Block& block : config.blocks)
    widths.widen(
        std::visit([&](const auto& sizes) { return block_widths(sizes, layout, max_tokens, device); }, block.config));
  const auto rows = [&](int64_t width) { return Buffer<float>(static_cast<size_t>(max_tokens * width)); };
  arrays_.hidden = rows(config.hidden_size);
  arrays_.normal = rows(config.hidden_size);
  arrays_.projection = rows(widths.projection);
  arrays_.convolved = rows(widths.convolved);
  arrays_.gate = rows(widths.gate);
  arrays_.beta = rows(widths.beta);
  arrays_.mixed = rows(widths.mixed);
  const AttentionConfig* attention = config.first<AttentionConfig>();
  const int rotary_size = attention == nullptr ? 0 : attention->rotary_size;
  arrays_.cosine = rows(rotary_size / 2);
  arrays_.sine = rows(rotary_size / 2);
  arrays_.workspace = Buffer<std::byte>(widths.workspace_bytes);
}

size_t LanguageModel::workspace_bytes() const {
  size_t floats = 0;
  for (const Buffer<float>* buffer : {&arrays_.hidden, &arrays_.normal, &arrays_.projection, &arrays_.convolved,
                                      &arrays_.gate, &arrays_.beta, &arrays_.mixed, &arrays_.cosine, &arrays_.sine})
    floats += buffer->size();
  return floats * sizeof(float) + arrays_.workspace.size();
}

void LanguageModel::check(const ModelStep& step, const StatePool& pool) const {
  require(step.plan != nullptr, "forward: the plan must not be null");
  require(step.plan->tokens <= max_tokens_, "forward: expected a step of at most {} tokens, got {}", max_tokens_,
          step.plan->tokens);
  require(step.plan->tokens == 0 || step.token != nullptr, "forward: token must not be null");
  for (int n = 0; n < step.plan->tokens; ++n)
    require(step.token[n] >= 0 && step.token[n] < config_.vocabulary, "forward: expected tokens of 0 .. {}, got {}",
            config_.vocabulary - 1, step.token[n]);
  require(step.logit_token.size() <= static_cast<size_t>(max_tokens_) &&
              (step.logit_token.empty() || step.logits != nullptr),
          "forward: expected at most {} logit tokens and a place for their logits, got {}", max_tokens_,
          step.logit_token.size());
  for (int32_t n : step.logit_token)
    require(n >= 0 && n < step.plan->tokens, "forward: expected logit tokens of 0 .. {}, got {}", step.plan->tokens - 1,
            n);
  const StateLayout& given = pool.layout();
  require(given.ring_capacity() <= layout_.ring_capacity() && given.layers == layout_.layers,
          "forward: the pool's layers or window are not those of the model");
}

// hidden <- embedding; hidden <- hidden + block(norm(hidden)), block by block; logits.
void LanguageModel::forward(const ModelStep& step, StatePool& pool) {
  check(step, pool);
  const Forward forward{config_, step, pool, arrays_, device_, step.plan->tokens};
  if (forward.tokens == 0) return;
  embed({.tokens = forward.tokens,
         .vocabulary = config_.vocabulary,
         .size = config_.hidden_size,
         .token = step.token,
         .table = weights_.embedding.bf16.data(),
         .table_f32 = weights_.embedding.f32.data(),
         .y = arrays_.hidden.data()},
        device_);
  const AttentionConfig* attention = config_.first<AttentionConfig>();
  if (attention != nullptr && attention->rotary_size > 0)
    rope_angles({.tokens = forward.tokens,
                 .rotary_size = attention->rotary_size,
                 .theta = attention->rope_theta,
                 .position = step.plan->position,
                 .cosine = arrays_.cosine.data(),
                 .sine = arrays_.sine.data()},
                device_);
  for (size_t index = 0; index < weights_.blocks.size(); ++index) {
    normalize(forward, weights_.blocks[index].norm.data());
    run_block(forward, index);
  }
  project_logits(forward);
}

void LanguageModel::run_block(const Forward& forward, size_t index) {
  const BlockConfig& config = config_.blocks[index].config;
  const BlockWeights& weights = weights_.blocks[index].body;
  if (const auto* delta = std::get_if<DeltaConfig>(&config))
    run_delta(forward, *delta, std::get<DeltaWeights>(weights), state_[index]);
  else if (const auto* mamba = std::get_if<Mamba2Config>(&config))
    run_mamba2(forward, *mamba, std::get<Mamba2Weights>(weights), state_[index]);
  else if (const auto* attention = std::get_if<AttentionConfig>(&config))
    run_attention(forward, *attention, std::get<AttentionWeights>(weights), state_[index]);
  else if (const auto* latent = std::get_if<LatentAttentionConfig>(&config))
    run_latent_attention(forward, *latent, std::get<LatentAttentionWeights>(weights), state_[index]);
  else if (const auto* experts = std::get_if<ExpertsConfig>(&config))
    run_experts(forward, *experts, std::get<ExpertsWeights>(weights));
  else
    run_feed_forward(forward, std::get<FeedForwardConfig>(config), std::get<FeedForwardWeights>(weights));
}

// normal <- norm(hidden)
void LanguageModel::normalize(const Forward& forward, const float* weight) {
  const int64_t size = config_.hidden_size;
  rms_norm({.tokens = forward.tokens,
            .size = size,
            .x = arrays_.hidden.data(),
            .x_stride = size,
            .weight = weight,
            .is_zero_centred = config_.has_zero_centred_norms,
            .eps = static_cast<float>(config_.norm_epsilon),
            .y = arrays_.normal.data(),
            .y_stride = size},
           device_);
}

void project(const Forward& forward, const MatrixRows& matrix, const float* x, int64_t x_stride, float* y,
             bool is_added) {
  project(forward, matrix, forward.tokens, x, x_stride, y, is_added);
}

void project(const Forward& forward, const MatrixRows& matrix, int64_t rows, const float* x, int64_t x_stride, float* y,
             bool is_added) {
  linear({.tokens = rows,
          .inputs = matrix.inputs,
          .outputs = matrix.outputs,
          .weight = matrix.bf16,
          .weight_f32 = matrix.f32,
          .x = x,
          .x_stride = x_stride,
          .y = y,
          .y_stride = matrix.outputs,
          .residual = is_added ? y : nullptr,
          .residual_stride = matrix.outputs},
         forward.device);
}

// logits = W_head norm(hidden), of the wanted tokens alone.
void LanguageModel::project_logits(const Forward& forward) {
  const ModelStep& step = forward.step;
  const int64_t size = config_.hidden_size, count = static_cast<int64_t>(step.logit_token.size());
  if (count == 0) return;
  normalize(forward, weights_.norm.data());
  float* wanted = arrays_.projection.data();
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(arrays_.normal.data() + step.logit_token[i] * size, size, wanted + i * size);
  const Matrix& head = weights_.head();
  linear({.tokens = count,
          .inputs = size,
          .outputs = head.outputs,
          .weight = head.bf16.data(),
          .weight_f32 = head.f32.data(),
          .x = wanted,
          .x_stride = size,
          .y = step.logits,
          .y_stride = head.outputs},
         device_);
}

void LanguageModel::prefill(std::span<const Handle> rows, std::span<const std::span<const int32_t>> prompts,
                            float* logits, StatePool& pool) {
  pieces_.start(rows, prompts, static_cast<size_t>(pool.ledger().limits().max_rows));
  while (pieces_.next()) {
    const StepPlan& plan = pool.begin_step(StepKind::kPrefill, pieces_.rows(), pieces_.tokens_per_row());
    try {
      forward({.plan = &plan,
               .token = pieces_.token().data(),
               .logit_token = pieces_.last_token(),
               .logits = logits + pieces_.first_done() * static_cast<size_t>(config_.vocabulary)},
              pool);
    } catch (...) {
      pool.abort_step();
      throw;
    }
    pool.commit();
  }
}

}  // namespace replayssm
