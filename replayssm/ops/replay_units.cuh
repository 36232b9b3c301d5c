// Internal to the CUDA replay kernel: what a launch is given, how it cuts the work, and what its blocks keep in shared
// memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "replayssm/ops/delta.h"
#include "replayssm/ops/slices.cuh"

namespace replayssm {

enum class Rule { kDelta, kMamba2 };  // kDelta: one gate a head

// Where what lies in a block's shared memory, in bytes from its beginning, after the slices. Of [2] and [3] units take
// turns: one is worked on, the next is made ready, the one after that is on its way.
struct ReplayShared {
  int raw_buffers;  // 2, or 1 where that makes room: then records are fetched when those before have been made ready
  int key_buffers;  // 2, or 1 for wide windows: then records are made ready when a walk before them has ended
  int raw_keys;     // T [raw_buffers, records, K]
  int raw_queries;  // T [raw_buffers, tokens, K]
  int keys;         // float [key_buffers, records, K]
  int queries;      // float [2, tokens, K]
  int products;     // float [2, tokens, records]
  int mutual;       // float [records / 4, 6]
  int values;       // T [3, records, unit_values]
  int gates;        // float [3, 3, records]: decay, strength, scale
  int schedule;     // Schedule
  int bytes;
};

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
  // How the launch cuts the work.
  int unit_values = 0;                // rows of a block
  int warp_rows = 0;                  // of a warp: a slice's or two's
  int helpers = 0;                    // warps of a block beside those of the rows
  int records = 0;                    // that a unit may have
  Divisor by_row, by_part, by_share;  // units of a row and of a head, heads of a key head
  uint32_t units = 0;
  uint32_t* asked = nullptr;  // counts the units asked for beyond each block's first kAhead; null if there are no more
  ReplayShared shared{};
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

constexpr int kMaxUnitValues = 128;
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

// The shared memory of a block.
template <typename T>
ReplayShared share_memory(int padded_keys, int unit_values, int records, int tokens, int raw_buffers) {
  ReplayShared plan{};
  const auto take = [&](size_t bytes) {
    const int at = plan.bytes;
    plan.bytes += static_cast<int>((bytes + 15) / 16 * 16);
    return at;
  };
  const size_t keys = size_t(padded_keys);
  take(sizeof(float) * keys * unit_values);
  plan.raw_buffers = raw_buffers;
  plan.raw_keys = take(sizeof(T) * raw_buffers * records * keys);
  plan.raw_queries = take(sizeof(T) * raw_buffers * tokens * keys);
  plan.key_buffers = records <= 20 ? 2 : 1;
  plan.keys = take(sizeof(float) * plan.key_buffers * records * keys);
  plan.queries = take(sizeof(float) * 2 * tokens * keys);
  plan.products = take(sizeof(float) * 2 * tokens * records);
  plan.mutual = take(sizeof(float) * ((records + 3) / 4) * 6);
  plan.values = take(sizeof(T) * 3 * records * unit_values);
  plan.gates = take(sizeof(float) * 3 * 3 * records);
  plan.schedule = take(sizeof(ReplaySchedule<T>));
  return plan;
}

}  // namespace replayssm
