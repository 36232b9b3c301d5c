// Attention over latents that all heads share, in its absorbed form, on a GPU.
#include <cmath>
#include <span>

#include "replayssm/model/cuda_forward.h"
#include "replayssm/ops/attention.h"
#include "replayssm/ops/norm.h"
#include "replayssm/ops/ring.h"

namespace replayssm {
namespace {

template <typename T>
struct LatentArrays {
  LatentArrays(const LatentAttentionConfig& config, int64_t tokens, size_t attention_bytes, std::byte* memory)
      : heads(config.heads),
        query(config.nope_size + config.rope_size),
        key(config.key_size()),
        latent(config.query_rank > 0 ? config.query_rank : heads * query),
        stride(aligned_stride(latent + key)) {
    Carver carver(memory);
    projection = carver.take<T>(tokens * stride);
    q = carver.take<T>(config.query_rank > 0 ? tokens * heads * query : 0);
    absorbed = carver.take<T>(tokens * heads * key);
    mixed = carver.take<T>(tokens * heads * config.latent_size);
    out = carver.take<T>(tokens * heads * config.value_size);
    attention = {carver.take<std::byte>(attention_bytes), attention_bytes};
    bytes = carver.bytes();
  }

  int64_t heads, query, key;
  int64_t latent, stride;  // of a row of the projection: the queries, or their latent, first
  T *projection, *q, *absorbed, *mixed, *out;
  std::span<std::byte> attention;
  size_t bytes;
};

// x <- norm(x), `size` numbers of each row of the projection.
template <typename T>
void normalize(const CudaForward<T>& forward, const LatentAttentionConfig& config, const DeviceBuffer<float>& weight,
               T* x, int64_t stride) {
  forward.begin(StepPart::kOther);
  rms_norm(BasicRmsNorm<T, T>{.tokens = forward.step.tokens,
                              .size = static_cast<int64_t>(weight.size()),
                              .x = x,
                              .x_stride = stride,
                              .weight = weight.data(),
                              .eps = static_cast<float>(config.norm_epsilon),
                              .y = x,
                              .y_stride = stride},
           forward.device);
}

// y_h = matrix_h x_h, the matrices of the heads one below the other.
template <typename T>
void project_heads(const CudaForward<T>& forward, const CudaMatrix& matrix, int heads, const T* x, int64_t x_stride,
                   int64_t x_step, T* y, int64_t y_step) {
  forward.begin(StepPart::kProducts);
  linear(BasicLinear<T, T>{.tokens = forward.step.tokens,
                           .inputs = matrix.inputs,
                           .outputs = matrix.outputs / heads,
                           .weight = data_of<T>(matrix),
                           .x = x,
                           .x_stride = x_stride,
                           .y = y,
                           .y_stride = heads * y_step,
                           .heads = heads,
                           .x_step = x_step,
                           .y_step = y_step},
         forward.products);
}

}  // namespace

template <typename T>
size_t block_bytes(const LatentAttentionConfig& config, const ModelConfig&, const CudaStepLimits& limits) {
  const size_t of_attention = attention_bytes<T>(
      {.kv_heads = 1, .head_size = config.key_size(), .latent_size = config.latent_size}, config.heads, limits);
  return LatentArrays<T>(config, limits.tokens, of_attention, nullptr).bytes;
}

template <typename T>
void run_latent_attention(const CudaForward<T>& forward, const LatentAttentionConfig& config,
                          const BasicLatentAttentionWeights<DeviceBuffer>& weights, int state) {
  const CudaModelStep& step = forward.step;
  BasicAttention<T> args = {.cache = forward.pool.template kv_cache<T>(state),
                            .pages = forward.pool.pages(),
                            .rows = step.rows,
                            .token_begin = forward.token_begin(),
                            .query_heads = config.heads,
                            .scale = 1.0f / std::sqrt(static_cast<float>(config.nope_size + config.rope_size)),
                            .tokens = step.tokens,
                            .max_tokens_per_row = forward.attention_tokens()};
  const LatentArrays<T> arrays(config, step.tokens, attention_workspace_bytes(args), forward.workspace.data());
  project_normal(forward, weights.in_proj, arrays.projection, arrays.stride);
  const T* q = arrays.projection;
  int64_t q_stride = arrays.stride;
  if (config.query_rank > 0) {
    normalize(forward, config, weights.query_norm, arrays.projection, arrays.stride);
    project(forward, weights.query_up, step.tokens, q, arrays.stride, arrays.q, arrays.heads * arrays.query);
    q = arrays.q;
    q_stride = arrays.heads * arrays.query;
  }
  T* const latent = arrays.projection + arrays.latent;
  normalize(forward, config, weights.latent_norm, latent, arrays.stride);
  project_heads(forward, weights.key_up, config.heads, q, q_stride, arrays.query, arrays.absorbed, arrays.key);
  forward.begin(StepPart::kAttention);
  args.q = arrays.absorbed;
  args.k = latent;
  args.q_stride = arrays.heads * arrays.key;
  args.k_stride = arrays.stride;
  args.out = arrays.mixed;
  attention(args, forward.device, arrays.attention);
  project_heads(forward, weights.value_up, config.heads, arrays.mixed, arrays.heads * config.latent_size,
                int64_t{config.latent_size}, arrays.out, int64_t{config.value_size});
  add_projected(forward, weights.out_proj, arrays.out, arrays.heads * config.value_size);
}

#define REPLAYSSM_BLOCK(T)                                                                                 \
  template size_t block_bytes<T>(const LatentAttentionConfig&, const ModelConfig&, const CudaStepLimits&); \
  template void run_latent_attention(const CudaForward<T>&, const LatentAttentionConfig&,                  \
                                     const BasicLatentAttentionWeights<DeviceBuffer>&, int);
REPLAYSSM_BLOCK(float)
REPLAYSSM_BLOCK(Bf16)
#undef REPLAYSSM_BLOCK

}  // namespace replayssm
