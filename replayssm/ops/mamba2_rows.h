// Internal to the Mamba-2 ops: one row's window and the places of its records, and the checks at the ops' doors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/ops/mamba2.h"
#include "replayssm/ops/ring.h"

namespace replayssm {

// Heads of one group that one unit of work takes at most: few enough that a model of one group occupies all threads,
// many enough that what they share is computed once for several.
inline constexpr int kMamba2UnitHeads = 8;

// A row's heads in units of work: each group is cut into equal parts.
struct Mamba2Units {
  int groups, ratio, parts;  // ratio: heads of a group

  explicit Mamba2Units(const Mamba2Shape& shape)
      : groups(shape.groups),
        ratio(shape.heads / shape.groups),
        parts((ratio + kMamba2UnitHeads - 1) / kMamba2UnitHeads) {}
  int per_row() const { return groups * parts; }
};

// One unit of one row: `history` records of its slot's ring, then `tokens` inputs, as heads head_begin .. head_end-1 of
// a group see them. A unit reads the window's records from the inputs, so none waits for another's appending.
struct Mamba2Window {
  const Mamba2State* state;
  const Mamba2Tokens* inputs;
  int64_t first_token;  // of the row, within the inputs
  int32_t slot, checkpoint_in, checkpoint_out;
  int start;  // ring position of record 0
  int history, tokens;
  int group, head_begin, head_end;
  bool is_first_part;  // of its group: appends what the group's heads share

  int count() const { return history + tokens; }
  int position(int j) const { return ring_position(start, j, state->capacity); }
  float* ring_b(int j) const {
    const int64_t index = static_cast<int64_t>(slot) * state->shape.groups + group;
    return state->ring_b + (index * state->capacity + position(j)) * state->shape.state_size;
  }
  float* ring_x(int j, int head) const { return state->ring_x + record(j, head) * state->shape.head_size; }
  float* ring_dt(int j, int head) const { return state->ring_dt + record(j, head); }
  float* ring_decay(int j, int head) const { return state->ring_decay + record(j, head); }

  // Of record j, wherever it lies.
  const float* b(int j) const {
    if (j < history) return ring_b(j);
    return inputs->b + token(j) * inputs->b_stride + static_cast<ptrdiff_t>(group) * state->shape.state_size;
  }
  const float* x(int j, int head) const {
    if (j < history) return ring_x(j, head);
    return inputs->x + token(j) * inputs->x_stride + static_cast<ptrdiff_t>(head) * state->shape.head_size;
  }
  float dt(int j, int head) const {
    return j < history ? *ring_dt(j, head) : inputs->dt[token(j) * state->shape.heads + head];
  }
  // Of window token t.
  const float* c(int t) const {
    return inputs->c + (first_token + t) * inputs->c_stride + static_cast<ptrdiff_t>(group) * state->shape.state_size;
  }
  const float* z(int t, int head) const {  // null: no gate
    if (inputs->z == nullptr) return nullptr;
    return inputs->z + (first_token + t) * inputs->z_stride + static_cast<ptrdiff_t>(head) * state->shape.head_size;
  }

 private:
  int64_t token(int j) const { return first_token + (j - history); }
  int64_t record(int j, int head) const {
    return (static_cast<int64_t>(slot) * state->shape.heads + head) * state->capacity + position(j);
  }
};

// Unit `unit` (0 .. B * per_row() - 1) of a call: its row is unit / per_row(), whose first token is `first_token`.
inline Mamba2Window window_of(const Mamba2State& state, const StateRows& rows, const Mamba2Tokens& inputs,
                              const Mamba2Units& units, int64_t unit, int64_t first_token, int tokens) {
  const int row = static_cast<int>(unit / units.per_row()), in_row = static_cast<int>(unit % units.per_row());
  const int group = in_row / units.parts, part = in_row % units.parts;
  return {&state,
          &inputs,
          first_token,
          rows.slot[row],
          rows.checkpoint_in[row],
          rows.checkpoint_out[row],
          static_cast<int>(rows.base[row] % state.capacity),
          rows.history[row],
          tokens,
          group,
          group * units.ratio + units.ratio * part / units.parts,
          group * units.ratio + units.ratio * (part + 1) / units.parts,
          part == 0};
}

inline HeadState checkpoint_of(const Mamba2State& state, int32_t checkpoint, int head) {
  const ptrdiff_t size = static_cast<ptrdiff_t>(state.shape.head_size) * state.shape.state_size;
  return {state.checkpoint + (static_cast<int64_t>(checkpoint) * state.shape.heads + head) * size, size, state.form};
}

// Clears the unit's outputs; `out` is the row's first token's.
inline void zero_outputs(const Mamba2Window& window, float* out) {
  const Mamba2Shape& shape = window.state->shape;
  for (int t = 0; t < window.tokens; ++t)
    std::fill(out + (static_cast<ptrdiff_t>(t) * shape.heads + window.head_begin) * shape.head_size,
              out + (static_cast<ptrdiff_t>(t) * shape.heads + window.head_end) * shape.head_size, 0.0f);
}

// Throw Error, with the op's name, for arguments outside the contract.
void check_call(const char* op, const Mamba2State& state, const StateRows& rows, Device& device,
                std::span<std::byte> workspace);
void check_heads(const char* op, const Mamba2Heads& heads);
void check_tokens(const char* op, const Mamba2Shape& shape, const Mamba2Tokens& tokens, const float* out);

// The prefill's share of mamba2_workspace_bytes, for one thread.
size_t mamba2_prefill_scratch_bytes(const Mamba2Shape& shape);

}  // namespace replayssm
