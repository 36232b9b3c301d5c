// Memory for timed runs of the ops: inputs that are nowhere zero, and state for more batches than the caches hold.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <random>

#include "replayssm/core/buffer.h"

namespace replayssm::bench {

// Random numbers for inputs; the state starts random too, so that nothing is zero.
inline void fill_random(Buffer<float>& values, float low, float high, uint32_t seed) {
  std::minstd_rand random(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  // A block drawn once and repeated: gigabytes of draws would take longer than the benchmark.
  const size_t block = std::min<size_t>(values.size(), 1 << 16);
  for (size_t i = 0; i < block; ++i) values[i] = uniform(random);
  for (size_t i = block; i < values.size(); ++i) values[i] = values[i - block];
}

// Gives both halves of each word the word's upper half: a checkpoint as planes of finite words, whatever its heads.
inline void make_planes(Buffer<float>& words) {
  for (float& word : words) {
    const uint32_t high = std::bit_cast<uint32_t>(word) >> 16;
    word = std::bit_cast<float>(high << 16 | high);
  }
}

// Batches of `batch_floats` of state that calls must take in turn: twice the last cache, and enough where its size is
// not known.
inline int rotating_sets(int64_t batch_floats) {
  const int64_t bytes = std::max<int64_t>(int64_t{512} << 20, 2 * sysconf(_SC_LEVEL3_CACHE_SIZE));
  return static_cast<int>(std::max<int64_t>(2, (bytes / 4 + batch_floats - 1) / batch_floats));
}

}  // namespace replayssm::bench
