#include "replayssm/ops/ring.h"

#include "replayssm/core/error.h"

namespace replayssm {

void check_ring(const char* op, int window, int capacity) {
  require(window >= 1 && capacity > window,
          "{}: expected a window of at least 1 and a larger ring capacity, got {} and {}", op, window, capacity);
}

void check_rows(const char* op, const StateRows& rows, int64_t slots, int64_t checkpoints, int window) {
  require(rows.count >= 0, "{}: expected rows >= 0, got {}", op, rows.count);
  for (int b = 0; b < rows.count; ++b) {
    if (rows.slot[b] == kPaddingSlot) continue;
    require(rows.slot[b] >= 0 && rows.slot[b] < slots, "{}: row {}: expected a slot of 0 to {}, got {}", op, b,
            slots - 1, rows.slot[b]);
    require(rows.base[b] >= 0, "{}: row {}: expected a base >= 0, got {}", op, b, rows.base[b]);
    require(rows.history[b] >= 0 && rows.history[b] <= window,
            "{}: row {}: expected a history of 0 to {} records, got {}", op, b, window, rows.history[b]);
    if (rows.flush_limit != nullptr)
      require(rows.flush_limit[b] >= 1, "{}: row {}: expected a flush limit of at least 1 record, got {}", op, b,
              rows.flush_limit[b]);
    for (int32_t checkpoint : {rows.checkpoint_in[b], rows.checkpoint_out[b]})
      require(checkpoint >= 0 && checkpoint < checkpoints, "{}: row {}: expected a checkpoint of 0 to {}, got {}", op,
              b, checkpoints - 1, checkpoint);
  }
}

void check_workspace(const char* op, std::span<std::byte> workspace, size_t needed_bytes) {
  require(workspace.size() >= needed_bytes, "{}: expected a workspace of {} bytes, got {}", op, needed_bytes,
          workspace.size());
  require(reinterpret_cast<uintptr_t>(workspace.data()) % 64 == 0, "{}: expected a workspace aligned to 64 bytes", op);
}

void check_token_begin(const char* op, const StateRows& rows, const int32_t* token_begin) {
  require(token_begin != nullptr && token_begin[0] == 0, "{}: expected token_begin to start at 0", op);
  for (int b = 0; b < rows.count; ++b)
    require(token_begin[b] <= token_begin[b + 1], "{}: expected token_begin not to decrease, got {} then {} at row {}",
            op, token_begin[b], token_begin[b + 1], b);
}

void check_window(const char* op, int tokens_per_row, int window, int capacity) {
  require(tokens_per_row >= 1 && tokens_per_row <= window, "{}: expected 1 to {} tokens a row (the window), got {}", op,
          window, tokens_per_row);
  require(tokens_per_row <= capacity - window,
          "{}: expected at most {} tokens a row (ring capacity {} less window {}), got {}", op, capacity - window,
          capacity, window, tokens_per_row);
}

}  // namespace replayssm
