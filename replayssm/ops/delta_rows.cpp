#include "replayssm/ops/delta_rows.h"

#include "replayssm/core/error.h"

namespace replayssm {

void check_shape(const DeltaShape& shape) {
  require(shape.heads >= 1 && shape.key_heads >= 1 && shape.heads % shape.key_heads == 0,
          "delta: expected value heads to be a multiple of key heads, got {} and {}", shape.heads, shape.key_heads);
  require(shape.key_size >= 16 && shape.key_size <= 256 && shape.key_size % 16 == 0,
          "delta: expected a key size of 16 to 256, a multiple of 16, got {}", shape.key_size);
  require(shape.value_size >= 4 && shape.value_size <= 1024 && shape.value_size % 4 == 0,
          "delta: expected a value size of 4 to 1024, a multiple of 4, got {}", shape.value_size);
  require(shape.gate_size == 1, "delta: expected one gate a head (gate size 1), got gate size {}", shape.gate_size);
}

void check_call(const char* op, const DeltaState& state, const StateRows& rows, Device& device,
                std::span<std::byte> workspace) {
  check_shape(state.shape);
  require(state.window >= 1 && state.capacity > state.window,
          "{}: expected a window of at least 1 and a larger ring capacity, got {} and {}", op, state.window,
          state.capacity);
  const size_t needed = delta_workspace_bytes(state.shape, state.capacity, device);
  require(workspace.size() >= needed, "{}: expected a workspace of {} bytes, got {}", op, needed, workspace.size());
  require(reinterpret_cast<uintptr_t>(workspace.data()) % 64 == 0, "{}: expected a workspace aligned to 64 bytes", op);
  require(rows.count >= 0, "{}: expected rows >= 0, got {}", op, rows.count);
  for (int b = 0; b < rows.count; ++b) {
    if (rows.slot[b] == kPaddingSlot) continue;
    require(rows.slot[b] >= 0 && rows.slot[b] < state.slots, "{}: row {}: expected a slot of 0 to {}, got {}", op, b,
            state.slots - 1, rows.slot[b]);
    require(rows.base[b] >= 0, "{}: row {}: expected a base >= 0, got {}", op, b, rows.base[b]);
    require(rows.history[b] >= 0 && rows.history[b] <= state.window,
            "{}: row {}: expected a history of 0 to {} records, got {}", op, b, state.window, rows.history[b]);
    for (int32_t checkpoint : {rows.checkpoint_in[b], rows.checkpoint_out[b]})
      require(checkpoint >= 0 && checkpoint < state.checkpoints, "{}: row {}: expected a checkpoint of 0 to {}, got {}",
              op, b, state.checkpoints - 1, checkpoint);
  }
}

void check_tokens(const char* op, const DeltaShape& shape, const DeltaTokens& tokens, const float* out) {
  require(tokens.q != nullptr && tokens.k != nullptr && tokens.v != nullptr && tokens.g != nullptr &&
              tokens.beta != nullptr && out != nullptr,
          "{}: expected q, k, v, g, beta and out, got a null pointer", op);
  const int64_t keys = static_cast<int64_t>(shape.key_heads) * shape.key_size;
  const int64_t values = static_cast<int64_t>(shape.heads) * shape.value_size;
  require(tokens.q_stride >= keys && tokens.k_stride >= keys && tokens.v_stride >= values,
          "{}: expected strides of at least {}, {} and {} elements for q, k and v, got {}, {} and {}", op, keys, keys,
          values, tokens.q_stride, tokens.k_stride, tokens.v_stride);
}

}  // namespace replayssm
