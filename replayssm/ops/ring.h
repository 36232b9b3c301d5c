// Internal to the ops that keep rings of records: the places of records and heads, scratch memory, and the checks at
// the doors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/core/bf16.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// Cuts aligned arrays out of one block of memory; with a null block it only counts.
class Carver {
 public:
  explicit Carver(std::byte* memory, size_t alignment = 64) : memory_(memory), alignment_(alignment) {}

  template <typename T>
  T* take(size_t count) {
    T* array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * sizeof(T) + alignment_ - 1) / alignment_ * alignment_;
    return array;
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  size_t alignment_;
  size_t bytes_ = 0;
};

// One head's part of a checkpoint, in either form (rows.h).
struct HeadState {
  float* memory;  // of `size` elements, 4 bytes each
  ptrdiff_t size;
  CheckpointForm form;

  bool is_words() const { return form == CheckpointForm::kWords; }
  float* words() const { return memory; }
  Bf16* hi() const { return reinterpret_cast<Bf16*>(memory); }
  int16_t* lo() const { return reinterpret_cast<int16_t*>(memory) + size; }
};

// The ring position of record j of a window whose record 0 lies at position `start`.
inline int ring_position(int start, int j, int capacity) {
  const int position = start + j;
  return position < capacity ? position : position - capacity;
}

// Throw Error, with the op's name, for a ring, rows or a workspace outside the contract.
void check_ring(const char* op, int window, int capacity);
void check_rows(const char* op, const StateRows& rows, int64_t slots, int64_t checkpoints, int window);
void check_workspace(const char* op, std::span<std::byte> workspace, size_t needed_bytes);
// Throws Error unless token_begin [rows.count + 1] starts at 0 and does not decrease.
void check_token_begin(const char* op, const StateRows& rows, const int32_t* token_begin);
// Throws Error unless a replay step may have `tokens_per_row` tokens a row.
void check_window(const char* op, int tokens_per_row, int window, int capacity);

}  // namespace replayssm
