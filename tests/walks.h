// How long the tests' walks are: random ones, and the ones that look for drift.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

namespace replayssm::test {

// A short walk runs the code that a long one runs; what a long one adds, rare meetings of events and drift, one run in
// full finds. So sanitizers and further vector targets take this part of each walk.
inline constexpr int kShortWalkPart = 10;

inline bool are_walks_short() {
  const char* length = std::getenv("REPLAYSSM_TEST_WALKS");
  return length != nullptr && std::string_view(length) == "short";
}

// The length of a walk of `full` steps.
inline int walk_length(int full) {
  return are_walks_short() ? full / kShortWalkPart : full;
}

// What a walk through a list visits: all of it, or if short the first `count`.
template <typename T>
std::span<const T> walked(const std::vector<T>& list, size_t count) {
  return std::span(list).first(are_walks_short() ? count : list.size());
}

}  // namespace replayssm::test
