// Float64 oracle of ops/sample.h: the distribution that a row is drawn from, by sorting and masking.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <span>
#include <vector>

#include "replayssm/ops/sample.h"

namespace replayssm::ref {

inline std::vector<double> softmax(const std::vector<double>& scores) {
  const double largest = *std::max_element(scores.begin(), scores.end());
  std::vector<double> p;
  for (double score : scores) p.push_back(std::exp(score - largest));
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= total;
  return p;
}

inline std::vector<double> sample_distribution(std::span<const float> logits, std::span<const int32_t> history,
                                               const SampleSettings& settings) {
  constexpr double kDropped = -std::numeric_limits<double>::infinity();
  std::vector<double> scores(logits.begin(), logits.end());
  for (int32_t token : std::set<int32_t>(history.begin(), history.end()))
    scores[token] *= scores[token] < 0 ? settings.repetition_penalty : 1.0 / settings.repetition_penalty;
  for (double& score : scores) score /= settings.temperature;
  if (settings.top_k > 0) {
    std::vector<double> sorted = scores;
    std::sort(sorted.rbegin(), sorted.rend());
    const double smallest = sorted[std::min<size_t>(settings.top_k, sorted.size()) - 1];
    for (double& score : scores)
      if (score < smallest) score = kDropped;
  }
  if (settings.top_p < 1) {
    const std::vector<double> p = softmax(scores);
    std::vector<size_t> order(p.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
    double before = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      if (i > 0 && before >= settings.top_p) scores[order[i]] = kDropped;
      before += p[order[i]];
    }
  }
  const std::vector<double> p = softmax(scores);
  const double largest = *std::max_element(p.begin(), p.end());
  for (size_t v = 0; v < p.size(); ++v)
    if (p[v] < settings.min_p * largest) scores[v] = kDropped;
  return softmax(scores);
}

}  // namespace replayssm::ref
