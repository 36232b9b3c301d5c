// Qwen3.5 and Qwen3-Next dense text models: layers of Gated DeltaNet and of gated softmax attention, each followed by a
// SwiGLU feed-forward. The forward pass over the state of a StatePool. Source: the models' public code and configs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/core/device.h"
#include "replayssm/model/config.h"
#include "replayssm/model/qwen_weights.h"
#include "replayssm/ops/delta.h"
#include "replayssm/state/layout.h"
#include "replayssm/state/pool.h"

namespace replayssm {

// What a pool's slot holds for this model: a state layer for each of the model's layers, in their order.
// window L, max_step_tokens 1 .. L and page_tokens as in StateLayout; context_tokens is the model's.
StateLayout qwen_state_layout(const ModelConfig& config, const QwenWeights& weights, int window, int max_step_tokens,
                              int page_tokens);

// One step of a begun plan. A token's logits depend, bit for bit, on its own sequence alone: not on the batch, the
// row's place, the thread count; and of the sequence, in prefill, also on where the prompt was split (within rounding).
// A conventional step and a replay step with the exact readout give the same bits.
struct QwenStep {
  const StepPlan* plan = nullptr;
  const int32_t* token = nullptr;  // [plan->tokens] of 0 .. vocabulary-1; of padding rows too
  // How a replay step reads the state; conventional and prefill steps do not use it.
  Readout readout = Readout::kDirect;
  // The tokens whose logits are wanted, each an index of 0 .. plan->tokens-1, and their logits. Those of padding rows
  // are finite and mean nothing.
  std::span<const int32_t> logit_token;
  float* logits = nullptr;  // [logit_token.size(), vocabulary]
};

class Qwen {
 public:
  // Steps of up to max_tokens tokens on pools of `layout` (or of one with a smaller window and smaller steps). All
  // memory is taken here, none in a step. config, weights and device must outlive the model.
  Qwen(const ModelConfig& config, const QwenWeights& weights, const StateLayout& layout, int max_tokens,
       Device& device);
  Qwen(const Qwen&) = delete;
  Qwen& operator=(const Qwen&) = delete;

  const ModelConfig& config() const { return config_; }
  int max_tokens() const { return max_tokens_; }
  // Everything that a step writes besides states and logits.
  size_t workspace_bytes() const;

  // Runs the plan's tokens through all layers: states, rings and caches of the pool's slots take them in, and the
  // wanted logits are written. The caller has begun the step and commits it. Throws Error, before any state was
  // touched, for a plan of more than max_tokens tokens, a token or logit_token out of range, null pointers, or a pool
  // of other layers; after an Error from an op the caller aborts the step.
  void forward(const QwenStep& step, StatePool& pool);

  // Takes in whole prompts, in as many prefill steps as max_tokens asks for, and writes the logits of each prompt's
  // last token, [rows, vocabulary]. Begins and commits the steps; after an Error the step is aborted and the rows in it
  // are lost (StatePool::abort_step). No prompt may be empty. As long as a prompt is alone in its steps, that is, with
  // one row a call, its bits depend on max_tokens but on nothing else.
  void prefill(std::span<const Handle> rows, std::span<const std::span<const int32_t>> prompts, float* logits,
               StatePool& pool);

 private:
  void normalize(const float* weight);
  void mix_delta(const QwenDeltaWeights& weights, int layer, const QwenStep& step, StatePool& pool);
  void update_delta(int layer, const QwenStep& step, StatePool& pool);
  void attend(const QwenAttentionWeights& weights, int layer, const QwenStep& step, StatePool& pool);
  void feed_forward(const QwenLayerWeights& weights);
  void project_logits(const QwenStep& step);
  void project(const Matrix& matrix, const float* x, int64_t x_stride, float* y, bool is_added);
  void check(const QwenStep& step, const StatePool& pool) const;

  const ModelConfig& config_;
  const QwenWeights& weights_;
  StateLayout layout_;
  int max_tokens_;
  Device& device_;
  int64_t tokens_ = 0;           // of the running step, N
  Buffer<float> hidden_;         // [max_tokens, hidden] the residual stream
  Buffer<float> normal_;         // [max_tokens, hidden]
  Buffer<float> projection_;     // [max_tokens, the widest input projection]
  Buffer<float> convolved_;      // [max_tokens, C]
  Buffer<float> mixed_;          // [max_tokens, the widest mixer output]
  Buffer<float> g_, beta_;       // [max_tokens, H]
  Buffer<float> cosine_, sine_;  // [max_tokens, rotary_size / 2]
  Buffer<std::byte> workspace_;  // of the ops
  // The pieces of a prefill.
  std::vector<Handle> piece_rows_;
  std::vector<int> piece_tokens_;
  std::vector<int32_t> piece_token_, piece_logit_;
};

}  // namespace replayssm
