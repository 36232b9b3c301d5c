// Mamba-2 behind a short convolution: x | B | C = silu(conv(W u) + b); y = the recurrence; hidden += W_out norm(y *
// silu(z)), the norm a group at a time.
#include "replayssm/model/forward.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/ops/norm.h"

namespace replayssm {
namespace {

// Rows of in_proj: z, then x, B and C, which the convolution takes as they lie, then dt.
int64_t projection_width(const Mamba2Config& config) {
  return config.inner_channels() + config.conv_channels() + config.shape.heads;
}

// mixed <- the recurrence over convolved, by the step's kind.
void update_state(const Forward& forward, const Mamba2Config& config, const Mamba2Weights& weights, int state_layer) {
  Activations& arrays = forward.arrays;
  const StepPlan& plan = *forward.step.plan;
  const int64_t channels = config.conv_channels(), inner = config.inner_channels();
  const int64_t group_channels = int64_t{config.shape.groups} * config.shape.state_size;
  const Mamba2State state = forward.pool.mamba2_state(state_layer);
  const Mamba2Heads heads{.a_log = weights.a_log.data(), .d = weights.d.data()};
  const Mamba2Tokens tokens{.x = arrays.convolved.data(),
                            .b = arrays.convolved.data() + inner,
                            .c = arrays.convolved.data() + inner + group_channels,
                            .dt = arrays.gate.data(),
                            .x_stride = channels,
                            .b_stride = channels,
                            .c_stride = channels};
  float* out = arrays.mixed.data();
  switch (plan.kind) {
    case StepKind::kPrefill:
      mamba2_prefill({.state = state,
                      .rows = plan.rows,
                      .heads = heads,
                      .token_begin = plan.token_begin,
                      .tokens = tokens,
                      .out = out},
                     forward.device, forward.workspace());
      return;
    case StepKind::kConventional:
      mamba2_step({.state = state, .rows = plan.rows, .heads = heads, .tokens = tokens, .out = out}, forward.device,
                  forward.workspace());
      return;
    case StepKind::kReplay:
      mamba2_decode({.state = state,
                     .rows = plan.rows,
                     .heads = heads,
                     .tokens_per_row = plan.tokens_per_row,
                     .tokens = tokens,
                     .readout = forward.step.readout,
                     .out = out},
                    forward.device, forward.workspace());
      return;
  }
}

}  // namespace

BlockWidths block_widths(const Mamba2Config& config, const StateLayout& layout, int, Device& device) {
  return {.projection = projection_width(config),
          .convolved = config.conv_channels(),
          .gate = config.shape.heads,
          .mixed = config.inner_channels(),
          .workspace_bytes = mamba2_workspace_bytes(config.shape, layout.ring_capacity(), device)};
}

void run_mamba2(const Forward& forward, const Mamba2Config& config, const Mamba2Weights& weights, int state) {
  Activations& arrays = forward.arrays;
  const StepPlan& plan = *forward.step.plan;
  const int64_t width = projection_width(config), inner = config.inner_channels();
  project(forward, weights.in_proj, arrays.normal.data(), forward.config.hidden_size, arrays.projection.data(), false);
  const float* z = arrays.projection.data();
  const float* xbc = z + inner;
  const float* dt = xbc + config.conv_channels();
  conv1d({.state = forward.pool.conv_state(state),
          .rows = plan.rows,
          .token_begin = plan.token_begin,
          .x = xbc,
          .x_stride = width,
          .weight = weights.conv.data(),
          .bias = config.has_conv_bias ? weights.conv_bias.data() : nullptr,
          .out = arrays.convolved.data()},
         forward.device);
  mamba2_gates({.tokens = forward.tokens,
                .heads = config.shape.heads,
                .dt = dt,
                .dt_stride = width,
                .dt_bias = weights.dt_bias.data(),
                .time_step_min = static_cast<float>(config.time_step_min),
                .time_step_max = static_cast<float>(config.time_step_max),
                .out = arrays.gate.data()},
               forward.device);
  update_state(forward, config, weights, state);
  gate_first_rms_norm({.tokens = forward.tokens,
                       .groups = config.shape.groups,
                       .size = inner / config.shape.groups,
                       .x = arrays.mixed.data(),
                       .z = z,
                       .x_stride = inner,
                       .z_stride = width,
                       .weight = weights.norm.data(),
                       .eps = static_cast<float>(forward.config.norm_epsilon),
                       .y = arrays.mixed.data(),
                       .y_stride = inner},
                      forward.device);
  project(forward, weights.out_proj, arrays.mixed.data(), inner, arrays.hidden.data(), true);
}

}  // namespace replayssm
