// The delta rule behind a short convolution: q | k | v = silu(conv(W x)); o = delta rule;
// hidden += W_out (norm(o) * silu(z)), or sigmoid(z). The gates and z come from one projection or from two of low rank.
#include <algorithm>

#include "replayssm/model/forward.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/norm.h"

namespace replayssm {
namespace {

// gate, beta <- the gates of the projected tokens.
void make_gates(const Forward& forward, const DeltaConfig& config, const DeltaWeights& weights) {
  Activations& arrays = forward.arrays;
  const DeltaRows at(config);
  const float* a = arrays.projection.data() + at.a;
  int64_t a_stride = at.count;
  if (config.gate_rank > 0) {
    project(forward, weights.gate, a, at.count, arrays.mixed.data(), false);
    a = arrays.mixed.data();
    a_stride = config.gates();
  }
  delta_gates({.tokens = forward.tokens,
               .heads = config.shape.heads,
               .gate_size = config.shape.gate_size,
               .a = a,
               .b = arrays.projection.data() + at.b,
               .a_stride = a_stride,
               .b_stride = at.count,
               .a_log = weights.a_log.data(),
               .dt_bias = weights.dt_bias.data(),
               .lower_bound = static_cast<float>(config.lower_bound),
               .g = arrays.gate.data(),
               .beta = arrays.beta.data()},
              forward.device);
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
  return {.projection = DeltaRows(config).count,
          .convolved = config.conv_channels(),
          .gate = config.gates(),
          .beta = config.shape.heads,
          .mixed = std::max(config.value_channels(), config.gates()),
          .workspace_bytes = delta_workspace_bytes(config.shape, layout.ring_capacity(), device)};
}

void run_delta(const Forward& forward, const DeltaConfig& config, const DeltaWeights& weights, int state) {
  Activations& arrays = forward.arrays;
  const StepPlan& plan = *forward.step.plan;
  const DeltaRows at(config);
  const int64_t values = config.value_channels();
  project(forward, weights.in_proj, arrays.normal.data(), forward.config.hidden_size, arrays.projection.data(), false);
  conv1d({.state = forward.pool.conv_state(state),
          .rows = plan.rows,
          .token_begin = plan.token_begin,
          .x = arrays.projection.data(),
          .x_stride = at.count,
          .weight = weights.conv.data(),
          .out = arrays.convolved.data()},
         forward.device);
  make_gates(forward, config, weights);
  update_state(forward, config, state);
  const float* z = arrays.projection.data() + at.z;
  int64_t z_stride = at.count;
  if (config.output_gate_rank > 0) {  // into the place of q, k and v, which are done with
    project(forward, weights.output_gate, arrays.projection.data() + at.output_gate, at.count, arrays.convolved.data(),
            false);
    z = arrays.convolved.data();
    z_stride = values;
  }
  gated_rms_norm({.tokens = forward.tokens,
                  .heads = config.shape.heads,
                  .size = config.shape.value_size,
                  .x = arrays.mixed.data(),
                  .z = z,
                  .x_stride = values,
                  .z_stride = z_stride,
                  .weight = weights.norm.data(),
                  .has_sigmoid_gate = config.has_sigmoid_gate,
                  .eps = static_cast<float>(forward.config.norm_epsilon),
                  .y = arrays.mixed.data(),
                  .y_stride = values},
                 forward.device);
  project(forward, weights.out_proj, arrays.mixed.data(), values, arrays.hidden.data(), true);
}

}  // namespace replayssm
