// What a GPU's memory gives, measured: the roofs that its benchmarks compare with.
#pragma once

#include <cstddef>

#include "replayssm/core/cuda_device.h"

namespace replayssm::bench {

// Bytes per second, read and written ones added: the best of several block counts and unrollings, each the median of
// some passes over `bytes` of memory.
struct CudaRoofs {
  double read = 0;    // every byte once
  double update = 0;  // every byte read and written in place
  double copy = 0;    // one half to the other
  size_t bytes = 0;
};
CudaRoofs measure_roofs(CudaDevice& device);

}  // namespace replayssm::bench
