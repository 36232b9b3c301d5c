// Rows to sample from, as their tests name them, and the arrays that the op takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/ops/sample.h"
#include "tests/arrays.h"

namespace replayssm::test {

struct SampleRow {
  std::vector<float> logits;
  SampleSettings settings = {};
  uint64_t sequence = 0;
  int64_t position = 0;
  std::vector<int32_t> history = {};
};

// Rows of one vocabulary; `gap` poisoned numbers lie between the logits of two.
struct SampleBatch {
  explicit SampleBatch(const std::vector<SampleRow>& rows, int64_t gap = 3)
      : vocabulary(static_cast<int64_t>(rows[0].logits.size())),
        stride(vocabulary + gap),
        logits(poisoned(rows.size() * stride)) {
    for (size_t r = 0; r < rows.size(); ++r) {
      std::copy(rows[r].logits.begin(), rows[r].logits.end(), logits.begin() + r * stride);
      settings.push_back(rows[r].settings);
      sequence.push_back(rows[r].sequence);
      position.push_back(rows[r].position);
      history.insert(history.end(), rows[r].history.begin(), rows[r].history.end());
      history_begin.push_back(static_cast<int64_t>(history.size()));
    }
  }

  int64_t vocabulary, stride;
  std::vector<float> logits;
  std::vector<SampleSettings> settings;
  std::vector<uint64_t> sequence;
  std::vector<int64_t> position, history_begin = {0};
  std::vector<int32_t> history;
};

inline constexpr int32_t kUnsampled = -77;  // what tokens hold before

inline std::vector<int32_t> sampled(const std::vector<SampleRow>& rows, Device& device) {
  const SampleBatch batch(rows);
  std::vector<int32_t> token(batch.settings.size(), kUnsampled);
  Buffer<std::byte> workspace(sample_workspace_bytes(batch.vocabulary, device));
  std::fill(workspace.begin(), workspace.end(), std::byte{0xFF});
  sample({.rows = static_cast<int64_t>(token.size()),
          .vocabulary = batch.vocabulary,
          .logits = batch.logits.data(),
          .logits_stride = batch.stride,
          .settings = batch.settings.data(),
          .sequence = batch.sequence.data(),
          .position = batch.position.data(),
          .history = batch.history.data(),
          .history_begin = batch.history_begin.data(),
          .token = token.data()},
         device, {workspace.data(), workspace.size()});
  return token;
}

// Settings that exercise each filter and all together.
inline const SampleSettings kSampleSettings[] = {
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

}  // namespace replayssm::test
