// What the blocks of a model share in one step on a GPU, and the blocks: one function and one file a kind. T is the
// type of the activations between a block's ops, Bf16 or float; the residual stream is FP32 whatever T is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "replayssm/core/cuda_device.h"
#include "replayssm/model/config.h"
#include "replayssm/model/weights.h"
#include "replayssm/ops/attention.h"
#include "replayssm/ops/cuda_checks.h"
#include "replayssm/ops/linear.h"
#include "replayssm/ops/norm.h"
#include "replayssm/ops/rows.h"
#include "replayssm/state/cuda_pool.h"
#include "replayssm/state/step.h"

namespace replayssm {

// What a step's time goes to.
enum class StepPart {
  kStateSpace,  // everything between a recurrent layer's projections
  kAttention,   // the keys and values of a step, and the attention over all
  kProducts,    // matrix products, experts' too
  kOther,       // embedding, norms, activations, positions, routing
};
inline constexpr int kStepParts = 4;

// Marks where a step's parts begin. What is captured with a timer into a graph tells the times of each launch.
class StepTimer {
 public:
  explicit StepTimer(CudaDevice& device) : timer_(device) {}

  void begin(StepPart part);
  void end();
  // Microseconds of each part in the run since, [kStepParts]. Waits for the stream.
  std::vector<double> part_us();

 private:
  CudaTimer timer_;
  std::vector<StepPart> parts_;
};

// One step of a begun plan; every pointer is of device memory and is read when the work runs, so that a captured step
// serves any rows, cursors and tokens. A token's logits depend on its own sequence, on the step's number of rows and
// tokens, and of the sequence, in prefill, also on where the prompt was split; never on the other rows' numbers. A
// conventional step and a replay step with the exact readout give the same bits.
struct CudaModelStep {
  StepKind kind = StepKind::kReplay;
  StateRows rows;                      // CudaStatePool::rows
  int64_t tokens = 0;                  // N
  int tokens_per_row = 1;              // of a prefill the most that a row has
  Readout readout = Readout::kDirect;  // of replay steps
  const int32_t* token = nullptr;      // [N]; outside the vocabulary: the sequence's logits are NaN from then on
  // The tokens whose logits are wanted, or null: all N.
  const int32_t* logit_token = nullptr;  // [logit_tokens]
  int64_t logit_tokens = 0;
  float* logits = nullptr;     // [logit_tokens or N, vocabulary]
  StepTimer* timer = nullptr;  // or null
};

// A block's last product of up to so many tokens is made in parts of its inputs, which the next norm adds to the
// residual stream: its rows are so few that whole sums leave a third of the GPU idle (an H200, 256 tokens: 2560 x 9216
// takes 21.2 us for 23.2, 3136 x 12544 30.7 for 36.6; 128 tokens 15.9 for 21.0 and 23.9 for 28.8; more parts gain
// none).
inline constexpr int kResidualParts = 2;
inline constexpr int64_t kMostPartTokens = 256;

template <typename T>
struct CudaForward {
  const ModelConfig& config;
  const CudaModelStep& step;
  CudaStatePool& pool;
  MatrixProducts& products;
  CudaDevice& device;
  float* hidden;                   // [N, hidden size] the residual stream
  float* parts;                    // [kResidualParts, N, hidden size] of a block's output, where leaves_parts
  T* normal;                       // [N, hidden size] the norm of hidden, from normalize on
  float *cosine, *sine;            // [N, rotary size / 2]
  std::span<std::byte> workspace;  // a block's own arrays, and of its ops
  // From hidden, and the parts that the block before left, to normal, with the weights of the block that runs. A block
  // runs it itself, once: by project_normal if a single product reads it, else by normalize.
  BasicRmsNorm<float, T> norm = {};
  bool leaves_parts = false;  // the block that runs

  // [B + 1]
  const int32_t* token_begin() const { return pool.row_arrays().token_begin; }

  // That a row may have: of a prefill more than a decoding step's, so that no prompt's attention is split over its
  // context, however short its last piece is.
  int attention_tokens() const {
    return step.kind == StepKind::kPrefill ? std::max(step.tokens_per_row, kMaxCudaTokens + 1) : step.tokens_per_row;
  }

