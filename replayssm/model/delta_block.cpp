// The delta rule behind a short convolution: q | k | v = silu(conv(W x)); o = delta rule;
// hidden += W_out (norm(o) * silu(z)).
#include "replayssm/model/forward.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/norm.h"

namespace replayssm {
namespace {

// Rows of in_proj: q, k and v first, which the convolution takes as they lie.
int64_t projection_width(const DeltaConfig& config) {
  return config.conv_channels() + config.value_channels() + 2 * int64_t{config.shape.heads};
}

// mixed <- the delta rule over convolved, by the step's kind.
void update_state(const Forward& forward, const DeltaConfig& config, int state_layer) {
  Activations& arrays = forward.arrays;
  const StepPlan& plan = *forward.step.plan;
  const int64_t channels = config.conv_channels(), keys = config.key_channels();
  const DeltaState state = forward.pool.delta_state(state_layer);
  const DeltaTokens tokens{.q = arrays.convolved.data(),
                           .k = arrays.convolved.data() + keys,
                           .v = arrays.convolved.data() + 2 * keys,
                           .g = arrays.gate.data(),
                           .beta = arrays.beta.data(),
                           .q_stride = channels,
                           .k_stride = channels,
                           .v_stride = channels};
  float* out = arrays.mixed.data();
  switch (plan.kind) {
    case StepKind::kPrefill:
      delta_prefill({.state = state, .rows = plan.rows, .token_begin = plan.token_begin, .tokens = tokens, .out = out},
                    forward.device, forward.workspace());
      return;
    case StepKind::kConventional:
      delta_step({.state = state, .rows = plan.rows, .tokens = tokens, .out = out}, forward.device,
                 forward.workspace());
      return;
    case StepKind::kReplay:
      delta_decode({.state = state,
                    .rows = plan.rows,
                    .tokens_per_row = plan.tokens_per_row,
                    .tokens = tokens,
                    .readout = forward.step.readout,
                    .out = out},
                   forward.device, forward.workspace());
      return;
  }
}

}  // namespace

BlockWidths block_widths(const DeltaConfig& config, const StateLayout& layout, int, Device& device) {
  return {.projection = projection_width(config),
          .convolved = config.conv_channels(),
          .gate = config.shape.heads,
          .beta = config.shape.heads,
          .mixed = config.value_channels(),
          .workspace_bytes = delta_workspace_bytes(config.shape, layout.ring_capacity(), device)};
}

void run_delta(const Forward& forward, const DeltaConfig& config, const DeltaWeights& weights, int state) {
  Activations& arrays = forward.arrays;
  const StepPlan& plan = *forward.step.plan;
  const int64_t width = projection_width(config), values = config.value_channels();
  project(forward, weights.in_proj, arrays.normal.data(), forward.config.hidden_size, arrays.projection.data(), false);
  const float* z = arrays.projection.data() + config.conv_channels();
  const float* b = z + values;
  const float* a = b + config.shape.heads;
  conv1d({.state = forward.pool.conv_state(state),
          .rows = plan.rows,
          .token_begin = plan.token_begin,
          .x = arrays.projection.data(),
          .x_stride = width,
          .weight = weights.conv.data(),
          .out = arrays.convolved.data()},
         forward.device);
  delta_gates({.tokens = forward.tokens,
               .heads = config.shape.heads,
               .a = a,
               .b = b,
               .a_stride = width,
               .b_stride = width,
               .a_log = weights.a_log.data(),
               .dt_bias = weights.dt_bias.data(),
               .g = arrays.gate.data(),
               .beta = arrays.beta.data()},
              forward.device);
  update_state(forward, config, state);
  gated_rms_norm({.tokens = forward.tokens,
                  .heads = config.shape.heads,
                  .size = config.shape.value_size,
                  .x = arrays.mixed.data(),
                  .z = z,
                  .x_stride = values,
                  .z_stride = width,
                  .weight = weights.norm.data(),
                  .eps = static_cast<float>(forward.config.norm_epsilon),
                  .y = arrays.mixed.data(),
                  .y_stride = values},
                 forward.device);
  project(forward, weights.out_proj, arrays.mixed.data(), values, arrays.hidden.data(), true);
}

}  // namespace replayssm
