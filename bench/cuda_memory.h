// Device memory of timed runs: one allocation that is carved anew for each configuration, inputs that are nowhere zero,
// and the count of outputs that no op should give.
#pragma once

#include <cstddef>
#include <cstdint>

#include "replayssm/core/bf16.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/core/fp16.h"

namespace replayssm::bench {

// Uniform random numbers of (low, high), never zero if low is -high; queued on the device's stream.
void fill_uniform(float* values, size_t count, float low, float high, uint32_t seed, CudaDevice& device);
void fill_uniform(Bf16* values, size_t count, float low, float high, uint32_t seed, CudaDevice& device);
void fill_uniform(Fp16* values, size_t count, float low, float high, uint32_t seed, CudaDevice& device);

struct OutputCounts {
  unsigned long long not_finite;
  unsigned long long zero;
};

// Adds to *counts, in device memory, what there is among the outputs; queued on the device's stream.
void count_outputs(const float* values, size_t count, OutputCounts* counts, CudaDevice& device);
void count_outputs(const Bf16* values, size_t count, OutputCounts* counts, CudaDevice& device);
void count_outputs(const Fp16* values, size_t count, OutputCounts* counts, CudaDevice& device);

// A word of NaNs, of one output of 4 bytes or of two of 2.
template <typename T>
inline constexpr uint32_t kPoison = sizeof(T) == 4 ? 0x7FC00000u : 0x7FC07FC0u;

// Arrays one after the other in one allocation, each aligned to 256 bytes. Without an allocation it hands out null
// pointers and counts the bytes that one would need.
class CudaArena {
 public:
  explicit CudaArena(CudaDevice& device) : device_(device) {}
  CudaArena(size_t bytes, CudaDevice& device) : device_(device), memory_(bytes, device) {}

  size_t used_bytes() const { return used_bytes_; }
  void start_over() { used_bytes_ = 0; }

  template <typename T>
  T* take(size_t count) {
    std::byte* start = memory_.data() == nullptr ? nullptr : memory_.data() + used_bytes_;
    used_bytes_ += (count * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(start);
  }

  template <typename T>
  T* take_uniform(size_t count, float low, float high) {
    T* values = take<T>(count);
    if (values != nullptr) fill_uniform(values, count, low, high, static_cast<uint32_t>(used_bytes_ >> 8), device_);
    return values;
  }

 private:
  CudaDevice& device_;
  DeviceBuffer<std::byte> memory_;
  size_t used_bytes_ = 0;
};

}  // namespace replayssm::bench
