// The thread pool: every index once, from any number of threads, loop after loop.
#include "replayssm/core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

TEST(ThreadPool, EveryIndexIsVisitedOnce) {
  for (int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    for (int64_t count : {0, 1, 2, 7, 64, 1000}) {
      for (int64_t grain : {1, 3, 64}) {
        std::vector<std::atomic<int>> visits(count);
        std::vector<std::atomic<int>> inside(threads);
        pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int thread) {
          ASSERT_EQ(inside[thread].fetch_add(1), 0);
          ASSERT_LE(end - begin, grain);
          for (int64_t i = begin; i < end; ++i) visits[i].fetch_add(1);
          inside[thread].fetch_sub(1);
        });
        for (auto& visit : visits) EXPECT_EQ(visit.load(), 1);
      }
    }
  }
}

TEST(ThreadPool, PlainWritesOfOneLoopAreSeenByTheNext) {
  ThreadPool pool(3);
  std::vector<int64_t> values(257, 0);
  for (int round = 0; round < 20000; ++round)
    pool.parallel_for(257, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) values[i] = values[256 - (256 - i)] + 1;
    });
  for (int64_t value : values) EXPECT_EQ(value, 20000);
}

TEST(ThreadPool, RefusesImpossibleSizes) {
  EXPECT_THROW(ThreadPool(-1), Error);
  EXPECT_THROW(ThreadPool(5000), Error);
}

}  // namespace
}  // namespace replayssm
