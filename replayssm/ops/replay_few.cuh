// Internal to the CUDA replay kernel: what a direct readout of the delta rule with one gate a head takes, of few
// records, from products on tensor cores.
#pragma once

#include <cfloat>

#include "replayssm/ops/tensor_cores.cuh"
#include "replayssm/ops/updates.cuh"

namespace replayssm {

// Records 0 .. newest - 1 and the token that follows them, in shared memory. The first `committed` are of the ring,
// those after them are the call's own, of which there are no scales, and logarithms of the decays.
template <typename T>
struct FewRecords {
  const T *keys, *query;            // [newest + 1, K], [K], as they came
  const float* decays;              // [newest]
  const float *strengths, *scales;  // [newest + 1], [committed]
  int committed, newest;
};
constexpr int kFewRecords = 16;

__device__ inline float finite(float x) {
  return fminf(fmaxf(x, -FLT_MAX), FLT_MAX);
}

// Pulls the token's query q back through all records. First come the products of all keys k[j] with one another and
// with the query, of the vectors as they are (16-bit numbers are exact operands); with x[j] the product of key j and
// the query that has been pulled back through the records after j, from the newest record on,
//   x[j] = scale_q (q k[j]) - sum_{i > j} u[i] (k[i] k[j]),   u[j] = beta[j] scale[j]^2 x[j]
//   weight[j] = beta[j] scale[j] x[j] (decay of the records after j)
//   result = (decay of all records) (scale_q q - sum_j u[j] k[j])
// Gives the lane's quad of the result, and the scale of the token's key; for a warp. newest < kFewRecords. kHasOwn:
// committed may be less than newest.
template <int K, bool kHasOwn, typename T>
__device__ float4 pull_through_few(const FewRecords<T>& records, float own_decay, float query_factor, float& own_scale,
                                   float* weights) {
  static_assert(K == 128);
  const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, newest = records.newest;
  // A lane has rows r and r + 8 of the products; rows that are not there are the first once more.
  float products[2][4] = {}, with_query[4] = {};  // columns 8 i + [2 c, 2 c + 1] of row r, then of row r + 8
  const T* first = records.keys + (r <= newest ? r : 0) * K + 8 * c;
  const T* second = records.keys + (r + 8 <= newest ? r + 8 : 0) * K + 8 * c;
#pragma unroll
  for (int i = 0; i < K / 32; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(first + 32 * i);
    const uint4 y = *reinterpret_cast<const uint4*>(second + 32 * i);
    const uint4 q = *reinterpret_cast<const uint4*>(records.query + 8 * c + 32 * i);
    const uint32_t even[4] = {x.x, y.x, x.y, y.y}, odd[4] = {x.z, y.z, x.w, y.w};
    multiply_add(products[0], even, x.x, x.y, T());
    multiply_add(products[1], even, y.x, y.y, T());
    multiply_add(with_query, even, q.x, q.y, T());
    multiply_add(products[0], odd, x.z, x.w, T());
    multiply_add(products[1], odd, y.z, y.w, T());
    multiply_add(with_query, odd, q.z, q.w, T());
  }
  float4 w = to_numbers(quad_at(records.query + 4 * lane));
  float squares[2] = {squares_of(w), squares_of(to_numbers(quad_at(records.keys + newest * K + 4 * lane)))};
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
    for (float& sum : squares) sum = __fadd_rn(sum, __shfl_xor_sync(kWarp, sum, distance));
  const float query_scale = __fmul_rn(scale_of(squares[0]), query_factor);
  own_scale = scale_of(squares[1]);

  float own_squares[2];  // a row's product with itself, in all lanes that have the row
  if constexpr (kHasOwn)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* of_row = products[half] + 2 * half;
      own_squares[half] = __shfl_sync(kWarp, r % 2 == 0 ? of_row[0] : of_row[1], lane - c + r / 2);
    }
  float strength_scale[2], factor[2], x[2], decay[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = r + 8 * half;
    const bool is_there = row <= newest, is_record = row < newest;
    float scale = is_record ? records.scales[row] : own_scale;
    decay[half] = is_record ? records.decays[row] : is_there ? own_decay : 1.0f;
    if (kHasOwn && is_record && row >= records.committed) {
      scale = scale_of(own_squares[half]);
      decay[half] = expf(decay[half]);
    }
    strength_scale[half] = is_there ? __fmul_rn(records.strengths[row], scale) : 0.0f;
    factor[half] = is_there ? __fmul_rn(strength_scale[half], scale) : 0.0f;
    // A vector whose squares overflow is normalised to zero: what is multiplied by 0 has to be finite.
    x[half] = __fmul_rn(finite(with_query[2 * half]), query_scale);
#pragma unroll
    for (float& product : products[half]) product = finite(product);
  }
  float pulled[2] = {};  // x at its record's turn
#pragma unroll
  for (int i = kFewRecords - 1; i >= 0; --i) {
    const int half = i / 8, in_quad = lane - c + i % 8 / 2;
    const float taken = __shfl_sync(kWarp, __fmul_rn(factor[half], x[half]), i % 8 * 4);
    if (r == i % 8) pulled[half] = x[half];
    x[0] = __fmaf_rn(-taken, __shfl_sync(kWarp, products[half][i % 2], in_quad), x[0]);
    if (half == 1) x[1] = __fmaf_rn(-taken, __shfl_sync(kWarp, products[half][2 + i % 2], in_quad), x[1]);
  }
  // The decays of a half's records from the lane's on, then of all records after it.
  float after[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      const float further = __shfl_down_sync(kWarp, decay[half], 4 * distance);
      if (r + distance < 8) decay[half] = __fmul_rn(decay[half], further);
    }
    after[half] = __shfl_down_sync(kWarp, decay[half], 4);
    if (r == 7) after[half] = 1;
  }
  const float of_second = __shfl_sync(kWarp, decay[1], 0);
  after[0] = __fmul_rn(after[0], of_second);
  const float of_all = __fmul_rn(__shfl_sync(kWarp, decay[0], 0), of_second);
  float taken[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    taken[half] = __fmul_rn(factor[half], pulled[half]);
    const int row = r + 8 * half;
    if (c == 0 && row <= newest) weights[row] = __fmul_rn(__fmul_rn(strength_scale[half], pulled[half]), after[half]);
  }
  w = scaled(w, query_scale);
#pragma unroll 4
  for (int j = 0; j <= newest; ++j) {
    const float of_record = __shfl_sync(kWarp, j < 8 ? taken[0] : taken[1], j % 8 * 4);
    w = multiply_added(to_numbers(quad_at(records.keys + j * K + 4 * lane)), -of_record, w);
  }
  return scaled(w, of_all);
}

}  // namespace replayssm
