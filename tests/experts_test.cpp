// Mixture of experts: choices against the oracle, ties, bad numbers, whole batches against single tokens bit for bit.
#include "replayssm/ops/experts.h"

#include <gtest/gtest.h>

#include <limits>

#include "replayssm/ops/activation.h"
#include "replayssm/ops/linear.h"
#include "tests/arrays.h"
#include "tests/bad_input.h"
#include "tests/ref/experts.h"
#include "tests/ref/linear.h"
#include "tests/router_cases.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Routed route_on(Device& device, const RouterCase& c, const std::vector<float>& logits,
                const std::vector<float>& correction) {
  const int64_t tokens = static_cast<int64_t>(logits.size()) / c.experts;
  Routed routed{std::vector<int32_t>(tokens * c.top_k, -1), poisoned(tokens * c.top_k)};
  std::vector<double> workspace(route_experts_workspace_bytes(c.experts, device) / sizeof(double),
                                std::numeric_limits<double>::quiet_NaN());
  route_experts({.tokens = tokens,
                 .experts = c.experts,
                 .top_k = c.top_k,
                 .router = c.router,
                 .logits = logits.data(),
                 .logits_stride = c.experts,
                 .correction = correction.data(),
                 .expert = routed.expert.data(),
                 .weight = routed.weight.data()},
                device, std::as_writable_bytes(std::span(workspace)));
  return routed;
}

Route route_with(Device& device) {
  return [&](const RouterCase& c, const std::vector<float>& logits, const std::vector<float>& correction) {
    return route_on(device, c, logits, correction);
  };
}

TEST(Experts, RouteMatchesTheOracle) {
  std::vector<Routed> first;
  for (int threads : {1, 2, 3}) {
    Device device(threads);
    const std::vector<Routed> routed = routing_matches_the_oracle(route_with(device));
    if (threads == 1) first = routed;
    for (size_t i = 0; i < routed.size(); ++i) {
      EXPECT_EQ(routed[i].expert, first[i].expert);
      EXPECT_TRUE(same_bits(routed[i].weight, first[i].weight));
    }
  }
}

TEST(Experts, EveryPartOfARouterIsSeen) {
  Device device(1);
  every_part_of_a_router_is_seen(route_with(device));
}

TEST(Experts, ACorrectionChoosesButDoesNotWeigh) {
  Device device(1);
  a_correction_chooses_but_does_not_weigh(route_with(device));
}

TEST(Experts, AGroupCountsItsTwoBest) {
  Device device(1);
  a_group_counts_its_two_best(route_with(device));
}

TEST(Experts, OfEqualsTheLowestNumberWins) {
  Device device(1);
  of_equals_the_lowest_number_wins(route_with(device));
}

TEST(Experts, HugeLogitsAreNumbers) {
  Device device(1);
  huge_logits_are_numbers(route_with(device));
}

TEST(Experts, ABadNumberStaysInItsToken) {
  Device device(2);
  a_bad_number_stays_in_its_token(route_with(device));
}

TEST(Experts, RouteRefusesWrongArguments) {
  Device device(1);
  const std::vector<float> logits(24, 0.0f);
  std::vector<int32_t> expert(24, -1);
  std::vector<float> weight = poisoned(24);
  std::vector<double> workspace(3 * 12);
  const RouteExperts good{.tokens = 2,
                          .experts = 12,
                          .top_k = 3,
                          .logits = logits.data(),
                          .logits_stride = 12,
                          .expert = expert.data(),
                          .weight = weight.data()};
  const auto refused = [&](auto change, auto... parts) {
    RouteExperts bad = good;
    change(bad);
    expect_refusal([&] { route_experts(bad, device, std::as_writable_bytes(std::span(workspace))); }, parts...);
  };
  refused([](RouteExperts& a) { a.tokens = -1; }, "tokens", "-1");
  refused([](RouteExperts& a) { a.experts = 0; }, "experts", "got 0");
  refused([](RouteExperts& a) { a.top_k = 0; }, "top_k", "1 .. 12", "got 0");
  refused([](RouteExperts& a) { a.top_k = 13; }, "top_k", "1 .. 12", "got 13");
  refused([](RouteExperts& a) { a.router.groups = 0; }, "groups", "got 0");
  refused([](RouteExperts& a) { a.router.groups = 5; }, "groups", "divisor of 12", "got 5");
  refused([](RouteExperts& a) { a.router.groups = a.router.top_groups = 12; }, "groups", "at least two");
  refused([](RouteExperts& a) { a.router.top_groups = 0; }, "top_groups", "1 .. 1", "got 0");
  refused([](RouteExperts& a) { a.router.top_groups = 2; }, "top_groups", "1 .. 1", "got 2");
  refused([](RouteExperts& a) { a.router.groups = 6; }, "top_k", "at most 2", "got 3");
  refused([](RouteExperts& a) { a.router.scale = std::numeric_limits<double>::infinity(); }, "scale");
  refused([](RouteExperts& a) { a.router.has_correction = true; }, "correction");
  refused([](RouteExperts& a) { a.logits = nullptr; }, "logits");
  refused([](RouteExperts& a) { a.expert = nullptr; }, "expert");
  refused([](RouteExperts& a) { a.weight = nullptr; }, "weight");
  refused([](RouteExperts& a) { a.logits_stride = 11; }, "logits_stride", "12", "11");
  expect_refusal([&] { route_experts(good, device, std::as_writable_bytes(std::span(workspace).first(35))); },
                 "workspace", "288", "280");
  for (float value : weight) EXPECT_TRUE(std::isnan(value));
  route_experts({.experts = 12, .top_k = 3}, device, {});
}

