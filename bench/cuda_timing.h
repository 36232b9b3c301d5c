// Times of calls on a GPU, as a graph of them, and what they leave in their outputs.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "bench/cuda_memory.h"
#include "replayssm/core/cuda_device.h"

namespace replayssm::bench {

inline constexpr int kWarmUps = 3;
// After memory has been taken an H200 needs some 30 ms until it is as fast as it stays: before, conventional steps of
// batch 256 take a tenth longer.
inline constexpr std::chrono::milliseconds kFirstWarmUp{300};
// A graph moves this much at least, so that its launch is a small part of its time.
inline constexpr double kGraphBytes = 2e9;

// What calls in rotation read in at least before one reads the same again.
inline double rotation_bytes(const CudaDevice& device) {
  return std::max(400e6, 4.0 * static_cast<double>(device.properties().l2_bytes));
}

struct CudaTimes {
  double us_median = 0, us_min = 0, us_p95 = 0;  // of one call
};

// call(0) .. call(calls - 1) as one graph. is_first: nothing has been timed yet.
template <typename Call>
CudaTimes time_calls(int calls, const Call& call, int rounds, bool is_first, CudaDevice& device) {
  CudaGraph graph(device, [&] {
    for (int i = 0; i < calls; ++i) call(i);
  });
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kWarmUps || (is_first && std::chrono::steady_clock::now() - start < kFirstWarmUp); ++i) {
    graph.launch();
    device.synchronize();
  }
  CudaTimer timer(device);
  timer.mark();
  for (int round = 0; round < rounds; ++round) {
    graph.launch();
    timer.mark();
  }
  std::vector<double> us = timer.intervals_us();
  for (double& interval : us) interval /= calls;
  std::ranges::sort(us);
  return {us[us.size() / 2], us.front(), us[us.size() * 95 / 100]};
}

// Runs the calls one by one, each on poisoned outputs, and counts what no op should give.
template <typename Out, typename Call>
OutputCounts counts_of_calls(int calls, const Call& call, Out* out, size_t count, CudaDevice& device) {
  const DeviceBuffer<OutputCounts> counts(1, device);
  device.fill_words(counts.data(), 0, sizeof(OutputCounts) / sizeof(uint32_t));
  for (int i = 0; i < calls; ++i) {
    device.fill_words(out, kPoison<Out>, count * sizeof(Out) / sizeof(uint32_t));
    call(i);
    count_outputs(out, count, counts.data(), device);
  }
  device.synchronize();
  return counts.download(device)[0];
}

}  // namespace replayssm::bench
