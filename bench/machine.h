// The machine that a benchmark runs on: its choice and its names.
#pragma once

#include <algorithm>
#include <fstream>
#include <string>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/error.h"

namespace replayssm::bench {

// Throws Error unless `device` is cpu or cuda, and the threads are those of a CPU.
inline void check_device(const std::string& device, int threads) {
  require(device == "cpu" || device == "cuda", "--device: expected cpu or cuda, got '{}'", device);
  require(device == "cpu" || threads == 0, "--threads: expected with --device cpu alone, got {}", threads);
}

inline std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) {
      std::string name = line.substr(line.find(':') + 2);
      std::ranges::replace(name, ',', ' ');
      return name;
    }
  return "unknown";
}

inline std::string cuda_device_label(const CudaDevice& device) {
  return fmt::format("cuda-sm_{}{}", device.properties().compute_major, device.properties().compute_minor);
}

}  // namespace replayssm::bench
