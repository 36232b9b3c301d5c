// How long the tests' walks are: random ones, and the ones that look for drift.
#pragma once

#include <cstdlib>
#include <string_view>

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

}  // namespace replayssm::test
