// Causal depthwise convolution over time, with a window that rolls back.
//
//   y[t, c] = act(bias[c] + sum_{i=0}^{W-1} weight[c, i] x[t - (W-1) + i, c])      x before the first token is 0
//
// act is the identity or silu(u) = u / (1 + e^-u). All arithmetic is FP32, and so are the weights. (The short
// convolution of Mamba, Gated DeltaNet and Kimi Linear; W is 4 in all of them.)
#pragma once

#include <cstdint>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// One layer's inputs of the last tokens, for all slots. The input of the token at position p = base + history + t lies
// at ring position p % capacity; capacity >= W - 1 + largest T, so that after a window of T tokens any number of them
// can be rejected: the cursor moves, the inputs stay. T is the type of the layer's activations: float on the CPU;
// float, Bf16 or Fp16 on a GPU. The inputs are kept in it, unrounded.
template <typename T>
struct BasicConv1dState {
  int channels = 0;
  int width = 0;  // W, 2 .. 8
  int64_t slots = 0;
  int capacity = 0;
  T* window = nullptr;  // [slots, capacity, channels]
};
using Conv1dState = BasicConv1dState<float>;

// Row b holds tokens token_begin[b] .. token_begin[b+1]-1, at positions base + history, base + history + 1, ...
// Decode windows and prefill are the same call; without token_begin every row holds tokens_per_row. Writes the last
// inputs of each row to its window. `out` may not overlap `x`. weight is transposed from a checkpoint's
// [channels, 1, W].
template <typename T, typename Out>
struct BasicConv1d {
  BasicConv1dState<T> state;
  StateRows rows;
  const int32_t* token_begin = nullptr;  // [B + 1], non-decreasing from 0; or null
  const T* x = nullptr;                  // [N, channels], x_stride
  int64_t x_stride = 0;
  const float* weight = nullptr;  // [W, channels]
  const float* bias = nullptr;    // [channels] or null
  bool use_silu = true;
  Out* out = nullptr;      // [N, channels]
  int tokens_per_row = 1;  // without token_begin: at most capacity - (W - 1)
  int64_t tokens = -1;     // N, where token_begin is in a GPU's memory
};
using Conv1d = BasicConv1d<float, float>;
void conv1d(const Conv1d& args, Device& device);

// The same on a GPU, queued on its stream. Every pointer is of device memory, those of `rows` and token_begin too, and
// is read when the work runs; the weights may be read before the work queued earlier is done. Types (T, Out):
// (float, float), (Bf16, Bf16), (Bf16, float), (Fp16, Fp16), (Fp16, float). Fast at width 4 with 16-byte alignment and
// channels a multiple of 8; right whatever they are. A row whose slot lies outside the pool has NaN for outputs and
// writes no window, and CudaDevice::synchronize names it.
template <typename T, typename Out>
void conv1d(const BasicConv1d<T, Out>& args, CudaDevice& device);

}  // namespace replayssm
