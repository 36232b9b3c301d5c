// Causal depthwise convolution over time, with a window that rolls back.
//
//   y[t, c] = act(bias[c] + sum_{i=0}^{W-1} weight[c, i] x[t - (W-1) + i, c])      x before the first token is 0
//
// act is the identity or silu(u) = u / (1 + e^-u). Everything is FP32. (The short convolution of Mamba, Gated DeltaNet
// and Kimi Linear; W is 4 in all of them.)
#pragma once

#include <cstdint>

#include "replayssm/core/device.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// One layer's inputs of the last tokens, for all slots. The input of the token at position p = base + history + t lies
// at ring position p % capacity; capacity >= W - 1 + largest T, so that after a window of T tokens any number of them
// can be rejected: the cursor moves, the inputs stay.
struct Conv1dState {
  int channels = 0;
  int width = 0;  // W, 2 .. 8
  int64_t slots = 0;
  int capacity = 0;
  float* window = nullptr;  // [slots, capacity, channels]
};

// Row b holds tokens token_begin[b] .. token_begin[b+1]-1, at positions base + history, base + history + 1, ...
// Decode windows and prefill are the same call. Writes the last inputs of each row to its window. `out` may not overlap
// `x`. weight is transposed from a checkpoint's [channels, 1, W].
struct Conv1d {
  Conv1dState state;
  StateRows rows;
  const int32_t* token_begin = nullptr;  // [B + 1], non-decreasing from 0
  const float* x = nullptr;              // [N, channels], x_stride
  int64_t x_stride = 0;
  const float* weight = nullptr;  // [W, channels]
  const float* bias = nullptr;    // [channels] or null
  bool use_silu = true;
  float* out = nullptr;  // [N, channels]
};
void conv1d(const Conv1d& args, Device& device);

}  // namespace replayssm
