#include "bench/cuda_memory.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "replayssm/core/cuda_error.cuh"

namespace replayssm::bench {
namespace {

constexpr int kThreads = 256;

__device__ void store(float* to, float value) {
  *to = value;
}
__device__ void store(Bf16* to, float value) {
  to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ void store(Fp16* to, float value) {
  to->bits = __half_as_ushort(__float2half_rn(value));
}

// A thread fills every gridDim.x * kThreads-th value with a hash of its place.
template <typename T>
__global__ void fill_uniform_kernel(T* values, size_t count, float low, float range, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x; i < count; i += size_t{gridDim.x} * kThreads) {
    uint32_t hash = static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(i >> 32) + seed * 40503u;
    hash = (hash ^ hash >> 15) * 2246822519u;
    hash = (hash ^ hash >> 13) * 3266489917u;
    hash ^= hash >> 16;
    // Middles of 2^23 parts of the range: a range about zero has no zero, whose halves (rows.h) could make a NaN.
    store(values + i, low + range * ((static_cast<float>(hash >> 9) + 0.5f) * 0x1p-23f));
  }
}

// A thread looks at every gridDim.x * kThreads-th value; `exponent` and `magnitude` are masks of the format's bits.
template <typename Word>
__global__ void count_outputs_kernel(const Word* values, size_t count, Word exponent, Word magnitude,
                                     OutputCounts* counts) {
  unsigned long long not_finite = 0, zero = 0;
  for (size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x; i < count; i += size_t{gridDim.x} * kThreads) {
    not_finite += (values[i] & exponent) == exponent;
    zero += (values[i] & magnitude) == 0;
  }
  if (not_finite > 0) atomicAdd(&counts->not_finite, not_finite);
  if (zero > 0) atomicAdd(&counts->zero, zero);
}

int blocks_for(size_t count) {
  return static_cast<int>(std::clamp<size_t>((count + kThreads - 1) / kThreads, 1, 4096));
}

cudaStream_t stream_of(CudaDevice& device) {
  return static_cast<cudaStream_t>(device.stream());
}

template <typename T>
void fill(T* values, size_t count, float low, float high, uint32_t seed, CudaDevice& device) {
  fill_uniform_kernel<<<blocks_for(count), kThreads, 0, stream_of(device)>>>(values, count, low, high - low, seed);
  check_cuda(cudaGetLastError(), "bench: fill memory");
}

template <typename Word>
void count_words(const void* values, size_t count, Word exponent, Word magnitude, OutputCounts* counts,
                 CudaDevice& device) {
  count_outputs_kernel<<<blocks_for(count), kThreads, 0, stream_of(device)>>>(static_cast<const Word*>(values), count,
                                                                              exponent, magnitude, counts);
  check_cuda(cudaGetLastError(), "bench: count outputs");
}

}  // namespace

void fill_uniform(float* values, size_t count, float low, float high, uint32_t seed, CudaDevice& device) {
  fill(values, count, low, high, seed, device);
}
void fill_uniform(Bf16* values, size_t count, float low, float high, uint32_t seed, CudaDevice& device) {
  fill(values, count, low, high, seed, device);
}
void fill_uniform(Fp16* values, size_t count, float low, float high, uint32_t seed, CudaDevice& device) {
  fill(values, count, low, high, seed, device);
}

void count_outputs(const float* values, size_t count, OutputCounts* counts, CudaDevice& device) {
  count_words<uint32_t>(values, count, 0x7F800000u, 0x7FFFFFFFu, counts, device);
}
void count_outputs(const Bf16* values, size_t count, OutputCounts* counts, CudaDevice& device) {
  count_words<uint16_t>(values, count, 0x7F80u, 0x7FFFu, counts, device);
}
void count_outputs(const Fp16* values, size_t count, OutputCounts* counts, CudaDevice& device) {
  count_words<uint16_t>(values, count, 0x7C00u, 0x7FFFu, counts, device);
}

}  // namespace replayssm::bench
