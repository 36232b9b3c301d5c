// Rotary position embedding of the first `rotary_size` dimensions of each head, in halves (FP32).
// Source: Su et al., arXiv 2104.09864, in the GPT-NeoX arrangement; partial as in Qwen3-Next and Qwen3.5.
//
//   angle[n, i] = position[n] * theta^(-2 i / R)                                    i = 0 .. R/2 - 1, R = rotary_size
//   x'[i] = x[i] cos - x[i + R/2] sin;   x'[i + R/2] = x[i + R/2] cos + x[i] sin;   x'[j] = x[j] for j >= R
#pragma once

#include <cstdint>

#include "replayssm/core/device.h"

namespace replayssm {

// The cosines and sines of a step's tokens, once for all layers: computed in float64 and rounded, so that they are
// right at any position. Throws Error for an odd or negative rotary_size, theta <= 0, a negative position and null
// pointers.
struct RopeAngles {
  int64_t tokens = 0;   // N
  int rotary_size = 0;  // R, even
  double theta = 0;
  const int64_t* position = nullptr;  // [N] >= 0
  float* cosine = nullptr;            // [N, R/2]
  float* sine = nullptr;              // [N, R/2]
};
void rope_angles(const RopeAngles& args, Device& device);

// Rotates the heads of x in place; head h of token n starts at n * x_stride + h * x_head_stride. A token's bits depend
// on nothing but its own values and angles. Throws Error if rotary_size is odd, negative or larger than head_size.
struct Rope {
  int64_t tokens = 0;  // N
  int heads = 0;
  int head_size = 0;              // D
  int rotary_size = 0;            // R <= D, even
  const float* cosine = nullptr;  // [N, R/2]
  const float* sine = nullptr;    // [N, R/2]
  float* x = nullptr;             // [N, heads, D], x_stride, x_head_stride
  int64_t x_stride = 0, x_head_stride = 0;
};
void rope(const Rope& args, Device& device);

}  // namespace replayssm
