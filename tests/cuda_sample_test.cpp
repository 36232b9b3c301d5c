// Sampling on a GPU: the CPU's tokens, for every way that a row can take through the kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "tests/bad_input.h"
#include "tests/cuda_memory.h"
#include "tests/sample_cases.h"

namespace replayssm::test {
namespace {

class CudaSample : public CudaTest {};

// A batch on a GPU. The logits begin `offset` numbers behind an aligned place.
class CudaBatch {
 public:
  CudaBatch(const std::vector<SampleRow>& rows, CudaDevice& device, int64_t gap = 3, int64_t offset = 0)
      : device_(device),
        offset_(offset),
        batch_(rows, gap),
        logits_(shifted(), device),
        settings_(batch_.settings, device),
        sequence_(batch_.sequence, device),
        position_(batch_.position, device),
        history_(std::max<size_t>(batch_.history.size(), 1), device),
        history_begin_(batch_.history_begin, device),
        token_(rows.size() + 1, device),
        workspace_(sample_workspace_bytes(static_cast<int64_t>(rows.size()), batch_.vocabulary, device), device) {
    history_.upload(batch_.history, device);
    device.fill_words(workspace_.data(), 0xFFFFFFFFu, workspace_.size() / 4);
    device.fill_words(token_.data(), static_cast<uint32_t>(kUnsampled), token_.size());
  }

  // Other rows of the same number and vocabulary, and of no more history, in the same places.
  void replace(const std::vector<SampleRow>& rows) {
    batch_ = SampleBatch(rows, batch_.stride - batch_.vocabulary);
    logits_.upload(shifted(), device_);
    settings_.upload(batch_.settings, device_);
    sequence_.upload(batch_.sequence, device_);
    position_.upload(batch_.position, device_);
    history_.upload(batch_.history, device_);
    history_begin_.upload(batch_.history_begin, device_);
    device_.fill_words(token_.data(), static_cast<uint32_t>(kUnsampled), token_.size());
  }

  Sample args() const {
    return {.rows = static_cast<int64_t>(settings_.size()),
            .vocabulary = batch_.vocabulary,
            .logits = logits_.data() + offset_,
            .logits_stride = batch_.stride,
            .settings = settings_.data(),
            .sequence = sequence_.data(),
            .position = position_.data(),
            .history = history_.data(),
            .history_begin = history_begin_.data(),
            .token = token_.data()};
  }
  std::span<std::byte> workspace() const { return {workspace_.data(), workspace_.size()}; }

  // What the op wrote, and that it wrote nothing else.
  std::vector<int32_t> tokens() {
    device_.synchronize();
    const std::vector<float> expected = shifted();
    EXPECT_TRUE(same_bits(logits_.download(device_), expected));
    std::vector<int32_t> tokens = token_.download(device_);
    EXPECT_EQ(tokens.back(), kUnsampled);
    tokens.pop_back();
    return tokens;
  }

 private:
  std::vector<float> shifted() const {
    std::vector<float> logits = poisoned(offset_);
    logits.insert(logits.end(), batch_.logits.begin(), batch_.logits.end());
    return logits;
  }

