// Internal to the CUDA replay kernel: what a launch is given, how it cuts the work, and what its blocks keep in shared
// memory.
#pragma once

#include <cstdint>

#include "replayssm/ops/recurrence_args.h"
#include "replayssm/ops/replay_order.cuh"
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

// A row's numbers, as words of the arrays that have them: base has two.
enum RowWord { kBaseWord, kSlotWord = 2, kHistoryWord, kInWord, kOutWord, kLimitWord, kRowWords };
struct RowWords {
  int32_t words[kRowWords];
};

template <typename T>
struct ReplayArgs : RecurrenceArgs<T> {
  Readout readout = Readout::kExact;
  int tokens = 0;  // of a row
  ReplayPlan plan;
  const int32_t* row_words[kRowWords] = {};  // of rows; flush_limit's may be null
  Divisor by_row, by_part, by_share;         // units of a row and of a head, heads of a key head
  // Counts the units asked for beyond those that each block knows; null if there are no more.
  uint32_t* asked = nullptr;
  int first_arranged_row = -1;  // the rows from here on may be taken in another order; negative: none
};

// kDirect: its tokens are read out directly; kWalk: the recurrence runs over its records and tokens; kFold: it runs
// over the records, and the tokens are read out directly from the state after them.
enum class UnitKind { kNone, kPadding, kOutside, kDirect, kFold, kWalk };

// A unit as its block finds it in shared memory.
enum UnitOffset { kSliceIn, kRowsOut, kHeadRecords, kKeyHeadRecords, kFirstOut, kOffsets };
struct ReplayUnit {
  UnitKind kind;
  int row, head, key_head, first_value, values, history, start;
  int place, raw_place;  // in shared memory, of those that units have in turn; raw: of records as they come
  int walks;             // of the block's units before
  int key_place;         // of those for converted keys; a walk's
  bool will_flush;
  // Bytes before its first slice's words, or upper halves, in the checkpoints it is read from; rows before its head's
  // in those it is written to; records before its rings and its key head's; outputs before its first.
  int64_t offset[kOffsets];
};

// A block's units, by their index in turn, and when what is theirs is there: phase index / kUnits of barrier index %
// kUnits. No warp is so far ahead of another that a phase could be over twice. Walks' conversions likewise, by their
// own count.
constexpr int kUnits = 8;
constexpr int kConverted = 4;
constexpr int kRowTurns = kLead + 2;
struct ReplaySchedule {
  // Of units to be derived, whose first are made without that.
  uint32_t number[kRowTurns];
  RowWords row[kRowTurns];
  PhaseBarrier rows_there[kRowTurns];
  ReplayUnit unit[kUnits];
  float head_numbers[kLead + 2][2];  // a_log, skip
  PhaseBarrier derived[kUnits];
  Arrival<true> records[kUnits];
  PhaseBarrier ready[kUnits];          // for each token what a direct readout takes
  PhaseBarrier converted[kConverted];  // what a walk takes
  PhaseBarrier done[kUnits];           // all warps with the unit
  // Of a warp each: words, by units; or upper halves, in two places in turn, and lower ones, by walks.
  Arrival<false> slices[kMaxUnitValues / kSliceRows][2];
  Arrival<false> lo_slices[kMaxUnitValues / kSliceRows];

  __device__ void initialise(int thread, int warps, int tokens) {
    if (thread < kUnits) {
      derived[thread].initialise(1);
      records[thread].initialise();
      ready[thread].initialise(tokens);
      done[thread].initialise(warps);
    }
    if (thread < kRowTurns) rows_there[thread].initialise(33);
    if (thread < kConverted) converted[thread].initialise(warps);
    if (thread >= warps) return;
    slices[thread][0].initialise();
    slices[thread][1].initialise();
    lo_slices[thread].initialise();
  }
};
static_assert(sizeof(ReplaySchedule) <= kReplayScheduleBytes);

}  // namespace replayssm
