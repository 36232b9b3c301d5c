// Float64 oracle of ops/attention.h: one token of one row, its keys and values in order of position.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace replayssm::ref {

// q [Q, D]; k [positions, M, D], v [positions, M, E], the last position being the token's own. Returns [Q, E].
template <typename Array>
std::vector<double> attention(const Array& q, const Array& k, const Array& v, int query_heads, int kv_heads, int size,
                              int value_size, int64_t positions, double scale) {
  std::vector<double> out(static_cast<size_t>(query_heads) * value_size, 0.0);
  for (int i = 0; i < query_heads; ++i) {
    const int m = i / (query_heads / kv_heads);
    std::vector<double> score(positions);
    for (int64_t s = 0; s < positions; ++s) {
      for (int d = 0; d < size; ++d)
        score[s] += static_cast<double>(q[i * size + d]) * static_cast<double>(k[(s * kv_heads + m) * size + d]);
      score[s] *= scale;
    }
    const double largest = *std::max_element(score.begin(), score.end());
    double total = 0;
    for (double& value : score) total += value = std::exp(value - largest);
    for (int64_t s = 0; s < positions; ++s)
      for (int d = 0; d < value_size; ++d)
        out[i * value_size + d] += score[s] / total * v[(s * kv_heads + m) * value_size + d];
  }
  return out;
}

}  // namespace replayssm::ref
