// The delta rule behind a short convolution, on a GPU: a fused layer step in decoding, op after op over a prompt.
#include <algorithm>

#include "replayssm/model/cuda_forward.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/layer_step.h"
#include "replayssm/ops/norm.h"
#include "replayssm/ops/ring.h"

namespace replayssm {
namespace {

template <typename T>
struct DeltaArrays {
  DeltaArrays(const DeltaConfig& config, int64_t tokens, std::byte* memory)
      : at(config), stride(aligned_stride(at.count)), values(config.value_channels()) {
    Carver carver(memory);
    projection = carver.take<T>(tokens * stride);
    gate = carver.take<T>(config.gate_rank > 0 ? tokens * config.gates() : 0);
    z = carver.take<T>(config.output_gate_rank > 0 ? tokens * values : 0);
    out = carver.take<T>(tokens * values);
    step_bytes = layer_workspace_bytes<T>(config.shape, tokens);
    step = carver.take<std::byte>(step_bytes);
    bytes = carver.bytes();
    // A prompt's, in the place of the fused step's.
    Carver own(step);
    convolved = own.take<T>(tokens * config.conv_channels());
    g = own.take<float>(tokens * config.gates());
    beta = own.take<float>(tokens * config.shape.heads);
    mixed = own.take<float>(tokens * values);
  }

