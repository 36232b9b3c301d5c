// The cases of routing, for any path: the oracle, ties, extreme and bad numbers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "replayssm/ops/experts.h"
#include "tests/arrays.h"
#include "tests/ref/experts.h"
#include "tests/tolerance.h"

namespace replayssm::test {

struct RouterCase {
  const char* name;
  int experts, top_k;
  RouterConfig router;
};

inline const RouterCase kRouterCases[] = {
    {"one expert", 1, 1, {}},
    {"all experts", 5, 5, {}},
    {"Qwen3.5", 256, 8, {}},
    {"softmax, plain weights", 12, 3, {.is_normalised = false}},
    {"softmax, correction", 12, 3, {.has_correction = true, .scale = 1.5}},
    {"Nemotron-3", 512, 22, {.scores = RouterScores::kSigmoid, .has_correction = true, .scale = 5.0}},
    {"Kimi-Linear", 256, 8, {.scores = RouterScores::kSigmoid, .has_correction = true, .scale = 2.446}},
    {"groups",
     256,
     8,
     {.scores = RouterScores::kSigmoid, .has_correction = true, .groups = 8, .top_groups = 4, .scale = 2.5}},
    {"groups of two, no slack", 14, 6, {.scores = RouterScores::kSigmoid, .groups = 7, .top_groups = 3}},
    {"sigmoid, plain weights", 9, 4, {.scores = RouterScores::kSigmoid, .is_normalised = false, .scale = 0.5}},
    {"the most that a GPU takes",
     1024,
     40,
     {.scores = RouterScores::kSigmoid, .has_correction = true, .groups = 64, .top_groups = 9, .scale = 2.5}},
};

// What a router gives for a batch.
struct Routed {
  std::vector<int32_t> expert;
  std::vector<float> weight;
};

// Routes the tokens of logits [N, E] into poison.
using Route =
    std::function<Routed(const RouterCase&, const std::vector<float>& logits, const std::vector<float>& correction)>;

// The largest relative error of a token's weights, infinity where the experts differ.
inline double route_error(const RouterCase& c, const std::vector<float>& logits, const std::vector<float>& correction,
                          const Routed& routed) {
  double worst = 0;
  for (size_t n = 0; n < logits.size() / c.experts; ++n) {
    const ref::Choices expected =
        ref::route(std::span(logits).subspan(n * c.experts, c.experts), correction, c.router, c.top_k);
    std::vector<double> weights;
    for (int i = 0; i < c.top_k; ++i) {
      if (expected[i].first != routed.expert[n * c.top_k + i]) return std::numeric_limits<double>::infinity();
      weights.push_back(expected[i].second);
    }
    worst = std::max(worst, relative_error(std::span(routed.weight).subspan(n * c.top_k, c.top_k), weights));
  }
  return worst;
}

// What it gave, by case.
inline std::vector<Routed> routing_matches_the_oracle(const Route& route) {
  std::vector<Routed> results;
  for (const RouterCase& c : kRouterCases) {
    std::mt19937_64 random(1);
    const std::vector<float> logits = random_normal(random, 37 * c.experts, 2.0f);
    const std::vector<float> correction = random_normal(random, c.experts, 0.3f);
    results.push_back(route(c, logits, correction));
    EXPECT_LE(route_error(c, logits, correction, results.back()), kFloat32Bound) << c.name;
  }
  return results;
}

inline void every_part_of_a_router_is_seen(const Route& route) {
  const RouterCase good{
      "good",
      32,
      4,
      {.scores = RouterScores::kSigmoid, .has_correction = true, .groups = 8, .top_groups = 3, .scale = 2}};
  std::mt19937_64 random(2);
  const std::vector<float> logits = random_normal(random, 20 * good.experts, 2.0f);
  const std::vector<float> correction = random_normal(random, good.experts, 0.3f);
  const auto error_of = [&](auto change) {
    RouterCase bad = good;
    change(bad.router);
    return route_error(good, logits, correction, route(bad, logits, correction));
  };
  EXPECT_LE(error_of([](RouterConfig&) {}), kFloat32Bound);
  EXPECT_GT(error_of([](RouterConfig& r) { r.scores = RouterScores::kSoftmax; }), kFaultBound);
  EXPECT_GT(error_of([](RouterConfig& r) { r.has_correction = false; }), kFaultBound);
  EXPECT_GT(error_of([](RouterConfig& r) { r.groups = r.top_groups = 1; }), kFaultBound);
  EXPECT_GT(error_of([](RouterConfig& r) { r.top_groups = 2; }), kFaultBound);
  EXPECT_GT(error_of([](RouterConfig& r) { r.is_normalised = false; }), kFaultBound);
  EXPECT_GT(error_of([](RouterConfig& r) { r.scale = 1.9; }), kFaultBound);
}

inline void a_correction_chooses_but_does_not_weigh(const Route& route) {
  const RouterCase c{"", 3, 2, {.scores = RouterScores::kSigmoid, .has_correction = true}};
  const Routed routed = route(c, std::vector<float>{0, 0, 0}, {0.0f, -1.0f, 5.0f});
  EXPECT_EQ(routed.expert, (std::vector<int32_t>{2, 0}));
  EXPECT_EQ(routed.weight, (std::vector<float>{0.5f, 0.5f}));
}

inline void a_group_counts_its_two_best(const Route& route) {
  // Group 0 has the best expert, group 1 the best pair.
  const RouterCase c{"", 6, 2, {.scores = RouterScores::kSigmoid, .groups = 2, .top_groups = 1}};
  const Routed routed = route(c, std::vector<float>{3, -4, -4, 1, 2, -4}, {});
  EXPECT_EQ(routed.expert, (std::vector<int32_t>{4, 3}));
}

inline void of_equals_the_lowest_number_wins(const Route& route) {
  const RouterCase plain{"", 6, 3, {}};
  EXPECT_EQ(route(plain, std::vector<float>(6, 1.0f), {}).expert, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(route(plain, std::vector<float>{0, 1, 0, 1, 0, 1}, {}).expert, (std::vector<int32_t>{1, 3, 5}));
  const RouterCase groups{"", 6, 2, {.groups = 3, .top_groups = 2}};
  EXPECT_EQ(route(groups, std::vector<float>(6, 1.0f), {}).expert, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(route(groups, std::vector<float>{0, 0, 0, 1, 1, 0}, {}).expert, (std::vector<int32_t>{3, 4}));
}

inline void huge_logits_are_numbers(const Route& route) {
  for (RouterScores scores : {RouterScores::kSoftmax, RouterScores::kSigmoid}) {
    const RouterCase c{"", 4, 2, {.scores = scores}};
    const Routed routed = route(c, std::vector<float>{-3e38f, 1e4f, -1e4f, -3.3e38f}, {});
    EXPECT_EQ(routed.expert[0], 1);
    EXPECT_EQ(routed.weight, (std::vector<float>{1.0f, 0.0f}));
  }
}

inline void a_bad_number_stays_in_its_token(const Route& route) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const RouterCase& c : kRouterCases) {
    std::mt19937_64 random(3);
    const std::vector<float> logits = random_normal(random, 3 * c.experts);
    const std::vector<float> correction = random_normal(random, c.experts, 0.3f);
    const Routed good = route(c, logits, correction);
    for (float value : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
      for (int at : {0, c.experts - 1}) {
        std::vector<float> bad = logits;
        bad[c.experts + at] = value;
        const Routed routed = route(c, bad, correction);
        for (int i = 0; i < 3 * c.top_k; ++i) {
          const bool is_bad = i / c.top_k == 1;
          EXPECT_EQ(routed.expert[i], is_bad ? i % c.top_k : good.expert[i]) << c.name;
          if (is_bad)
            EXPECT_TRUE(std::isnan(routed.weight[i])) << c.name;
          else
            EXPECT_EQ(routed.weight[i], good.weight[i]) << c.name;
        }
      }
    }
  }
}

}  // namespace replayssm::test
