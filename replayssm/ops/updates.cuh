// Internal to the CUDA state kernels: the recurrences. The updates below are the only places where they run, for a
// slice in whose kernel a vector's i-th quad of a lane is vector[i].
#pragma once

#include "replayssm/ops/slices.cuh"

namespace replayssm {

constexpr float kNormEps = 1e-6f;

// 1 / sqrt(|k|^2 + eps) of a vector of which each lane holds four channels: its squares, summed over the lanes.
__device__ inline float squares_of(float4 k) {
  return __fmaf_rn(k.w, k.w, __fmaf_rn(k.z, k.z, __fmaf_rn(k.y, k.y, __fmul_rn(k.x, k.x))));
}
__device__ inline float scale_of(float squares) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(squares, kNormEps)));
}
__device__ inline float key_scale(float4 k) {
  return scale_of(sum_of_lanes<32>(squares_of(k)));
}

__device__ inline float query_scale(float key_scale, int key_size) {
  return __fmul_rn(key_scale, __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(key_size))));
}

// One token of the delta rule: decay, d = beta (v - S k^), S += d k^^T; v_first and v_second of a lane's two rows. The
// key is read twice or, if kKeeps, once and stays in registers.
template <bool kPerChannel, bool kKeeps, typename Slice, typename Vector, typename Decays>
__device__ void delta_update(Slice& slice, const Vector& k, const Decays& decays, float decay, float beta,
                             float v_first, float v_second) {
  RowSums sums[2];
  float4 kept[kKeeps ? Slice::kQuads : 1];
#pragma unroll
  for (int i = 0; i < Slice::kQuads; ++i) {
    const float4 x = k[i];
    if constexpr (kKeeps) kept[i] = x;
    const float4 a = kPerChannel ? decays[i] : make_float4(decay, decay, decay, decay);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      slice.rows[half][i] = multiplied(slice.rows[half][i], a);
      sums[half].add(i, slice.rows[half][i], x);
    }
  }
  const float d[2] = {__fmul_rn(beta, __fsub_rn(v_first, sums[0].total())),
                      __fmul_rn(beta, __fsub_rn(v_second, sums[1].total()))};
#pragma unroll
  for (int i = 0; i < Slice::kQuads; ++i) {
    const float4 x = kKeeps ? kept[kKeeps ? i : 0] : k[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) slice.rows[half][i] = multiply_added(x, d[half], slice.rows[half][i]);
  }
}

// One token of Mamba-2: S = a S + (dt' x) B^T, x_first and x_second already times dt'.
template <typename Slice, typename Vector>
__device__ void mamba2_update(Slice& slice, const Vector& b, float decay, float x_first, float x_second) {
#pragma unroll
  for (int i = 0; i < Slice::kQuads; ++i) {
    const float4 y = b[i];
    slice.rows[0][i] = multiply_added(y, x_first, scaled(slice.rows[0][i], decay));
    slice.rows[1][i] = multiply_added(y, x_second, scaled(slice.rows[1][i], decay));
  }
}

}  // namespace replayssm