  void begin(StepPart part) const {
    if (step.timer != nullptr) step.timer->begin(part);
  }
};

template <typename T>
const T* data_of(const CudaMatrix& matrix) {
  if constexpr (std::is_same_v<T, float>)
    return matrix.f32.data();
  else
    return matrix.bf16.data();
}

// The first `size` numbers of each row of `inner` <- activation(row), a row of SwiGLU being twice as long.
template <typename T>
void activate(const CudaForward<T>& forward, Activation activation, int64_t rows, int64_t size, T* inner,
              int64_t stride);

// normal <- norm(hidden)
template <typename T>
void normalize(const CudaForward<T>& forward) {
  forward.begin(StepPart::kOther);
  rms_norm(forward.norm, forward.device);
}

// y = matrix x, of `rows` rows.
template <typename T, typename Out>
BasicLinear<T, Out> product_of(const CudaMatrix& matrix, int64_t rows, const T* x, int64_t x_stride, Out* y,
                               int64_t y_stride) {
  return {.tokens = rows,
          .inputs = matrix.inputs,
          .outputs = matrix.outputs,
          .weight = data_of<T>(matrix),
          .x = x,
          .x_stride = x_stride,
          .y = y,
          .y_stride = y_stride};
}

// Runs a product with forward.norm before it, if it has a norm, and with its activation (then Out is T), if it has one:
// in one launch where linear can fuse them.
template <typename T, typename Out>
void project(const CudaForward<T>& forward, BasicLinear<T, Out> product) {
  const std::optional<Activation> activation = product.activation;
  const bool is_fused = can_fuse(product);
  if (!is_fused) {
    if (product.norm != nullptr) normalize(forward);
    product.norm = nullptr;
    product.activation.reset();
  }
  forward.begin(StepPart::kProducts);
  linear(product, forward.products);
  if constexpr (std::is_same_v<T, Out>)
    if (activation && !is_fused)
      activate(forward, *activation, product.tokens,
               *activation == Activation::kSwiGlu ? product.outputs / 2 : product.outputs, product.y, product.y_stride);
}

// y = matrix x, of `rows` rows.
template <typename T, typename Out>
void project(const CudaForward<T>& forward, const CudaMatrix& matrix, int64_t rows, const T* x, int64_t x_stride,
             Out* y, int64_t y_stride) {
  project(forward, product_of(matrix, rows, x, x_stride, y, y_stride));
}

// y = matrix norm(hidden), or its activation, for the product that alone reads the norm.
template <typename T, typename Out>
void project_normal(const CudaForward<T>& forward, const CudaMatrix& matrix, Out* y, int64_t y_stride,
                    std::optional<Activation> activation = {}) {
  BasicLinear<T, Out> product = product_of(matrix, forward.norm.tokens, forward.normal, forward.norm.size, y, y_stride);
  product.norm = &forward.norm;
  product.activation = activation;
  project(forward, product);
}

// hidden += matrix x, now or by the next norm.
template <typename T>
void add_projected(const CudaForward<T>& forward, const CudaMatrix& matrix, const T* x, int64_t x_stride) {
  const int64_t tokens = forward.step.tokens;
  float* const y = forward.leaves_parts ? forward.parts : forward.hidden;
  BasicLinear<T, float> product = product_of(matrix, tokens, x, x_stride, y, matrix.outputs);
  if (forward.leaves_parts) {
    product.parts = kResidualParts;
    product.y_step = tokens * matrix.outputs;
  } else {
    product.is_added = true;
  }
  project(forward, product);
}

// The stride of rows of `size` elements, every one of which starts aligned.
inline int64_t aligned_stride(int64_t size) {
  return (size + 7) / 8 * 8;
}

// Of rows of a feed-forward's W_up x.
inline int64_t inner_stride(Activation activation, int64_t size) {
  return aligned_stride(activation == Activation::kSwiGlu ? 2 * size : size);
}

// Each adds its block's output for norm(hidden) to `hidden`. `state` is the block's layer in the pool.
template <typename T>
void run_delta(const CudaForward<T>& forward, const DeltaConfig& config, const BasicDeltaWeights<DeviceBuffer>& weights,
               int state);
template <typename T>
void run_mamba2(const CudaForward<T>& forward, const Mamba2Config& config,
                const BasicMamba2Weights<DeviceBuffer>& weights, int state);
template <typename T>
void run_attention(const CudaForward<T>& forward, const AttentionConfig& config,
                   const BasicAttentionWeights<DeviceBuffer>& weights, int state);
template <typename T>
void run_latent_attention(const CudaForward<T>& forward, const LatentAttentionConfig& config,
                          const BasicLatentAttentionWeights<DeviceBuffer>& weights, int state);
template <typename T>
void run_feed_forward(const CudaForward<T>& forward, const FeedForwardConfig& config,
                      const BasicFeedForwardWeights<DeviceBuffer>& weights);
template <typename T>
void run_experts(const CudaForward<T>& forward, const ExpertsConfig& config,
                 const BasicExpertsWeights<DeviceBuffer>& weights);

// The most that a step may hold, by which its memory is sized.
struct CudaStepLimits {
  int64_t tokens = 0;  // N
  int rows = 0;        // B
  int64_t sequence_tokens = 0;
  int page_tokens = 0;

  int64_t sequence_pages() const { return (sequence_tokens + page_tokens - 1) / page_tokens; }
};

// The bytes of workspace that attention needs within the limits, of a cache of these sizes. Decoding steps alone split
// rows: of at most kMaxCudaTokens tokens each, as many as a step holds.
template <typename T>
size_t attention_bytes(const BasicKvCache<T>& cache, int query_heads, const CudaStepLimits& limits) {
  BasicAttention<T> args;
  args.cache = cache;
  args.cache.page_tokens = limits.page_tokens;
  args.pages.table_stride = static_cast<int>(limits.sequence_pages());
  args.rows.count = static_cast<int>(std::min(limits.tokens, int64_t{limits.rows} * kMaxCudaTokens));
  args.query_heads = query_heads;
  args.max_tokens_per_row = 1;
  return attention_workspace_bytes(args);
}

// The bytes of workspace that each needs.
template <typename T>
size_t block_bytes(const DeltaConfig& config, const ModelConfig& model, const CudaStepLimits& limits);
template <typename T>
size_t block_bytes(const Mamba2Config& config, const ModelConfig& model, const CudaStepLimits& limits);
template <typename T>
size_t block_bytes(const AttentionConfig& config, const ModelConfig& model, const CudaStepLimits& limits);
template <typename T>
size_t block_bytes(const LatentAttentionConfig& config, const ModelConfig& model, const CudaStepLimits& limits);
template <typename T>
size_t block_bytes(const FeedForwardConfig& config, const ModelConfig& model, const CudaStepLimits& limits);
template <typename T>
size_t block_bytes(const ExpertsConfig& config, const ModelConfig& model, const CudaStepLimits& limits);

}  // namespace replayssm
