// The thread pool: every index once, from any number of threads, loop after loop.
#include "replayssm/core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "replayssm/core/error.h"
#include "tests/walks.h"

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
  const int rounds = test::walk_length(20000);
  for (int round = 0; round < rounds; ++round)
    pool.parallel_for(257, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) ++values[i];
    });
  for (int64_t value : values) EXPECT_EQ(value, rounds);
}

// Rounds far apart and ranges of unequal length, so that workers and the caller fall asleep and must be woken.
TEST(ThreadPool, SleepersAreWoken) {
  ThreadPool pool(4);
  for (int round = 0; round < 50; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::atomic<int64_t> sum{0};
    pool.parallel_for(8, 1, [&](int64_t begin, int64_t, int) {
      if (begin % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      sum.fetch_add(begin);
    });
    ASSERT_EQ(sum.load(), 28);
  }
}

TEST(ThreadPool, WhatABodyThrowsReachesTheCallerAndThePoolLives) {
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 200; ++round) {
      const int64_t bad = round % 64;
      std::atomic<int> inside{0};
      EXPECT_THROW(pool.parallel_for(64, 1,
                                     [&](int64_t begin, int64_t, int) {
                                       inside.fetch_add(1);
                                       if (begin == bad) {
                                         inside.fetch_sub(1);
                                         throw Error("bad range");
                                       }
                                       inside.fetch_sub(1);
                                     }),
                   Error);
      EXPECT_EQ(inside.load(), 0);
      std::atomic<int64_t> visited{0};
      pool.parallel_for(64, 1, [&](int64_t begin, int64_t end, int) { visited.fetch_add(end - begin); });
      ASSERT_EQ(visited.load(), 64);
    }
  }
}

TEST(ThreadPool, PoolsComeAndGo) {
  for (int round = 0; round < 100; ++round) {
    ThreadPool idle(3);
    ThreadPool pool(3);
    int64_t values[16] = {};
    pool.parallel_for(16, 1, [&](int64_t begin, int64_t, int) { values[begin] = begin; });
    for (int64_t i = 0; i < 16; ++i) ASSERT_EQ(values[i], i);
  }
}

TEST(ThreadPool, RefusesImpossibleSizes) {
  EXPECT_THROW(ThreadPool(-1), Error);
  EXPECT_THROW(ThreadPool(5000), Error);
}

}  // namespace
}  // namespace replayssm
