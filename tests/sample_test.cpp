// Sampling: an independent filter in float64, frequencies, reproducible draws, bad rows.
#include "replayssm/ops/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "replayssm/core/buffer.h"
#include "replayssm/core/error.h"
#include "tests/arrays.h"
#include "tests/ref/sample.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

struct Row {
  std::vector<float> logits;
  SampleSettings settings = {};
  uint64_t sequence = 0;
  int64_t position = 0;
  std::vector<int32_t> history = {};
};

std::vector<int32_t> run(const std::vector<Row>& rows, Device& device) {
  const int64_t vocabulary = static_cast<int64_t>(rows[0].logits.size()), stride = vocabulary + 3;
  std::vector<float> logits = poisoned(rows.size() * stride);
  std::vector<SampleSettings> settings;
  std::vector<uint64_t> sequence;
  std::vector<int64_t> position, history_begin = {0};
  std::vector<int32_t> history = {}, token(rows.size(), -77);
  for (size_t r = 0; r < rows.size(); ++r) {
    std::copy(rows[r].logits.begin(), rows[r].logits.end(), logits.begin() + r * stride);
    settings.push_back(rows[r].settings);
    sequence.push_back(rows[r].sequence);
    position.push_back(rows[r].position);
    history.insert(history.end(), rows[r].history.begin(), rows[r].history.end());
    history_begin.push_back(static_cast<int64_t>(history.size()));
  }
  Buffer<std::byte> workspace(sample_workspace_bytes(vocabulary, device));
  std::fill(workspace.begin(), workspace.end(), std::byte{0xFF});
  sample({.rows = static_cast<int64_t>(rows.size()),
          .vocabulary = vocabulary,
          .logits = logits.data(),
          .logits_stride = stride,
          .settings = settings.data(),
          .sequence = sequence.data(),
          .position = position.data(),
          .history = history.data(),
          .history_begin = history_begin.data(),
          .token = token.data()},
         device, {workspace.data(), workspace.size()});
  return token;
}

// Settings that exercise each filter and all together.
const SampleSettings kSettings[] = {
    {.temperature = 1},
    {.temperature = 0.7f},
    {.temperature = 1, .top_k = 3},
    {.temperature = 1.5f, .top_p = 0.8f},
    {.temperature = 1, .min_p = 0.1f},
    {.temperature = 0.9f, .top_k = 6, .top_p = 0.9f, .min_p = 0.05f, .repetition_penalty = 1.3f},
    {.temperature = 1, .top_k = 1},
    {.temperature = 1, .top_p = 0},
    {.temperature = 1, .min_p = 1},
    {.temperature = 1, .top_k = 100, .repetition_penalty = 0.5f},
};

TEST(Sample, FrequenciesFollowTheFilteredDistribution) {
  std::mt19937_64 random(1);
  Device device(2);
  for (SampleSettings settings : kSettings) {
    Row row{.logits = random_normal(random, 12, 2.0f), .settings = settings, .history = {3, 5, 3, 3, 11}};
    row.logits[7] = row.logits[2];  // equals
    const std::vector<double> expected = ref::sample_distribution(row.logits, row.history, settings);
    constexpr int kDraws = 20000;
    std::vector<Row> rows(kDraws, row);
    for (int i = 0; i < kDraws; ++i) rows[i].position = i;
    std::vector<double> count(12, 0.0);
    for (int32_t token : run(rows, device)) ++count.at(token);
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
  Row row{.logits = {1, 4, 4, -2, 3}};
  EXPECT_EQ(run({row}, device)[0], 1);
  row.settings.repetition_penalty = 1.2f;
  row.history = {1, 1, 1};
  EXPECT_EQ(run({row}, device)[0], 2);
  row.history = {1, 2};
  EXPECT_EQ(run({row}, device)[0], 1);  // 3.33, once however often
  row.settings.repetition_penalty = 2;
  EXPECT_EQ(run({row}, device)[0], 4);
  Row negative{.logits = {-1, -1.5f}, .settings = {.repetition_penalty = 2}, .history = {0}};
  EXPECT_EQ(run({negative}, device)[0], 1);
}

TEST(Sample, ARowsTokenDependsOnNothingElse) {
  std::mt19937_64 random(2);
  std::vector<Row> rows;
  for (int r = 0; r < 40; ++r) {
    SampleSettings settings = kSettings[r % std::size(kSettings)];
    settings.seed = r / 3;
    rows.push_back({random_normal(random, 1000), settings, static_cast<uint64_t>(r % 5), r % 7, {r, 2 * r}});
  }
  Device one(1);
  const std::vector<int32_t> expected = run(rows, one);
  for (int threads : {2, 3}) {
    Device device(threads);
    EXPECT_EQ(run(rows, device), expected);
  }
  std::vector<Row> turned(rows.rbegin(), rows.rend());
  std::vector<int32_t> given = run(turned, one);
  std::reverse(given.begin(), given.end());
  EXPECT_EQ(given, expected);
  for (size_t r = 0; r < rows.size(); ++r) EXPECT_EQ(run({rows[r]}, one)[0], expected[r]);
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
      std::vector<Row> rows(3, Row{random_normal(random, 50), {.temperature = temperature}, 0, 0, {}});
      const std::vector<int32_t> expected = run(rows, device);
      rows[1].logits[49] = value;
      const std::vector<int32_t> given = run(rows, device);
      EXPECT_EQ(given[0], expected[0]);
      EXPECT_EQ(given[1], kNoToken);
      EXPECT_EQ(given[2], expected[2]);
    }
  }
}

TEST(Sample, ExtremeSettingsStaySane) {
  Device device(1);
  Row row{.logits = {1, 3e38f, 2, -3e38f}, .settings = {.temperature = 1e-38f}};
  EXPECT_EQ(run({row}, device)[0], 1);
  row.settings = {.temperature = 1, .top_k = 2, .top_p = 0.5f, .min_p = 0.5f};
  EXPECT_EQ(run({row}, device)[0], 1);
}

TEST(Sample, RefusesWrongArguments) {
  Device device(1);
  const auto refused = [&](SampleSettings settings) {
    EXPECT_THROW(run({Row{{1, 2}, settings, 0, 0, {}}}, device), Error);
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
  EXPECT_THROW(run({Row{{1, 2}, {}, 0, 0, {2}}}, device), Error);
  EXPECT_THROW(run({Row{{1, 2}, {}, 0, 0, {-1}}}, device), Error);
  EXPECT_THROW(sample({.rows = 1, .vocabulary = 0}, device, {}), Error);
}

}  // namespace
}  // namespace replayssm
