// A layer's step on the GPU: convolution and gates in one launch, the state's own kernel, the gated norm in another.
#include "replayssm/ops/layer_step.h"

#include "replayssm/ops/checks.h"
#include "replayssm/ops/conv1d.cuh"
#include "replayssm/ops/gates.cuh"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/norm.cuh"
#include "replayssm/ops/ring.h"

namespace replayssm {
namespace {

constexpr int kWindowTokens = 4;  // of a row, that a thread loads together

template <typename T, typename Gates, typename GateTiles>
struct PrepareArgs {
  BasicConv1d<T, T> conv;
  ConvLimits limits;
  int tiles;  // of the convolution's channels
  Gates gates;
  GateTiles gate_tiles;
  uint32_t gate_blocks;
  uint32_t interval;  // of blocks, the first of which is one of the gates
};

// Grid: gate_blocks blocks of gates, spread among the convolution's so that arithmetic and memory overlap; of those a
// tile of channels and kRows rows each, or with kRows = 0 a row of several tokens. Blocks of kTileThreads threads; a
// thread owns a pack of channels, or of gates.
template <int kRows, typename T, typename Gates, typename GateTiles>
__global__ __launch_bounds__(kTileThreads) void layer_prepare_kernel(
    const __grid_constant__ PrepareArgs<T, Gates, GateTiles> args) {
  const uint32_t earlier_gates = min(args.gate_blocks, (blockIdx.x + args.interval - 1) / args.interval);
  if (earlier_gates < args.gate_blocks && blockIdx.x % args.interval == 0) {
    wait_for_previous();
    let_next_start();
    make_gates(args.gates, args.gate_tiles, static_cast<int64_t>(earlier_gates) * kTileThreads + threadIdx.x);
    return;
  }
  const BasicConv1d<T, T>& conv = args.conv;
  const int block = static_cast<int>(blockIdx.x - earlier_gates);
  const int group = block / args.tiles;
  const int channel = (block % args.tiles * kTileThreads + static_cast<int>(threadIdx.x)) * kPackSize;
  if (channel >= conv.state.channels) return;
  const ConvChannels<ConvForm::kFast> channels(conv, channel);
  wait_for_previous();
  let_next_start();
  if constexpr (kRows > 0) {
    convolve_rows<kRows>(conv, channels, group * kRows, args.limits);
  } else {
    const ConvRow row(conv.rows, group, args.limits);
    const RowKind kind = row.kind(args.limits, group, channel == 0);
    const int64_t begin = static_cast<int64_t>(group) * conv.tokens_per_row;
    convolve_tokens<kWindowTokens, ConvAppend::kYes>(conv, channels, row, kind, begin, begin,
                                                     begin + conv.tokens_per_row);
  }
}

template <typename T, typename State, typename Gates>
void launch_prepare(const char* op, const BasicConv1d<T, T>& conv, const State& state, const Gates& gates,
                    const LayerPlan& plan, CudaDevice& device) {
  using GateTiles = decltype(gate_tiles(gates));
  const int64_t blocks = plan.conv_blocks + plan.gate_blocks;
  const PrepareArgs<T, Gates, GateTiles> args = {.conv = conv,
                                                 .limits = {.slots = state.slots,
                                                            .checkpoints = state.checkpoints,
                                                            .window = state.window,
                                                            .op = op,
                                                            .fault = device.fault()},
                                                 .tiles = conv_tiles(conv.state.channels),
                                                 .gates = gates,
                                                 .gate_tiles = gate_tiles(gates),
                                                 .gate_blocks = static_cast<uint32_t>(plan.gate_blocks),
                                                 .interval = static_cast<uint32_t>(blocks / plan.gate_blocks)};
  const auto kernel = conv.tokens_per_row > 1        ? layer_prepare_kernel<0, T, Gates, GateTiles>
                      : plan.conv_rows_a_thread == 2 ? layer_prepare_kernel<2, T, Gates, GateTiles>
                                                     : layer_prepare_kernel<1, T, Gates, GateTiles>;
  launch(op, kernel, dim3(check_blocks(op, blocks)), kTileThreads, 0, args, device, Launch::kOverlapping);
}

// The arrays between the launches.
template <typename T>
struct DeltaArrays {
  DeltaArrays(const DeltaShape& shape, int64_t tokens, std::byte* memory) {
    Carver carver(memory);
    channels = 2 * shape.key_heads * shape.key_size + shape.heads * shape.value_size;
    convolved = carver.take<T>(tokens * channels);
    g = carver.take<float>(tokens * shape.heads * shape.gate_size);
    beta = carver.take<float>(tokens * shape.heads);
    mixed = carver.take<float>(tokens * shape.heads * shape.value_size);
    bytes = carver.bytes();
  }

