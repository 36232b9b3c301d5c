// Rotary position embedding of the first `rotary_size` dimensions of each head, in halves (FP32).
// Source: Su et al., arXiv 2104.09864, in the GPT-NeoX arrangement; partial as in Qwen3-Next and Qwen3.5.
//
//   angle[n, i] = position[n] * theta^(-2 i / R)                                    i = 0 .. R/2 - 1, R = rotary_size
//   x'[i] = x[i] cos - x[i + R/2] sin;   x'[i + R/2] = x[i + R/2] cos + x[i] sin;   x'[j] = x[j] for j >= R
#pragma once

#include <cstdint>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/rows.h"

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

// On a GPU, queued on its stream. Every pointer is of device memory, those of `rows` and token_begin too, and is read
// when the work runs.
//
// The angles of a step's tokens, whose positions follow from the cursors: token t of row b is at base + history + t.
// Those of padding rows, and of tokens past the last row's, are 0. Throws Error for an odd or negative rotary_size,
// theta <= 0, null pointers, and without token_begin for more tokens than the rows have.
struct RowRopeAngles {
  int64_t tokens = 0;  // N
  StateRows rows;
  const int32_t* token_begin = nullptr;  // [B + 1], non-decreasing from 0; or null: tokens_per_row in every row
  int tokens_per_row = 1;
  int rotary_size = 0;  // R, even
  double theta = 0;
  float* cosine = nullptr;  // [N, R/2]
  float* sine = nullptr;    // [N, R/2]
};
void rope_angles(const RowRopeAngles& args, CudaDevice& device);

// A token's query and key heads made ready for attention, in place and in one launch: x <- rope(norm(x)), head by head,
// with rms_norm of norm.h over the D elements of a head (FP32, rounded to T once, after the rotation). T is float,
// Bf16 or Fp16. D is even and at most 1024. A head's bits depend on its own values, weights and angles alone. The
// weights may be read before the work queued earlier is done. Throws Error for other sizes, negative ones, eps < 0 and
// null pointers. Fast where pointers and strides are multiples of 16 bytes and D and R/2 of 8.
template <typename T>
struct PlaceHeads {
  int64_t tokens = 0;  // N
  int query_heads = 0, key_heads = 0;
  int head_size = 0;              // D
  int rotary_size = 0;            // R <= D, even; 0: no rotation, and the angles are not read
  const float* q_norm = nullptr;  // [D] or null: no norm of queries
  const float* k_norm = nullptr;  // [D] or null: no norm of keys
  bool is_zero_centred = false;   // of both norms
  float eps = 1e-6f;
  const float* cosine = nullptr;  // [N, R/2]
  const float* sine = nullptr;    // [N, R/2]
  T* q = nullptr;                 // [N, query_heads, D], q_stride
  T* k = nullptr;                 // [N, key_heads, D], k_stride
  int64_t q_stride = 0, k_stride = 0;
};
template <typename T>
void place_heads(const PlaceHeads<T>& args, CudaDevice& device);

}  // namespace replayssm
