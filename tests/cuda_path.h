// A GPU as a path of cases (paths.h), activations in T_, results in Out_.
#pragma once

#include <type_traits>

#include "tests/cuda_memory.h"
#include "tests/paths.h"

namespace replayssm::test {

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
  static std::vector<float> rounded(std::vector<float> values) {
    for (float& value : values) value = to_float(to_element<E>(value));
    return values;
  }
  template <typename E>
  Array<E> array(std::span<const E> values) {
    return Array<E>(values, device);
  }
  template <typename E>
  Array<E> elements(const std::vector<float>& values) {
    return Array<E>(to_elements<E>(values), device);
  }
  template <typename E>
  std::vector<float> read(const Array<E>& array) {
    if (throws_faults) device.synchronize();
    return to_floats<E>(array.download(device));
  }

  Device device;
  bool throws_faults = true;  // as soon as something is read
};

}  // namespace replayssm::test