  int channels;
  T* convolved;     // [tokens, channels]
  float *g, *beta;  // [tokens, H, gate_size], [tokens, H]
  float* mixed;     // [tokens, H, V]
  size_t bytes;
};

template <typename T>
struct Mamba2Arrays {
  Mamba2Arrays(const Mamba2Shape& shape, int64_t tokens, std::byte* memory) {
    Carver carver(memory);
    inner = shape.heads * shape.head_size;
    channels = inner + 2 * shape.groups * shape.state_size;
    convolved = carver.take<T>(tokens * channels);
    dt = carver.take<float>(tokens * shape.heads);
    mixed = carver.take<float>(tokens * inner);
    bytes = carver.bytes();
  }

  int inner, channels;
  T* convolved;  // [tokens, channels]
  float* dt;     // [tokens, H]
  float* mixed;  // [tokens, H, P]
  size_t bytes;
};

// What the two steps' doors have in common. Returns the number of tokens.
template <typename State>
int64_t check_tokens(const char* op, const State& state, const StateRows& rows, int tokens_per_row,
                     bool is_conventional, int key_size) {
  check_shape(state.shape);
  check_cuda_sizes(op, "key size", key_size, rows.count);
  check_ring(op, state.window, state.capacity);
  check_window(op, tokens_per_row, state.window, state.capacity);
  check_cuda_window(op, state.window, tokens_per_row);
  require(!is_conventional || tokens_per_row == 1, "{}: expected 1 token a row in a conventional step, got {}", op,
          tokens_per_row);
  return int64_t{rows.count} * tokens_per_row;
}

template <typename T, typename State>
void check_step(const char* op, const BasicConv1dState<T>& conv, const State& state, const StateRows& rows,
                int tokens_per_row, int channels) {
  require(conv.width == kTapsOf<ConvForm::kFast>, "{}: expected a convolution of width {}, got {}", op,
          kTapsOf<ConvForm::kFast>, conv.width);
  require(conv.channels == channels && channels % kPackSize == 0,
          "{}: expected a convolution of {} channels, a multiple of {}, got {}", op, channels, kPackSize,
          conv.channels);
  require(conv.capacity >= conv.width - 1 + tokens_per_row,
          "{}: expected a convolution's window of at least {} inputs, got {}", op, conv.width - 1 + tokens_per_row,
          conv.capacity);
  require(conv.slots == state.slots, "{}: expected a convolution's window for each of {} slots, got {}", op,
          state.slots, conv.slots);
  require(!has_null({rows.slot, rows.base, rows.history, rows.checkpoint_in, rows.checkpoint_out}),
          "{}: expected the rows' slots, bases, histories and checkpoints, got a null pointer", op);
  check_pointers(op, {{"the convolution's window", conv.window}});
}

template <typename T>
void check_delta_step(const DeltaLayerStep<T>& args, const DeltaArrays<T>& arrays, std::span<std::byte> workspace) {
  constexpr const char* kOp = "delta_layer_step";
  const DeltaShape& shape = args.state.shape;
  check_step(kOp, args.conv, args.state, args.rows, args.tokens_per_row, arrays.channels);
  check_pointers(kOp, {{"qkv", args.qkv},
                       {"z", args.z},
                       {"conv_weight", args.conv_weight},
                       {"norm_weight", args.norm_weight},
                       {"out", args.out}});
  check_alignment(kOp, 16, {{"conv_bias", args.conv_bias}});
  require(!has_null({args.a, args.b, args.a_log, args.dt_bias}),
          "delta_layer_step: expected a, b, a_log and dt_bias, got a null pointer");
  check_alignment(kOp, sizeof(T), {{"a", args.a}, {"b", args.b}});
  check_alignment(kOp, sizeof(float), {{"a_log", args.a_log}, {"dt_bias", args.dt_bias}});
  const int64_t values = int64_t{shape.heads} * shape.value_size, gates = int64_t{shape.heads} * shape.gate_size;
  check_strides(kOp, sizeof(T),
                {{"qkv_stride", args.qkv_stride, arrays.channels},
                 {"z_stride", args.z_stride, values},
                 {"out_stride", args.out_stride, values}});
  require(args.a_stride >= gates && args.b_stride >= shape.heads,
          "delta_layer_step: expected strides of at least {} for a and {} for b, got {} and {}", gates, shape.heads,
          args.a_stride, args.b_stride);
  require(args.lower_bound <= 0, "delta_layer_step: expected a lower bound <= 0, got {}", args.lower_bound);
  require(args.eps >= 0, "delta_layer_step: expected eps >= 0, got {}", args.eps);
  check_workspace(kOp, workspace, arrays.bytes);
}

template <typename T>
void check_mamba2_step(const Mamba2LayerStep<T>& args, const Mamba2Arrays<T>& arrays, std::span<std::byte> workspace) {
  constexpr const char* kOp = "mamba2_layer_step";
  const Mamba2Shape& shape = args.state.shape;
  check_step(kOp, args.conv, args.state, args.rows, args.tokens_per_row, arrays.channels);
  check_pointers(kOp, {{"xbc", args.xbc},
                       {"z", args.z},
                       {"conv_weight", args.conv_weight},
                       {"norm_weight", args.norm_weight},
                       {"out", args.out}});
  check_alignment(kOp, 16, {{"conv_bias", args.conv_bias}});
  require(!has_null({args.dt, args.heads.a_log, args.dt_bias}),
          "mamba2_layer_step: expected dt, a_log and dt_bias, got a null pointer");
  check_alignment(kOp, sizeof(T), {{"dt", args.dt}});
  check_alignment(kOp, sizeof(float), {{"a_log", args.heads.a_log}, {"d", args.heads.d}, {"dt_bias", args.dt_bias}});
  check_strides(kOp, sizeof(T),
                {{"xbc_stride", args.xbc_stride, arrays.channels},
                 {"z_stride", args.z_stride, arrays.inner},
                 {"out_stride", args.out_stride, arrays.inner}});
  require(args.dt_stride >= shape.heads, "mamba2_layer_step: expected a stride of at least {} for dt, got {}",
          shape.heads, args.dt_stride);
  require(args.time_step_min >= 0 && args.time_step_min <= args.time_step_max,
          "mamba2_layer_step: expected 0 <= time_step_min <= time_step_max, got {} and {}", args.time_step_min,
          args.time_step_max);
  require(args.eps >= 0, "mamba2_layer_step: expected eps >= 0, got {}", args.eps);
  require(arrays.inner / shape.groups <= kLargestNorm,
          "mamba2_layer_step: expected at most {} channels a group, got {}", kLargestNorm, arrays.inner / shape.groups);
  check_workspace(kOp, workspace, arrays.bytes);
}

}  // namespace

template <typename T>
size_t layer_workspace_bytes(const DeltaShape& shape, int64_t tokens) {
  return DeltaArrays<T>(shape, tokens, nullptr).bytes;
}
template <typename T>
size_t layer_workspace_bytes(const Mamba2Shape& shape, int64_t tokens) {
  return Mamba2Arrays<T>(shape, tokens, nullptr).bytes;
}

template <typename T>
void delta_layer_step(const DeltaLayerStep<T>& args, CudaDevice& device, std::span<std::byte> workspace) {
  const DeltaShape& shape = args.state.shape;
  const int64_t tokens = check_tokens("delta_layer_step", args.state, args.rows, args.tokens_per_row,
                                      args.is_conventional, shape.key_size);
  if (tokens == 0) return;
  const DeltaArrays<T> arrays(shape, tokens, workspace.data());
  check_delta_step(args, arrays, workspace);
  const LayerPlan plan =
      plan_layer(shape, args.rows.count, args.tokens_per_row, static_cast<int>(sizeof(T)), device.properties());

  const BasicConv1d<T, T> conv = {.state = args.conv,
                                  .rows = args.rows,
                                  .x = args.qkv,
                                  .x_stride = args.qkv_stride,
                                  .weight = args.conv_weight,
                                  .bias = args.conv_bias,
                                  .out = arrays.convolved,
                                  .tokens_per_row = args.tokens_per_row};
  const BasicDeltaGates<T> gates = {.tokens = tokens,
                                    .heads = shape.heads,
                                    .gate_size = shape.gate_size,
                                    .a = args.a,
                                    .b = args.b,
                                    .a_stride = args.a_stride,
                                    .b_stride = args.b_stride,
                                    .a_log = args.a_log,
                                    .dt_bias = args.dt_bias,
                                    .lower_bound = args.lower_bound,
                                    .g = arrays.g,
                                    .beta = arrays.beta};
  launch_prepare("delta_layer_step", conv, args.state, gates, plan, device);

  const int64_t keys = int64_t{shape.key_heads} * shape.key_size;
  const BasicDeltaTokens<T> convolved = {.q = arrays.convolved,
                                         .k = arrays.convolved + keys,
                                         .v = arrays.convolved + 2 * keys,
                                         .g = arrays.g,
                                         .beta = arrays.beta,
                                         .q_stride = arrays.channels,
                                         .k_stride = arrays.channels,
                                         .v_stride = arrays.channels,
                                         .are_just_made = true};
  if (args.is_conventional)
    delta_step(BasicDeltaStep<T, float>{args.state, args.rows, convolved, arrays.mixed}, device, {});
  else
    delta_decode(
        BasicDeltaDecode<T, float>{args.state, args.rows, args.tokens_per_row, convolved, args.readout, arrays.mixed},
        device, {});

  NormVectors<float, T, T> norm =
      vectors_of(BasicGatedRmsNorm<float, T, T>{.tokens = tokens,
                                                .heads = shape.heads,
                                                .size = shape.value_size,
                                                .x = arrays.mixed,
                                                .z = args.z,
                                                .x_stride = int64_t{shape.heads} * shape.value_size,
                                                .z_stride = args.z_stride,
                                                .weight = args.norm_weight,
                                                .has_sigmoid_gate = args.has_sigmoid_gate,
                                                .eps = args.eps,
                                                .y = args.out,
                                                .y_stride = args.out_stride});
  norm.slot = args.rows.slot;
  norm.tokens_per_row = args.tokens_per_row;
  launch_norm<NormForm::kGateLast>("delta_layer_step", norm, device);
}

template <typename T>
void mamba2_layer_step(const Mamba2LayerStep<T>& args, CudaDevice& device, std::span<std::byte> workspace) {
  const Mamba2Shape& shape = args.state.shape;
  const int64_t tokens = check_tokens("mamba2_layer_step", args.state, args.rows, args.tokens_per_row,
                                      args.is_conventional, shape.state_size);
  if (tokens == 0) return;
  const Mamba2Arrays<T> arrays(shape, tokens, workspace.data());
  check_mamba2_step(args, arrays, workspace);
  const LayerPlan plan =
      plan_layer(shape, args.rows.count, args.tokens_per_row, static_cast<int>(sizeof(T)), device.properties());

  const BasicConv1d<T, T> conv = {.state = args.conv,
                                  .rows = args.rows,
                                  .x = args.xbc,
                                  .x_stride = args.xbc_stride,
                                  .weight = args.conv_weight,
                                  .bias = args.conv_bias,
                                  .out = arrays.convolved,
                                  .tokens_per_row = args.tokens_per_row};
  const BasicMamba2Gates<T> gates = {.tokens = tokens,
                                     .heads = shape.heads,
                                     .dt = args.dt,
                                     .dt_stride = args.dt_stride,
                                     .dt_bias = args.dt_bias,
                                     .time_step_min = args.time_step_min,
                                     .time_step_max = args.time_step_max,
                                     .out = arrays.dt};
  launch_prepare("mamba2_layer_step", conv, args.state, gates, plan, device);

  const BasicMamba2Tokens<T> convolved = {
      .x = arrays.convolved,
      .b = arrays.convolved + arrays.inner,
      .c = arrays.convolved + arrays.inner + int64_t{shape.groups} * shape.state_size,
      .dt = arrays.dt,
      .x_stride = arrays.channels,
      .b_stride = arrays.channels,
      .c_stride = arrays.channels,
      .are_just_made = true};
  if (args.is_conventional)
    mamba2_step(BasicMamba2Step<T, float>{args.state, args.rows, args.heads, convolved, arrays.mixed}, device, {});
  else
    mamba2_decode(BasicMamba2Decode<T, float>{args.state, args.rows, args.heads, args.tokens_per_row, convolved,
                                              args.readout, arrays.mixed},
                  device, {});

  NormVectors<float, T, T> norm = vectors_of(BasicGateFirstRmsNorm<float, T, T>{.tokens = tokens,
                                                                                .groups = shape.groups,
                                                                                .size = arrays.inner / shape.groups,
                                                                                .x = arrays.mixed,
                                                                                .z = args.z,
                                                                                .x_stride = arrays.inner,
                                                                                .z_stride = args.z_stride,
                                                                                .weight = args.norm_weight,
                                                                                .eps = args.eps,
                                                                                .y = args.out,
                                                                                .y_stride = args.out_stride});
  norm.slot = args.rows.slot;
  norm.tokens_per_row = args.tokens_per_row;
  launch_norm<NormForm::kGateFirst>("mamba2_layer_step", norm, device);
}

#define REPLAYSSM_LAYER_STEPS(T)                                                                 \
  template void delta_layer_step(const DeltaLayerStep<T>&, CudaDevice&, std::span<std::byte>);   \
  template void mamba2_layer_step(const Mamba2LayerStep<T>&, CudaDevice&, std::span<std::byte>); \
  template size_t layer_workspace_bytes<T>(const DeltaShape&, int64_t);                          \
  template size_t layer_workspace_bytes<T>(const Mamba2Shape&, int64_t);
REPLAYSSM_LAYER_STEPS(float)
REPLAYSSM_LAYER_STEPS(Bf16)
REPLAYSSM_LAYER_STEPS(Fp16)
#undef REPLAYSSM_LAYER_STEPS

}  // namespace replayssm
