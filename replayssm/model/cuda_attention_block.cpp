// Softmax attention with grouped queries, on a GPU.
#include <algorithm>
#include <cmath>

#include "replayssm/model/cuda_forward.h"
#include "replayssm/ops/activation.h"
#include "replayssm/ops/attention.h"
#include "replayssm/ops/cuda_checks.h"
#include "replayssm/ops/ring.h"
#include "replayssm/ops/rope.h"

namespace replayssm {
namespace {

template <typename T>
struct AttentionArrays {
  AttentionArrays(const AttentionConfig& config, int64_t tokens, size_t attention_bytes, std::byte* memory)
      : queries(int64_t{config.query_heads} * config.head_size),
        k(queries),
        v(k + int64_t{config.kv_heads} * config.head_size),
        gate(v + int64_t{config.kv_heads} * config.head_size),
        stride(aligned_stride(gate + (config.has_output_gate ? queries : 0))) {
    Carver carver(memory);
    projection = carver.take<T>(tokens * stride);
    out = carver.take<T>(tokens * queries);
    attention = {carver.take<std::byte>(attention_bytes), attention_bytes};
    bytes = carver.bytes();
  }

  int64_t queries;
  int64_t k, v, gate, stride;  // of a row of the projection: q first
  T *projection, *out;
  std::span<std::byte> attention;
  size_t bytes;
};

}  // namespace

template <typename T>
size_t block_bytes(const AttentionConfig& config, const ModelConfig&, const CudaStepLimits& limits) {
  const size_t of_attention =
      attention_bytes<T>({.kv_heads = config.kv_heads, .head_size = config.head_size}, config.query_heads, limits);
  return AttentionArrays<T>(config, limits.tokens, of_attention, nullptr).bytes;
}

template <typename T>
void run_attention(const CudaForward<T>& forward, const AttentionConfig& config,
                   const BasicAttentionWeights<DeviceBuffer>& weights, int state) {
  const CudaModelStep& step = forward.step;
  BasicAttention<T> args = {.cache = forward.pool.template kv_cache<T>(state),
                            .pages = forward.pool.pages(),
                            .rows = step.rows,
                            .token_begin = forward.token_begin(),
                            .query_heads = config.query_heads,
                            .scale = 1.0f / std::sqrt(static_cast<float>(config.head_size)),
                            .tokens = step.tokens,
                            .max_tokens_per_row = forward.attention_tokens()};
  const AttentionArrays<T> arrays(config, step.tokens, attention_workspace_bytes(args), forward.workspace.data());
  project_normal(forward, weights.in_proj, arrays.projection, arrays.stride);
  forward.begin(StepPart::kOther);
  if (config.has_head_norms || config.rotary_size > 0)
    place_heads(PlaceHeads<T>{.tokens = step.tokens,
                              .query_heads = config.query_heads,
                              .key_heads = config.kv_heads,
                              .head_size = config.head_size,
                              .rotary_size = config.rotary_size,
                              .q_norm = weights.q_norm.data(),
                              .k_norm = weights.k_norm.data(),
                              .is_zero_centred = forward.config.has_zero_centred_norms,
                              .eps = static_cast<float>(forward.config.norm_epsilon),
                              .cosine = forward.cosine,
                              .sine = forward.sine,
                              .q = arrays.projection,
                              .k = arrays.projection + arrays.k,
                              .q_stride = arrays.stride,
                              .k_stride = arrays.stride},
                forward.device);
  args.q = arrays.projection;
  args.k = arrays.projection + arrays.k;
  args.v = arrays.projection + arrays.v;
  args.q_stride = args.k_stride = args.v_stride = arrays.stride;
  args.out = arrays.out;
  forward.begin(StepPart::kAttention);
  attention(args, forward.device, arrays.attention);
  forward.begin(StepPart::kOther);
  if (config.has_output_gate)
    sigmoid_gate(BasicSigmoidGate<T>{.tokens = step.tokens,
                                     .heads = config.query_heads,
                                     .size = config.head_size,
                                     .gate = arrays.projection + arrays.gate,
                                     .gate_stride = arrays.stride,
                                     .gate_head_stride = config.head_size,
                                     .x = arrays.out,
                                     .x_stride = arrays.queries},
                 forward.device);
  add_projected(forward, weights.out_proj, arrays.out, arrays.queries);
}

#define REPLAYSSM_BLOCK(T)                                                                           \
  template size_t block_bytes<T>(const AttentionConfig&, const ModelConfig&, const CudaStepLimits&); \
  template void run_attention(const CudaForward<T>&, const AttentionConfig&,                         \
                              const BasicAttentionWeights<DeviceBuffer>&, int);
REPLAYSSM_BLOCK(float)
REPLAYSSM_BLOCK(Bf16)
#undef REPLAYSSM_BLOCK

}  // namespace replayssm
