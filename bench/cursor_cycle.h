// Where the cursors of a batch's rows stand in steady decoding: the cycle that each passes through, and how the rows
// are spread over it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <vector>

namespace replayssm::bench {

// Steps after which a fixed pattern of acceptances repeats, unless all steps accept the same number.
inline constexpr int kAcceptanceSteps = 20;

// The tokens that successive steps accept, over and over: `mean` on average, 1 to `tokens` each (0 too if the mean is
// below 1). `mean` is a multiple of 1 / kAcceptanceSteps.
inline std::vector<int> acceptance_pattern(int tokens, double mean) {
  if (mean == std::floor(mean)) return {static_cast<int>(mean)};
  const int least = mean < 1 ? 0 : 1;
  std::minstd_rand random(1);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  std::vector<int> accepted(kAcceptanceSteps);
  for (int& count : accepted) count = draw(least, tokens);
  const int sum = static_cast<int>(std::lround(mean * kAcceptanceSteps));
  for (int left = sum - std::accumulate(accepted.begin(), accepted.end(), 0); left != 0;) {
    const int change = left > 0 ? 1 : -1;
    int& count = accepted[draw(0, kAcceptanceSteps - 1)];
    if (count + change < least || count + change > tokens) continue;
    count += change;
    left -= change;
  }
  return accepted;
}

struct CursorPhase {
  int64_t base;
  int32_t history;
};

// The cursor before each step of a cycle of steps of `tokens` tokens, of which `accepted` are, as it is once the start
// is forgotten: after the last phase comes the first again, with a later base.
inline std::vector<CursorPhase> cursor_cycle(int window, int tokens, std::span<const int> accepted) {
  std::vector<CursorPhase> passed;
  std::vector<int64_t> pattern_start(window + 1, -1);  // by the history there: the place in `passed`
  CursorPhase cursor{0, 0};
  for (size_t step = 0;; ++step) {
    const size_t place = step % accepted.size();
    if (place == 0) {
      int64_t& start = pattern_start[cursor.history];
      if (start >= 0) {
        passed.erase(passed.begin(), passed.begin() + start);
        return passed;
      }
      start = static_cast<int64_t>(passed.size());
    }
    passed.push_back(cursor);
    if (cursor.history + tokens > window) cursor = {cursor.base + cursor.history, 0};
    cursor.history += accepted[place];
  }
}

// What a replay step moves of a row's state, in states: a flush reads and writes it, another step reads it, or half.
inline double states_moved(bool is_flush, bool is_half_read) {
  return is_flush ? 2.0 : is_half_read ? 0.5 : 1.0;
}

// How far into a cycle of `phases` each row of a batch is: evenly spread, neighbouring rows far apart.
inline std::vector<int> row_phases(int batch, int phases) {
  int stride = std::max(1, static_cast<int>(0.618 * batch));
  while (std::gcd(stride, batch) != 1) ++stride;
  std::vector<int> result;
  for (int64_t row = 0; row < batch; ++row) result.push_back(static_cast<int>(row * stride % batch * phases / batch));
  return result;
}

}  // namespace replayssm::bench
