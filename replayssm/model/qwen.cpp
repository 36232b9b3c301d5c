// The forward pass of Qwen3.5 and Qwen3-Next dense text models.
#include "replayssm/model/qwen.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "replayssm/core/error.h"
#include "replayssm/ops/activation.h"
#include "replayssm/ops/attention.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/embed.h"
#include "replayssm/ops/linear.h"
#include "replayssm/ops/norm.h"
#include "replayssm/ops/rope.h"

namespace replayssm {
namespace {

// Rows of in_proj of a delta layer: q, k and v first, which the convolution takes as they lie.
int64_t delta_projection(const DeltaConfig& delta) {
  return delta.conv_channels() + delta.value_channels() + 2 * static_cast<int64_t>(delta.shape.heads);
}

int64_t attention_projection(const AttentionConfig& attention) {
  return 2 * static_cast<int64_t>(attention.query_heads + attention.kv_heads) * attention.head_size;
}

int64_t widest_projection(const ModelConfig& config) {
  return std::max({delta_projection(config.delta), attention_projection(config.attention),
                   2 * static_cast<int64_t>(config.intermediate_size), static_cast<int64_t>(config.hidden_size)});
}

int64_t widest_mixer(const ModelConfig& config) {
  return std::max<int64_t>(config.delta.value_channels(),
                           static_cast<int64_t>(config.attention.query_heads) * config.attention.head_size);
}

size_t ops_workspace_bytes(const ModelConfig& config, const StateLayout& layout, Device& device) {
  const AttentionConfig& attention = config.attention;
  return std::max(delta_workspace_bytes(config.delta.shape, layout.ring_capacity(), device),
                  attention_workspace_bytes(attention.query_heads, attention.kv_heads, attention.head_size, device));
}

bool is_same_layer(const StateLayer& a, const StateLayer& b) {
  if (a.index() != b.index()) return false;
  if (const auto* delta = std::get_if<DeltaLayer>(&a)) {
    const DeltaLayer& other = std::get<DeltaLayer>(b);
    const auto sizes = [](const DeltaLayer& layer) {
      return std::array{layer.shape.heads,     layer.shape.key_heads, layer.shape.key_size, layer.shape.value_size,
                        layer.shape.gate_size, layer.conv_channels,   layer.conv_width};
    };
    return sizes(*delta) == sizes(other);
  }
  const AttentionLayer &left = std::get<AttentionLayer>(a), &right = std::get<AttentionLayer>(b);
  return left.kv_heads == right.kv_heads && left.head_size == right.head_size;
}

}  // namespace

StateLayout qwen_state_layout(const ModelConfig& config, const QwenWeights& weights, int window, int max_step_tokens,
                              int page_tokens) {
  StateLayout layout;
  layout.model = weights.fingerprint;
  for (LayerKind kind : config.layers) {
    if (kind == LayerKind::kDelta)
      layout.layers.push_back(DeltaLayer{config.delta.shape, config.delta.conv_channels(), config.delta.conv_width});
    else
      layout.layers.push_back(AttentionLayer{config.attention.kv_heads, config.attention.head_size});
  }
  layout.window = window;
  layout.max_step_tokens = max_step_tokens;
  layout.page_tokens = page_tokens;
  layout.context_tokens = config.context_tokens;
  check_layout(layout);
  return layout;
}

Qwen::Qwen(const ModelConfig& config, const QwenWeights& weights, const StateLayout& layout, int max_tokens,
           Device& device)
    : config_(config), weights_(weights), layout_(layout), max_tokens_(max_tokens), device_(device) {
  require(max_tokens > 0, "max_tokens: expected 1 or more, got {}", max_tokens);
  const auto rows = [&](int64_t width) { return Buffer<float>(static_cast<size_t>(max_tokens * width)); };
  hidden_ = rows(config.hidden_size);
  normal_ = rows(config.hidden_size);
  projection_ = rows(widest_projection(config));
  convolved_ = rows(config.delta.conv_channels());
  mixed_ = rows(widest_mixer(config));
  g_ = rows(config.delta.shape.heads);
  beta_ = rows(config.delta.shape.heads);
  cosine_ = rows(config.attention.rotary_size / 2);
  sine_ = rows(config.attention.rotary_size / 2);
  workspace_ = Buffer<std::byte>(ops_workspace_bytes(config, layout, device));
  piece_rows_.reserve(max_tokens);
  piece_tokens_.reserve(max_tokens);
  piece_token_.reserve(max_tokens);
  piece_logit_.reserve(max_tokens);
}

size_t Qwen::workspace_bytes() const {
  size_t floats = 0;
  for (const Buffer<float>* buffer :
       {&hidden_, &normal_, &projection_, &convolved_, &mixed_, &g_, &beta_, &cosine_, &sine_})
    floats += buffer->size();
  return floats * sizeof(float) + workspace_.size();
}

void Qwen::check(const QwenStep& step, const StatePool& pool) const {
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
  require(given.ring_capacity() <= layout_.ring_capacity() &&
              std::equal(given.layers.begin(), given.layers.end(), layout_.layers.begin(), layout_.layers.end(),
                         is_same_layer),
          "forward: the pool's layers or window are not those of the model");
}

// hidden <- hidden + mixer(norm(hidden)), hidden <- hidden + feed_forward(norm(hidden)), layer by layer.
void Qwen::forward(const QwenStep& step, StatePool& pool) {
  check(step, pool);
  tokens_ = step.plan->tokens;
  if (tokens_ == 0) return;
  embed({.tokens = tokens_,
         .vocabulary = config_.vocabulary,
         .size = config_.hidden_size,
         .token = step.token,
         .table = weights_.embedding.bf16.data(),
         .table_f32 = weights_.embedding.f32.data(),
         .y = hidden_.data()},
        device_);
  rope_angles({.tokens = tokens_,
               .rotary_size = config_.attention.rotary_size,
               .theta = config_.attention.rope_theta,
               .position = step.plan->position,
               .cosine = cosine_.data(),
               .sine = sine_.data()},
              device_);
  for (int layer = 0; layer < static_cast<int>(weights_.layers.size()); ++layer) {
    const QwenLayerWeights& weights = weights_.layers[layer];
    normalize(weights.input_norm.data());
    if (const auto* delta = std::get_if<QwenDeltaWeights>(&weights.mixer))
      mix_delta(*delta, layer, step, pool);
    else
      attend(std::get<QwenAttentionWeights>(weights.mixer), layer, step, pool);
    normalize(weights.post_norm.data());
    feed_forward(weights);
  }
  project_logits(step);
}

// normal <- norm(hidden)
void Qwen::normalize(const float* weight) {
  const int64_t size = config_.hidden_size;
  rms_norm({.tokens = tokens_,
            .size = size,
            .x = hidden_.data(),
            .x_stride = size,
            .weight = weight,
            .is_zero_centred = true,
            .eps = static_cast<float>(config_.norm_epsilon),
            .y = normal_.data(),
            .y_stride = size},
           device_);
}

// y = matrix x, or y += matrix x.
void Qwen::project(const Matrix& matrix, const float* x, int64_t x_stride, float* y, bool is_added) {
  linear({.tokens = tokens_,
          .inputs = matrix.inputs,
          .outputs = matrix.outputs,
          .weight = matrix.bf16.data(),
          .weight_f32 = matrix.f32.data(),
          .x = x,
          .x_stride = x_stride,
          .y = y,
          .y_stride = matrix.outputs,
          .residual = is_added ? y : nullptr,
          .residual_stride = matrix.outputs},
         device_);
}

// q | k | v = silu(conv(W x)); o = delta rule; hidden += W_out (norm(o) * silu(z))
void Qwen::mix_delta(const QwenDeltaWeights& weights, int layer, const QwenStep& step, StatePool& pool) {
  const DeltaConfig& delta = config_.delta;
  const int64_t width = delta_projection(delta), channels = delta.conv_channels(), values = delta.value_channels();
  project(weights.in_proj, normal_.data(), config_.hidden_size, projection_.data(), false);
  const float* z = projection_.data() + channels;
  const float* b = z + values;
  const float* a = b + delta.shape.heads;
  conv1d({.state = pool.conv_state(layer),
          .rows = step.plan->rows,
          .token_begin = step.plan->token_begin,
          .x = projection_.data(),
          .x_stride = width,
          .weight = weights.conv.data(),
          .out = convolved_.data()},
         device_);
  delta_gates({.tokens = tokens_,
               .heads = delta.shape.heads,
               .a = a,
               .b = b,
               .a_stride = width,
               .b_stride = width,
               .a_log = weights.a_log.data(),
               .dt_bias = weights.dt_bias.data(),
               .g = g_.data(),
               .beta = beta_.data()},
              device_);
  update_delta(layer, step, pool);
  gated_rms_norm({.tokens = tokens_,
                  .heads = delta.shape.heads,
                  .size = delta.shape.value_size,
                  .x = mixed_.data(),
                  .z = z,
                  .x_stride = values,
                  .z_stride = width,
                  .weight = weights.norm.data(),
                  .eps = static_cast<float>(config_.norm_epsilon),
                  .y = mixed_.data(),
                  .y_stride = values},
                 device_);
  project(weights.out_proj, mixed_.data(), weights.out_proj.inputs, hidden_.data(), true);
}

// mixed <- the delta rule over convolved, by the step's kind.
void Qwen::update_delta(int layer, const QwenStep& step, StatePool& pool) {
  const StepPlan& plan = *step.plan;
  const int64_t channels = config_.delta.conv_channels(), keys = config_.delta.key_channels();
  const DeltaState state = pool.delta_state(layer);
  const DeltaTokens tokens{.q = convolved_.data(),
                           .k = convolved_.data() + keys,
                           .v = convolved_.data() + 2 * keys,
                           .g = g_.data(),
                           .beta = beta_.data(),
                           .q_stride = channels,
                           .k_stride = channels,
                           .v_stride = channels};
  const std::span<std::byte> workspace(workspace_.data(), workspace_.size());
  switch (plan.kind) {
    case StepKind::kPrefill:
      delta_prefill(
          {.state = state, .rows = plan.rows, .token_begin = plan.token_begin, .tokens = tokens, .out = mixed_.data()},
          device_, workspace);
      return;
    case StepKind::kConventional:
      delta_step({.state = state, .rows = plan.rows, .tokens = tokens, .out = mixed_.data()}, device_, workspace);
      return;
    case StepKind::kReplay:
      delta_decode({.state = state,
                    .rows = plan.rows,
                    .tokens_per_row = plan.tokens_per_row,
                    .tokens = tokens,
                    .readout = step.readout,
                    .out = mixed_.data()},
                   device_, workspace);
      return;
  }
}

// o = attention(rope(norm(q)), rope(norm(k)), v); hidden += W_out (o * sigmoid(gate))
void Qwen::attend(const QwenAttentionWeights& weights, int layer, const QwenStep& step, StatePool& pool) {
  const AttentionConfig& sizes = config_.attention;
  const int64_t head = sizes.head_size, queries = sizes.query_heads * head, keys = sizes.kv_heads * head;
  const int64_t width = attention_projection(sizes);
  project(weights.in_proj, normal_.data(), config_.hidden_size, projection_.data(), false);
  float* q = projection_.data();
  float* k = q + queries;
  const float* v = k + keys;
  const float* gate = v + keys;
  const auto place = [&](float* x, int heads, const Buffer<float>& norm) {
    rms_norm({.tokens = tokens_,
              .heads = heads,
              .size = head,
              .x = x,
              .x_stride = width,
              .x_head_stride = head,
              .weight = norm.data(),
              .is_zero_centred = true,
              .eps = static_cast<float>(config_.norm_epsilon),
              .y = x,
              .y_stride = width,
              .y_head_stride = head},
             device_);
    rope({.tokens = tokens_,
          .heads = heads,
          .head_size = sizes.head_size,
          .rotary_size = sizes.rotary_size,
          .cosine = cosine_.data(),
          .sine = sine_.data(),
          .x = x,
          .x_stride = width,
          .x_head_stride = head},
         device_);
  };
  place(q, sizes.query_heads, weights.q_norm);
  place(k, sizes.kv_heads, weights.k_norm);
  attention({.cache = pool.kv_cache(layer),
             .pages = step.plan->pages,
             .rows = step.plan->rows,
             .token_begin = step.plan->token_begin,
             .query_heads = sizes.query_heads,
             .scale = 1.0f / std::sqrt(static_cast<float>(head)),
             .q = q,
             .k = k,
             .v = v,
             .q_stride = width,
             .k_stride = width,
             .v_stride = width,
             .out = mixed_.data()},
            device_, {workspace_.data(), workspace_.size()});
  sigmoid_gate({.tokens = tokens_,
                .heads = sizes.query_heads,
                .size = head,
                .gate = gate,
                .gate_stride = width,
                .gate_head_stride = head,
                .x = mixed_.data(),
                .x_stride = queries},
               device_);
  project(weights.out_proj, mixed_.data(), weights.out_proj.inputs, hidden_.data(), true);
}

// hidden += W_down (silu(W_gate x) * W_up x)
void Qwen::feed_forward(const QwenLayerWeights& weights) {
  const int64_t size = config_.intermediate_size, width = 2 * size;
  float* gate = projection_.data();
  project(weights.gate_up, normal_.data(), config_.hidden_size, gate, false);
  silu_product({.tokens = tokens_,
                .size = size,
                .gate = gate,
                .up = gate + size,
                .gate_stride = width,
                .up_stride = width,
                .y = gate,
                .y_stride = width},
               device_);
  project(weights.down, gate, width, hidden_.data(), true);
}

// logits = W_head norm(hidden), of the wanted tokens alone.
void Qwen::project_logits(const QwenStep& step) {
  const int64_t size = config_.hidden_size, count = static_cast<int64_t>(step.logit_token.size());
  if (count == 0) return;
  normalize(weights_.norm.data());
  float* wanted = projection_.data();
  for (int64_t i = 0; i < count; ++i) std::copy_n(normal_.data() + step.logit_token[i] * size, size, wanted + i * size);
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

void Qwen::prefill(std::span<const Handle> rows, std::span<const std::span<const int32_t>> prompts, float* logits,
                   StatePool& pool) {
  require(rows.size() == prompts.size(), "prefill: expected a prompt for each of {} rows, got {}", rows.size(),
          prompts.size());
  for (size_t b = 0; b < prompts.size(); ++b) require(!prompts[b].empty(), "prefill: the prompt of row {} is empty", b);
  const size_t max_rows = static_cast<size_t>(pool.ledger().limits().max_rows);
  size_t row = 0, taken = 0;  // tokens taken of that row's prompt
  while (row < rows.size()) {
    const size_t first_done = row;
    piece_rows_.clear();
    piece_tokens_.clear();
    piece_token_.clear();
    piece_logit_.clear();
    while (row < rows.size() && piece_rows_.size() < max_rows &&
           piece_token_.size() < static_cast<size_t>(max_tokens_)) {
      const size_t count =
          std::min(prompts[row].size() - taken, static_cast<size_t>(max_tokens_) - piece_token_.size());
      const auto piece = prompts[row].subspan(taken, count);
      piece_rows_.push_back(rows[row]);
      piece_tokens_.push_back(static_cast<int>(count));
      piece_token_.insert(piece_token_.end(), piece.begin(), piece.end());
      taken += count;
      if (taken < prompts[row].size()) break;
      piece_logit_.push_back(static_cast<int32_t>(piece_token_.size()) - 1);
      ++row;
      taken = 0;
    }
    const StepPlan& plan = pool.begin_step(StepKind::kPrefill, piece_rows_, piece_tokens_);
    try {
      forward({.plan = &plan,
               .token = piece_token_.data(),
               .logit_token = piece_logit_,
               .logits = logits + first_done * static_cast<size_t>(config_.vocabulary)},
              pool);
    } catch (...) {
      pool.abort_step();
      throw;
    }
    pool.commit();
  }
}

}  // namespace replayssm
