#include "replayssm/model/cuda_runner.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "replayssm/model/language_model.h"

namespace replayssm {
namespace {

// Everything that the sampler reads of a row but its history, and what aligns the arrays.
size_t argument_bytes(int rows) {
  constexpr size_t kRowBytes = sizeof(SampleSettings) + sizeof(uint64_t) + 2 * sizeof(int64_t);
  constexpr size_t kArrays = 4, kAlignment = 16;
  return (rows + 1) * kRowBytes + kArrays * kAlignment;
}

template <typename T>
CudaStatePool make_pool(const ModelConfig& config, const CudaWeights& weights, CudaDevice& device, int window, int rows,
                        int64_t sequence_tokens) {
  const StateLayout layout = state_layout(config, weights.fingerprint, window, 1, kCudaPageTokens);
  return CudaStatePool(layout, pool_size(layout, rows, sequence_tokens), device,
                       {.max_rows = graph_rows(rows),
                        .element = std::is_same_v<T, float> ? Dtype::kF32 : Dtype::kBF16,
                        .max_sequence_tokens = sequence_tokens});
}

}  // namespace

int graph_rows(int rows) {
  int power = 1;
  while (2 * power < rows) power *= 2;
  if (rows <= power) return power;
  return rows <= power * 3 / 2 ? power * 3 / 2 : 2 * power;
}

template <typename T>
CudaRunner<T>::CudaRunner(const ModelConfig& config, const CudaWeights& weights, CudaDevice& device, int window,
                          int rows, int64_t sequence_tokens, int max_tokens)
    : device_(device),
      pool_(make_pool<T>(config, weights, device, window, rows, sequence_tokens)),
      model_(config, weights,
             {.tokens = std::max(max_tokens, graph_rows(rows)),
              .rows = graph_rows(rows),
              .sequence_tokens = sequence_tokens,
              .page_tokens = kCudaPageTokens},
             device),
      logits_(static_cast<size_t>(graph_rows(rows)) * config.vocabulary, device),
      token_(graph_rows(rows), device),
      sample_memory_(sample_workspace_bytes(rows, config.vocabulary, device), device),
      arguments_(argument_bytes(rows), device),
      token_uploads_(graph_rows(rows) * sizeof(int32_t), device),
      argument_uploads_(argument_bytes(rows), device),
      logits_here_(config.vocabulary) {}

template <typename T>
void CudaRunner<T>::prefill(Handle handle, std::span<const int32_t> tokens, int row) {
  model_.prefill({&handle, 1}, {&tokens, 1}, logits_.data() + row * config().vocabulary, pool_);
}

template <typename T>
void CudaRunner<T>::decode(const StepPlan& plan, Readout readout, std::span<const int32_t> tokens) {
  // Rows past the step's are padding rows, of any token.
  const int rows = graph_rows(plan.rows.count);
  auto* const block = static_cast<int32_t*>(token_uploads_.next());
  std::fill(std::ranges::copy(tokens, block).out, block + rows, 0);
  token_uploads_.upload(token_.data(), rows * sizeof(int32_t), rows * sizeof(int32_t), 1);
  const bool is_replay = plan.kind == StepKind::kReplay;
  const GraphKey key{plan.kind, is_replay ? readout : Readout::kDirect, rows};
  auto at = graphs_.find(key);
  if (at == graphs_.end())
    at = graphs_
             .try_emplace(key, device_,
                          [&] {
                            model_.forward({.kind = plan.kind,
                                            .rows = pool_.rows(rows),
                                            .tokens = rows,
                                            .readout = readout,
                                            .token = token_.data(),
                                            .logits = logits_.data()},
                                           pool_);
                          })
             .first;
  at->second.launch();
}

template <typename T>
template <typename Element>
const Element* CudaRunner<T>::stage(std::byte* block, size_t& at, std::span<const Element> values) const {
  const size_t offset = at;
  std::memcpy(block + offset, values.data(), values.size_bytes());
  at = (offset + values.size_bytes() + 15) / 16 * 16;
  return reinterpret_cast<const Element*>(arguments_.data() + offset);
}

template <typename T>
void CudaRunner<T>::sample(Sample args) {
  const auto rows = static_cast<size_t>(args.rows);
  int32_t* const token_here = args.token;
  auto* const block = static_cast<std::byte*>(argument_uploads_.next());
  size_t bytes = 0;
  args.settings = stage(block, bytes, std::span(args.settings, rows));
  if (args.sequence != nullptr) args.sequence = stage(block, bytes, std::span(args.sequence, rows));
  args.position = stage(block, bytes, std::span(args.position, rows));
  const auto history_tokens = args.history_begin == nullptr ? 0 : static_cast<size_t>(args.history_begin[rows]);
  if (history_tokens > history_.size()) history_ = DeviceBuffer<int32_t>(2 * history_tokens, device_);
  device_.upload(history_.data(), args.history, history_tokens * sizeof(int32_t));
  args.history = history_tokens == 0 ? nullptr : history_.data();
  args.history_begin = history_tokens == 0 ? nullptr : stage(block, bytes, std::span(args.history_begin, rows + 1));
  argument_uploads_.upload(arguments_.data(), bytes, bytes, 1);
  args.vocabulary = args.logits_stride = config().vocabulary;
  args.logits = logits_.data();
  args.token = token_.data();
  replayssm::sample(args, device_, {sample_memory_.data(), sample_memory_.size()});
  device_.download(token_here, token_.data(), rows * sizeof(int32_t));
  device_.synchronize();
}

template <typename T>
std::span<const float> CudaRunner<T>::logits(int row) {
  device_.download(logits_here_.data(), logits_.data() + row * config().vocabulary,
                   logits_here_.size() * sizeof(float));
  return logits_here_;
}

std::unique_ptr<Runner> make_cuda_runner(const CudaModel& model, CudaDevice& device, int window, int rows,
                                         int64_t sequence_tokens, int max_tokens) {
  if (model.element == Dtype::kF32)
    return std::make_unique<CudaRunner<float>>(model.config, model.weights, device, window, rows, sequence_tokens,
                                               max_tokens);
  return std::make_unique<CudaRunner<Bf16>>(model.config, model.weights, device, window, rows, sequence_tokens,
                                            max_tokens);
}

template class CudaRunner<float>;
template class CudaRunner<Bf16>;

}  // namespace replayssm
