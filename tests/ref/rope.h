// Float64 oracle of ops/rope.h, one head at a time.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <span>
#include <vector>

namespace replayssm::ref {

inline double rope_angle(int i, int rotary_size, double theta, int64_t position) {
  return static_cast<double>(position) / std::pow(theta, 2.0 * i / rotary_size);
}

inline std::vector<double> rope(std::vector<double> x, int rotary_size, double theta, int64_t position) {
  const int half = rotary_size / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = rope_angle(i, rotary_size, theta, position);
    const auto rotated = std::complex<double>(x[i], x[i + half]) * std::polar(1.0, angle);
    x[i] = rotated.real();
    x[i + half] = rotated.imag();
  }
  return x;
}
inline std::vector<double> rope(std::span<const float> x, int rotary_size, double theta, int64_t position) {
  return rope(std::vector<double>(x.begin(), x.end()), rotary_size, theta, position);
}

}  // namespace replayssm::ref
