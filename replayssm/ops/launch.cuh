// Internal to the CUDA paths: the launch of a kernel that takes one struct.
#pragma once

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/cuda_error.cuh"

namespace replayssm {

enum class Launch {
  kPlain,
  // May start before the kernel queued before it has ended, as soon as that one lets it (let_next_start); it must
  // wait_for_previous before it reads what the other writes, and all kernels wait before they let the next start: when
  // one starts all before the other have ended.
  kOverlapping,
};

// What the driver was told of kernels and what it answered, so that it is asked once and not at every launch. Of the
// whole process: a kernel's attributes are, and any thread may launch it.
struct KernelFacts {
  std::mutex mutex;
  std::map<std::pair<int, const void*>, size_t> shared_bytes;  // by GPU and kernel: how much a block may have
  std::map<std::tuple<int, const void*, int, size_t>, int> resident_blocks;
};
inline KernelFacts& kernel_facts() {
  static KernelFacts facts;
  return facts;
}

inline int current_gpu(const char* op) {
  int gpu = 0;
  check_cuda(cudaGetDevice(&gpu), op);
  return gpu;
}

// Lets a kernel have so much shared memory.
inline void set_shared_memory(const char* op, const void* kernel, size_t shared_bytes) {
  constexpr size_t kUnasked = 48 * 1024;
  KernelFacts& facts = kernel_facts();
  const int gpu = current_gpu(op);
  const std::lock_guard lock(facts.mutex);
  size_t& allowed = facts.shared_bytes[{gpu, kernel}];
  if (allowed == 0) {
    // All of a multiprocessor's memory that can be shared memory is: kernels that want different shares cannot run on
    // one at a time, and these read little twice.
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        op);
    allowed = kUnasked;
  }
  // Never less than before: another thread may be about to launch the kernel with that.
  if (shared_bytes <= allowed) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
             op);
  allowed = shared_bytes;
}

// The blocks of a kernel that a multiprocessor has room for.
template <typename Args>
int resident_blocks(const char* op, void (*kernel)(Args), int threads, size_t shared_bytes) {
  const void* const key = reinterpret_cast<const void*>(kernel);
  set_shared_memory(op, key, shared_bytes);
  KernelFacts& facts = kernel_facts();
  const int gpu = current_gpu(op);
  const std::lock_guard lock(facts.mutex);
  int& count = facts.resident_blocks[{gpu, key, threads, shared_bytes}];
  if (count == 0) check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared_bytes), op);
  return count;
}

template <typename Args>
void launch(const char* op, void (*kernel)(Args), dim3 grid, int threads, size_t shared_bytes, const Args& args,
            CudaDevice& device, Launch how = Launch::kPlain) {
  set_shared_memory(op, reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(device.stream());
  config.attrs = &overlap;
  config.numAttrs = how == Launch::kOverlapping && device.properties().compute_major >= 9 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args), op);
}

// Lets an overlapping kernel queued next start where this one leaves room.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
// Waits until the kernel queued before this one has ended and its writes can be seen.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace replayssm
