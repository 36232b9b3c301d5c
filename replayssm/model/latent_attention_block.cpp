// Multi-head latent attention without positions, its up-projections absorbed: a token keeps one latent and one key part
// that all heads share, and queries and outputs meet them in the latent space.
//
//   q = W_q x  (or W_qb norm(W_qa x));   c | r = W_kv x;   c <- norm(c)
//   q'_h = [W_uk,h^T q_nope,h | q_rope,h];   o'_h = attention(q'_h, [c | r], c);   o_h = W_uv,h o'_h;   hidden += W_o o
//
// Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, with nothing rotated, as Kimi Linear (arXiv 2510.26692) has it.
#include <algorithm>
#include <cmath>

#include "replayssm/model/forward.h"
#include "replayssm/ops/attention.h"
#include "replayssm/ops/linear.h"
#include "replayssm/ops/norm.h"

namespace replayssm {
namespace {

int64_t query_channels(const LatentAttentionConfig& config) {
  return int64_t{config.heads} * (config.nope_size + config.rope_size);
}

// Rows of in_proj: the queries or what they are made from, then the latent and the shared part of the key.
int64_t projection_width(const LatentAttentionConfig& config) {
  return (config.query_rank > 0 ? config.query_rank : query_channels(config)) + config.key_size();
}

void normalize(const Forward& forward, const LatentAttentionConfig& config, const Buffer<float>& weight, float* x) {
  const int64_t width = projection_width(config);
  rms_norm({.tokens = forward.tokens,
            .size = static_cast<int64_t>(weight.size()),
            .x = x,
            .x_stride = width,
            .weight = weight.data(),
            .eps = static_cast<float>(config.norm_epsilon),
            .y = x,
            .y_stride = width},
           forward.device);
}

// y_h = matrix_h x_h, the matrices of the heads one below the other; heads of x and y are x_step and y_step apart,
// tokens x_stride and y_stride.
void project_heads(const Forward& forward, const Matrix& matrix, int heads, const float* x, int64_t x_stride,
                   int64_t x_step, float* y, int64_t y_stride, int64_t y_step) {
  const int64_t outputs = matrix.outputs / heads;
  for (int head = 0; head < heads; ++head) {
    const MatrixRows own = matrix.rows(head * outputs, outputs);
    linear({.tokens = forward.tokens,
            .inputs = own.inputs,
            .outputs = own.outputs,
            .weight = own.bf16,
            .weight_f32 = own.f32,
            .x = x + head * x_step,
            .x_stride = x_stride,
            .y = y + head * y_step,
            .y_stride = y_stride},
           forward.device);
  }
}

}  // namespace

BlockWidths block_widths(const LatentAttentionConfig& config, const StateLayout&, int, Device& device) {
  const int64_t heads = config.heads;
  return {.projection = projection_width(config),
          .convolved = heads * std::max(config.key_size(), config.value_size),
          .mixed = std::max(query_channels(config), heads * config.latent_size),
          .workspace_bytes = attention_workspace_bytes(config.heads, 1, config.key_size(), device)};
}

void run_latent_attention(const Forward& forward, const LatentAttentionConfig& config,
                          const LatentAttentionWeights& weights, int state) {
  Activations& arrays = forward.arrays;
  const int64_t width = projection_width(config), key = config.key_size(), heads = config.heads;
  const int64_t query = config.nope_size + config.rope_size;
  project(forward, weights.in_proj, arrays.normal.data(), forward.config.hidden_size, arrays.projection.data(), false);
  const float* q = arrays.projection.data();
  int64_t q_stride = width;
  if (config.query_rank > 0) {
    normalize(forward, config, weights.query_norm, arrays.projection.data());
    project(forward, weights.query_up, arrays.projection.data(), width, arrays.mixed.data(), false);
    q = arrays.mixed.data();
    q_stride = heads * query;
  }
  float* latent = arrays.projection.data() + width - key;
  normalize(forward, config, weights.latent_norm, latent);

  float* absorbed = arrays.convolved.data();
  project_heads(forward, weights.key_up, config.heads, q, q_stride, query, absorbed, heads * key, key);
  attention({.cache = forward.pool.kv_cache(state),
             .pages = forward.step.plan->pages,
             .rows = forward.step.plan->rows,
             .token_begin = forward.step.plan->token_begin,
             .query_heads = config.heads,
             .scale = 1.0f / std::sqrt(static_cast<float>(query)),
             .q = absorbed,
             .k = latent,
             .q_stride = heads * key,
             .k_stride = width,
             .out = arrays.mixed.data()},
            forward.device, forward.workspace());
  const int64_t latents = heads * config.latent_size, values = heads * config.value_size;
  project_heads(forward, weights.value_up, config.heads, arrays.mixed.data(), latents, config.latent_size,
                arrays.convolved.data(), values, config.value_size);
  project(forward, weights.out_proj, arrays.convolved.data(), values, arrays.hidden.data(), true);
}

}  // namespace replayssm
