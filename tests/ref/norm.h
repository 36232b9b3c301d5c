// Float64 oracles of ops/norm.h, one vector at a time.
#pragma once

#include <cmath>
#include <span>
#include <vector>

namespace replayssm::ref {

inline std::vector<double> rms_norm(std::span<const float> x, std::span<const float> weight, bool is_zero_centred,
                                    double eps) {
  double mean = 0;
  for (float value : x) mean += static_cast<double>(value) * value / static_cast<double>(x.size());
  std::vector<double> y;
  for (size_t i = 0; i < x.size(); ++i)
    y.push_back(x[i] / std::sqrt(mean + eps) * (is_zero_centred ? 1.0 + weight[i] : weight[i]));
  return y;
}

inline std::vector<double> gated_rms_norm(std::span<const float> x, std::span<const float> z,
                                          std::span<const float> weight, bool has_sigmoid_gate, double eps) {
  std::vector<double> y = rms_norm(x, weight, false, eps);
  for (size_t i = 0; i < y.size(); ++i)
    y[i] *= (has_sigmoid_gate ? 1.0 : z[i]) / (1 + std::exp(-static_cast<double>(z[i])));
  return y;
}

inline std::vector<double> gate_first_rms_norm(std::span<const float> x, std::span<const float> z,
                                               std::span<const float> weight, double eps) {
  std::vector<double> y;
  double mean = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    y.push_back(x[i] * static_cast<double>(z[i]) / (1 + std::exp(-static_cast<double>(z[i]))));
    mean += y[i] * y[i] / static_cast<double>(x.size());
  }
  for (size_t i = 0; i < x.size(); ++i) y[i] *= weight[i] / std::sqrt(mean + eps);
  return y;
}

}  // namespace replayssm::ref
