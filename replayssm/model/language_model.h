// The forward pass of a model: its blocks, one after another, over the state of a StatePool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "replayssm/core/device.h"
#include "replayssm/model/config.h"
#include "replayssm/model/forward.h"
#include "replayssm/model/prompt_pieces.h"
#include "replayssm/model/weights.h"
#include "replayssm/state/layout.h"
#include "replayssm/state/pool.h"

namespace replayssm {

// What a pool's slot holds for this model: a state layer for each block that keeps state, in their order. window L,
// max_step_tokens 1 .. L and page_tokens as in StateLayout; context_tokens is the model's; fingerprint is that of its
// weights.
StateLayout state_layout(const ModelConfig& config, const std::string& fingerprint, int window, int max_step_tokens,
                         int page_tokens);

// Of each block: its layer in that layout, or -1.
std::vector<int> state_indices(const ModelConfig& config);

class LanguageModel {
 public:
  // Steps of up to max_tokens tokens on pools of `layout` (or of one with a smaller window and smaller steps). All
  // memory is taken here, none in a step. config, weights and device must outlive the model.
  LanguageModel(const ModelConfig& config, const Weights& weights, const StateLayout& layout, int max_tokens,
                Device& device);
  LanguageModel(const LanguageModel&) = delete;
  LanguageModel& operator=(const LanguageModel&) = delete;

  const ModelConfig& config() const { return config_; }
  int max_tokens() const { return max_tokens_; }
  // Everything that a step writes besides states and logits.
  size_t workspace_bytes() const;

  // Runs the plan's tokens through all blocks: states, rings and caches of the pool's slots take them in, and the
  // wanted logits are written. The caller has begun the step and commits it. Throws Error, before any state was
  // touched, for a plan of more than max_tokens tokens, a token or logit_token out of range, null pointers, or a pool
  // of other layers; after an Error from an op the caller aborts the step.
  void forward(const ModelStep& step, StatePool& pool);

  // Takes in whole prompts, in as many prefill steps as max_tokens asks for, and writes the logits of each prompt's
  // last token, [rows, vocabulary]. Begins and commits the steps; after an Error the step is aborted and the rows in it
  // are lost (StatePool::abort_step). No prompt may be empty. As long as a prompt is alone in its steps, that is, with
  // one row a call, its bits depend on max_tokens but on nothing else.
  void prefill(std::span<const Handle> rows, std::span<const std::span<const int32_t>> prompts, float* logits,
               StatePool& pool);

 private:
  void normalize(const Forward& forward, const float* weight);
  void run_block(const Forward& forward, size_t index);
  void project_logits(const Forward& forward);
  void check(const ModelStep& step, const StatePool& pool) const;

  const ModelConfig& config_;
  const Weights& weights_;
  StateLayout layout_;
  std::vector<int> state_;
  int max_tokens_;
  Device& device_;
  Activations arrays_;
  PromptPieces pieces_;
};

}  // namespace replayssm
