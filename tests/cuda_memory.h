// A GPU's memory for rigs: tests look at and change host numbers, which travel when the other side wants them.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "replayssm/core/bf16.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/core/error.h"
#include "replayssm/core/fp16.h"
#include "replayssm/ops/rows.h"
#include "tests/arrays.h"
#include "tests/planes.h"
#include "tests/tolerance.h"

namespace replayssm::test {

// Why tests that need a GPU cannot run here, or null.
inline const char* missing_gpu() {
  return cuda_device_count() == 0 ? "no GPU here" : nullptr;
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* missing = missing_gpu()) GTEST_SKIP() << missing;
  }
};

inline float to_float(float value) {
  return value;
}

// Rounded to nearest, ties to even.
template <typename T>
T to_element(float value) {
  if constexpr (std::is_same_v<T, Bf16>)
    return to_bf16(value);
  else if constexpr (std::is_same_v<T, Fp16>)
    return {std::bit_cast<uint16_t>(static_cast<_Float16>(value))};
  else
    return value;
}

template <typename T>
std::vector<T> to_elements(std::span<const float> values) {
  std::vector<T> elements;
  elements.reserve(values.size());
  for (float value : values) elements.push_back(to_element<T>(value));
  return elements;
}

template <typename T>
std::vector<float> to_floats(std::span<const T> elements) {
  std::vector<float> values;
  values.reserve(elements.size());
  for (T element : elements) values.push_back(to_float(element));
  return values;
}

// An array of a layer's state on a GPU, at first poison. T is its type there.
template <typename T>
class CudaArray {
 public:
  // plane_head_size: the words of a head of a checkpoint that is kept as planes; else 0.
  template <typename Memory>
  CudaArray(size_t count, Memory& memory, size_t plane_head_size = 0)
      : device_(memory.device()),
        plane_head_size_(plane_head_size),
        host_(poisoned(count)),
        elements_(count, device_) {}

  size_t size() const { return host_.size(); }
  float& operator[](size_t index) { return values()[index]; }
  std::span<float> values() {
    fetch();
    is_changed_ = true;
    return host_;
  }
  std::span<const float> values() const {
    fetch();
    return host_;
  }
  operator std::span<const float>() const { return values(); }

  // For an op, which may write it.
  T* data() {
    if (is_changed_) store();
    is_stale_ = true;
    return elements_.data();
  }

 private:
  void fetch() const {
    if (!is_stale_) return;
    is_stale_ = false;
    if (plane_head_size_ > 0) {
      std::vector<uint16_t> halves(2 * host_.size());
      device_.download(halves.data(), elements_.data(), halves.size() * sizeof(uint16_t));
      from_planes(halves, plane_head_size_, host_);
    } else if constexpr (std::is_same_v<T, float>) {
      device_.download(host_.data(), elements_.data(), host_.size() * sizeof(float));
    } else {
      host_ = to_floats<T>(elements_.download(device_));
    }
  }
  void store() {
    is_changed_ = false;
    if (plane_head_size_ > 0) {
      const std::vector<uint16_t> halves = to_planes(host_, plane_head_size_);
      device_.upload(elements_.data(), halves.data(), halves.size() * sizeof(uint16_t));
    } else if constexpr (std::is_same_v<T, float>) {
      elements_.upload(host_, device_);
    } else {
      elements_.upload(to_elements<T>(host_), device_);
    }
  }

  CudaDevice& device_;
  size_t plane_head_size_;
  mutable std::vector<float> host_;
  DeviceBuffer<T> elements_;
  mutable bool is_stale_ = false;  // the host's numbers are older
  bool is_changed_ = true;         // the device's are
};

// Inputs whose activations hold only what a T can.
template <typename Inputs, typename T>
struct RoundedTo : Inputs {
  template <typename... Arguments>
  explicit RoundedTo(Arguments&&... arguments) : Inputs(std::forward<Arguments>(arguments)...) {
    for (std::vector<float>* values : this->elements())
      for (float& value : *values) value = to_float(to_element<T>(value));
  }
};

