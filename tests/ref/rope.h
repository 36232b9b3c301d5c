// Float64 oracle of ops/rope.h, one head at a time.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <span>
#include <vector>

namespace replayssm::ref {

inline std::vector<double> rope(std::span<const float> x, int rotary_size, double theta, int64_t position) {
  std::vector<double> y(x.begin(), x.end());
  const int half = rotary_size / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) / std::pow(theta, 2.0 * i / rotary_size);
    const auto rotated = std::complex<double>(x[i], x[i + half]) * std::polar(1.0, angle);
    y[i] = rotated.real();
    y[i + half] = rotated.imag();
  }
  return y;
}

}  // namespace replayssm::ref
