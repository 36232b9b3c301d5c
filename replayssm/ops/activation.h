// Elementwise products with an activation (FP32). sigmoid(u) = 1 / (1 + e^-u), silu(u) = u sigmoid(u).
//
//   silu_product:  y[n, i] = silu(gate[n, i]) * up[n, i]    (the SwiGLU of Shazeer, arXiv 2002.05202)
//   relu2:         y[n, i] = max(x[n, i], 0)^2              (So et al., arXiv 2109.08668; Nemotron's feed-forward)
//   sigmoid_gate:  x[n, h, i] *= sigmoid(gate[n, h, i])     (output gate of gated attention)
//
// An element's bits depend on its own operands alone; a NaN operand gives a NaN.
#pragma once

#include <cstdint>

#include "replayssm/core/device.h"

namespace replayssm {

// y may be gate or up (with the same stride), else they may not overlap. Throws Error for negative sizes and null
// pointers.
struct SiluProduct {
  int64_t tokens = 0;  // N
  int64_t size = 0;
  const float* gate = nullptr;  // [N, size], gate_stride
  const float* up = nullptr;    // [N, size], up_stride
  int64_t gate_stride = 0, up_stride = 0;
  float* y = nullptr;  // [N, size], y_stride
  int64_t y_stride = 0;
};
void silu_product(const SiluProduct& args, Device& device);

// y may be x (with the same stride), else they may not overlap. Throws Error for negative sizes and null pointers.
struct Relu2 {
  int64_t tokens = 0;  // N
  int64_t size = 0;
  const float* x = nullptr;  // [N, size], x_stride
  int64_t x_stride = 0;
  float* y = nullptr;  // [N, size], y_stride
  int64_t y_stride = 0;
};
void relu2(const Relu2& args, Device& device);

// In place; vector h of token n starts at n * x_stride + h * size, its gate at n * gate_stride + h * gate_head_stride.
struct SigmoidGate {
  int64_t tokens = 0;  // N
  int heads = 0;
  int64_t size = 0;
  const float* gate = nullptr;  // [N, heads, size], gate_stride, gate_head_stride
  int64_t gate_stride = 0, gate_head_stride = 0;
  float* x = nullptr;  // [N, heads, size], x_stride
  int64_t x_stride = 0;
};
void sigmoid_gate(const SigmoidGate& args, Device& device);

}  // namespace replayssm
