// Launches that overlap: a kernel may start while the one queued before it still runs (programmatic dependent launch),
// so that its launch and its first loads cost no time of their own. Below compute capability 9.0 they are plain.
#pragma once

#include <cuda_runtime.h>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/cuda_error.cuh"

namespace replayssm {

// Waits until all work queued earlier is done and its writes are seen. A kernel launched by launch_overlapped reads
// nothing but constants, and writes nothing, before it.
__device__ inline void wait_for_earlier_work() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start once every block has come here or ended. To be called after
// wait_for_earlier_work: then what was queued before this kernel is done before anything after it starts, and the
// kernel after the next need not wait for it.
__device__ inline void let_later_work_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Queues kernel(args...). Throws Error, naming `what`, for a launch that fails.
template <typename... Parameters, typename... Arguments>
void launch_overlapped(const char* what, void (*kernel)(Parameters...), int64_t blocks, int threads, CudaDevice& device,
                       const Arguments&... arguments) {
  require(blocks < int64_t{1} << 31, "{}: expected fewer than 2^31 blocks of work, got {}", what, blocks);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(device.stream());
  config.attrs = &attribute;
  config.numAttrs = device.properties().compute_major >= 9 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), what);
}

}  // namespace replayssm
