// Matrix products of a batch of tokens with a weight matrix (FP32 activations, BF16 or FP32 weights).
//
//   y[n, o] = sum_{i < I} w[o, i] x[n, i]  (+ residual[n, o])
#pragma once

#include <cstdint>

#include "replayssm/core/bf16.h"
#include "replayssm/core/device.h"

namespace replayssm {

// Weights are widened exactly; products are fused into FP32 sums and the residual is added last. The order of a sum
// depends on I alone, so y[n, :] has the same bits whatever N, the token's place in the batch and the thread count.
// `y` may be `residual` (with the same stride) but may not overlap `x`. A non-finite x[n, :] spoils y[n, :] alone.
// Throws Error if a size is negative, a needed pointer is null, a stride is shorter than its row, or not exactly one
// weight pointer is given.
struct Linear {
  int64_t tokens = 0;                 // N
  int64_t inputs = 0;                 // I
  int64_t outputs = 0;                // O
  const Bf16* weight = nullptr;       // [O, I], this or weight_f32
  const float* weight_f32 = nullptr;  // [O, I]
  const float* x = nullptr;           // [N, I], x_stride elements between tokens
  int64_t x_stride = 0;
  float* y = nullptr;  // [N, O], y_stride
  int64_t y_stride = 0;
  const float* residual = nullptr;  // [N, O] or null, residual_stride
  int64_t residual_stride = 0;
};
void linear(const Linear& args, Device& device);

}  // namespace replayssm
