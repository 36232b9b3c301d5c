// Whole models on a GPU with a pool of their own, whose memory was NaN before; logits come to the host.
#pragma once

#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "replayssm/core/cuda_device.h"
#include "replayssm/model/cuda_language_model.h"
#include "replayssm/model/language_model.h"
#include "replayssm/model/model.h"
#include "tests/arrays.h"
#include "tests/cuda_memory.h"
#include "tests/model_rig.h"

namespace replayssm::test {

// T of float or Bf16.
template <typename T>
class CudaModelRig {
 public:
  CudaModelRig(const ModelConfig& config, const CudaWeights& weights, CudaDevice& device,
               const RigOptions& options = {})
      : device_(device),
        pool(layout_of(config, weights, options), pool_size(layout_of(config, weights, options), options.slots, 2048),
             device,
             {.max_rows = options.slots,
              .is_poisoned = true,
              .element = std::is_same_v<T, float> ? Dtype::kF32 : Dtype::kBF16,
              .max_sequence_tokens = 2048}),
        model(config, weights,
              {.tokens = options.max_tokens, .rows = options.slots, .sequence_tokens = 2048, .page_tokens = 16},
              device),
        logits_(static_cast<size_t>(options.max_tokens) * config.vocabulary, device),
        token_(options.max_tokens + 16, device) {}

  // Runs and commits a step; the logits of all its tokens, [N, vocabulary]. A captured one is launched as a graph.
  std::vector<float> step(StepKind kind, const std::vector<Handle>& rows, const std::vector<int>& counts,
                          const std::vector<int32_t>& token, Readout readout = Readout::kDirect,
                          const std::vector<int>& accepted = {}, bool is_captured = false) {
    const StepPlan& plan = pool.begin_step(kind, rows, counts);
    token_.upload(token, device_);
    device_.fill_words(logits_.data(), 0x7FC07FC0u, logits_.size());
    const auto run = [&] {
      model.forward({.kind = kind,
                     .rows = pool.rows(plan.rows.count),
                     .tokens = plan.tokens,
                     .tokens_per_row = *std::max_element(counts.begin(), counts.end()),
                     .readout = readout,
                     .token = token_.data(),
                     .logits = logits_.data()},
                    pool);
    };
    if (is_captured) {
      CudaGraph graph(device_, run);
      graph.launch();
      device_.synchronize();
    } else {
      run();
      device_.synchronize();
    }
    flushes += plan.flushes;
    if (accepted.empty())
      pool.commit();
    else
      pool.commit(accepted);
    std::vector<float> logits(token.size() * model.config().vocabulary);
    device_.download(logits.data(), logits_.data(), logits.size() * sizeof(float));
    return logits;
  }

  // Captures a decoding step of `rows` rows, and runs a step that is begun with it.
  std::unique_ptr<CudaGraph> capture(int rows, StepKind kind, Readout readout) {
    return std::make_unique<CudaGraph>(device_, [&] {
      model.forward({.kind = kind,
                     .rows = pool.rows(rows),
                     .tokens = rows,
                     .readout = readout,
                     .token = token_.data(),
                     .logits = logits_.data()},
                    pool);
    });
  }
  std::vector<float> launch(CudaGraph& graph, StepKind kind, const std::vector<Handle>& rows,
                            const std::vector<int32_t>& token) {
    pool.begin_step(kind, rows, std::vector<int>(rows.size(), 1));
    token_.upload(token, device_);
    graph.launch();
    device_.synchronize();
    pool.commit();
    std::vector<float> logits(token.size() * model.config().vocabulary);
    device_.download(logits.data(), logits_.data(), logits.size() * sizeof(float));
    return logits;
  }

  // All bytes of the pool's state.
  std::vector<std::byte> state() const {
    std::vector<std::byte> bytes(pool.bytes().size());
    device_.download(bytes.data(), pool.bytes().data(), bytes.size());
    return bytes;
  }

  std::vector<float> prefill(Handle row, std::span<const int32_t> token) {
    return step(StepKind::kPrefill, {row}, {static_cast<int>(token.size())}, {token.begin(), token.end()});
  }

  // One window of the same length in every row.
  std::vector<float> decode(Decoder decoder, const std::vector<Handle>& rows, const std::vector<int32_t>& token,
                            const std::vector<int>& accepted = {}, bool is_captured = false) {
    const std::vector<int> counts(rows.size(), static_cast<int>(token.size() / rows.size()));
    return step(decoder == Decoder::kConventional ? StepKind::kConventional : StepKind::kReplay, rows, counts, token,
                decoder == Decoder::kExact ? Readout::kExact : Readout::kDirect, accepted, is_captured);
  }

 private:
  static StateLayout layout_of(const ModelConfig& config, const CudaWeights& weights, const RigOptions& options) {
    StateLayout layout = state_layout(config, weights.fingerprint, options.window, options.max_step_tokens, 16);
    layout.form = options.form;
    return layout;
  }

  CudaDevice& device_;

 public:
  CudaStatePool pool;
  CudaLanguageModel<T> model;
  int flushes = 0;

 private:
  DeviceBuffer<float> logits_;
  DeviceBuffer<int32_t> token_;
};

}  // namespace replayssm::test
