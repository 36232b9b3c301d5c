// A recurrent layer in a GPU's memory for tests of the fused step: the state twice, for the fused step and for the ops
// called one after the other, and beside it the float64 oracles of all ops in a chain.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "replayssm/ops/layer_step.h"
#include "replayssm/ops/norm.h"
#include "tests/cuda_path.h"
#include "tests/ref/conv1d.h"
#include "tests/ref/delta.h"
#include "tests/ref/mamba2.h"
#include "tests/ref/norm.h"

namespace replayssm::test {

// Arrays of a state, whose bytes are compared as they are.
class LayerMemory {
 public:
  explicit LayerMemory(CudaDevice& device) : device_(device) {}

  template <typename E>
  E* array(size_t count, float value = kPoison) {
    const std::vector<E> values(count, to_element<E>(value));
    const auto bytes = std::as_bytes(std::span(values));
    return reinterpret_cast<E*>(arrays_.emplace_back(bytes, device_).data());
  }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all;
    for (const DeviceBuffer<std::byte>& array : arrays_) {
      const std::vector<std::byte> own = array.download(device_);
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }

 private:
  CudaDevice& device_;
  std::vector<DeviceBuffer<std::byte>> arrays_;
};

struct LayerSizes {
  int slots, window, max_tokens;
  int capacity() const { return window + max_tokens; }
  int conv_capacity() const { return 3 + max_tokens; }
};

template <typename T>
BasicConv1dState<T> conv_memory(LayerMemory& memory, int channels, const LayerSizes& sizes) {
  return {.channels = channels,
          .width = 4,
          .slots = sizes.slots,
          .capacity = sizes.conv_capacity(),
          .window = memory.array<T>(size_t(sizes.slots) * sizes.conv_capacity() * channels)};
}

// The outputs of a convolution over a sequence of inputs, from token `first`, as the state op gets them in T.
template <typename T>
std::vector<float> convolved(const std::vector<float>& inputs, int channels, const std::vector<float>& weight,
                             const std::vector<float>& bias, int64_t first) {
  const std::vector<double> all = ref::conv1d(inputs, channels, 4, weight, bias, true);
  return CudaPath<T>::template rounded<T>(std::vector<float>(all.begin() + first * channels, all.end()));
}

// The delta rule's layer: rows of a projection [q | k | v | z | b | a].
struct DeltaLayerOracle {
  using Shape = DeltaShape;
  using Sequence = ref::DeltaSequence;
  struct Options {
    float lower_bound = 0;
    bool has_sigmoid_gate = false;
    bool has_conv_bias = false;
  };

  DeltaLayerOracle(const Shape& of, const Options& chosen, std::mt19937_64& random)
      : shape(of),
        options(chosen),
        keys(of.key_heads * of.key_size),
        inner(of.heads * of.value_size),
        channels(2 * keys + inner),
        gates(of.heads * of.gate_size),
        width((channels + inner + of.heads + gates + 7) / 8 * 8),
        conv_weight(random_normal(random, 4 * channels, 0.5f)),
        conv_bias(chosen.has_conv_bias ? random_normal(random, channels, 0.5f) : std::vector<float>()),
        a_log(random_normal(random, of.heads, 0.5f)),
        dt_bias(random_normal(random, gates, 1.0f, -2.0f)),
        norm_weight(random_normal(random, of.value_size, 0.5f, 1.0f)) {}

  Sequence sequence() const {
    return {shape.heads, shape.key_heads, shape.key_size, shape.value_size, shape.gate_size};
  }
  const float* conv_input(const float* row) const { return row; }

  // One token's output [H, V].
  std::vector<double> step(Sequence& sequence, const float* conv, const float* row) const {
    const float *z = row + channels, *b = z + inner, *a = b + shape.heads;
    std::vector<float> g, beta;
    for (int i = 0; i < gates; ++i)
      g.push_back(float(ref::delta_gate(a[i], dt_bias[i], a_log[i / shape.gate_size], options.lower_bound)));
    for (int h = 0; h < shape.heads; ++h) beta.push_back(float(1 / (1 + std::exp(-double(b[h])))));
    const std::vector<double> o = ref::delta_step(sequence, conv, conv + keys, conv + 2 * keys, g.data(), beta.data());
    const std::vector<float> mixed(o.begin(), o.end());
    std::vector<double> out;
    for (int h = 0; h < shape.heads; ++h) {
      const int from = h * shape.value_size;
      const auto y =
          ref::gated_rms_norm(std::span(mixed).subspan(from, shape.value_size), {z + from, size_t(shape.value_size)},
                              norm_weight, options.has_sigmoid_gate, 1e-6);
      out.insert(out.end(), y.begin(), y.end());
    }
    return out;
  }

