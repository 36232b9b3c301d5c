// Sampling: an independent filter in float64, frequencies, reproducible draws, bad rows.
#include "replayssm/ops/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "replayssm/core/error.h"
#include "tests/ref/sample.h"
#include "tests/sample_cases.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

TEST(Sample, FrequenciesFollowTheFilteredDistribution) {
  std::mt19937_64 random(1);
  Device device(2);
  for (SampleSettings settings : kSampleSettings) {
    SampleRow row{.logits = random_normal(random, 12, 2.0f), .settings = settings, .history = {3, 5, 3, 3, 11}};
    row.logits[7] = row.logits[2];  // equals
    const std::vector<double> expected = ref::sample_distribution(row.logits, row.history, settings);
    constexpr int kDraws = 20000;
    std::vector<SampleRow> rows(kDraws, row);
    for (int i = 0; i < kDraws; ++i) rows[i].position = i;
    std::vector<double> count(12, 0.0);
    for (int32_t token : sampled(rows, device)) ++count.at(token);
    for (int v = 0; v < 12; ++v) {
      const double p = expected[v];
      // Five standard deviations; a token that was dropped is never drawn.
      EXPECT_LE(std::abs(count[v] - p * kDraws), 5 * std::sqrt(p * (1 - p) * kDraws) + (p > 0 ? 1 : 0))
          << "token " << v << " of p " << p;
    }
  }
}

TEST(Sample, GreedyTakesTheLowestOfEqualsAndSeesThePenalty) {
  Device device(1);
  SampleRow row{.logits = {1, 4, 4, -2, 3}};
  EXPECT_EQ(sampled({row}, device)[0], 1);
  row.settings.repetition_penalty = 1.2f;
  row.history = {1, 1, 1};
  EXPECT_EQ(sampled({row}, device)[0], 2);
  row.history = {1, 2};
  EXPECT_EQ(sampled({row}, device)[0], 1);  // 3.33, once however often
  row.settings.repetition_penalty = 2;
  EXPECT_EQ(sampled({row}, device)[0], 4);
  SampleRow negative{.logits = {-1, -1.5f}, .settings = {.repetition_penalty = 2}, .history = {0}};
  EXPECT_EQ(sampled({negative}, device)[0], 1);
}

TEST(Sample, ARowsTokenDependsOnNothingElse) {
  std::mt19937_64 random(2);
  std::vector<SampleRow> rows;
  for (int r = 0; r < 40; ++r) {
    SampleSettings settings = kSampleSettings[r % std::size(kSampleSettings)];
    settings.seed = r / 3;
    rows.push_back({random_normal(random, 1000), settings, static_cast<uint64_t>(r % 5), r % 7, {r, 2 * r}});
  }
  Device one(1);
  const std::vector<int32_t> expected = sampled(rows, one);
  for (int threads : {2, 3}) {
    Device device(threads);
    EXPECT_EQ(sampled(rows, device), expected);
  }
  std::vector<SampleRow> turned(rows.rbegin(), rows.rend());
  std::vector<int32_t> given = sampled(turned, one);
  std::reverse(given.begin(), given.end());
  EXPECT_EQ(given, expected);
  for (size_t r = 0; r < rows.size(); ++r) EXPECT_EQ(sampled({rows[r]}, one)[0], expected[r]);
}

TEST(Sample, UniformNumbersDifferInEveryPart) {
  std::vector<double> numbers;
  for (uint64_t seed = 0; seed < 20; ++seed)
    for (uint64_t sequence = 0; sequence < 20; ++sequence)
      for (int64_t position = 0; position < 20; ++position) numbers.push_back(sample_uniform(seed, sequence, position));
  const double mean = std::accumulate(numbers.begin(), numbers.end(), 0.0) / 8000;
  EXPECT_NEAR(mean, 0.5, 0.02);
  std::sort(numbers.begin(), numbers.end());
  EXPECT_EQ(std::adjacent_find(numbers.begin(), numbers.end()), numbers.end());
  EXPECT_GE(numbers.front(), 0.0);
  EXPECT_LT(numbers.back(), 1.0);
}

TEST(Sample, ABadNumberStaysInItsRow) {
  std::mt19937_64 random(3);
  Device device(2);
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  for (float value : bad) {
    for (float temperature : {0.0f, 1.0f}) {
      std::vector<SampleRow> rows(3, SampleRow{random_normal(random, 50), {.temperature = temperature}, 0, 0, {}});
      const std::vector<int32_t> expected = sampled(rows, device);
      rows[1].logits[49] = value;
      const std::vector<int32_t> given = sampled(rows, device);
      EXPECT_EQ(given[0], expected[0]);
      EXPECT_EQ(given[1], kNoToken);
      EXPECT_EQ(given[2], expected[2]);
    }
  }
}

TEST(Sample, ExtremeSettingsStaySane) {
  Device device(1);
  SampleRow row{.logits = {1, 3e38f, 2, -3e38f}, .settings = {.temperature = 1e-38f}};
  EXPECT_EQ(sampled({row}, device)[0], 1);
  row.settings = {.temperature = 1, .top_k = 2, .top_p = 0.5f, .min_p = 0.5f};
  EXPECT_EQ(sampled({row}, device)[0], 1);
}

TEST(Sample, RefusesWrongArguments) {
  Device device(1);
  const auto refused = [&](SampleSettings settings) {
    EXPECT_THROW(sampled({SampleRow{{1, 2}, settings, 0, 0, {}}}, device), Error);
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  refused({.temperature = -1});
  refused({.temperature = nan});
  refused({.temperature = std::numeric_limits<float>::infinity()});
  refused({.top_k = -1});
  refused({.top_p = 1.01f});
  refused({.top_p = nan});
  refused({.min_p = -0.1f});
  refused({.repetition_penalty = 0});
  EXPECT_THROW(sampled({SampleRow{{1, 2}, {}, 0, 0, {2}}}, device), Error);
  EXPECT_THROW(sampled({SampleRow{{1, 2}, {}, 0, 0, {-1}}}, device), Error);
  EXPECT_THROW(sample({.rows = 1, .vocabulary = 0}, device, {}), Error);
}

}  // namespace
}  // namespace replayssm
