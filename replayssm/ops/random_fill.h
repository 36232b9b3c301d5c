// Seeded random numbers in place of weights:  y[i] = low + (high - low) u_i,  u_i uniform in [0, 1) with 24 bits, a
// function of (seed, i) alone (the finalizer of SplitMix64: Steele, Lea and Flood, OOPSLA 2014).
#pragma once

#include <cstddef>
#include <cstdint>

#include "replayssm/core/bf16.h"
#include "replayssm/core/cuda_device.h"

namespace replayssm {

// Computed in FP32 and rounded to T, Bf16 or float; the same bits on the CPU and on a GPU.
template <typename T>
struct RandomFill {
  size_t count = 0;
  uint64_t seed = 0;
  float low = -1, high = 1;
  T* y = nullptr;  // [count]
};
template <typename T>
void random_fill(const RandomFill<T>& args);

// Queued on the GPU's stream, y in its memory.
template <typename T>
void random_fill(const RandomFill<T>& args, CudaDevice& device);

}  // namespace replayssm
