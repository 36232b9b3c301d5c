// Where loaded weights go: the CPU's memory, or that of a GPU by way of page-locked memory, a piece at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "replayssm/core/buffer.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/core/error.h"
#include "replayssm/core/safetensors.h"

namespace replayssm {

// Told how many of the checkpoint's bytes have been read so far.
using LoadProgress = std::function<void(size_t bytes, size_t total)>;

template <template <typename> class Array>
class WeightStore;

template <>
class WeightStore<Buffer> {
 public:
  static constexpr size_t kPieceBytes = size_t{1} << 40;

  template <typename T>
  Buffer<T> take(size_t count) {
    return Buffer<T>(count);
  }
  // Whether a matrix is kept in BF16, else in FP32.
  bool keeps_bf16(bool is_bf16) const { return is_bf16; }
  // Lets `fill`, a function of T*, write `count` elements of `array` from `first` on, at most kPieceBytes.
  template <typename T, typename Fill>
  void write(Buffer<T>& array, size_t first, size_t, const Fill& fill) {
    fill(array.data() + first);
  }
};

// All matrices are kept in `element`, BF16 or F32: FP32 numbers are rounded to BF16 where they have to be.
template <>
class WeightStore<DeviceBuffer> {
 public:
  static constexpr size_t kPieceBytes = size_t{16} << 20;

  WeightStore(CudaDevice& device, Dtype element) : device_(device), element_(element) {}

  CudaDevice& device() const { return device_; }
  template <typename T>
  DeviceBuffer<T> take(size_t count) {
    return DeviceBuffer<T>(count, device_);
  }
  bool keeps_bf16(bool) const { return element_ == Dtype::kBF16; }
  template <typename T, typename Fill>
  void write(DeviceBuffer<T>& array, size_t first, size_t count, const Fill& fill) {
    require(count * sizeof(T) <= kPieceBytes, "weights: expected pieces of at most {} bytes, got {}", kPieceBytes,
            count * sizeof(T));
    if (!uploads_) uploads_.emplace(kPieceBytes, device_);
    fill(static_cast<T*>(uploads_->next()));
    uploads_->upload(array.data() + first, count * sizeof(T), count * sizeof(T), 1);
  }

 private:
  CudaDevice& device_;
  Dtype element_;
  std::optional<PinnedUploads> uploads_;
};

}  // namespace replayssm
