// The check of every CUDA call.
#pragma once

#include <cuda_runtime.h>

#include "replayssm/core/error.h"

namespace replayssm {

// Throws Error, naming `what`, unless `status` is success.
inline void check_cuda(cudaError_t status, const char* what) {
  require(status == cudaSuccess, "{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

}  // namespace replayssm
