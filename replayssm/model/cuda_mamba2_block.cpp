// Mamba-2 behind a short convolution, on a GPU: a fused layer step in decoding, op after op over a prompt.
#include "replayssm/model/cuda_forward.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/layer_step.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/ops/norm.h"
#include "replayssm/ops/ring.h"

namespace replayssm {
namespace {

template <typename T>
struct Mamba2Arrays {
  Mamba2Arrays(const Mamba2Config& config, int64_t tokens, std::byte* memory)
      : inner(config.inner_channels()),
        xbc(inner),
        dt(xbc + config.conv_channels()),
        stride(aligned_stride(dt + config.shape.heads)) {
    Carver carver(memory);
    projection = carver.take<T>(tokens * stride);
    out = carver.take<T>(tokens * inner);
    step_bytes = layer_workspace_bytes<T>(config.shape, tokens);
    step = carver.take<std::byte>(step_bytes);
    bytes = carver.bytes();
    // A prompt's, in the place of the fused step's.
    Carver own(step);
    convolved = own.take<T>(tokens * config.conv_channels());
    steps = own.take<float>(tokens * config.shape.heads);
    mixed = own.take<float>(tokens * inner);
  }

  int64_t inner;
  int64_t xbc, dt, stride;  // of a row of the projection: z first
  T *projection, *out;
  std::byte* step;
  size_t step_bytes;
  T* convolved;
  float *steps, *mixed;
  size_t bytes;
};

template <typename T>
void decode(const CudaForward<T>& forward, const Mamba2Config& config, const BasicMamba2Weights<DeviceBuffer>& weights,
            int state, const Mamba2Arrays<T>& arrays) {
  const CudaModelStep& step = forward.step;
  mamba2_layer_step(Mamba2LayerStep<T>{.conv = forward.pool.template conv_state<T>(state),
                                       .state = forward.pool.template mamba2_state<T>(state),
                                       .rows = step.rows,
                                       .tokens_per_row = step.tokens_per_row,
                                       .readout = step.readout,
                                       .is_conventional = step.kind == StepKind::kConventional,
                                       .xbc = arrays.projection + arrays.xbc,
                                       .z = arrays.projection,
                                       .dt = arrays.projection + arrays.dt,
                                       .xbc_stride = arrays.stride,
                                       .z_stride = arrays.stride,
                                       .dt_stride = arrays.stride,
                                       .conv_weight = weights.conv.data(),
                                       .conv_bias = weights.conv_bias.data(),
                                       .heads = {.a_log = weights.a_log.data(), .d = weights.d.data()},
                                       .dt_bias = weights.dt_bias.data(),
                                       .time_step_min = static_cast<float>(config.time_step_min),
                                       .time_step_max = static_cast<float>(config.time_step_max),
                                       .norm_weight = weights.norm.data(),
                                       .eps = static_cast<float>(forward.config.norm_epsilon),
                                       .out = arrays.out,
                                       .out_stride = arrays.inner},
                    forward.device, {arrays.step, arrays.step_bytes});
}

template <typename T>
void prefill(const CudaForward<T>& forward, const Mamba2Config& config, const BasicMamba2Weights<DeviceBuffer>& weights,
             int state, const Mamba2Arrays<T>& arrays) {
  const CudaModelStep& step = forward.step;
  const int64_t channels = config.conv_channels();
  const int64_t group_channels = int64_t{config.shape.groups} * config.shape.state_size;
  conv1d(BasicConv1d<T, T>{.state = forward.pool.template conv_state<T>(state),
                           .rows = step.rows,
                           .token_begin = forward.token_begin(),
                           .x = arrays.projection + arrays.xbc,
                           .x_stride = arrays.stride,
                           .weight = weights.conv.data(),
                           .bias = weights.conv_bias.data(),
                           .out = arrays.convolved,
                           .tokens = step.tokens},
         forward.device);
  mamba2_gates(BasicMamba2Gates<T>{.tokens = step.tokens,
                                   .heads = config.shape.heads,
                                   .dt = arrays.projection + arrays.dt,
                                   .dt_stride = arrays.stride,
                                   .dt_bias = weights.dt_bias.data(),
                                   .time_step_min = static_cast<float>(config.time_step_min),
                                   .time_step_max = static_cast<float>(config.time_step_max),
                                   .out = arrays.steps},
               forward.device);
  mamba2_prefill(BasicMamba2Prefill<T, float>{.state = forward.pool.template mamba2_state<T>(state),
                                              .rows = step.rows,
                                              .heads = {.a_log = weights.a_log.data(), .d = weights.d.data()},
                                              .token_begin = forward.token_begin(),
                                              .tokens = {.x = arrays.convolved,
                                                         .b = arrays.convolved + arrays.inner,
                                                         .c = arrays.convolved + arrays.inner + group_channels,
                                                         .dt = arrays.steps,
                                                         .x_stride = channels,
                                                         .b_stride = channels,
                                                         .c_stride = channels},
                                              .out = arrays.mixed},
                 forward.device, {});
  gate_first_rms_norm(BasicGateFirstRmsNorm<float, T, T>{.tokens = step.tokens,
                                                         .groups = config.shape.groups,
                                                         .size = arrays.inner / config.shape.groups,
                                                         .x = arrays.mixed,
                                                         .z = arrays.projection,
                                                         .x_stride = arrays.inner,
                                                         .z_stride = arrays.stride,
                                                         .weight = weights.norm.data(),
                                                         .eps = static_cast<float>(forward.config.norm_epsilon),
                                                         .y = arrays.out,
                                                         .y_stride = arrays.inner},
                      forward.device);
}

}  // namespace

template <typename T>
size_t block_bytes(const Mamba2Config& config, const ModelConfig&, const CudaStepLimits& limits) {
  return Mamba2Arrays<T>(config, limits.tokens, nullptr).bytes;
}

template <typename T>
void run_mamba2(const CudaForward<T>& forward, const Mamba2Config& config,
                const BasicMamba2Weights<DeviceBuffer>& weights, int state) {
  const Mamba2Arrays<T> arrays(config, forward.step.tokens, forward.workspace.data());
  project_normal(forward, weights.in_proj, arrays.projection, arrays.stride);
  forward.begin(StepPart::kStateSpace);
  if (forward.step.kind == StepKind::kPrefill)
    prefill(forward, config, weights, state, arrays);
  else
    decode(forward, config, weights, state, arrays);
  add_projected(forward, weights.out_proj, arrays.out, arrays.inner);
}

#define REPLAYSSM_BLOCK(T)                                                                        \
  template size_t block_bytes<T>(const Mamba2Config&, const ModelConfig&, const CudaStepLimits&); \
  template void run_mamba2(const CudaForward<T>&, const Mamba2Config&, const BasicMamba2Weights<DeviceBuffer>&, int);
REPLAYSSM_BLOCK(float)
REPLAYSSM_BLOCK(Bf16)
#undef REPLAYSSM_BLOCK

}  // namespace replayssm
