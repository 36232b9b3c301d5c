#include "bench/cuda_roof.h"

#include <algorithm>
#include <vector>

#include "bench/cuda_memory.h"
#include "replayssm/core/cuda_error.cuh"

namespace replayssm::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kPasses = 3;

// In all three kernels a block goes through tiles of kThreads * kUnroll 16-byte words, every gridDim.x-th one, and a
// thread has kUnroll of them in flight.
template <int kUnroll>
__global__ __launch_bounds__(kThreads) void read_kernel(const uint4* memory, size_t tiles, uint32_t* sink) {
  uint32_t sum = 0;
  for (size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint4* from = memory + tile * (kThreads * kUnroll) + threadIdx.x;
    uint4 words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) words[i] = __ldcs(from + i * kThreads);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) sum ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  }
  if (sum == 1) *sink = sum;  // keeps the compiler from dropping the reads
}

template <int kUnroll>
__global__ __launch_bounds__(kThreads) void update_kernel(uint4* memory, size_t tiles, uint32_t mask) {
  for (size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    uint4* place = memory + tile * (kThreads * kUnroll) + threadIdx.x;
    uint4 words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) words[i] = __ldcs(place + i * kThreads);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint4 word = words[i];
      __stcs(place + i * kThreads, make_uint4(word.x ^ mask, word.y ^ mask, word.z ^ mask, word.w ^ mask));
    }
  }
}

template <int kUnroll>
__global__ __launch_bounds__(kThreads) void copy_kernel(const uint4* from, uint4* to, size_t tiles) {
  for (size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const size_t place = tile * (kThreads * kUnroll) + threadIdx.x;
    uint4 words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) words[i] = __ldcs(from + place + i * kThreads);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) __stcs(to + place + i * kThreads, words[i]);
  }
}

// Microseconds of a pass: the median after one more.
template <typename Pass>
double pass_us(CudaDevice& device, const Pass& pass) {
  CudaTimer timer(device);
  pass();
  timer.mark();
  for (int i = 0; i < kPasses; ++i) {
    pass();
    timer.mark();
  }
  check_cuda(cudaGetLastError(), "bench: measure a roof");
  std::vector<double> us = timer.intervals_us();
  std::ranges::sort(us);
  return us[us.size() / 2];
}

template <int kUnroll>
void try_unrolled(DeviceBuffer<std::byte>& memory, uint32_t* sink, CudaDevice& device, CudaRoofs& best) {
  uint4* const words = reinterpret_cast<uint4*>(memory.data());
  const cudaStream_t stream = static_cast<cudaStream_t>(device.stream());
  const size_t tiles = memory.size() / (sizeof(uint4) * kThreads * kUnroll);
  const auto speed = [&](double us) { return static_cast<double>(memory.size()) / (us * 1e-6); };
  const auto raise = [](double& roof, double value) { roof = std::max(roof, value); };
  for (const size_t blocks_per_multiprocessor : {4, 8, 1 << 20}) {
    const size_t most = blocks_per_multiprocessor * device.properties().multiprocessors;
    const auto grid = [&](size_t count) { return static_cast<unsigned>(std::min(count, most)); };
    raise(best.read, speed(pass_us(device, [&] {
            read_kernel<kUnroll><<<grid(tiles), kThreads, 0, stream>>>(words, tiles, sink);
          })));
    raise(best.update, 2 * speed(pass_us(device, [&] {
                         update_kernel<kUnroll><<<grid(tiles), kThreads, 0, stream>>>(words, tiles, 1u);
                       })));
    uint4* const half = words + tiles / 2 * (kThreads * kUnroll);
    raise(best.copy, speed(pass_us(device, [&] {
            copy_kernel<kUnroll><<<grid(tiles / 2), kThreads, 0, stream>>>(words, half, tiles / 2);
          })));
  }
}

}  // namespace

CudaRoofs measure_roofs(CudaDevice& device) {
  constexpr size_t kBytes = size_t{8} << 30;
  CudaRoofs best;
  // A multiple of two tiles, whatever the unrolling.
  best.bytes = std::min(kBytes, device.properties().memory_bytes / 2) >> 20 << 20;
  DeviceBuffer<std::byte> memory(best.bytes, device);
  DeviceBuffer<uint32_t> sink(1, device);
  fill_uniform(reinterpret_cast<float*>(memory.data()), best.bytes / sizeof(float), -1, 1, 1, device);
  try_unrolled<2>(memory, sink.data(), device, best);
  try_unrolled<4>(memory, sink.data(), device, best);
  try_unrolled<8>(memory, sink.data(), device, best);
  return best;
}

}  // namespace replayssm::bench
