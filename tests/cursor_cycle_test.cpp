// The cursors that timed runs step through must be those of steady decoding.
#include "bench/cursor_cycle.h"

#include <gtest/gtest.h>

namespace replayssm::bench {
namespace {

constexpr double kMeans[] = {0.35, 1, 1.55, 2.8, 4};

TEST(CursorCycle, OneTokenPassesThroughAllHistories) {
  const std::vector<CursorPhase> cycle = cursor_cycle(16, 1, acceptance_pattern(1, 1));
  ASSERT_EQ(cycle.size(), 16u);
  for (int32_t i = 0; i < 16; ++i) EXPECT_EQ(cycle[i].history, i + 1);
}

TEST(CursorCycle, AcceptanceHasItsMean) {
  for (const double mean : kMeans) {
    const std::vector<int> accepted = acceptance_pattern(4, mean);
    double sum = 0;
    for (const int count : accepted) {
      EXPECT_GE(count, mean < 1 ? 0 : 1);
      EXPECT_LE(count, 4);
      sum += count;
    }
    EXPECT_NEAR(sum / static_cast<double>(accepted.size()), mean, 1e-9);
  }
}

// Each phase follows from the one before, the first from the last, and bases grow by what flushes fold.
TEST(CursorCycle, ClosesAndKeepsTheRules) {
  for (const int window : {4, 5, 16, 32})
    for (const double mean : kMeans) {
      const std::vector<int> accepted = acceptance_pattern(4, mean);
      const std::vector<CursorPhase> cycle = cursor_cycle(window, 4, accepted);
      ASSERT_EQ(cycle.size() % accepted.size(), 0u);
      int64_t folded = 0, committed = 0;
      for (size_t i = 0; i < cycle.size(); ++i) {
        const CursorPhase& now = cycle[i];
        const bool is_flush = now.history + 4 > window;
        EXPECT_LE(now.history, window);
        folded += is_flush ? now.history : 0;
        committed += accepted[i % accepted.size()];
        const CursorPhase& next = cycle[(i + 1) % cycle.size()];
        EXPECT_EQ(next.history, (is_flush ? 0 : now.history) + accepted[i % accepted.size()]);
        if (i + 1 == cycle.size()) continue;
        EXPECT_EQ(next.base, now.base + (is_flush ? now.history : 0));
      }
      EXPECT_EQ(folded, committed);
    }
}

TEST(CursorCycle, RowsAreSpreadEvenly) {
  for (const int batch : {1, 2, 8, 16, 100, 256, 512})
    for (const int phases : {1, 4, 16, 60}) {
      std::vector<int> rows(phases, 0);
      for (const int phase : row_phases(batch, phases)) ++rows.at(phase);
      const auto [fewest, most] = std::ranges::minmax(rows);
      EXPECT_LE(most - fewest, 1);
    }
}

}  // namespace
}  // namespace replayssm::bench