  Shape shape;
  Options options;
  int keys, inner, channels, gates, width;
  std::vector<float> conv_weight, conv_bias, a_log, dt_bias, norm_weight;
};

// Weights and a state of a layer on a GPU, and the step in both forms.
template <typename T>
struct DeltaLayerOnGpu {
  using Layer = DeltaLayerOracle;
  using Args = DeltaLayerStep<T>;
  using Shape = DeltaShape;

  DeltaLayerOnGpu(const Layer& of, const LayerSizes& sizes, CudaPath<T>& path)
      : layer(of),
        memory(path.device),
        conv_weight(path.template elements<float>(of.conv_weight)),
        conv_bias(path.template elements<float>(of.conv_bias)),
        a_log(path.template elements<float>(of.a_log)),
        dt_bias(path.template elements<float>(of.dt_bias)),
        norm_weight(path.template elements<float>(of.norm_weight)),
        conv(conv_memory<T>(memory, of.channels, sizes)) {
    const Shape& shape = of.shape;
    const size_t slots = sizes.slots, C = sizes.capacity();
    state.shape = shape;
    state.slots = state.checkpoints = sizes.slots;
    state.window = sizes.window;
    state.capacity = sizes.capacity();
    state.checkpoint = memory.array<float>(slots * of.inner * shape.key_size, 0.0f);
    state.ring_k = memory.array<T>(slots * of.keys * C);
    state.ring_k_scale = memory.array<float>(slots * shape.key_heads * C);
    if (shape.gate_size == 1) state.ring_gram = memory.array<float>(slots * shape.key_heads * C * C);
    state.ring_v = memory.array<T>(slots * of.inner * C);
    state.ring_decay = memory.array<float>(slots * of.gates * C);
    state.ring_beta = memory.array<float>(slots * shape.heads * C);
  }

  Args args(const StateRows& rows, int tokens_per_row, Readout readout, const T* projected, T* out) const {
    return {.conv = conv,
            .state = state,
            .rows = rows,
            .tokens_per_row = tokens_per_row,
            .readout = readout,
            .qkv = projected,
            .z = projected + layer.channels,
            .a = projected + layer.channels + layer.inner + layer.shape.heads,
            .b = projected + layer.channels + layer.inner,
            .qkv_stride = layer.width,
            .z_stride = layer.width,
            .a_stride = layer.width,
            .b_stride = layer.width,
            .conv_weight = conv_weight.data(),
            .conv_bias = layer.conv_bias.empty() ? nullptr : conv_bias.data(),
            .a_log = a_log.data(),
            .dt_bias = dt_bias.data(),
            .lower_bound = layer.options.lower_bound,
            .norm_weight = norm_weight.data(),
            .has_sigmoid_gate = layer.options.has_sigmoid_gate,
            .out = out,
            .out_stride = layer.inner};
  }
  static void fused(const Args& args, CudaDevice& device, std::span<std::byte> workspace) {
    delta_layer_step(args, device, workspace);
  }
  // The ops one after the other.
  static void apart(const Args& args, CudaDevice& device) {
    const Shape& shape = args.state.shape;
    const int64_t tokens = int64_t{args.rows.count} * args.tokens_per_row, keys = shape.key_heads * shape.key_size;
    const int64_t inner = int64_t{shape.heads} * shape.value_size, channels = args.conv.channels;
    DeviceBuffer<T> mixed_in(tokens * channels, device);
    DeviceBuffer<float> g(tokens * shape.heads * shape.gate_size, device), beta(tokens * shape.heads, device);
    DeviceBuffer<float> mixed(tokens * inner, device);
    conv1d(BasicConv1d<T, T>{.state = args.conv,
                             .rows = args.rows,
                             .x = args.qkv,
                             .x_stride = args.qkv_stride,
                             .weight = args.conv_weight,
                             .bias = args.conv_bias,
                             .out = mixed_in.data(),
                             .tokens_per_row = args.tokens_per_row},
           device);
    delta_gates(BasicDeltaGates<T>{.tokens = tokens,
                                   .heads = shape.heads,
                                   .gate_size = shape.gate_size,
                                   .a = args.a,
                                   .b = args.b,
                                   .a_stride = args.a_stride,
                                   .b_stride = args.b_stride,
                                   .a_log = args.a_log,
                                   .dt_bias = args.dt_bias,
                                   .lower_bound = args.lower_bound,
                                   .g = g.data(),
                                   .beta = beta.data()},
                device);
    delta_decode(BasicDeltaDecode<T, float>{.state = args.state,
                                            .rows = args.rows,
                                            .tokens_per_row = args.tokens_per_row,
                                            .tokens = {.q = mixed_in.data(),
                                                       .k = mixed_in.data() + keys,
                                                       .v = mixed_in.data() + 2 * keys,
                                                       .g = g.data(),
                                                       .beta = beta.data(),
                                                       .q_stride = channels,
                                                       .k_stride = channels,
                                                       .v_stride = channels},
                                            .readout = args.readout,
                                            .out = mixed.data()},
                 device, {});
    gated_rms_norm(BasicGatedRmsNorm<float, T, T>{.tokens = tokens,
                                                  .heads = shape.heads,
                                                  .size = shape.value_size,
                                                  .x = mixed.data(),
                                                  .z = args.z,
                                                  .x_stride = inner,
                                                  .z_stride = args.z_stride,
                                                  .weight = args.norm_weight,
                                                  .has_sigmoid_gate = args.has_sigmoid_gate,
                                                  .eps = args.eps,
                                                  .y = args.out,
                                                  .y_stride = args.out_stride},
                   device);
    device.synchronize();
  }

