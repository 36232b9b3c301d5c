// Internal to the CUDA replay kernel: what a launch is given, how it cuts the work, and what its blocks keep in shared
// memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "replayssm/ops/replay_plan.h"
#include "replayssm/ops/slices.cuh"

namespace replayssm {

enum class Rule { kDelta, kMamba2 };  // kDelta: one gate a head

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

// The family's own names: query is q or C, key is k or B, value is v or x, strength is beta or dt'.
template <typename T>
struct ReplayArgs {
  StateRows rows;
  int64_t slots = 0, checkpoints = 0;
  float* checkpoint = nullptr;
  CheckpointForm form = CheckpointForm::kWords;
  int heads = 0, key_heads = 0, key_size = 0, values = 0, window = 0, capacity = 0;
  T* ring_key = nullptr;
  T* ring_value = nullptr;
  float* ring_decay = nullptr;
  float* ring_strength = nullptr;
  float* ring_scale = nullptr;  // delta
  const T *query = nullptr, *key = nullptr, *value = nullptr, *z = nullptr;
  int64_t query_stride = 0, key_stride = 0, value_stride = 0, z_stride = 0;
  const float* log_decay = nullptr;  // delta: g
  const float* strength = nullptr;
  const float* a_log = nullptr;  // Mamba-2
  const float* skip = nullptr;   // Mamba-2: D
  Readout readout = Readout::kExact;
  int tokens = 0;  // of a row
  void* out = nullptr;
  bool has_float_out = false;
  CudaFault* fault = nullptr;
  const char* op = "";
  ReplayPlan plan;
  Divisor by_row, by_part, by_share;  // units of a row and of a head, heads of a key head
  uint32_t units = 0;
  uint32_t* asked = nullptr;  // counts the units asked for beyond each block's first kAhead; null if there are no more
};

// What the families' decodes have in common.
template <typename T, typename Decode>
ReplayArgs<T> replay_args(const char* op, const Decode& decode, CudaDevice& device) {
  ReplayArgs<T> args;
  args.rows = decode.rows;
  args.slots = decode.state.slots;
  args.checkpoints = decode.state.checkpoints;
  args.checkpoint = decode.state.checkpoint;
  args.form = decode.state.form;
  args.window = decode.state.window;
  args.capacity = decode.state.capacity;
  args.ring_decay = decode.state.ring_decay;
  args.readout = decode.readout;
  args.tokens = decode.tokens_per_row;
  args.out = decode.out;
  args.has_float_out = std::is_same_v<decltype(decode.out), float*>;
  args.fault = device.fault();
  args.op = op;
  return args;
}

enum class UnitKind { kNone, kPadding, kOutside, kDirect, kWalk };

// A unit as its block finds it in shared memory.
template <typename T>
struct ReplayUnit {
  UnitKind kind;
  int head, first_value, values, history, start;
  bool will_flush, appends_key, appends_gates;
  int64_t first_token;
  int64_t rows_in, rows_out;  // before the head's, in the checkpoints
  T *key_ring, *value_ring;
  float *decay_ring, *strength_ring, *scale_ring;
  const T *query, *key, *value;
  const float *log_decay, *strength;
  int64_t out;  // of value first_value of token 0
};

// A row's numbers as the arrays have them.
struct RowWords {
  int64_t base;
  int32_t slot, history, checkpoint_in, checkpoint_out;
};

// A block's units, by their index in turn. Of the first kAhead a block knows the numbers without asking.
constexpr int kAhead = 4;
constexpr int kUnits = 8;
template <typename T>
struct ReplaySchedule {
  uint32_t number[kUnits];
  RowWords row[kUnits];
  ReplayUnit<T> unit[kUnits];
  float head_numbers[3][2];                     // a_log, skip
  Arrival records[2];                           // of units in turn
  Arrival slices[kMaxUnitValues / kSliceRows];  // of a rows' warp each, by units
};
static_assert(sizeof(ReplaySchedule<float>) <= kReplayScheduleBytes);

}  // namespace replayssm