TEST(Experts, ChoicesAreGroupedByExpertInTheOrderOfTokens) {
  const std::vector<int32_t> expert = {4, 1, 1, 0, 4, 0, 1, 4};
  const std::vector<float> expert_weight = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<int64_t> begin(6, -1);
  std::vector<int32_t> token(8, -1);
  std::vector<float> weight = poisoned(8);
  GroupChoices args{.tokens = 4,
                    .experts = 5,
                    .top_k = 2,
                    .expert = expert.data(),
                    .expert_weight = expert_weight.data(),
                    .begin = begin.data(),
                    .token = token.data(),
                    .weight = weight.data()};
  group_choices(args);
  EXPECT_EQ(begin, (std::vector<int64_t>{0, 2, 5, 5, 5, 8}));
  EXPECT_EQ(token, (std::vector<int32_t>{1, 2, 0, 1, 3, 0, 2, 3}));
  EXPECT_EQ(weight, (std::vector<float>{4, 6, 2, 3, 7, 1, 5, 8}));

  const auto refused = [&](std::vector<int32_t> wrong, auto... parts) {
    args.expert = wrong.data();
    expect_refusal([&] { group_choices(args); }, parts...);
  };
  refused({4, 1, 1, 0, 5, 0, 1, 4}, "0 .. 4", "got 5");
  refused({4, 1, 1, 0, -1, 0, 1, 4}, "0 .. 4", "got -1");
  refused({4, 1, 1, 0, 4, 4, 1, 4}, "token 2 has 4 twice");
  args.expert = expert.data();
  args.top_k = 0;
  expect_refusal([&] { group_choices(args); }, "top_k");
  args.top_k = 2;
  args.token = nullptr;
  expect_refusal([&] { group_choices(args); }, "token");
  args.tokens = 0;
  group_choices(args);
  EXPECT_EQ(begin, std::vector<int64_t>(6, 0));
}

TEST(Experts, RowsAreGatheredAndAdded) {
  std::mt19937_64 random(4);
  for (int64_t size : {1, 15, 16, 33, 640}) {
    const int64_t tokens = 9, x_stride = size + 3, y_stride = size + 1;
    const std::vector<float> x = random_normal(random, tokens * x_stride);
    const std::vector<float> before = random_normal(random, tokens * y_stride);
    const std::vector<int32_t> token = {7, 0, 3, 8};
    const std::vector<float> weight = {0.5f, -2.0f, 1.0f, 0.0f};
    for (int threads : {1, 2}) {
      Device device(threads);
      std::vector<float> rows = poisoned(4 * y_stride), sum = before, all = before;
      gather_rows({.rows = 4,
                   .size = size,
                   .token = token.data(),
                   .x = x.data(),
                   .x_stride = x_stride,
                   .y = rows.data(),
                   .y_stride = y_stride},
                  device);
      AddRows add{.rows = 4,
                  .size = size,
                  .token = token.data(),
                  .weight = weight.data(),
                  .x = rows.data(),
                  .x_stride = y_stride,
                  .y = sum.data(),
                  .y_stride = y_stride};
      add_rows(add, device);
      add = {.rows = tokens, .size = size, .x = x.data(), .x_stride = x_stride, .y = all.data(), .y_stride = y_stride};
      add_rows(add, device);
      std::vector<double> expected(before.begin(), before.end()), expected_all = expected;
      for (size_t i = 0; i < token.size(); ++i) {
        for (int64_t c = 0; c < size; ++c) {
          EXPECT_EQ(rows[i * y_stride + c], x[token[i] * x_stride + c]);
          expected[token[i] * y_stride + c] += double(weight[i]) * x[token[i] * x_stride + c];
        }
        EXPECT_TRUE(std::isnan(rows[i * y_stride + size]));
      }
      for (int64_t n = 0; n < tokens; ++n)
        for (int64_t c = 0; c < size; ++c) expected_all[n * y_stride + c] += x[n * x_stride + c];
      EXPECT_LE(relative_error(sum, expected), kFloat32Bound);
      EXPECT_LE(relative_error(all, expected_all), kFloat32Bound);
      for (int64_t n : {1, 2, 4, 5, 6})  // tokens that no row is added to
        EXPECT_TRUE(same_bits(std::span(sum).subspan(n * y_stride, y_stride),
                              std::span(before).subspan(n * y_stride, y_stride)));
    }
  }
}

