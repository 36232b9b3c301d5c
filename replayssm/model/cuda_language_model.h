// The forward pass of a model on a GPU, over the state of a CudaStatePool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "replayssm/core/cuda_device.h"
#include "replayssm/model/config.h"
#include "replayssm/model/cuda_forward.h"
#include "replayssm/model/prompt_pieces.h"
#include "replayssm/model/weights.h"
#include "replayssm/state/cuda_pool.h"

namespace replayssm {

// T is Bf16 or float: the type of the weights' matrices, of the activations between a block's ops, and of the pool's
// activations. Sums, norms, gates, states and the residual stream are FP32.
template <typename T>
class CudaLanguageModel {
 public:
  // Steps within `limits` on pools of the model's layers. All memory is taken here, none in a step. config, weights and
  // device must outlive the model. Throws Error if the weights' matrices are not of T, a convolution's width is not 4,
  // or the memory cannot be had.
  CudaLanguageModel(const ModelConfig& config, const CudaWeights& weights, const CudaStepLimits& limits,
                    CudaDevice& device);

  const ModelConfig& config() const { return config_; }
  const CudaStepLimits& limits() const { return limits_; }
  // What the model takes of the GPU's memory besides weights and state.
  static size_t workspace_bytes(const ModelConfig& config, const CudaStepLimits& limits);

  // Queues the step: states, rings and caches of the pool's rows take its tokens in, and the wanted logits are written.
  // The caller has begun the step and commits it. Throws Error, before anything was queued, for a step past the limits,
  // null pointers, and a pool of other layers, another type or longer sequences. Can be captured.
  void forward(const CudaModelStep& step, CudaStatePool& pool);

  // Queues the reading of whole prompts, in as many prefill steps as the limits ask for, which it begins and commits;
  // the logits of each prompt's last token go to `logits`, [rows, vocabulary] in device memory. After an Error the step
  // is aborted and the rows in it are lost. No prompt may be empty.
  void prefill(std::span<const Handle> rows, std::span<const std::span<const int32_t>> prompts, float* logits,
               CudaStatePool& pool);

 private:
  bool may_leave_parts(const CudaModelStep& step, size_t index) const;
  void run_block(const CudaForward<T>& forward, size_t index);
  BasicRmsNorm<float, T> norm_of(int64_t tokens, const float* x, const DeviceBuffer<float>& weight,
                                 bool has_parts) const;
  void project_logits(CudaForward<T>& forward);
  void check(const CudaModelStep& step, const CudaStatePool& pool) const;

  const ModelConfig& config_;
  const CudaWeights& weights_;
  CudaStepLimits limits_;
  int64_t sequence_tokens_;  // the limit, rounded up to whole pages
  CudaDevice& device_;
  std::vector<StateLayer> layers_;  // that the pool must have
  std::vector<int> state_;          // of each block: its layer in the pool, or -1
  MatrixProducts products_;
  DeviceBuffer<std::byte> memory_;
  // Parts of memory_.
  float *hidden_ = nullptr, *wanted_ = nullptr, *parts_ = nullptr, *cosine_ = nullptr, *sine_ = nullptr;
  T* normal_ = nullptr;
  int32_t* token_ = nullptr;  // of a prefill, and behind them those whose logits are wanted
  std::span<std::byte> workspace_;
  PinnedUploads uploads_;  // to token_
  PromptPieces pieces_;
};

}  // namespace replayssm
