// Arrays for tests: seeded random numbers, poison, and comparisons that no non-finite number passes.
#pragma once

#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <span>
#include <vector>

namespace replayssm::test {

// What memory is filled with before an op may read it: a NaN that stays one when its upper half is read alone.
inline const float kPoison = std::bit_cast<float>(0x7FC00000u);

inline std::vector<float> poisoned(size_t count) {
  return std::vector<float>(count, kPoison);
}

inline std::vector<float> random_normal(std::mt19937_64& random, size_t count, float scale = 1.0f, float mean = 0.0f) {
  std::normal_distribution<float> normal(mean, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

inline std::vector<float> random_uniform(std::mt19937_64& random, size_t count, float low, float high) {
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(random);
  return values;
}

// Zeros in address space alone: a page takes memory when it is written.
class SparseFloats {
 public:
  explicit SparseFloats(size_t count) : bytes_(count * sizeof(float)) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~SparseFloats() { munmap(memory_, bytes_); }
  SparseFloats(const SparseFloats&) = delete;
  SparseFloats& operator=(const SparseFloats&) = delete;

  float* data() { return static_cast<float*>(memory_); }

 private:
  size_t bytes_;
  void* memory_;
};

// ||given - expected|| / ||expected||; infinity if anything is not finite or the sizes differ.
template <typename Given, typename Expected>
double relative_error(const Given& given, const Expected& expected) {
  if (std::size(given) != std::size(expected)) return std::numeric_limits<double>::infinity();
  double error = 0, norm = 0;
  for (size_t i = 0; i < std::size(given); ++i) {
    const double difference = static_cast<double>(given[i]) - static_cast<double>(expected[i]);
    error += difference * difference;
    norm += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
  }
  if (!std::isfinite(error) || !std::isfinite(norm)) return std::numeric_limits<double>::infinity();
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

}  // namespace replayssm::test
