// Softmax attention: o = attention(rope(norm(q)), rope(norm(k)), v); hidden += W_out (o * sigmoid(gate)), each part
// where the model has it.
#include <cmath>

#include "replayssm/model/forward.h"
#include "replayssm/ops/activation.h"
#include "replayssm/ops/attention.h"
#include "replayssm/ops/norm.h"
#include "replayssm/ops/rope.h"

namespace replayssm {
namespace {

int64_t projection_width(const AttentionConfig& config) {
  const int64_t heads = (config.has_output_gate ? 2 : 1) * int64_t{config.query_heads} + 2 * int64_t{config.kv_heads};
  return heads * config.head_size;
}

// Norm and position of each head of the queries or the keys, in place in the projection.
void place_heads(const Forward& forward, const AttentionConfig& config, float* x, int heads,
                 const Buffer<float>& norm) {
  const int64_t width = projection_width(config), head = config.head_size;
  if (config.has_head_norms)
    rms_norm({.tokens = forward.tokens,
              .heads = heads,
              .size = head,
              .x = x,
              .x_stride = width,
              .x_head_stride = head,
              .weight = norm.data(),
              .is_zero_centred = forward.config.has_zero_centred_norms,
              .eps = static_cast<float>(forward.config.norm_epsilon),
              .y = x,
              .y_stride = width,
              .y_head_stride = head},
             forward.device);
  if (config.rotary_size > 0)
    rope({.tokens = forward.tokens,
          .heads = heads,
          .head_size = config.head_size,
          .rotary_size = config.rotary_size,
          .cosine = forward.arrays.cosine.data(),
          .sine = forward.arrays.sine.data(),
          .x = x,
          .x_stride = width,
          .x_head_stride = head},
         forward.device);
}

}  // namespace

BlockWidths block_widths(const AttentionConfig& config, const StateLayout&, int, Device& device) {
  return {.projection = projection_width(config),
          .mixed = int64_t{config.query_heads} * config.head_size,
          .workspace_bytes = attention_workspace_bytes(config.query_heads, config.kv_heads, config.head_size, device)};
}

void run_attention(const Forward& forward, const AttentionConfig& config, const AttentionWeights& weights, int state) {
  Activations& arrays = forward.arrays;
  const int64_t head = config.head_size, queries = config.query_heads * head, keys = config.kv_heads * head;
  const int64_t width = projection_width(config);
  project(forward, weights.in_proj, arrays.normal.data(), forward.config.hidden_size, arrays.projection.data(), false);
  float* q = arrays.projection.data();
  float* k = q + queries;
  const float* v = k + keys;
  const float* gate = v + keys;
  place_heads(forward, config, q, config.query_heads, weights.q_norm);
  place_heads(forward, config, k, config.kv_heads, weights.k_norm);
  attention({.cache = forward.pool.kv_cache(state),
             .pages = forward.step.plan->pages,
             .rows = forward.step.plan->rows,
             .token_begin = forward.step.plan->token_begin,
             .query_heads = config.query_heads,
             .scale = 1.0f / std::sqrt(static_cast<float>(head)),
             .q = q,
             .k = k,
             .v = v,
             .q_stride = width,
             .k_stride = width,
             .v_stride = width,
             .out = arrays.mixed.data()},
            forward.device, forward.workspace());
  if (config.has_output_gate)
    sigmoid_gate({.tokens = forward.tokens,
                  .heads = config.query_heads,
                  .size = head,
                  .gate = gate,
                  .gate_stride = width,
                  .gate_head_stride = head,
                  .x = arrays.mixed.data(),
                  .x_stride = queries},
                 forward.device);
  project(forward, weights.out_proj, arrays.mixed.data(), queries, arrays.hidden.data(), true);
}

}  // namespace replayssm
