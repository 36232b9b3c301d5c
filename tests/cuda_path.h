// A GPU as a path of cases (paths.h), activations in T_, results in Out_.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#include "replayssm/core/bf16.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/core/fp16.h"
#include "tests/paths.h"

namespace replayssm::test {

// The tests of ops on a GPU; where there is none they say so and are skipped.
class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU here";
  }
};

template <typename T_, typename Out_ = T_, typename X_ = T_>
struct CudaPath {
  using X = X_;
  using T = T_;
  using Out = Out_;
  using Device = CudaDevice;
  template <typename E>
  using Array = DeviceBuffer<E>;
  static constexpr double kBound = std::is_same_v<Out, float> ? kFloat32Bound : kBf16Bound;
  static constexpr double kOtherFormula = std::is_same_v<Out, float> ? 100 * kFloat32Bound : kBf16Bound;
  static constexpr int kVariants = 1;

  explicit CudaPath(int = 0) {}

  template <typename E>
  static E element(float value) {
    if constexpr (std::is_same_v<E, Bf16>)
      return to_bf16(value);
    else if constexpr (std::is_same_v<E, Fp16>)
      return {std::bit_cast<uint16_t>(static_cast<_Float16>(value))};
    else
      return value;
  }
  template <typename E>
  static float number(E element) {
    if constexpr (std::is_same_v<E, float>)
      return element;
    else
      return to_float(element);
  }
  template <typename E>
  static std::vector<float> rounded(std::vector<float> values) {
    for (float& value : values) value = number(element<E>(value));
    return values;
  }
  template <typename E>
  Array<E> array(std::span<const E> values) {
    return Array<E>(values, device);
  }
  template <typename E>
  Array<E> elements(const std::vector<float>& values) {
    std::vector<E> converted(values.size());
    std::transform(values.begin(), values.end(), converted.begin(), element<E>);
    return Array<E>(converted, device);
  }
  template <typename E>
  std::vector<float> read(const Array<E>& array) {
    if (throws_faults) device.synchronize();
    const std::vector<E> values = array.download(device);
    std::vector<float> numbers(values.size());
    std::transform(values.begin(), values.end(), numbers.begin(), number<E>);
    return numbers;
  }

  Device device;
  bool throws_faults = true;  // as soon as something is read
};

}  // namespace replayssm::test
