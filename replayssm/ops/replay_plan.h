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

// Where what lies in a block's shared memory, in bytes from its beginning, after the slices. Of [2] and [3] units
// take turns: one is worked on, the next is made ready, the one after it is on its way.
struct ReplayShared {
  int raw_places = 0;   // 3, or 2: then a unit's records are fetched when those two before it are converted
  int raw_keys = 0;     // T [raw_places, records, K]
  int raw_queries = 0;  // T [raw_places, tokens, K]
  int decays = 0;       // float [3, records, K], with a gate a channel
  int keys = 0;         // float [records, K]
  int queries = 0;      // float [2, tokens, K]
  int weights = 0;      // float [2, tokens, records]
  int values = 0;       // T [3, records, unit_values]
  int gates = 0;        // float [3, 3, records]: decay, strength, scale
  int schedule = 0;     // ReplaySchedule
  int bytes = 0;
};
inline constexpr int kMaxUnitValues = 128;
inline constexpr int kReplayScheduleBytes = 1024;  // at most

// A unit of work is some value rows of one head of one row of the batch. Each warp of a block owns a slice of 16 rows.
struct ReplayPlan {
  int unit_values = 0;
  int warps = 0;
  int records = 0;  // that a unit may have
  uint32_t units = 0;
  ReplayShared shared;
  int blocks = 0;  // for which a multiprocessor has room; 0: the kernel has none

  int threads() const { return 32 * warps; }
};

// The sizes of a decode: B, H, V, K, L and T; elements are those of keys and values.
struct ReplaySizes {
  int rows = 0, heads = 0, values = 0, key_size = 0, window = 0, tokens_per_row = 1, element_bytes = 2, gate_size = 1;
};
ReplayPlan plan_replay(const ReplaySizes& sizes, const CudaProperties& gpu);

enum class DecodePath {
  kReplay,      // one kernel, whose blocks stay (replay.cuh)
  kRecurrence,  // a warp for each slice of 16 rows runs the recurrence, whatever the readout
};
struct DecodePlan {
  DecodePath path = DecodePath::kRecurrence;
  ReplayPlan replay;  // of kReplay
};
DecodePlan plan_decode(const DeltaShape& shape, int rows, int window, int tokens_per_row, int element_bytes,
                       const CudaProperties& gpu);
DecodePlan plan_decode(const Mamba2Shape& shape, int rows, int window, int tokens_per_row, int element_bytes,
                       const CudaProperties& gpu);

// One line.
std::string describe(const DecodePlan& plan);

}  // namespace replayssm
