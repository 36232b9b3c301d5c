// How many bytes of state a step has to move.
#pragma once

#include <cstddef>

#include "replayssm/ops/rows.h"
#include "replayssm/state/layout.h"
#include "replayssm/state/step.h"

namespace replayssm {

struct StateTraffic {
  size_t read_bytes = 0;
  size_t written_bytes = 0;

  StateTraffic& operator+=(const StateTraffic& other) {
    read_bytes += other.read_bytes;
    written_bytes += other.written_bytes;
    return *this;
  }
};

// What the step `plan` reads and writes of checkpoints, ring records and convolution inputs, each byte once, all layers
// and rows; keys and values are not counted. For a row with history h and T tokens, and records of r bytes (the layer's
// ring arrays but square ones, which hold a record's products with older ones):
//
//   read     checkpoint + h r + (W-1) inputs, and if the readout is direct and the row does not flush the products of
//            the history, h (h-1) / 2 a head of a square array; then also of a checkpoint in planes only half
//   written  the checkpoint unless it is a replay step that does not flush; in replay steps T r and the window's
//            products, T h' + T (T-1) / 2 a head, h' = 0 if the row flushes and h otherwise; the last inputs
//
// `readout` is that of replay steps; the other kinds read no products. `storage` says what the pool keeps, and how.
StateTraffic step_traffic(const StateLayout& layout, const StepPlan& plan, Readout readout,
                          const StateStorage& storage = {});

}  // namespace replayssm