  CudaDevice& device_;
  int64_t offset_;
  SampleBatch batch_;
  DeviceBuffer<float> logits_;
  DeviceBuffer<SampleSettings> settings_;
  DeviceBuffer<uint64_t> sequence_;
  DeviceBuffer<int64_t> position_;
  DeviceBuffer<int32_t> history_;
  DeviceBuffer<int64_t> history_begin_;
  DeviceBuffer<int32_t> token_;
  DeviceBuffer<std::byte> workspace_;
};

std::vector<int32_t> sampled_there(const std::vector<SampleRow>& rows, CudaDevice& device, int64_t gap = 3,
                                   int64_t offset = 0) {
  CudaBatch batch(rows, device, gap, offset);
  sample(batch.args(), device, batch.workspace());
  return batch.tokens();
}

void expect_the_hosts(const std::vector<SampleRow>& rows, CudaDevice& device, int64_t gap = 3) {
  Device host;
  const std::vector<int32_t> expected = sampled(rows, host), given = sampled_there(rows, device, gap);
  for (size_t r = 0; r < rows.size(); ++r) {
    const SampleSettings& settings = rows[r].settings;
    EXPECT_EQ(given[r], expected[r]) << "row " << r << ": temperature " << settings.temperature << ", top_k "
                                     << settings.top_k << ", top_p " << settings.top_p << ", min_p " << settings.min_p
                                     << ", penalty " << settings.repetition_penalty << ", position "
                                     << rows[r].position;
  }
}

// Beside those of the CPU's test: greedy rows, candidates that a block's list holds and does not hold, from bounds by
// sections, by bins and by the settings alone.
std::vector<SampleSettings> all_settings() {
  std::vector<SampleSettings> settings(std::begin(kSampleSettings), std::end(kSampleSettings));
  const SampleSettings more[] = {
      {},
      {.repetition_penalty = 1.2f},
      {.repetition_penalty = 0.7f},
      {.temperature = 1, .repetition_penalty = 1.1f},
      {.temperature = 1, .top_k = 50, .top_p = 0.95f},
      {.temperature = 0.8f, .top_k = 700, .min_p = 0.001f},
      {.temperature = 1, .top_k = 20000, .top_p = 0.97f},
      {.temperature = 1, .top_k = 30000},
      {.temperature = 1, .top_k = std::numeric_limits<int32_t>::max()},
      {.temperature = 1, .top_p = 0.5f},
      {.temperature = 0.6f, .top_p = 0.95f, .repetition_penalty = 1.05f},
      {.temperature = 5, .top_p = 0.9f},
      {.temperature = 5, .top_p = 0.9999f, .min_p = 1e-4f},
      {.temperature = 1, .min_p = 1e-30f},
      {.temperature = 3, .top_p = 0.99f, .min_p = 0.02f},
      {.temperature = 0.01f},
      {.temperature = 100, .top_k = 5},
  };
  settings.insert(settings.end(), std::begin(more), std::end(more));
  return settings;
}

std::vector<int32_t> random_tokens(std::mt19937_64& random, size_t count, int64_t vocabulary) {
  std::uniform_int_distribution<int32_t> pick(0, static_cast<int32_t>(vocabulary) - 1);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = pick(random);
  return tokens;
}

enum class Shape { kSmooth, kRounded, kFlat, kPeaked };

// Random logits; of the rounded many are equal, of the flat all; a peaked row has one logit far above the others.
SampleRow random_row(std::mt19937_64& random, int64_t vocabulary, Shape shape, const SampleSettings& settings) {
  SampleRow row{.logits = random_normal(random, vocabulary, 3.0f), .settings = settings};
  if (shape == Shape::kRounded)
    for (float& logit : row.logits) logit = std::round(logit * 4.0f) / 4.0f;
  if (shape == Shape::kFlat) row.logits.assign(vocabulary, 0.625f);
  const std::vector<int32_t> tokens = random_tokens(random, 40, vocabulary);
  if (shape == Shape::kPeaked) row.logits[tokens[0]] = 25.0f;
  row.history = tokens;
  row.history.insert(row.history.end(), tokens.begin(), tokens.begin() + 5);
  // Tokens that the penalty matters to.
  row.history.push_back(
      static_cast<int32_t>(std::max_element(row.logits.begin(), row.logits.end()) - row.logits.begin()));
  row.settings.seed = random();
  row.sequence = random() % 3;
  row.position = static_cast<int64_t>(random() % 5);
  return row;
}

std::vector<SampleRow> rows_of_all_settings(std::mt19937_64& random, int64_t vocabulary, Shape shape, int repeats) {
  std::vector<SampleRow> rows;
  for (int i = 0; i < repeats; ++i)
    for (const SampleSettings& settings : all_settings())
      rows.push_back(random_row(random, vocabulary, shape, settings));
  return rows;
}

TEST_F(CudaSample, TokensAreTheHosts) {
  CudaDevice device;
  std::mt19937_64 random(71);
  struct Size {
    int64_t vocabulary, gap;
    int repeats;
  };
  for (const auto& [vocabulary, gap, repeats] :
       {Size{1, 3, 1}, Size{7, 0, 8}, Size{512, 0, 8}, Size{1000, 3, 16}, Size{4097, 3, 8}, Size{50257, 0, 3}}) {
    for (const Shape shape : {Shape::kSmooth, Shape::kRounded, Shape::kFlat, Shape::kPeaked}) {
      SCOPED_TRACE(testing::Message() << vocabulary << " tokens, shape " << static_cast<int>(shape));
      expect_the_hosts(rows_of_all_settings(random, vocabulary, shape, repeats), device, gap);
    }
  }
}

TEST_F(CudaSample, TokensOfALargeVocabularyAreTheHosts) {
  CudaDevice device;
  std::mt19937_64 random(72);
  expect_the_hosts(rows_of_all_settings(random, 248320, Shape::kSmooth, 1), device, 0);
  expect_the_hosts(rows_of_all_settings(random, 248320, Shape::kRounded, 1), device, 1);
}

// Those of equal logits lie in one lane, in lanes, sections and blocks apart.
TEST_F(CudaSample, GreedyTakesTheLowestOfEquals) {
  CudaDevice device;
  std::mt19937_64 random(73);
  std::vector<SampleRow> rows;
  for (const std::vector<int32_t>& tokens : std::vector<std::vector<int32_t>>{
           {5, 4}, {4, 7, 132}, {511, 128, 384}, {512, 511}, {2048, 9000, 4095}, {9999, 8888}, {0, 9999}, {9999}}) {
    for (const float value : {30.0f, 1e-30f, 0.0f}) {
      SampleRow row{.logits = random_normal(random, 10000)};
      if (value < 1)
        for (float& logit : row.logits) logit = -std::abs(logit) - 1e-3f;
      for (size_t i = 0; i < tokens.size(); ++i) row.logits[tokens[i]] = value == 0 && i % 2 == 0 ? -0.0f : value;
      rows.push_back(row);
      row.settings.repetition_penalty = 1.5f;
      row.history = {tokens.back(), tokens.back(), 17};
      rows.push_back(row);
    }
  }
  expect_the_hosts(rows, device);
}

TEST_F(CudaSample, BadAndExtremeNumbersStayInTheirRows) {
  CudaDevice device;
  std::mt19937_64 random(74);
  constexpr float kLargest = std::numeric_limits<float>::max(), kInfinity = std::numeric_limits<float>::infinity();
  std::vector<SampleRow> rows;
  for (const SampleSettings& settings :
       {SampleSettings{}, SampleSettings{.temperature = 1}, SampleSettings{.temperature = 1, .top_k = 4, .top_p = 0.9f},
        SampleSettings{.temperature = 1, .min_p = 0.1f, .repetition_penalty = 2}}) {
    const auto add = [&](auto&& change) {
      rows.push_back(random_row(random, 3001, Shape::kSmooth, settings));
      change(rows.back());
    };
    for (const int place : {0, 511, 1777, 3000})
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity})
        for (const bool is_bad : {false, true})
          add([&](SampleRow& row) {
            if (is_bad) row.logits[place] = bad;
          });
    add([](SampleRow& row) { row.logits[100] = kLargest, row.logits[200] = -kLargest; });
    add([](SampleRow& row) { row.logits.assign(row.logits.size(), -kLargest); });
    // Numbers that the temperature makes infinite, and all of them zero.
    add([](SampleRow& row) { row.settings.temperature *= 1e-38f, row.logits[2999] = 2000; });
    add([](SampleRow& row) { row.settings.temperature *= kLargest; });
    // A penalty that makes some or all infinite.
    add([](SampleRow& row) {
      row.settings.repetition_penalty = 1e-38f, row.logits[1500] = 1e4f, row.history = {1500};
    });
    add([](SampleRow& row) {
      row.settings.repetition_penalty = 4;
      row.logits.assign(row.logits.size(), -kLargest);
      row.history.resize(row.logits.size());
      std::iota(row.history.begin(), row.history.end(), 0);
    });
  }
  expect_the_hosts(rows, device);
}

