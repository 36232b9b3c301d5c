// Root-mean-square norms (FP32 arithmetic and weights). Sources: Zhang and Sennrich, arXiv 1910.07467; the gated form
// of Gated DeltaNet, arXiv 2412.06464, and of Kimi Linear, arXiv 2510.26692; the gate-first form of Mamba-2, arXiv
// 2405.21060.
//
//   rms_norm:             y = x / sqrt(mean(x^2) + eps) * s    s = w, or 1 + w where the weights are zero-centred
//   gated_rms_norm:       y = x / sqrt(mean(x^2) + eps) * w * gate(z)    gate is silu or sigmoid
//   gate_first_rms_norm:  y = u / sqrt(mean(u^2) + eps) * w,  u = x * silu(z)
//
// sigmoid(z) = 1 / (1 + e^-z), silu(z) = z sigmoid(z),
//
// over the last dimension of `size` elements. A vector's bits depend on nothing but the vector, its gate and the
// weights.
#pragma once

#include <cstdint>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"

namespace replayssm {

// A token holds `heads` vectors; vector h of token n starts at n * x_stride + h * x_head_stride, and so for y. y may be
// x (with the same strides), else they may not overlap. Throws Error for negative sizes, size 0, eps < 0 and null
// pointers.
template <typename X, typename Out>
struct BasicRmsNorm {
  int64_t tokens = 0;    // N
  int heads = 1;         // vectors a token
  int64_t size = 0;      // elements of a vector
  const X* x = nullptr;  // [N, heads, size], x_stride, x_head_stride
  int64_t x_stride = 0, x_head_stride = 0;
  const float* weight = nullptr;  // [size]
  bool is_zero_centred = false;
  float eps = 1e-6f;
  Out* y = nullptr;  // [N, heads, size], y_stride, y_head_stride
  int64_t y_stride = 0, y_head_stride = 0;
  // On a GPU, with one head and X = float: what is added to x first, a part after the other. The sums take x's place.
  const float* parts = nullptr;  // [part_count, N, size]
  int part_count = 0;
  float* sums = nullptr;  // [N, size], x_stride; it may be x
};
using RmsNorm = BasicRmsNorm<float, float>;
void rms_norm(const RmsNorm& args, Device& device);

// As above; the vectors of a token are contiguous. y may be x.
template <typename X, typename Z, typename Out>
struct BasicGatedRmsNorm {
  int64_t tokens = 0;    // N
  int heads = 0;         // H
  int64_t size = 0;      // V
  const X* x = nullptr;  // [N, H, V], x_stride
  const Z* z = nullptr;  // [N, H, V], z_stride
  int64_t x_stride = 0, z_stride = 0;
  const float* weight = nullptr;  // [V]
  bool has_sigmoid_gate = false;  // gate(z) is sigmoid(z), else silu(z)
  float eps = 1e-6f;
  Out* y = nullptr;  // [N, H, V], y_stride
  int64_t y_stride = 0;
};
using GatedRmsNorm = BasicGatedRmsNorm<float, float, float>;
void gated_rms_norm(const GatedRmsNorm& args, Device& device);

// The gate comes before the norm, and every group of a token has weights of its own. y may be x. Throws Error as
// rms_norm does.
template <typename X, typename Z, typename Out>
struct BasicGateFirstRmsNorm {
  int64_t tokens = 0;    // N
  int groups = 0;        // G
  int64_t size = 0;      // elements of a group
  const X* x = nullptr;  // [N, G, size], x_stride
  const Z* z = nullptr;  // [N, G, size], z_stride
  int64_t x_stride = 0, z_stride = 0;
  const float* weight = nullptr;  // [G, size]
  float eps = 1e-6f;
  Out* y = nullptr;  // [N, G, size], y_stride
  int64_t y_stride = 0;
};
using GateFirstRmsNorm = BasicGateFirstRmsNorm<float, float, float>;
void gate_first_rms_norm(const GateFirstRmsNorm& args, Device& device);

// The same three on a GPU, queued on its stream. Every pointer is of device memory; the weights may be read before the
// work queued earlier is done. size: at most 8192; fewer than 2^31 vectors. Fast where pointers and strides are
// multiples of 16 bytes and the size of 8; a vector's bits are the same wherever it lies. Types, A being Bf16 or Fp16:
// all float; all A; rms_norm (float, A) and (A, float); the others also (X, Z, Out) = (float, A, A) and (A, A, float).
template <typename X, typename Out>
void rms_norm(const BasicRmsNorm<X, Out>& args, CudaDevice& device);
template <typename X, typename Z, typename Out>
void gated_rms_norm(const BasicGatedRmsNorm<X, Z, Out>& args, CudaDevice& device);
template <typename X, typename Z, typename Out>
void gate_first_rms_norm(const BasicGateFirstRmsNorm<X, Z, Out>& args, CudaDevice& device);

}  // namespace replayssm
