// Where the cases of an op without a state of its own run: here on the CPU, in cuda_path.h on a GPU. A case is a
// function template of its path, so that both walk the same ones.
#pragma once

#include <span>
#include <vector>

#include "replayssm/core/device.h"
#include "tests/arrays.h"
#include "tests/tolerance.h"

namespace replayssm::test {

struct CpuPath {
  using X = float;    // of what a norm takes beside its gate
  using T = float;    // of activations
  using Out = float;  // of results
  using Device = replayssm::Device;
  template <typename E>
  using Array = std::vector<E>;
  static constexpr double kBound = kFloat32Bound;
  // What another formula's error is above.
  static constexpr double kOtherFormula = 100 * kFloat32Bound;
  static constexpr int kVariants = 3;  // whose bits must agree: threads

  explicit CpuPath(int variant = 1) : device(variant + 1) {}

  // What an E can hold of `values`.
  template <typename E>
  static std::vector<float> rounded(std::vector<float> values) {
    return values;
  }
  template <typename E>
  Array<E> array(std::span<const E> values) {
    return {values.begin(), values.end()};
  }
  // `values` as Es, and how an op's results are read.
  template <typename E>
  Array<E> elements(const std::vector<float>& values) {
    return values;
  }
  template <typename E>
  std::vector<float> read(const Array<E>& array) {
    return array;
  }

  Device device;
};

// Where [tokens, heads, size] vectors lie in an array: vector h of token n at n * stride + h * head_stride.
struct VectorPlaces {
  int64_t tokens, heads, size, stride, head_stride;

  std::vector<float> spread(const std::vector<float>& dense) const {
    std::vector<float> spaced = poisoned(tokens * stride);
    for_each([&](size_t i, size_t place) { spaced[place] = dense[i]; });
    return spaced;
  }
  std::vector<float> gather(const std::vector<float>& spaced) const {
    std::vector<float> dense(tokens * heads * size);
    for_each([&](size_t i, size_t place) { dense[i] = spaced[place]; });
    return dense;
  }
  // Whether what no vector covers is still poison.
  bool is_clean_between(std::vector<float> spaced) const {
    for_each([&](size_t, size_t place) { spaced[place] = kPoison; });
    for (float value : spaced)
      if (!std::isnan(value)) return false;
    return true;
  }

 private:
  template <typename Visit>
  void for_each(const Visit& visit) const {
    size_t i = 0;
    for (int64_t n = 0; n < tokens; ++n)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < size; ++c) visit(i++, n * stride + h * head_stride + c);
  }
};

}  // namespace replayssm::test
