// How many bytes of state a step has to move.
#pragma once

#include <cstddef>

#include "replayssm/ops/delta.h"
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
// and rows; keys and values are not counted. For a row with history h and T tokens, and records of r bytes (k, its
// scale, v, decays, beta):
//
//   read     checkpoint + h r + (W-1) inputs, and if the readout is pulled back and the row does not flush the Gram
//            products of the history, h (h-1) / 2 a key head
//   written  the checkpoint unless it is a replay step that does not flush; in replay steps T r and the window's Gram
//            products, T h' + T (T-1) / 2 a key head, h' = 0 if the row flushes and h otherwise; the last inputs
//
// `readout` is that of replay steps; the other kinds read no Gram products. A layer with a gate a channel has none.
StateTraffic step_traffic(const StateLayout& layout, const StepPlan& plan, Readout readout);

}  // namespace replayssm
