// Internal to the delta ops: one row's window and the places of its records, and the checks at the ops' doors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/ops/delta.h"
#include "replayssm/ops/ring.h"

namespace replayssm {

// One row's tokens as one key head sees them: `history` records of its slot's ring, then `tokens` inputs.
struct DeltaWindow {
  int32_t slot;
  int32_t checkpoint_in, checkpoint_out;
  int start;  // ring position of record 0
  int history;
  int tokens;
  int key_head;
  const DeltaTokens* inputs;
  int64_t first_token;  // of the row, within the inputs
  const DeltaShape* shape;

  const float* q(int t) const {
    return inputs->q + (first_token + t) * inputs->q_stride + static_cast<ptrdiff_t>(key_head) * shape->key_size;
  }
  const float* k(int t) const {
    return inputs->k + (first_token + t) * inputs->k_stride + static_cast<ptrdiff_t>(key_head) * shape->key_size;
  }
  const float* v(int t, int head) const {
    return inputs->v + (first_token + t) * inputs->v_stride + static_cast<ptrdiff_t>(head) * shape->value_size;
  }
  const float* g(int t, int head) const {
    return inputs->g + ((first_token + t) * shape->heads + head) * shape->gate_size;
  }
  float beta(int t, int head) const { return inputs->beta[(first_token + t) * shape->heads + head]; }
};

inline DeltaWindow window_of(const DeltaState& state, const StateRows& rows, const DeltaTokens& inputs, int row,
                             int64_t first_token, int tokens, int key_head) {
  return {rows.slot[row],
          rows.checkpoint_in[row],
          rows.checkpoint_out[row],
          static_cast<int>(rows.base[row] % state.capacity),
          rows.history[row],
          tokens,
          key_head,
          &inputs,
          first_token,
          &state.shape};
}

// The parts of a slot's ring that a key head and a value head own.
struct RingView {
  float* k;
  float* k_scale;
  float* gram;  // null with a gate a channel
};
inline RingView ring_view(const DeltaState& state, int32_t slot, int key_head) {
  const int64_t index = static_cast<int64_t>(slot) * state.shape.key_heads + key_head;
  const int64_t C = state.capacity;
  return {state.ring_k + index * C * state.shape.key_size, state.ring_k_scale + index * C,
          state.shape.gate_size > 1 ? nullptr : state.ring_gram + index * C * C};
}
struct HeadRing {
  float* v;
  float* decay;
  float* beta;
};
inline HeadRing head_ring_view(const DeltaState& state, int32_t slot, int head) {
  const int64_t index = static_cast<int64_t>(slot) * state.shape.heads + head;
  const int64_t C = state.capacity;
  return {state.ring_v + index * C * state.shape.value_size, state.ring_decay + index * C * state.shape.gate_size,
          state.ring_beta + index * C};
}

inline HeadState checkpoint_of(const DeltaState& state, int32_t checkpoint, int head) {
  const ptrdiff_t size = static_cast<ptrdiff_t>(state.shape.value_size) * state.shape.key_size;
  return {state.checkpoint + (static_cast<int64_t>(checkpoint) * state.shape.heads + head) * size, size, state.form};
}

// Throw Error, with the op's name, for arguments outside the contract.
void check_call(const char* op, const DeltaState& state, const StateRows& rows, Device& device,
                std::span<std::byte> workspace);
void check_tokens(const char* op, const DeltaShape& shape, const DeltaTokens& tokens, const float* out);

// The prefill's share of delta_workspace_bytes, for one thread.
size_t delta_prefill_scratch_bytes(const DeltaShape& shape);

}  // namespace replayssm
