// Float64 oracle of ops/linear.h.
#pragma once

#include <cstdint>
#include <vector>

namespace replayssm::ref {

// y[n, o] = sum_i w[o, i] x[n, i]; dense arrays.
template <typename W, typename X>
std::vector<double> linear(const W& w, const X& x, int64_t tokens, int64_t inputs, int64_t outputs) {
  std::vector<double> y(tokens * outputs);
  for (int64_t n = 0; n < tokens; ++n)
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < inputs; ++i)
        sum += static_cast<double>(w[o * inputs + i]) * static_cast<double>(x[n * inputs + i]);
      y[n * outputs + o] = sum;
    }
  return y;
}

}  // namespace replayssm::ref
