// `replayssm bench roof`: what a machine's memory gives.
#pragma once

#include <string>

namespace replayssm::bench {

struct RoofOptions {
  std::string device = "cpu";  // or cuda
  int threads = 0;             // 0: one per core
};

// Measures and prints to stdout. Throws Error for a bad option and for a device that is not there.
void run_roof(const RoofOptions& options);

}  // namespace replayssm::bench