TEST(Experts, RowsRefuseWrongArguments) {
  Device device(1);
  float x = 1, y = 2;
  const int32_t token = 0;
  expect_refusal([&] { gather_rows({.rows = -1, .size = 1}, device); }, "gather_rows", "-1");
  expect_refusal([&] { gather_rows({.rows = 1, .size = 1, .x = &x, .x_stride = 1, .y = &y, .y_stride = 1}, device); },
                 "gather_rows", "token");
  expect_refusal(
      [&] {
        gather_rows({.rows = 1, .size = 2, .token = &token, .x = &x, .x_stride = 1, .y = &y, .y_stride = 2}, device);
      },
      "gather_rows", "stride", "got 1 and 2");
  expect_refusal([&] { add_rows({.rows = 1, .size = -1}, device); }, "add_rows", "-1");
  expect_refusal([&] { add_rows({.rows = 1, .size = 1, .y = &y}, device); }, "add_rows", "null");
  expect_refusal([&] { add_rows({.rows = 1, .size = 2, .x = &x, .x_stride = 2, .y = &y, .y_stride = 1}, device); },
                 "add_rows", "stride", "got 2 and 1");
  add_rows({.rows = 0, .size = 2}, device);
  EXPECT_EQ(y, 2);
}

// A block of relu^2 experts, put together from the ops as a model does it.
struct ExpertBlock {
  static constexpr int kExperts = 12, kTopK = 4;
  static constexpr int64_t kInputs = 37, kSize = 21;
  const RouterCase router{"", kExperts, kTopK, {.scores = RouterScores::kSigmoid, .scale = 1.7}};

  explicit ExpertBlock(uint64_t seed) {
    std::mt19937_64 random(seed);
    gate = random_normal(random, kExperts * kInputs, 0.3f);
    up = random_normal(random, kExperts * kSize * kInputs, 0.3f);
    down = random_normal(random, kExperts * kInputs * kSize, 0.3f);
  }

  static void multiply(const float* w, int64_t tokens, int64_t inputs, int64_t outputs, const std::vector<float>& x,
                       std::vector<float>& y, Device& device) {
    linear({.tokens = tokens,
            .inputs = inputs,
            .outputs = outputs,
            .weight_f32 = w,
            .x = x.data(),
            .x_stride = inputs,
            .y = y.data(),
            .y_stride = outputs},
           device);
  }

  std::vector<float> run(const std::vector<float>& x, Device& device) const {
    const int64_t tokens = static_cast<int64_t>(x.size()) / kInputs;
    std::vector<float> logits = poisoned(tokens * kExperts), rows = poisoned(x.size()), outputs = poisoned(x.size());
    std::vector<float> inner = poisoned(tokens * kSize), y(x.size(), 0.0f), weight = poisoned(tokens * kTopK);
    std::vector<int64_t> begin(kExperts + 1);
    std::vector<int32_t> token(tokens * kTopK);
    multiply(gate.data(), tokens, kInputs, kExperts, x, logits, device);
    const Routed routed = route_on(device, router, logits, {});
    group_choices({.tokens = tokens,
                   .experts = kExperts,
                   .top_k = kTopK,
                   .expert = routed.expert.data(),
                   .expert_weight = routed.weight.data(),
                   .begin = begin.data(),
                   .token = token.data(),
                   .weight = weight.data()});
    for (int e = 0; e < kExperts; ++e) {
      const int64_t count = begin[e + 1] - begin[e];
      gather_rows({.rows = count,
                   .size = kInputs,
                   .token = token.data() + begin[e],
                   .x = x.data(),
                   .x_stride = kInputs,
                   .y = rows.data(),
                   .y_stride = kInputs},
                  device);
      multiply(up.data() + e * kSize * kInputs, count, kInputs, kSize, rows, inner, device);
      relu2(
          {.tokens = count, .size = kSize, .x = inner.data(), .x_stride = kSize, .y = inner.data(), .y_stride = kSize},
          device);
      multiply(down.data() + e * kInputs * kSize, count, kSize, kInputs, inner, outputs, device);
      add_rows({.rows = count,
                .size = kInputs,
                .token = token.data() + begin[e],
                .weight = weight.data() + begin[e],
                .x = outputs.data(),
                .x_stride = kInputs,
                .y = y.data(),
                .y_stride = kInputs},
               device);
    }
    return y;
  }

