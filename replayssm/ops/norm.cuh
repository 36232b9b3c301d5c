// The norms on the GPU, for kernels: a thread owns a pack of eight elements of a vector.
#pragma once

#include "replayssm/ops/norm.h"
#include "replayssm/ops/pack.cuh"

namespace replayssm {

// Adds the squares of a pack, in order.
__device__ inline float sum_of_squares(const float (&values)[kPackSize]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPackSize; ++i) sum = __fmaf_rn(values[i], values[i], sum);
  return sum;
}

// The sum over kLanes neighbouring lanes, the same bits in each. Every lane of the warp takes part.
template <int kLanes>
__device__ inline float sum_lanes(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value = value + __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}

// Adds the sums of `warps` warps, in order.
__device__ inline float sum_warps(const float* partial, int warps) {
  float sum = partial[0];
  for (int warp = 1; warp < warps; ++warp) sum = sum + partial[warp];
  return sum;
}

// The sum over the first `warps` warps of a block, the same bits in each thread; `partial` holds one number a warp.
// Every thread of those warps takes part. A second sum needs other numbers or a barrier before it.
__device__ inline float sum_block(float value, int warps, float* partial) {
  value = sum_lanes<32>(value);
  if (warps == 1) return value;
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  return sum_warps(partial, warps);
}

// 1 / sqrt(mean(x^2) + eps)
__device__ inline float inverse_rms(float squares, float inverse_size, float eps) {
  return rsqrtf(squares * inverse_size + eps);
}

// An element of rms_norm.
__device__ inline float plain_norm(float x, float factor, float weight, float weight_offset) {
  return x * factor * (weight_offset + weight);
}
// An element of gated_rms_norm.
__device__ inline float gated_norm(float x, float factor, float weight, float z, bool has_sigmoid_gate) {
  const float gate = sigmoid(z);
  return x * factor * weight * (has_sigmoid_gate ? gate : z * gate);
}

// The three norms: without a gate, with one after the norm, with one before it.
enum class NormForm { kPlain, kGateLast, kGateFirst };

// Their vectors: number v is vector v % heads of token v / heads.
template <typename X, typename Z, typename Out>
struct NormVectors {
  int64_t tokens = 0;
  int heads = 0;
  int size = 0;
  const X* x = nullptr;
  const Z* z = nullptr;
  const float* weight = nullptr;
  Out* y = nullptr;
  int64_t x_stride = 0, x_head_stride = 0, z_stride = 0, y_stride = 0, y_head_stride = 0;
  int weight_head_stride = 0;  // 0: all heads share the weights
  float weight_offset = 0;
  bool has_sigmoid_gate = false;
  float eps = 0;
  const float* parts = nullptr;  // [part_count, tokens, size]; see BasicRmsNorm
  int part_count = 0;
  float* sums = nullptr;
  // The slots of the rows that the tokens belong to: those of padding rows get zeros. Or null.
  const int32_t* slot = nullptr;
  int tokens_per_row = 1;
};

template <typename X, typename Out>
NormVectors<X, X, Out> vectors_of(const BasicRmsNorm<X, Out>& args) {
  return {.tokens = args.tokens,
          .heads = args.heads,
          .size = static_cast<int>(args.size),
          .x = args.x,
          .weight = args.weight,
          .y = args.y,
          .x_stride = args.x_stride,
          .x_head_stride = args.x_head_stride,
          .y_stride = args.y_stride,
          .y_head_stride = args.y_head_stride,
          .weight_offset = args.is_zero_centred ? 1.0f : 0.0f,
          .eps = args.eps,
          .parts = args.parts,
          .part_count = args.part_count,
          .sums = args.sums};
}

template <typename X, typename Z, typename Out>
NormVectors<X, Z, Out> vectors_of(const BasicGatedRmsNorm<X, Z, Out>& args) {
  return {.tokens = args.tokens,
          .heads = args.heads,
          .size = static_cast<int>(args.size),
          .x = args.x,
          .z = args.z,
          .weight = args.weight,
          .y = args.y,
          .x_stride = args.x_stride,
          .x_head_stride = args.size,
          .z_stride = args.z_stride,
          .y_stride = args.y_stride,
          .y_head_stride = args.size,
          .has_sigmoid_gate = args.has_sigmoid_gate,
          .eps = args.eps};
}

template <typename X, typename Z, typename Out>
NormVectors<X, Z, Out> vectors_of(const BasicGateFirstRmsNorm<X, Z, Out>& args) {
  return {.tokens = args.tokens,
          .heads = args.groups,
          .size = static_cast<int>(args.size),
          .x = args.x,
          .z = args.z,
          .weight = args.weight,
          .y = args.y,
          .x_stride = args.x_stride,
          .x_head_stride = args.size,
          .z_stride = args.z_stride,
          .y_stride = args.y_stride,
          .y_head_stride = args.size,
          .weight_head_stride = static_cast<int>(args.size),
          .eps = args.eps};
}

// Queues the norms of at least one vector, as `op`; overlaps what is queued before and after. For the types that norm.h
// names.
template <NormForm kForm, typename X, typename Z, typename Out>
void launch_norm(const char* op, const NormVectors<X, Z, Out>& args, CudaDevice& device);

}  // namespace replayssm
