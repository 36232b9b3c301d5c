// What the blocks of a model share in one step, and the blocks: one function and one file a kind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/core/buffer.h"
#include "replayssm/core/device.h"
#include "replayssm/model/config.h"
#include "replayssm/model/weights.h"
#include "replayssm/ops/rows.h"
#include "replayssm/state/layout.h"
#include "replayssm/state/pool.h"
#include "replayssm/state/step.h"

namespace replayssm {

// One step of a begun plan. A token's logits depend, bit for bit, on its own sequence alone: not on the batch, the
// row's place, the thread count; and of the sequence, in prefill, also on where the prompt was split (within rounding).
// A conventional step and a replay step with the exact readout give the same bits.
struct ModelStep {
  const StepPlan* plan = nullptr;
  const int32_t* token = nullptr;  // [plan->tokens] of 0 .. vocabulary-1; of padding rows too
  // How a replay step reads the state; conventional and prefill steps do not use it.
  Readout readout = Readout::kDirect;
  // The tokens whose logits are wanted, each an index of 0 .. plan->tokens-1, and their logits. Those of padding rows
  // are finite and mean nothing.
  std::span<const int32_t> logit_token;
  float* logits = nullptr;  // [logit_token.size(), vocabulary]
};

// Floats a token that a block writes to each array of Activations, and bytes of workspace.
struct BlockWidths {
  int64_t projection = 0, convolved = 0, gate = 0, beta = 0, mixed = 0;
  size_t workspace_bytes = 0;

  void widen(const BlockWidths& other);
};

// All memory of a step besides states and logits, taken once. [max_tokens, the widest block's] each, and at least the
// hidden size in projection, convolved and mixed.
struct Activations {
  Buffer<float> hidden;         // the residual stream
  Buffer<float> normal;         // its norm, a block's input
  Buffer<float> projection;     // of the input projection
  Buffer<float> convolved;      // of the short convolution; of experts, one expert's tokens
  Buffer<float> gate, beta;     // of the recurrence; of experts, the shared expert's gate
  Buffer<float> mixed;          // of a mixer, before its output projection; of experts, their sum
  Buffer<float> cosine, sine;   // [max_tokens, rotary_size / 2]
  Buffer<std::byte> workspace;  // of the ops
};

struct Forward {
  const ModelConfig& config;
  const ModelStep& step;
  StatePool& pool;
  Activations& arrays;
  Device& device;
  int64_t tokens;  // N

  std::span<std::byte> workspace() const { return {arrays.workspace.data(), arrays.workspace.size()}; }
};

// y = matrix x, or y += matrix x, of all tokens or of `rows` rows; y's rows are contiguous.
void project(const Forward& forward, const MatrixRows& matrix, const float* x, int64_t x_stride, float* y,
             bool is_added);
void project(const Forward& forward, const MatrixRows& matrix, int64_t rows, const float* x, int64_t x_stride, float* y,
             bool is_added);

// Floats a row of a feed-forward's W_up x.
int64_t inner_width(Activation activation, int64_t size);

// y = W_down activation(W_up x), or y += that, of `rows` rows. The rows of x and y are contiguous and y may be x;
// `inner` is scratch of `rows` rows of the inner width.
void feed_forward(const Forward& forward, Activation activation, const MatrixRows& up, const MatrixRows& down,
                  int64_t rows, const float* x, float* inner, float* y, bool is_added);

// Each adds its block's output for `arrays.normal` to `arrays.hidden`. `state` is the block's layer in the pool.
void run_delta(const Forward& forward, const DeltaConfig& config, const DeltaWeights& weights, int state);
void run_mamba2(const Forward& forward, const Mamba2Config& config, const Mamba2Weights& weights, int state);
void run_attention(const Forward& forward, const AttentionConfig& config, const AttentionWeights& weights, int state);
void run_latent_attention(const Forward& forward, const LatentAttentionConfig& config,
                          const LatentAttentionWeights& weights, int state);
void run_feed_forward(const Forward& forward, const FeedForwardConfig& config, const FeedForwardWeights& weights);
void run_experts(const Forward& forward, const ExpertsConfig& config, const ExpertsWeights& weights);

// What each needs for pools of this layout and steps of up to max_tokens tokens.
BlockWidths block_widths(const DeltaConfig& config, const StateLayout& layout, int max_tokens, Device& device);
BlockWidths block_widths(const Mamba2Config& config, const StateLayout& layout, int max_tokens, Device& device);
BlockWidths block_widths(const AttentionConfig& config, const StateLayout& layout, int max_tokens, Device& device);
BlockWidths block_widths(const LatentAttentionConfig& config, const StateLayout& layout, int max_tokens,
                         Device& device);
BlockWidths block_widths(const FeedForwardConfig& config, const StateLayout& layout, int max_tokens, Device& device);
BlockWidths block_widths(const ExpertsConfig& config, const StateLayout& layout, int max_tokens, Device& device);

}  // namespace replayssm