// A GPU for a rig, with activations in T and outputs in O. A call's arguments travel in one block, whose layout depends
// on their sizes alone, and each call is waited for.
template <typename T, typename O = T>
class CudaMemory {
 public:
  using Device = CudaDevice;
  using Element = T;
  using Out = O;
  template <typename U>
  using Array = CudaArray<U>;
  template <typename Inputs>
  using RoundedInputs = std::conditional_t<std::is_same_v<T, float>, Inputs, RoundedTo<Inputs, T>>;
  static constexpr int kMaxKeySize = 128;
  static constexpr int kMaxRecords = 64;
  static constexpr bool kUsesGram = false;
  static constexpr bool kPrefillSteps = true;
  static constexpr double kOutBound = std::is_same_v<O, float> ? kFloat32Bound : kBf16Bound;
  static const char* missing() { return missing_gpu(); }
  static CudaDevice device(int) { return CudaDevice(); }

  CudaMemory(CudaDevice& device, size_t) : device_(device), arguments_(kArgumentBytes, device) {}

  CudaDevice& device() { return device_; }

  // A call, as HostMemory's. Arguments may be replaced, and the op called, once more after ready().
  void begin() {
    used_bytes_ = 0;
    is_ready_ = false;
  }
  StateRows rows(const StateRows& rows) {
    const size_t count = static_cast<size_t>(rows.count);
    return {rows.count,
            array(rows.slot, count),
            array(rows.base, count),
            array(rows.history, count),
            array(rows.checkpoint_in, count),
            array(rows.checkpoint_out, count),
            rows.flush_limit == nullptr ? nullptr : array(rows.flush_limit, count)};
  }
  template <typename U>
  U* array(const U* values, size_t count) {
    const size_t begin = used_bytes_, bytes = count * sizeof(U);
    require(begin + bytes <= kArgumentBytes, "test: expected at most {} bytes of arguments, got {}", kArgumentBytes,
            begin + bytes);
    used_bytes_ += (bytes + 255) / 256 * 256;
    if (host_.size() < used_bytes_) host_.resize(used_bytes_);
    if (count > 0) std::memcpy(&host_[begin], values, bytes);
    return reinterpret_cast<U*>(arguments_.data() + begin);
  }
  // `count` rows of `width` numbers; the stride grows to the next that is allowed, with poison between the rows.
  const T* tokens(const float* values, size_t width, int64_t count, int64_t& stride) {
    constexpr int64_t kUnit = 16 / sizeof(T);
    const int64_t from_stride = stride;
    stride = (stride + kUnit - 1) / kUnit * kUnit;
    std::vector<T> elements(static_cast<size_t>(count * stride), to_element<T>(kPoison));
    for (int64_t i = 0; i < count; ++i)
      for (size_t c = 0; c < width; ++c) elements[i * stride + c] = to_element<T>(values[i * from_stride + c]);
    return array(elements.data(), elements.size());
  }
  O* results(size_t count) {
    result_count_ = count;
    const std::vector<O> poison(count, to_element<O>(kPoison));
    results_ = array(poison.data(), count);
    return results_;
  }
  CudaDevice& ready() {
    if (!is_ready_) device_.upload(arguments_.data(), host_.data(), used_bytes_);
    is_ready_ = true;
    return device_;
  }
  std::span<std::byte> workspace() { return {}; }
  std::vector<float> finish() {
    device_.synchronize();
    return read_results();
  }
  std::vector<float> read_results() {
    std::vector<O> results(result_count_);
    device_.download(results.data(), results_, result_count_ * sizeof(O));
    return to_floats<O>(results);
  }

 private:
  static constexpr size_t kArgumentBytes = size_t{32} << 20;

  CudaDevice& device_;
  DeviceBuffer<std::byte> arguments_;
  std::vector<std::byte> host_;
  size_t used_bytes_ = 0;
  bool is_ready_ = false;
  O* results_ = nullptr;
  size_t result_count_ = 0;
};

}  // namespace replayssm::test
