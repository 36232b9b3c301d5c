// Internal to the CUDA replay kernel: what a launch is given, how it cuts the work, and what its blocks keep in shared
// memory.
#pragma once

#include <cstdint>

#include "replayssm/ops/recurrence_args.h"
#include "replayssm/ops/replay_plan.h"
#include "replayssm/ops/slices.cuh"

namespace replayssm {

// Division by what a launch knows, as a product: exact for all 32-bit numbers.
struct Divisor {
  uint64_t reciprocal = 0;  // of 2^64, rounded up
  uint32_t divisor = 1;

  Divisor() = default;
  explicit Divisor(uint32_t by) : reciprocal(~uint64_t{0} / by + 1), divisor(by) {}
  __device__ uint32_t quotient(uint32_t number) const {
    return divisor == 1 ? number : static_cast<uint32_t>(__umul64hi(reciprocal, number));
  }
};

template <typename T>
struct ReplayArgs : RecurrenceArgs<T> {
  Readout readout = Readout::kExact;
  int tokens = 0;  // of a row
  ReplayPlan plan;
  Divisor by_row, by_part, by_share;  // units of a row and of a head, heads of a key head
  uint32_t* asked = nullptr;  // counts the units asked for beyond each block's first kAhead; null if there are no more
};

enum class UnitKind { kNone, kPadding, kOutside, kDirect, kWalk };

// A unit as its block finds it in shared memory.
enum UnitOffset { kRowsIn, kRowsOut, kHeadRecords, kKeyHeadRecords, kFirstOut, kOffsets };
struct ReplayUnit {
  UnitKind kind;
  int row, head, key_head, first_value, values, history, start;
  bool will_flush;
  // Rows before the head's, in the checkpoints; records before its rings and its key head's; outputs before its first.
  int64_t offset[kOffsets];
};

// A row's numbers as the arrays have them.
struct RowWords {
  int64_t base;
  int32_t slot, history, checkpoint_in, checkpoint_out;
};

// A block's units, by their index in turn. Of the first kAhead a block knows the numbers without asking.
constexpr int kAhead = 4;
constexpr int kUnits = 8;
static_assert(kUnits > kAhead + 1);
struct ReplaySchedule {
  uint32_t number[kUnits];
  RowWords row[kUnits];
  int32_t flush_limit[kUnits];  // of the same rows, if they have any
  ReplayUnit unit[kUnits];
  float head_numbers[3][2];                            // a_log, skip
  Arrival<true> records[2];                            // of units in turn
  Arrival<false> slices[kMaxUnitValues / kSliceRows];  // of a warp each, by units
};
static_assert(sizeof(ReplaySchedule) <= kReplayScheduleBytes);

}  // namespace replayssm