TEST_F(CudaSample, ARowsTokenDependsOnNothingElse) {
  CudaDevice device;
  std::mt19937_64 random(75);
  const std::vector<SampleRow> rows = rows_of_all_settings(random, 20001, Shape::kSmooth, 2);
  const std::vector<int32_t> expected = sampled_there(rows, device);
  EXPECT_EQ(sampled_there(rows, device, 0, 1), expected);
  std::vector<int32_t> given = sampled_there({rows.rbegin(), rows.rend()}, device, 7, 2);
  std::reverse(given.begin(), given.end());
  EXPECT_EQ(given, expected);
  for (size_t r = 0; r < rows.size(); r += 3) EXPECT_EQ(sampled_there({rows[r]}, device)[0], expected[r]) << r;
}

TEST_F(CudaSample, ACapturedCallServesAnyRows) {
  CudaDevice device;
  std::mt19937_64 random(76);
  std::vector<SampleRow> greedy = rows_of_all_settings(random, 5000, Shape::kSmooth, 1), others = greedy;
  for (SampleRow& row : greedy) row.settings = {};
  for (SampleRow& row : others) row = random_row(random, 5000, Shape::kRounded, row.settings);
  CudaBatch batch(greedy, device);
  CudaGraph graph(device, [&] { sample(batch.args(), device, batch.workspace()); });
  for (const auto& rows : {greedy, others, greedy}) {
    Device host;
    batch.replace(rows);
    graph.launch();
    EXPECT_EQ(batch.tokens(), sampled(rows, host));
  }
}

