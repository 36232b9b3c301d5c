// Matrix products of a batch of tokens with a weight matrix (FP32 activations, BF16 or FP32 weights).
//
//   y[n, o] = sum_{i < I} w[o, i] x[n, i]  (+ residual[n, o])
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "replayssm/core/bf16.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/activation.h"
#include "replayssm/ops/norm.h"

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

// Matrix products of one GPU: NVIDIA's cuBLASLt, the memory it works in, and the algorithm of each product met so far.
// An algorithm is the first that the library's own heuristic names for the product's sizes, strides and alignments; it
// is never chosen by a timing, so that another run has the same bits. One thread uses it; the device outlives it.
class MatrixProducts {
 public:
  // Throws Error if cuBLASLt cannot be started or the memory cannot be had.
  explicit MatrixProducts(CudaDevice& device);
  ~MatrixProducts();
  MatrixProducts(const MatrixProducts&) = delete;
  MatrixProducts& operator=(const MatrixProducts&) = delete;

  struct Parts;
  Parts& parts() const { return *parts_; }

 private:
  std::unique_ptr<Parts> parts_;
};

// The same on a GPU, queued on its stream, by cuBLASLt or, of one or two tokens in BF16, by a kernel that begins to
// read its weights before the work queued earlier is done: y = W x, or y += W x, with FP32 sums, rounded to Out once.
// Every pointer is of device memory. With several heads there are as many products: matrix h begins h O I elements
// after the first, its x and y x_step and y_step elements after the first's. With several parts the inputs are cut into
// so many of I / parts, and y = [parts, N, O] has a part's sums y_step elements after the last's: a product of few rows
// and tokens is as fast as the GPU only so, and rms_norm adds them up. Types (T, Out): (float, float), (Bf16,
// Bf16), (Bf16, float). Fast where pointers and strides are multiples of 16 bytes. y[n, :] depends on x[n, :], the
// weights and N, not on other tokens' numbers. A call can be captured. Throws Error as above, and if cuBLASLt has no
// algorithm.
//
// Where can_fuse(args), the norm before the product and the activation after it can be part of its launch:
//
//   y = activation(W x),  x = rms_norm(*norm),  W's rows for silu_product [gate O/2 | up O/2], y [N, O/2]
//
// y has the very bits of rms_norm, linear and the activation one after the other: x is rounded to BF16, W x to Out. The
// norm's weights, too, may be read before the work queued earlier is done. Throws Error also if there is a norm or an
// activation and not can_fuse(args), if the norm is not that of N vectors of I elements to x, and for an activation
// with is_added or, silu_product's, with an odd O.
template <typename T, typename Out>
struct BasicLinear {
  int64_t tokens = 0;         // N
  int64_t inputs = 0;         // I
  int64_t outputs = 0;        // O
  const T* weight = nullptr;  // [heads, O, I]
  const T* x = nullptr;       // [N, I], x_stride
  int64_t x_stride = 0;
  Out* y = nullptr;  // [N, O], y_stride
  int64_t y_stride = 0;
  bool is_added = false;
  int heads = 1;
  int parts = 1;
  int64_t x_step = 0, y_step = 0;
  // What makes x, which is then neither read nor written, or null: x is there. y may not overlap what the norm reads.
  const BasicRmsNorm<float, T>* norm = nullptr;
  std::optional<Activation> activation = {};
};
template <typename T, typename Out>
void linear(const BasicLinear<T, Out>& args, MatrixProducts& products);

// The tokens of a product that is not cuBLASLt's, at most: with four it is faster (18.8 us against 22.6 for 12352 x
// 2560 on an H200).
inline constexpr int64_t kFewTokens = 2;

// Whether a product's launch has room for its norm and its activation, if it has them: T is Bf16, there are one or two
// tokens, one head and one part, pointers and strides of all that is read are multiples of 16 bytes, and a norm has at
// most 4096 elements and no parts.
template <typename T, typename Out>
bool can_fuse(const BasicLinear<T, Out>& args);

}  // namespace replayssm
