// A model on the CPU with its sequences.
#pragma once

#include "replayssm/core/buffer.h"
#include "replayssm/core/device.h"
#include "replayssm/model/language_model.h"
#include "replayssm/model/runner.h"
#include "replayssm/state/pool.h"

namespace replayssm {

class HostRunner final : public Runner {
 public:
  // Slots for `rows` sequences of `sequence_tokens` tokens; prefills of at most max_tokens tokens a step. All must
  // outlive the runner.
  HostRunner(const ModelConfig& config, const Weights& weights, Device& device, int window, int rows,
             int64_t sequence_tokens, int max_tokens);

  const ModelConfig& config() const override { return model_.config(); }
  SequencePool& pool() override { return pool_; }
  bool replays(int) const override { return true; }
  void prefill(Handle handle, std::span<const int32_t> tokens, int row) override;
  void decode(const StepPlan& plan, Readout readout, std::span<const int32_t> tokens) override;
  void sample(Sample args) override;
  std::span<const float> logits(int row) override;

 private:
  Device& device_;
  StatePool pool_;
  LanguageModel model_;
  Buffer<float> logits_;  // [rows, vocabulary]
  Buffer<std::byte> workspace_;
  std::vector<int32_t> row_index_;
};

}  // namespace replayssm
