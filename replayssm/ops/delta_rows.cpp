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
  require(shape.gate_size == 1 || shape.gate_size == shape.key_size,
          "delta: expected a gate size of 1 or the key size of {}, got {}", shape.key_size, shape.gate_size);
}

void check_call(const char* op, const DeltaState& state, const StateRows& rows, Device& device,
                std::span<std::byte> workspace) {
  check_shape(state.shape);
  check_ring(op, state.window, state.capacity);
  check_workspace(op, workspace, delta_workspace_bytes(state.shape, state.capacity, device));
  check_rows(op, rows, state.slots, state.checkpoints, state.window);
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
