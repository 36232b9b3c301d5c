// What the timed layers on a GPU have in common.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bench/cuda_memory.h"
#include "replayssm/ops/rows.h"

namespace replayssm::bench {

// What a timed layer's memory must hold.
struct CudaLayerSize {
  int64_t slots = 0;
  int window = 1;
  int tokens_per_row = 1;
  int64_t tokens = 0;  // of a call: its inputs and outputs
  CheckpointForm form = CheckpointForm::kWords;
};

// A random state of `count` words. As planes any upper half that is not zero makes a finite word with any lower one.
inline float* take_checkpoint(CudaArena& arena, size_t count, CheckpointForm form) {
  if (form == CheckpointForm::kWords) return arena.take_uniform<float>(count, -1, 1);
  return reinterpret_cast<float*>(arena.take_uniform<Bf16>(2 * count, -1, 1));
}

// What a layer's calls move. The products of keys that the delta rule keeps beside its records are not counted: they
// follow from the records.
struct CudaLayerBytes {
  double checkpoint = 0;  // the words of a slot's state
  double record = 0;      // of the ring, all heads; keys that heads share count once
  double token = 0;       // inputs and outputs
};

}  // namespace replayssm::bench
