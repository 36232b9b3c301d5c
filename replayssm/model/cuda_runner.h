// A model on a GPU with its sequences; steps are captured once and launched as graphs.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "replayssm/model/cuda_language_model.h"
#include "replayssm/model/model.h"
#include "replayssm/model/runner.h"
#include "replayssm/state/cuda_pool.h"

namespace replayssm {

// Rows of the least replay step: of one row, conventional steps take 5.4 to 6.4 us a layer where replay takes 6.7 to 7,
// and of two 6.3 to 8.4 for 7.4 to 8.6 (an H200, Gated DeltaNet and Mamba-2 of several shapes; docs/kernels.md).
inline constexpr int kLeastReplayRows = 3;

// Positions of a page of keys and values.
inline constexpr int kCudaPageTokens = 64;

// The rows of the graph that serves steps of `rows` rows: of two neighbouring sizes one is at most half as large again,
// so that a batch which loses its sequences one by one needs few.
int graph_rows(int rows);

// T as in CudaLanguageModel.
template <typename T>
class CudaRunner final : public Runner {
 public:
  // As HostRunner's. Throws Error if the GPU has too little memory. Flushes are not spread over the window: the
  // rounding of a direct readout would then depend on a sequence's slot.
  CudaRunner(const ModelConfig& config, const CudaWeights& weights, CudaDevice& device, int window, int rows,
             int64_t sequence_tokens, int max_tokens);

  const ModelConfig& config() const override { return model_.config(); }
  SequencePool& pool() override { return pool_; }
  bool replays(int rows) const override { return rows >= kLeastReplayRows; }
  void prefill(Handle handle, std::span<const int32_t> tokens, int row) override;
  void decode(const StepPlan& plan, Readout readout, std::span<const int32_t> tokens) override;
  void sample(Sample args) override;
  std::span<const float> logits(int row) override;

 private:
  using GraphKey = std::tuple<StepKind, Readout, int>;  // and rows, padding rows included

  // Copies host arrays to where the sampler reads them.
  template <typename Element>
  const Element* stage(std::byte* block, size_t& at, std::span<const Element> values) const;

  CudaDevice& device_;
  CudaStatePool pool_;
  CudaLanguageModel<T> model_;
  DeviceBuffer<float> logits_;   // [rows, vocabulary]
  DeviceBuffer<int32_t> token_;  // [rows]
  DeviceBuffer<std::byte> sample_memory_, arguments_;
  DeviceBuffer<int32_t> history_;  // as long as the longest that was needed
  PinnedUploads token_uploads_, argument_uploads_;
  std::map<GraphKey, CudaGraph> graphs_;
  std::vector<float> logits_here_;  // of one row
};

// Of the type of the model's matrices.
std::unique_ptr<Runner> make_cuda_runner(const CudaModel& model, CudaDevice& device, int window, int rows,
                                         int64_t sequence_tokens, int max_tokens);

}  // namespace replayssm
