// Elementwise products with an activation (FP32). sigmoid(u) = 1 / (1 + e^-u), silu(u) = u sigmoid(u).
//
//   silu_product:  y[n, i] = silu(gate[n, i]) * up[n, i]    (the SwiGLU of Shazeer, arXiv 2002.05202)
//   relu2:         y[n, i] = max(x[n, i], 0)^2              (So et al., arXiv 2109.08668; Nemotron's feed-forward)
//   sigmoid_gate:  x[n, h, i] *= sigmoid(gate[n, h, i])     (output gate of gated attention)
//
// An element's bits depend on its own operands alone; a NaN operand gives a NaN.
#pragma once

#include <cstdint>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"

namespace replayssm {

// What a feed-forward makes of a row of its first product.
enum class Activation {
  kSwiGlu,  // silu_product of its two halves, the gate first
  kRelu2,   // relu2
};

// y may be gate or up (with the same stride), else they may not overlap. Throws Error for negative sizes and null
// pointers.
template <typename T>
struct BasicSiluProduct {
  int64_t tokens = 0;  // N
  int64_t size = 0;
  const T* gate = nullptr;  // [N, size], gate_stride
  const T* up = nullptr;    // [N, size], up_stride
  int64_t gate_stride = 0, up_stride = 0;
  T* y = nullptr;  // [N, size], y_stride
  int64_t y_stride = 0;
};
using SiluProduct = BasicSiluProduct<float>;
void silu_product(const SiluProduct& args, Device& device);

// y may be x (with the same stride), else they may not overlap. Throws Error for negative sizes and null pointers.
template <typename T>
struct BasicRelu2 {
  int64_t tokens = 0;  // N
  int64_t size = 0;
  const T* x = nullptr;  // [N, size], x_stride
  int64_t x_stride = 0;
  T* y = nullptr;  // [N, size], y_stride
  int64_t y_stride = 0;
};
using Relu2 = BasicRelu2<float>;
void relu2(const Relu2& args, Device& device);

// In place; vector h of token n starts at n * x_stride + h * size, its gate at n * gate_stride + h * gate_head_stride.
template <typename T>
struct BasicSigmoidGate {
  int64_t tokens = 0;  // N
  int heads = 0;
  int64_t size = 0;
  const T* gate = nullptr;  // [N, heads, size], gate_stride, gate_head_stride
  int64_t gate_stride = 0, gate_head_stride = 0;
  T* x = nullptr;  // [N, heads, size], x_stride
  int64_t x_stride = 0;
};
using SigmoidGate = BasicSigmoidGate<float>;
void sigmoid_gate(const SigmoidGate& args, Device& device);

// The same three on a GPU, queued on its stream, for T of float, Bf16 and Fp16: FP32 arithmetic, rounded to T once.
// Every pointer is of device memory. Fast where pointers and strides are multiples of 16 bytes and sizes of 8; right,
// and with the same bits, wherever arrays lie.
template <typename T>
void silu_product(const BasicSiluProduct<T>& args, CudaDevice& device);
template <typename T>
void relu2(const BasicRelu2<T>& args, CudaDevice& device);
template <typename T>
void sigmoid_gate(const BasicSigmoidGate<T>& args, CudaDevice& device);

}  // namespace replayssm
