// A recurrent layer between its input projections and its output projection, in decoding on a GPU, by replay or, where
// asked for, conventionally:
//
//   delta_layer_step:   q | k | v = silu(conv(qkv) + bias);  g, beta = delta_gates(a, b);  o = delta_decode(...);
//                       out = o / sqrt(mean(o^2) + eps) * w * gate(z), a head at a time, gate silu or sigmoid
//   mamba2_layer_step:  x | B | C = silu(conv(xbc) + bias);  dt' = mamba2_gates(dt);  y = mamba2_decode(...);
//                       u = y * silu(z);  out = u / sqrt(mean(u^2) + eps) * w, a group at a time
//
// The same bits as conv1d, the gates, the decode and the norm called one after the other, with the convolution's
// outputs in T, the decode's in FP32 and the norm's in T; fewer launches, which overlap. A padding row touches no state
// and gives zeros. A row whose slot or checkpoint lies outside the pool touches no state either, not even the
// convolution's window; its outputs are NaN, and CudaDevice::synchronize names it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "replayssm/core/cuda_device.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// T of float, Bf16 or Fp16. Consecutive tokens of qkv, z, a, b and out are `*_stride` elements apart, so that the
// inputs may lie in one row of a projection. Every pointer is of device memory; weights may be read before the work
// queued earlier is done. Pointers and strides are multiples of 16 bytes, those of a, b, a_log and dt_bias excepted; H
// * V is a multiple of 8. `out` may overlap no input.
template <typename T>
struct DeltaLayerStep {
  BasicConv1dState<T> conv;  // channels [q G*K | k G*K | v H*V], width 4
  BasicDeltaState<T> state;
  StateRows rows;
  int tokens_per_row = 1;  // T, 1 .. 16, and what both states have room for
  Readout readout = Readout::kDirect;
  bool is_conventional = false;  // with delta_step in place of delta_decode; tokens_per_row is 1
  const T* qkv = nullptr;        // [B * T, channels], as projected
  const T* z = nullptr;          // [B * T, H, V]
  const T* a = nullptr;          // [B * T, H, gate_size]
  const T* b = nullptr;          // [B * T, H]
  int64_t qkv_stride = 0, z_stride = 0, a_stride = 0, b_stride = 0;
  const float* conv_weight = nullptr;  // [4, channels]
  const float* conv_bias = nullptr;    // [channels] or null
  const float* a_log = nullptr;        // [H]
  const float* dt_bias = nullptr;      // [H, gate_size]
  float lower_bound = 0;               // of the gates, as delta_gates has it
  const float* norm_weight = nullptr;  // [V]
  bool has_sigmoid_gate = false;
  float eps = 1e-6f;
  T* out = nullptr;  // [B * T, H, V]
  int64_t out_stride = 0;
};
template <typename T>
void delta_layer_step(const DeltaLayerStep<T>& args, CudaDevice& device, std::span<std::byte> workspace);

// The same for xbc, z, dt and out; dt, a_log, d and dt_bias are the exceptions of alignment.
template <typename T>
struct Mamba2LayerStep {
  BasicConv1dState<T> conv;  // channels [x H*P | B G*N | C G*N], width 4
  BasicMamba2State<T> state;
  StateRows rows;
  int tokens_per_row = 1;  // T, 1 .. 16, and what both states have room for
  Readout readout = Readout::kDirect;
  bool is_conventional = false;  // with mamba2_step in place of mamba2_decode; tokens_per_row is 1
  const T* xbc = nullptr;        // [B * T, channels], as projected
  const T* z = nullptr;          // [B * T, H, P]
  const T* dt = nullptr;         // [B * T, H]
  int64_t xbc_stride = 0, z_stride = 0, dt_stride = 0;
  const float* conv_weight = nullptr;  // [4, channels]
  const float* conv_bias = nullptr;    // [channels] or null
  Mamba2Heads heads;
  const float* dt_bias = nullptr;  // [H]
  float time_step_min = 0.0f;
  float time_step_max = std::numeric_limits<float>::infinity();
  const float* norm_weight = nullptr;  // [H, P], in G groups of at most 8192 channels
  float eps = 1e-6f;
  T* out = nullptr;  // [B * T, H, P]
  int64_t out_stride = 0;
};
template <typename T>
void mamba2_layer_step(const Mamba2LayerStep<T>& args, CudaDevice& device, std::span<std::byte> workspace);

// The bytes of `workspace`, in device memory and aligned to 64 bytes, that a step of `tokens` = B * T tokens needs.
// Contents are scratch.
template <typename T>
size_t layer_workspace_bytes(const DeltaShape& shape, int64_t tokens);
template <typename T>
size_t layer_workspace_bytes(const Mamba2Shape& shape, int64_t tokens);

// How a step is run: a launch before the state kernel for convolution and gates, one after it for the norm.
struct LayerPlan {
  int conv_rows_a_thread = 0;  // whose eight channels a thread convolves; with several tokens a row: one
  int64_t conv_blocks = 0, gate_blocks = 0;
  int64_t norm_blocks = 0;
  int norm_block_threads = 0, norm_vector_threads = 0;
  // Counted once for every array: what the two launches read and write at the least.
  int64_t prepare_bytes = 0, norm_bytes = 0;
};
LayerPlan plan_layer(const DeltaShape& shape, int rows, int tokens_per_row, int element_bytes,
                     const CudaProperties& gpu);
LayerPlan plan_layer(const Mamba2Shape& shape, int rows, int tokens_per_row, int element_bytes,
                     const CudaProperties& gpu);

// One line.
std::string describe(const LayerPlan& plan);

}  // namespace replayssm
