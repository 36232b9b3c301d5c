// How decodes are run on a GPU: which kernels, and how the replay kernel cuts the work. Arithmetic of the host, there
// without CUDA too.
#pragma once

#include <cstdint>
#include <string>

#include "replayssm/core/cuda_device.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// Where what lies in a block's shared memory, in bytes from its beginning, after the slices. Of [2] and [3] units take
// turns: one is worked on, the next is made ready, the one after that is on its way.
struct ReplayShared {
  int raw_buffers = 0;  // 2, or 1: then records are fetched when those before them have been made ready
  int key_buffers = 0;  // 2, or 1: then records are made ready when a walk before them has ended
  int raw_keys = 0;     // T [raw_buffers, records, K]
  int raw_queries = 0;  // T [raw_buffers, tokens, K]
  int keys = 0;         // float [key_buffers, records, K]
  int queries = 0;      // float [2, tokens, K]
  int products = 0;     // float [2, tokens, records]
  int mutual = 0;       // float [records / 4, 6]
  int values = 0;       // T [3, records, unit_values]
  int gates = 0;        // float [3, 3, records]: decay, strength, scale
  int schedule = 0;     // ReplaySchedule
  int bytes = 0;
};
inline constexpr int kMaxUnitValues = 128;
inline constexpr int kReplayScheduleBytes = 2560;  // at most

// A unit of work is some value rows of one head of one row of the batch. A block has warps that own its rows, in slices
// of 16, and helpers beside them, which make records ready.
struct ReplayPlan {
  int unit_values = 0;
  int row_warps = 0;
  int warp_rows = 0;  // of each of them: a slice's or two's
  int helpers = 0;
  int records = 0;  // that a unit may have
  uint32_t units = 0;
  ReplayShared shared;
  int blocks = 0;  // for which a multiprocessor has shared memory; 0: the kernel has no room

  int threads() const { return 32 * (row_warps + helpers); }
};

// The sizes of a decode: B, H, V, K, L and T; elements are those of keys and values.
struct ReplaySizes {
  int rows = 0, heads = 0, values = 0, key_size = 0, window = 0, tokens_per_row = 1, element_bytes = 2;
};
ReplayPlan plan_replay(const ReplaySizes& sizes, const CudaProperties& gpu);

enum class DecodePath {
  kReplay,      // one kernel, whose blocks stay (replay.cuh)
  kPass,        // queries pulled back, a pass over the checkpoints, and flushes beside it (stream.cuh)
  kRecurrence,  // a warp for each slice of 16 rows runs the recurrence, whatever the readout
};
struct DecodePlan {
  DecodePath path = DecodePath::kRecurrence;
  ReplayPlan replay;  // of kReplay
};
DecodePlan plan_decode(const DeltaShape& shape, int rows, int window, int tokens_per_row, int element_bytes,
                       CheckpointForm form, Readout readout, const CudaProperties& gpu);
DecodePlan plan_decode(const Mamba2Shape& shape, int rows, int window, int tokens_per_row, int element_bytes,
                       const CudaProperties& gpu);

// One line.
std::string describe(const DecodePlan& plan);

}  // namespace replayssm