  std::vector<double> expected(const std::vector<float>& x) const {
    std::vector<double> y;
    for (size_t n = 0; n < x.size() / kInputs; ++n) {
      const auto row = std::span(x).subspan(n * kInputs, kInputs);
      std::vector<float> logits;
      for (double logit : ref::linear(gate, row, 1, kInputs, kExperts)) logits.push_back(static_cast<float>(logit));
      std::vector<double> sum(kInputs);
      for (const auto& [expert, weight] : ref::route(logits, {}, router.router, kTopK)) {
        std::vector<double> inner =
            ref::linear(std::span(up).subspan(expert * kSize * kInputs), row, 1, kInputs, kSize);
        for (double& value : inner) value = value > 0 ? value * value : 0;
        const auto output = ref::linear(std::span(down).subspan(expert * kInputs * kSize), inner, 1, kSize, kInputs);
        for (int64_t i = 0; i < kInputs; ++i) sum[i] += weight * output[i];
      }
      y.insert(y.end(), sum.begin(), sum.end());
    }
    return y;
  }

  std::vector<float> gate, up, down;
};

TEST(Experts, ABlockMatchesTheOracle) {
  const ExpertBlock block(5);
  std::mt19937_64 random(6);
  const std::vector<float> x = random_normal(random, 50 * ExpertBlock::kInputs);
  Device device(2);
  const std::vector<double> expected = block.expected(x);
  EXPECT_LE(relative_error(block.run(x, device), expected), kFloat32Bound);
  // One weight of one expert.
  ExpertBlock wrong(5);
  wrong.down[(7 * ExpertBlock::kInputs + 3) * ExpertBlock::kSize + 2] += 3;
  EXPECT_GT(relative_error(wrong.run(x, device), expected), kFaultBound);
}

TEST(Experts, ATokensBitsDependOnNeitherBatchNorPlaceNorThreads) {
  const ExpertBlock block(7);
  constexpr int64_t kInputs = ExpertBlock::kInputs;
  std::mt19937_64 random(8);
  const int64_t tokens = 67;
  const std::vector<float> x = random_normal(random, tokens * kInputs);
  Device one(1);
  std::vector<float> alone;
  for (int64_t n = 0; n < tokens; ++n) {
    const std::vector<float> y = block.run({x.begin() + n * kInputs, x.begin() + (n + 1) * kInputs}, one);
    alone.insert(alone.end(), y.begin(), y.end());
  }
  for (int threads : {1, 2, 3}) {
    Device device(threads);
    for (int64_t first : {0, 1, 2, 40}) {
      const std::vector<float> y = block.run({x.begin() + first * kInputs, x.end()}, device);
      EXPECT_TRUE(same_bits(y, std::span(alone).subspan(first * kInputs))) << threads << " threads, from " << first;
    }
  }
}

TEST(Experts, ABadTokenSpoilsItselfAlone) {
  const ExpertBlock block(9);
  constexpr int64_t kInputs = ExpertBlock::kInputs;
  std::mt19937_64 random(10);
  std::vector<float> x = random_normal(random, 20 * kInputs);
  Device device(2);
  const std::vector<float> good = block.run(x, device);
  x[11 * kInputs + 5] = kNan;
  const std::vector<float> bad = block.run(x, device);
  for (int64_t n = 0; n < 20; ++n) {
    for (int64_t i = 0; i < kInputs; ++i) {
      if (n == 11)
        EXPECT_TRUE(std::isnan(bad[n * kInputs + i]));
      else
        EXPECT_EQ(bad[n * kInputs + i], good[n * kInputs + i]);
    }
  }
}

}  // namespace
}  // namespace replayssm
