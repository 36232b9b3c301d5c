// Float64 oracle of ops/experts.h: one token's choice by sorting, and a whole block of experts by its definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "replayssm/ops/experts.h"

namespace replayssm::ref {

// (expert, weight), in the order of choice.
using Choices = std::vector<std::pair<int, double>>;

// 0 .. values.size()-1 by falling value, of equals by rising number.
inline std::vector<int> falling_order(const std::vector<double>& values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  return order;
}

inline Choices route(std::span<const float> logits, std::span<const float> correction, const RouterConfig& router,
                     int top_k) {
  const int experts = static_cast<int>(logits.size()), size = experts / router.groups;
  std::vector<double> scores, choice, group_scores;
  double total = 0;
  for (double logit : logits) total += std::exp(logit);
  for (double logit : logits)
    scores.push_back(router.scores == RouterScores::kSoftmax ? std::exp(logit) / total : 1 / (1 + std::exp(-logit)));
  for (int e = 0; e < experts; ++e) choice.push_back(scores[e] + (router.has_correction ? double(correction[e]) : 0));
  for (int g = 0; g < router.groups; ++g) {
    std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::sort(members.rbegin(), members.rend());
    group_scores.push_back(members[0] + (size > 1 ? members[1] : 0));
  }
  std::vector<int> groups = falling_order(group_scores);
  groups.resize(router.top_groups);
  Choices chosen;
  double sum = 0;
  for (int e : falling_order(choice)) {
    if (std::find(groups.begin(), groups.end(), e / size) == groups.end()) continue;
    if (static_cast<int>(chosen.size()) == top_k) break;
    chosen.emplace_back(e, scores[e]);
    sum += scores[e];
  }
  for (auto& [expert, weight] : chosen) weight *= router.scale / (router.is_normalised ? sum + 1e-20 : 1);
  return chosen;
}

}  // namespace replayssm::ref