  const Layer& layer;
  LayerMemory memory;
  DeviceBuffer<float> conv_weight, conv_bias, a_log, dt_bias, norm_weight;
  BasicConv1dState<T> conv;
  BasicDeltaState<T> state;
};

// Mamba-2's layer: rows of a projection [z | x | B | C | dt].
struct Mamba2LayerOracle {
  using Shape = Mamba2Shape;
  using Sequence = ref::Mamba2Sequence;
  struct Options {
    float time_step_min = 0;
    float time_step_max = std::numeric_limits<float>::infinity();
    bool has_conv_bias = true;
  };

  Mamba2LayerOracle(const Shape& of, const Options& chosen, std::mt19937_64& random)
      : shape(of),
        options(chosen),
        inner(of.heads * of.head_size),
        group_channels(of.groups * of.state_size),
        channels(inner + 2 * group_channels),
        width((inner + channels + of.heads + 7) / 8 * 8),
        conv_weight(random_normal(random, 4 * channels, 0.5f)),
        conv_bias(chosen.has_conv_bias ? random_normal(random, channels, 0.5f) : std::vector<float>()),
        a_log(random_normal(random, of.heads, 0.5f)),
        d(random_normal(random, of.heads)),
        dt_bias(random_normal(random, of.heads, 1.0f, -2.0f)),
        norm_weight(random_normal(random, inner, 0.5f, 1.0f)) {}

  Sequence sequence() const { return {shape.heads, shape.groups, shape.head_size, shape.state_size}; }
  const float* conv_input(const float* row) const { return row + inner; }

  // One token's output [H, P].
  std::vector<double> step(Sequence& sequence, const float* conv, const float* row) const {
    const float *z = row, *dt = row + inner + channels;
    std::vector<float> steps;
    for (int h = 0; h < shape.heads; ++h)
      steps.push_back(float(ref::mamba2_gate(dt[h], dt_bias[h], options.time_step_min, options.time_step_max)));
    const std::vector<double> y = ref::mamba2_step(sequence, conv, conv + inner, conv + inner + group_channels,
                                                   steps.data(), nullptr, a_log.data(), d.data());
    const std::vector<float> mixed(y.begin(), y.end());
    std::vector<double> out;
    const size_t size = inner / shape.groups;
    for (size_t from = 0; from < size_t(inner); from += size) {
      const auto normal = ref::gate_first_rms_norm(std::span(mixed).subspan(from, size), {z + from, size},
                                                   std::span(norm_weight).subspan(from, size), 1e-6);
      out.insert(out.end(), normal.begin(), normal.end());
    }
    return out;
  }

  Shape shape;
  Options options;
  int inner, group_channels, channels, width;
  std::vector<float> conv_weight, conv_bias, a_log, d, dt_bias, norm_weight;
};

template <typename T>
struct Mamba2LayerOnGpu {
  using Layer = Mamba2LayerOracle;
  using Args = Mamba2LayerStep<T>;
  using Shape = Mamba2Shape;

