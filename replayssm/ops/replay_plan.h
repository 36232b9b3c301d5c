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

// Where what lies in a block's shared memory, in bytes from its beginning, after the slices. Units take turns with the
// places: while one is worked on, the next ones are made ready and the one kLead after it is on its way.
struct ReplayShared {
  int raw_keys = 0;     // T [kLead, records, K]
  int raw_queries = 0;  // T [kLead, tokens, K]
  int decays = 0;       // float [places, records, K], with a gate a channel
  int keys = 0;         // float [key_places, records, K]
  // Of queries and weights as many places as there are or, with several tokens, kLead.
  int queries = 0;   // float [places, tokens, K]; for planes room for three BF16 parts of as many numbers
  int weights = 0;   // float [places, tokens, window]
  int values = 0;    // T [places, records, unit_values]
  int gates = 0;     // float [places, 3, records]: decay, strength, scale
  int schedule = 0;  // ReplaySchedule
  int order = 0;     // RowOrder
  int bytes = 0;
};
inline constexpr int kLead = 2;  // a unit's records are fetched so many units before it is worked on
inline constexpr int kMaxUnitValues = 128;
inline constexpr int kArrangedWords = 16;  // of 32 rows each
inline constexpr int kRowOrderBytes = 6 * kArrangedWords + 12;
inline constexpr int kReplayScheduleBytes = 1552;  // at most

// A unit of work is some value rows of one head of one row of the batch. Each warp of a block owns a slice of 16 rows.
struct ReplayPlan {
  int unit_values = 0;
  int warps = 0;
  int records = 0;  // that a unit may have
  uint32_t units = 0;
  int places = 0;      // kLead + 1 or kLead + 2: of what stays until a unit is done
  int key_places = 0;  // 1 or 2: of walks, whose records are converted a unit before where there are two
  ReplayShared shared;
  int blocks = 0;  // for which a multiprocessor has room; 0: the kernel has none

  int threads() const { return 32 * warps; }
};

// The sizes of a decode: B, H, V, K, L and T; elements are those of keys and values.
struct ReplaySizes {
  int rows = 0, heads = 0, values = 0, key_size = 0, window = 0, tokens_per_row = 1, element_bytes = 2, gate_size = 1;
  CheckpointForm form = CheckpointForm::kWords;
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
                       CheckpointForm form, const CudaProperties& gpu);
DecodePlan plan_decode(const Mamba2Shape& shape, int rows, int window, int tokens_per_row, int element_bytes,
                       CheckpointForm form, const CudaProperties& gpu);

// One line.
std::string describe(const DecodePlan& plan);

}  // namespace replayssm
