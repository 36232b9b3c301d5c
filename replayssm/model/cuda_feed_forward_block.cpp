// A feed-forward, on a GPU: hidden += W_down activation(W_up x).
#include "replayssm/model/cuda_forward.h"
#include "replayssm/ops/activation.h"

namespace replayssm {

template <typename T>
void activate(const CudaForward<T>& forward, Activation activation, int64_t rows, int64_t size, T* inner,
              int64_t stride) {
  forward.begin(StepPart::kOther);
  if (activation == Activation::kSwiGlu)
    silu_product(BasicSiluProduct<T>{.tokens = rows,
                                     .size = size,
                                     .gate = inner,
                                     .up = inner + size,
                                     .gate_stride = stride,
                                     .up_stride = stride,
                                     .y = inner,
                                     .y_stride = stride},
                 forward.device);
  else
    relu2(BasicRelu2<T>{.tokens = rows, .size = size, .x = inner, .x_stride = stride, .y = inner, .y_stride = stride},
          forward.device);
}

template <typename T>
size_t block_bytes(const FeedForwardConfig& config, const ModelConfig&, const CudaStepLimits& limits) {
  return limits.tokens * inner_stride(config.activation, config.size) * sizeof(T);
}

template <typename T>
void run_feed_forward(const CudaForward<T>& forward, const FeedForwardConfig& config,
                      const BasicFeedForwardWeights<DeviceBuffer>& weights) {
  const int64_t stride = inner_stride(config.activation, config.size);
  T* const inner = reinterpret_cast<T*>(forward.workspace.data());
  project_normal(forward, weights.up, inner, stride, config.activation);
  add_projected(forward, weights.down, inner, stride);
}

#define REPLAYSSM_BLOCK(T)                                                                             \
  template void activate(const CudaForward<T>&, Activation, int64_t, int64_t, T*, int64_t);            \
  template size_t block_bytes<T>(const FeedForwardConfig&, const ModelConfig&, const CudaStepLimits&); \
  template void run_feed_forward(const CudaForward<T>&, const FeedForwardConfig&,                      \
                                 const BasicFeedForwardWeights<DeviceBuffer>&);
REPLAYSSM_BLOCK(float)
REPLAYSSM_BLOCK(Bf16)
#undef REPLAYSSM_BLOCK

}  // namespace replayssm