TEST_F(CudaSample, LongAndStrangeHistoriesAndNone) {
  CudaDevice device;
  Device host;
  std::mt19937_64 random(77);
  constexpr int64_t kVocabulary = 6000;
  std::vector<SampleRow> rows, strange;
  for (const size_t count : {size_t{0}, size_t{1}, size_t{511}, size_t{2049}, size_t{20000}}) {
    SampleRow row = random_row(random, kVocabulary, Shape::kSmooth, {.repetition_penalty = 1.7f});
    row.history = random_tokens(random, count, kVocabulary);
    rows.push_back(row);
    // What lies outside the vocabulary is passed over.
    for (const int32_t outside : {-1, static_cast<int32_t>(kVocabulary), std::numeric_limits<int32_t>::max(),
                                  std::numeric_limits<int32_t>::min()})
      row.history.insert(row.history.begin() + static_cast<int64_t>(random() % (row.history.size() + 1)), outside);
    strange.push_back(row);
  }
  const std::vector<int32_t> expected = sampled(rows, host);
  EXPECT_EQ(sampled_there(strange, device), expected);

  for (SampleRow& row : rows) row.settings = {.temperature = 1}, row.sequence = 0;
  CudaBatch batch(rows, device);
  Sample bare = batch.args();
  bare.sequence = nullptr, bare.history = nullptr, bare.history_begin = nullptr;
  sample(bare, device, batch.workspace());
  EXPECT_EQ(batch.tokens(), sampled(rows, host));
}

TEST_F(CudaSample, RefusesWrongArguments) {
  CudaDevice device;
  CudaBatch batch({SampleRow{.logits = {1, 2, 3}}, SampleRow{.logits = {3, 2, 1}}}, device);
  const Sample good = batch.args();
  const auto refuses = [&](const Sample& bad, auto... parts) {
    expect_refusal([&] { sample(bad, device, batch.workspace()); }, "sample", parts...);
  };
  const auto odd = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + 1);
  };
  Sample bad = good;
  bad.rows = -1;
  refuses(bad, "rows >= 0", "got -1");
  bad = good;
  bad.vocabulary = 0;
  refuses(bad, "a vocabulary", "and 0");
  bad.vocabulary = (int64_t{1} << 30) + 1, bad.logits_stride = bad.vocabulary;
  refuses(bad, "at most 2^30", "got 1073741825");
  bad = good;
  bad.logits_stride = 2;
  refuses(bad, "logits_stride >= 3", "got 2");
  bad = good;
  bad.settings = nullptr;
  refuses(bad, "must not be null");
  bad = good;
  bad.logits = odd(good.logits);
  refuses(bad, "logits aligned to 4 bytes");
  bad = good;
  bad.settings = odd(good.settings);
  refuses(bad, "settings aligned to 8 bytes");
  expect_refusal([&] { sample(good, device, batch.workspace().first(batch.workspace().size() - 1)); },
                 "sample: expected a workspace of");
  const DeviceBuffer<std::byte> larger(batch.workspace().size() + 64, device);
  expect_refusal([&] { sample(good, device, {larger.data() + 16, larger.size() - 16}); }, "aligned to 64 bytes");

  sample({.rows = 0, .vocabulary = 3}, device, {});
  sample(good, device, batch.workspace());
  EXPECT_EQ(batch.tokens(), (std::vector<int32_t>{2, 0}));
}

}  // namespace
}  // namespace replayssm::test
