// A mixture of experts: hidden += sum_e weight_e expert_e(x) + shared(x). Each expert takes its tokens as one batch.
#include <algorithm>

#include "replayssm/model/forward.h"
#include "replayssm/ops/activation.h"
#include "replayssm/ops/experts.h"

namespace replayssm {
namespace {

// Inputs and outputs of a routed expert.
int64_t expert_width(const ExpertsConfig& config, int64_t hidden_size) {
  return config.latent_size > 0 ? config.latent_size : hidden_size;
}

// A step's choices, in the workspace.
struct Choices {
  Choices(std::byte* workspace, int experts, int64_t choices)
      : begin(reinterpret_cast<int64_t*>(workspace)),
        expert(reinterpret_cast<int32_t*>(begin + experts + 1)),
        expert_weight(reinterpret_cast<float*>(expert + choices)),
        token(reinterpret_cast<int32_t*>(expert_weight + choices)),
        weight(reinterpret_cast<float*>(token + choices)),
        end(reinterpret_cast<std::byte*>(weight + choices)) {}

  static size_t bytes(int experts, int64_t choices) {
    return sizeof(int64_t) * static_cast<size_t>(experts + 1) + 4 * sizeof(float) * static_cast<size_t>(choices);
  }

  int64_t* begin;        // [E + 1]
  int32_t* expert;       // [N, top_k]
  float* expert_weight;  // [N, top_k]
  int32_t* token;        // [N top_k], by expert
  float* weight;         // [N top_k], by expert
  std::byte* end;
};

// `logits` holds N E numbers for the while.
Choices choose(const Forward& forward, const ExpertsConfig& config, const ExpertsWeights& weights, float* logits) {
  const std::span<std::byte> workspace = forward.workspace();
  const Choices choices(workspace.data(), config.experts, forward.tokens * config.top_k);
  project(forward, weights.router, forward.arrays.normal.data(), forward.config.hidden_size, logits, false);
  route_experts({.tokens = forward.tokens,
                 .experts = config.experts,
                 .top_k = config.top_k,
                 .router = config.router,
                 .logits = logits,
                 .logits_stride = config.experts,
                 .correction = weights.correction.data(),
                 .expert = choices.expert,
                 .weight = choices.expert_weight},
                forward.device, {choices.end, workspace.data() + workspace.size()});
  group_choices({.tokens = forward.tokens,
                 .experts = config.experts,
                 .top_k = config.top_k,
                 .expert = choices.expert,
                 .expert_weight = choices.expert_weight,
                 .begin = choices.begin,
                 .token = choices.token,
                 .weight = choices.weight});
  return choices;
}

// sum <- sum_e weight_e expert_e(x), the experts in ascending order. `rows` and `inner` hold one expert's tokens.
void add_experts(const Forward& forward, const ExpertsConfig& config, const ExpertsWeights& weights,
                 const Choices& choices, const float* x, float* rows, float* inner, float* sum) {
  const int64_t width = expert_width(config, forward.config.hidden_size);
  const int64_t up_rows = inner_width(config.activation, config.size);
  std::fill_n(sum, forward.tokens * width, 0.0f);
  for (int e = 0; e < config.experts; ++e) {
    const int64_t begin = choices.begin[e], count = choices.begin[e + 1] - begin;
    if (count == 0) continue;
    gather_rows({.rows = count,
                 .size = width,
                 .token = choices.token + begin,
                 .x = x,
                 .x_stride = width,
                 .y = rows,
                 .y_stride = width},
                forward.device);
    feed_forward(forward, config.activation, weights.experts.up.rows(e * up_rows, up_rows),
                 weights.experts.down.rows(e * width, width), count, rows, inner, rows, false);
    add_rows({.rows = count,
              .size = width,
              .token = choices.token + begin,
              .weight = choices.weight + begin,
              .x = rows,
              .x_stride = width,
              .y = sum,
              .y_stride = width},
             forward.device);
  }
}

// hidden += shared(x), or hidden += sigmoid(w x) shared(x).
void add_shared(const Forward& forward, const ExpertsConfig& config, const ExpertsWeights& weights, float* rows,
                float* inner) {
  const Activations& arrays = forward.arrays;
  const int64_t hidden_size = forward.config.hidden_size;
  if (!config.has_shared_gate) {
    feed_forward(forward, config.activation, weights.shared.up, weights.shared.down, forward.tokens,
                 arrays.normal.data(), inner, forward.arrays.hidden.data(), true);
    return;
  }
  feed_forward(forward, config.activation, weights.shared.up, weights.shared.down, forward.tokens, arrays.normal.data(),
               inner, rows, false);
  float *logit = forward.arrays.gate.data(), *weight = forward.arrays.beta.data();
  project(forward, weights.shared_gate, arrays.normal.data(), hidden_size, logit, false);
  std::fill_n(weight, forward.tokens, 1.0f);
  sigmoid_gate({.tokens = forward.tokens,
                .heads = 1,
                .size = 1,
                .gate = logit,
                .gate_stride = 1,
                .gate_head_stride = 1,
                .x = weight,
                .x_stride = 1},
               forward.device);
  add_rows({.rows = forward.tokens,
            .size = hidden_size,
            .weight = weight,
            .x = rows,
            .x_stride = hidden_size,
            .y = forward.arrays.hidden.data(),
            .y_stride = hidden_size},
           forward.device);
}

}  // namespace

// The hidden size, which every array has, is enough where experts work on the hidden state.
BlockWidths block_widths(const ExpertsConfig& config, const StateLayout&, int max_tokens, Device& device) {
  const int64_t inner = std::max({int64_t{config.experts}, inner_width(config.activation, config.size),
                                  inner_width(config.activation, config.shared_size)});
  return {.projection = config.latent_size + inner,
          .convolved = config.latent_size,
          .gate = config.has_shared_gate ? 1 : 0,
          .beta = config.has_shared_gate ? 1 : 0,
          .mixed = config.latent_size,
          .workspace_bytes = Choices::bytes(config.experts, int64_t{max_tokens} * config.top_k) +
                             route_experts_workspace_bytes(config.experts, device)};
}

void run_experts(const Forward& forward, const ExpertsConfig& config, const ExpertsWeights& weights) {
  Activations& arrays = forward.arrays;
  const int64_t hidden_size = forward.config.hidden_size;
  float *latent = arrays.projection.data(), *inner = latent + forward.tokens * config.latent_size;
  float *rows = arrays.convolved.data(), *sum = arrays.mixed.data();
  const Choices choices = choose(forward, config, weights, inner);
  if (config.latent_size > 0) {
    project(forward, weights.latent_down, arrays.normal.data(), hidden_size, latent, false);
    add_experts(forward, config, weights, choices, latent, rows, inner, sum);
    project(forward, weights.latent_up, sum, config.latent_size, arrays.hidden.data(), true);
  } else {
    add_experts(forward, config, weights, choices, arrays.normal.data(), rows, inner, sum);
    add_rows({.rows = forward.tokens,
              .size = hidden_size,
              .x = sum,
              .x_stride = hidden_size,
              .y = arrays.hidden.data(),
              .y_stride = hidden_size},
             forward.device);
  }
  if (config.shared_size > 0) add_shared(forward, config, weights, rows, inner);
}

}  // namespace replayssm
