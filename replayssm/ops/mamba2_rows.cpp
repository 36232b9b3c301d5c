#include "replayssm/ops/mamba2_rows.h"

#include "replayssm/core/error.h"

namespace replayssm {

void check_shape(const Mamba2Shape& shape) {
  require(shape.heads >= 1 && shape.groups >= 1 && shape.heads % shape.groups == 0,
          "mamba2: expected heads to be a multiple of groups, got {} and {}", shape.heads, shape.groups);
  require(shape.head_size >= 8 && shape.head_size <= 1024 && shape.head_size % 8 == 0,
          "mamba2: expected a head size of 8 to 1024, a multiple of 8, got {}", shape.head_size);
  require(shape.state_size >= 16 && shape.state_size <= 256 && shape.state_size % 16 == 0,
          "mamba2: expected a state size of 16 to 256, a multiple of 16, got {}", shape.state_size);
}

void check_call(const char* op, const Mamba2State& state, const StateRows& rows, Device& device,
                std::span<std::byte> workspace) {
  check_shape(state.shape);
  check_ring(op, state.window, state.capacity);
  check_workspace(op, workspace, mamba2_workspace_bytes(state.shape, state.capacity, device));
  check_rows(op, rows, state.slots, state.checkpoints, state.window);
}

void check_heads(const char* op, const Mamba2Heads& heads) {
  require(heads.a_log != nullptr, "{}: expected a_log, got a null pointer", op);
}

void check_tokens(const char* op, const Mamba2Shape& shape, const Mamba2Tokens& tokens, const float* out) {
  require(tokens.x != nullptr && tokens.b != nullptr && tokens.c != nullptr && tokens.dt != nullptr && out != nullptr,
          "{}: expected x, b, c, dt and out, got a null pointer", op);
  const int64_t heads = static_cast<int64_t>(shape.heads) * shape.head_size;
  const int64_t groups = static_cast<int64_t>(shape.groups) * shape.state_size;
  require(tokens.x_stride >= heads && tokens.b_stride >= groups && tokens.c_stride >= groups,
          "{}: expected strides of at least {}, {} and {} elements for x, b and c, got {}, {} and {}", op, heads,
          groups, groups, tokens.x_stride, tokens.b_stride, tokens.c_stride);
  require(tokens.z == nullptr || tokens.z_stride >= heads,
          "{}: expected a stride of at least {} elements for z, got {}", op, heads, tokens.z_stride);
}

}  // namespace replayssm