  Mamba2LayerOnGpu(const Layer& of, const LayerSizes& sizes, CudaPath<T>& path)
      : layer(of),
        memory(path.device),
        conv_weight(path.template elements<float>(of.conv_weight)),
        conv_bias(path.template elements<float>(of.conv_bias)),
        a_log(path.template elements<float>(of.a_log)),
        d(path.template elements<float>(of.d)),
        dt_bias(path.template elements<float>(of.dt_bias)),
        norm_weight(path.template elements<float>(of.norm_weight)),
        conv(conv_memory<T>(memory, of.channels, sizes)) {
    const size_t slots = sizes.slots, C = sizes.capacity();
    state.shape = of.shape;
    state.slots = state.checkpoints = sizes.slots;
    state.window = sizes.window;
    state.capacity = sizes.capacity();
    state.checkpoint = memory.array<float>(slots * of.inner * of.shape.state_size, 0.0f);
    state.ring_x = memory.array<T>(slots * of.inner * C);
    state.ring_b = memory.array<T>(slots * of.group_channels * C);
    state.ring_dt = memory.array<float>(slots * of.shape.heads * C);
    state.ring_decay = memory.array<float>(slots * of.shape.heads * C);
  }

  Args args(const StateRows& rows, int tokens_per_row, Readout readout, const T* projected, T* out) const {
    return {.conv = conv,
            .state = state,
            .rows = rows,
            .tokens_per_row = tokens_per_row,
            .readout = readout,
            .xbc = projected + layer.inner,
            .z = projected,
            .dt = projected + layer.inner + layer.channels,
            .xbc_stride = layer.width,
            .z_stride = layer.width,
            .dt_stride = layer.width,
            .conv_weight = conv_weight.data(),
            .conv_bias = layer.conv_bias.empty() ? nullptr : conv_bias.data(),
            .heads = {a_log.data(), d.data()},
            .dt_bias = dt_bias.data(),
            .time_step_min = layer.options.time_step_min,
            .time_step_max = layer.options.time_step_max,
            .norm_weight = norm_weight.data(),
            .out = out,
            .out_stride = layer.inner};
  }
  static void fused(const Args& args, CudaDevice& device, std::span<std::byte> workspace) {
    mamba2_layer_step(args, device, workspace);
  }
  // The ops one after the other.
  static void apart(const Args& args, CudaDevice& device) {
    const Shape& shape = args.state.shape;
    const int64_t tokens = int64_t{args.rows.count} * args.tokens_per_row, channels = args.conv.channels;
    const int64_t inner = int64_t{shape.heads} * shape.head_size;
    DeviceBuffer<T> mixed_in(tokens * channels, device);
    DeviceBuffer<float> dt(tokens * shape.heads, device), mixed(tokens * inner, device);
    conv1d(BasicConv1d<T, T>{.state = args.conv,
                             .rows = args.rows,
                             .x = args.xbc,
                             .x_stride = args.xbc_stride,
                             .weight = args.conv_weight,
                             .bias = args.conv_bias,
                             .out = mixed_in.data(),
                             .tokens_per_row = args.tokens_per_row},
           device);
    mamba2_gates(BasicMamba2Gates<T>{.tokens = tokens,
                                     .heads = shape.heads,
                                     .dt = args.dt,
                                     .dt_stride = args.dt_stride,
                                     .dt_bias = args.dt_bias,
                                     .time_step_min = args.time_step_min,
                                     .time_step_max = args.time_step_max,
                                     .out = dt.data()},
                 device);
    mamba2_decode(BasicMamba2Decode<T, float>{.state = args.state,
                                              .rows = args.rows,
                                              .heads = args.heads,
                                              .tokens_per_row = args.tokens_per_row,
                                              .tokens = {.x = mixed_in.data(),
                                                         .b = mixed_in.data() + inner,
                                                         .c = mixed_in.data() + inner + shape.groups * shape.state_size,
                                                         .dt = dt.data(),
                                                         .x_stride = channels,
                                                         .b_stride = channels,
                                                         .c_stride = channels},
                                              .readout = args.readout,
                                              .out = mixed.data()},
                  device, {});
    gate_first_rms_norm(BasicGateFirstRmsNorm<float, T, T>{.tokens = tokens,
                                                           .groups = shape.groups,
                                                           .size = inner / shape.groups,
                                                           .x = mixed.data(),
                                                           .z = args.z,
                                                           .x_stride = inner,
                                                           .z_stride = args.z_stride,
                                                           .weight = args.norm_weight,
                                                           .eps = args.eps,
                                                           .y = args.out,
                                                           .y_stride = args.out_stride},
                        device);
    device.synchronize();
  }

  const Layer& layer;
  LayerMemory memory;
  DeviceBuffer<float> conv_weight, conv_bias, a_log, d, dt_bias, norm_weight;
  BasicConv1dState<T> conv;
  BasicMamba2State<T> state;
};

}  // namespace replayssm::test
