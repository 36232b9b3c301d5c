// The rows of timed calls on a GPU: slots permuted within each of several sets that calls take in turn, and for every
// phase of the cursors' cycle arrays of its own, so that no cursor has to move between calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "bench/cursor_cycle.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/ops/rows.h"

namespace replayssm::bench {

class CudaRows {
 public:
  CudaRows(int batch, int sets, std::span<const CursorPhase> cycle, CudaDevice& device)
      : batch_(batch), sets_(sets), phases_(static_cast<int>(cycle.size())) {
    std::vector<int32_t> slots, set(batch);
    std::minstd_rand random(1);
    for (int i = 0; i < sets; ++i) {
      for (int row = 0; row < batch; ++row) set[row] = i * batch + row;
      std::ranges::shuffle(set, random);
      slots.insert(slots.end(), set.begin(), set.end());
    }
    std::vector<int64_t> bases;
    std::vector<int32_t> histories;
    const std::vector<int> start = row_phases(batch, phases_);
    for (int phase = 0; phase < phases_; ++phase)
      for (int row = 0; row < batch; ++row) {
        const CursorPhase& cursor = cycle[(phase + start[row]) % phases_];
        bases.push_back(cursor.base + row);  // so that rings wrap around in different places
        histories.push_back(cursor.history);
      }
    slots_ = DeviceBuffer<int32_t>(std::span<const int32_t>(slots), device);
    bases_ = DeviceBuffer<int64_t>(std::span<const int64_t>(bases), device);
    histories_ = DeviceBuffer<int32_t>(std::span<const int32_t>(histories), device);
  }

  int sets() const { return sets_; }
  int phases() const { return phases_; }

  StateRows at(int64_t call) const {
    const int32_t* slots = slots_.data() + call % sets_ * batch_;
    const int64_t phase = call % phases_ * batch_;
    return {batch_, slots, bases_.data() + phase, histories_.data() + phase, slots, slots};
  }

 private:
  int batch_, sets_, phases_;
  DeviceBuffer<int32_t> slots_, histories_;
  DeviceBuffer<int64_t> bases_;
};

}  // namespace replayssm::bench
