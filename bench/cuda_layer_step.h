// A layer's fused step on a GPU, timed beside its state op: in the op's state and outputs, with rows of a projection, a
// convolution's window a slot and weights of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bench/cuda_delta.h"
#include "bench/cuda_layer.h"
#include "bench/cuda_mamba2.h"
#include "bench/cuda_memory.h"
#include "replayssm/ops/layer_step.h"

namespace replayssm::bench {

// What the steps of both families take: Args is DeltaLayerStep or Mamba2LayerStep.
template <typename Args, typename T>
void take_layer(Args& args, std::span<std::byte>& workspace, int channels, int norm_size, const CudaLayerSize& size,
                CudaArena& arena) {
  constexpr int kWidth = 4;
  args.conv = {
      .channels = channels, .width = kWidth, .slots = size.slots, .capacity = kWidth - 1 + size.tokens_per_row};
  args.conv.window = arena.take_uniform<T>(size.slots * args.conv.capacity * channels, -1, 1);
  args.conv_weight = arena.take_uniform<float>(int64_t{kWidth} * channels, -0.5f, 0.5f);
  args.norm_weight = arena.take_uniform<float>(norm_size, 0.5f, 1.5f);
  args.tokens_per_row = size.tokens_per_row;
  const size_t bytes = layer_workspace_bytes<T>(args.state.shape, size.tokens);
  workspace = {arena.take<std::byte>(bytes), bytes};
}

// The elements of a projection's row, every one of which starts aligned.
inline int64_t projection_width(int64_t elements) {
  return (elements + 7) / 8 * 8;
}

template <typename Op>
class CudaLayerStep;

// Rows [q | k | v | z | b | a]; the norm's gate is a sigmoid where gates are a channel's, as in Kimi Linear.
template <typename T>
class CudaLayerStep<CudaDelta<T, T>> {
 public:
  CudaLayerStep(CudaDelta<T, T>& op, const CudaLayerSize& size, CudaArena& arena) {
    const DeltaShape& shape = op.state().shape;
    const int values = shape.heads * shape.value_size, gates = shape.heads * shape.gate_size;
    const int channels = 2 * shape.key_heads * shape.key_size + values;
    args_.state = op.state();
    take_layer<DeltaLayerStep<T>, T>(args_, workspace_, channels, shape.value_size, size, arena);
    const int64_t width = projection_width(channels + values + shape.heads + gates);
    args_.qkv_stride = args_.z_stride = args_.a_stride = args_.b_stride = width;
    args_.qkv = arena.take_uniform<T>(size.tokens * width, -1, 1);
    args_.z = args_.qkv + channels;
    args_.b = args_.z + values;
    args_.a = args_.b + shape.heads;
    args_.a_log = arena.take_uniform<float>(shape.heads, -1, 1);
    args_.dt_bias = arena.take_uniform<float>(gates, -3, -1);
    args_.has_sigmoid_gate = shape.gate_size > 1;
    args_.out = op.out();
    args_.out_stride = values;
  }

  // The op's outputs are FP32 inside the step.
  static CudaLayerBytes op_bytes(const DeltaShape& shape) { return CudaDelta<T, float>::bytes(shape); }

  void run(const StateRows& rows, Readout readout, CudaDevice& device) {
    args_.rows = rows;
    args_.readout = readout;
    delta_layer_step(args_, device, workspace_);
  }

 private:
  DeltaLayerStep<T> args_;
  std::span<std::byte> workspace_;
};

// Rows [z | x | B | C | dt], and a bias of the convolution.
template <typename T>
class CudaLayerStep<CudaMamba2<T, T>> {
 public:
  CudaLayerStep(CudaMamba2<T, T>& op, const CudaLayerSize& size, CudaArena& arena) {
    const Mamba2Shape& shape = op.state().shape;
    const int inner = shape.heads * shape.head_size, channels = inner + 2 * shape.groups * shape.state_size;
    args_.state = op.state();
    args_.heads = op.heads();
    take_layer<Mamba2LayerStep<T>, T>(args_, workspace_, channels, inner, size, arena);
    args_.conv_bias = arena.take_uniform<float>(channels, -0.5f, 0.5f);
    const int64_t width = projection_width(inner + channels + shape.heads);
    args_.xbc_stride = args_.z_stride = args_.dt_stride = width;
    args_.z = arena.take_uniform<T>(size.tokens * width, -1, 1);
    args_.xbc = args_.z + inner;
    args_.dt = args_.xbc + channels;
    args_.dt_bias = arena.take_uniform<float>(shape.heads, -3, -1);
    args_.out = op.out();
    args_.out_stride = inner;
  }

  static CudaLayerBytes op_bytes(const Mamba2Shape& shape) { return CudaMamba2<T, float>::bytes(shape); }

  void run(const StateRows& rows, Readout readout, CudaDevice& device) {
    args_.rows = rows;
    args_.readout = readout;
    mamba2_layer_step(args_, device, workspace_);
  }

 private:
  Mamba2LayerStep<T> args_;
  std::span<std::byte> workspace_;
};

}  // namespace replayssm::bench