  DeltaRows at;
  int64_t stride, values;
  T *projection, *gate, *z, *out;
  std::byte* step;
  size_t step_bytes;
  T* convolved;
  float *g, *beta, *mixed;
  size_t bytes;
};

// What the gates and the output's gate are made of, wherever it lies.
template <typename T>
struct DeltaGateInputs {
  const T* a;
  int64_t a_stride;
  const T* z;
  int64_t z_stride;
};

template <typename T>
DeltaGateInputs<T> gate_inputs(const CudaForward<T>& forward, const DeltaConfig& config,
                               const BasicDeltaWeights<DeviceBuffer>& weights, const DeltaArrays<T>& arrays) {
  DeltaGateInputs<T> inputs = {arrays.projection + arrays.at.a, arrays.stride, arrays.projection + arrays.at.z,
                               arrays.stride};
  const int64_t tokens = forward.step.tokens;
  if (config.gate_rank > 0) {
    project(forward, weights.gate, tokens, inputs.a, arrays.stride, arrays.gate, config.gates());
    inputs.a = arrays.gate;
    inputs.a_stride = config.gates();
  }
  if (config.output_gate_rank > 0) {
    project(forward, weights.output_gate, tokens, arrays.projection + arrays.at.output_gate, arrays.stride, arrays.z,
            arrays.values);
    inputs.z = arrays.z;
    inputs.z_stride = arrays.values;
  }
  return inputs;
}

template <typename T>
void decode(const CudaForward<T>& forward, const DeltaConfig& config, const BasicDeltaWeights<DeviceBuffer>& weights,
            int state, const DeltaArrays<T>& arrays, const DeltaGateInputs<T>& inputs) {
  const CudaModelStep& step = forward.step;
  delta_layer_step(DeltaLayerStep<T>{.conv = forward.pool.template conv_state<T>(state),
                                     .state = forward.pool.template delta_state<T>(state),
                                     .rows = step.rows,
                                     .tokens_per_row = step.tokens_per_row,
                                     .readout = step.readout,
                                     .is_conventional = step.kind == StepKind::kConventional,
                                     .qkv = arrays.projection,
                                     .z = inputs.z,
                                     .a = inputs.a,
                                     .b = arrays.projection + arrays.at.b,
                                     .qkv_stride = arrays.stride,
                                     .z_stride = inputs.z_stride,
                                     .a_stride = inputs.a_stride,
                                     .b_stride = arrays.stride,
                                     .conv_weight = weights.conv.data(),
                                     .a_log = weights.a_log.data(),
                                     .dt_bias = weights.dt_bias.data(),
                                     .lower_bound = static_cast<float>(config.lower_bound),
                                     .norm_weight = weights.norm.data(),
                                     .has_sigmoid_gate = config.has_sigmoid_gate,
                                     .eps = static_cast<float>(forward.config.norm_epsilon),
                                     .out = arrays.out,
                                     .out_stride = arrays.values},
                   forward.device, {arrays.step, arrays.step_bytes});
}

template <typename T>
void prefill(const CudaForward<T>& forward, const DeltaConfig& config, const BasicDeltaWeights<DeviceBuffer>& weights,
             int state, const DeltaArrays<T>& arrays, const DeltaGateInputs<T>& inputs) {
  const CudaModelStep& step = forward.step;
  const int64_t keys = config.key_channels(), channels = config.conv_channels();
  conv1d(BasicConv1d<T, T>{.state = forward.pool.template conv_state<T>(state),
                           .rows = step.rows,
                           .token_begin = forward.token_begin(),
                           .x = arrays.projection,
                           .x_stride = arrays.stride,
                           .weight = weights.conv.data(),
                           .out = arrays.convolved,
                           .tokens = step.tokens},
         forward.device);
  delta_gates(BasicDeltaGates<T>{.tokens = step.tokens,
                                 .heads = config.shape.heads,
                                 .gate_size = config.shape.gate_size,
                                 .a = inputs.a,
                                 .b = arrays.projection + arrays.at.b,
                                 .a_stride = inputs.a_stride,
                                 .b_stride = arrays.stride,
                                 .a_log = weights.a_log.data(),
                                 .dt_bias = weights.dt_bias.data(),
                                 .lower_bound = static_cast<float>(config.lower_bound),
                                 .g = arrays.g,
                                 .beta = arrays.beta},
              forward.device);
  delta_prefill(BasicDeltaPrefill<T, float>{.state = forward.pool.template delta_state<T>(state),
                                            .rows = step.rows,
                                            .token_begin = forward.token_begin(),
                                            .tokens = {.q = arrays.convolved,
                                                       .k = arrays.convolved + keys,
                                                       .v = arrays.convolved + 2 * keys,
                                                       .g = arrays.g,
                                                       .beta = arrays.beta,
                                                       .q_stride = channels,
                                                       .k_stride = channels,
                                                       .v_stride = channels},
                                            .out = arrays.mixed},
                forward.device, {});
  gated_rms_norm(BasicGatedRmsNorm<float, T, T>{.tokens = step.tokens,
                                                .heads = config.shape.heads,
                                                .size = config.shape.value_size,
                                                .x = arrays.mixed,
                                                .z = inputs.z,
                                                .x_stride = arrays.values,
                                                .z_stride = inputs.z_stride,
                                                .weight = weights.norm.data(),
                                                .has_sigmoid_gate = config.has_sigmoid_gate,
                                                .eps = static_cast<float>(forward.config.norm_epsilon),
                                                .y = arrays.out,
                                                .y_stride = arrays.values},
                 forward.device);
}

}  // namespace

template <typename T>
size_t block_bytes(const DeltaConfig& config, const ModelConfig&, const CudaStepLimits& limits) {
  return DeltaArrays<T>(config, limits.tokens, nullptr).bytes;
}

template <typename T>
void run_delta(const CudaForward<T>& forward, const DeltaConfig& config, const BasicDeltaWeights<DeviceBuffer>& weights,
               int state) {
  const DeltaArrays<T> arrays(config, forward.step.tokens, forward.workspace.data());
  project_normal(forward, weights.in_proj, arrays.projection, arrays.stride);
  const DeltaGateInputs<T> inputs = gate_inputs(forward, config, weights, arrays);
  forward.begin(StepPart::kStateSpace);
  if (forward.step.kind == StepKind::kPrefill)
    prefill(forward, config, weights, state, arrays, inputs);
  else
    decode(forward, config, weights, state, arrays, inputs);
  add_projected(forward, weights.out_proj, arrays.out, arrays.values);
}

#define REPLAYSSM_BLOCK(T)                                                                       \
  template size_t block_bytes<T>(const DeltaConfig&, const ModelConfig&, const CudaStepLimits&); \
  template void run_delta(const CudaForward<T>&, const DeltaConfig&, const BasicDeltaWeights<DeviceBuffer>&, int);
REPLAYSSM_BLOCK(float)
REPLAYSSM_BLOCK(Bf16)
#undef REPLAYSSM_BLOCK

}  // namespace replayssm
