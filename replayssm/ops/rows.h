// The rows of one step: which slot each row of the batch uses and where that slot's cursor stands.
//
// Letters used by every op (docs/math.md): B rows of a batch, T tokens of a row's window, N tokens of the whole batch,
// H value heads, G key heads (H % G == 0; value head h uses key head h / (H/G)), K key size, V value size,
// L history window, h committed records of a slot's ring, C = L + largest T: the ring's capacity in records.
#pragma once

#include <cstdint>

#include "replayssm/core/cuda_device.h"

namespace replayssm {

// The slot of a padding row: it reads and writes no state, and its outputs are zeros.
inline constexpr int32_t kPaddingSlot = -1;

// One cursor (base, history) for all layers: `base` tokens are folded into the checkpoint and `history` more are
// committed records of the ring. Record i of the history lies at ring position (base + i) % C; token t of the window
// being decoded is record history + t. The arrays are read only; no op moves a cursor. No two rows that are not padding
// may name one slot, and a checkpoint that a row writes may be no other row's checkpoint_in or checkpoint_out.
struct StateRows {
  int count = 0;                            // B
  const int32_t* slot = nullptr;            // [B] in 0 .. slots-1, or kPaddingSlot
  const int64_t* base = nullptr;            // [B] >= 0
  const int32_t* history = nullptr;         // [B] 0 .. L
  const int32_t* checkpoint_in = nullptr;   // [B] checkpoint that is read
  const int32_t* checkpoint_out = nullptr;  // [B] checkpoint that a flush writes; may equal checkpoint_in
  // [B] >= 1, or null: none. A row whose history has reached its limit flushes in a replay step even though the ring
  // has room, so that rows which begin together need not flush together. A limit of L or more is none.
  const int32_t* flush_limit = nullptr;

  // Whether a replay step of T = `tokens` tokens a row with window L first folds row b's history. A row without history
  // never does.
  bool will_flush(int64_t b, int tokens, int window) const {
    return history[b] + tokens > window || (flush_limit != nullptr && history[b] >= flush_limit[b]);
  }
};

// How the FP32 words of a checkpoint lie in memory. Either way a head takes 4 bytes an element, and zeros are zeros.
enum class CheckpointForm {
  // [.., V, K] words.
  kWords,
  // [.., 2, V, K] 16-bit halves: for each head the words' nearest BF16, then what is missing to the word:
  //   hi = (word + 0x8000) >> 16, as an unsigned word;  lo = word - (hi << 16), signed;  word = (hi << 16) + lo
  // A word comes back exactly; a NaN is stored as 0x7FC00000, and a finite value beyond BF16's largest has an infinite
  // hi. The direct readout reads hi alone: half the bytes, outputs within the rounding of BF16 (relative 2^-9 an
  // element). Folds, steps and the exact readout read both and are what they are with words, bit for bit.
  kPlanes,
};

// How a replay step forms its outputs from a checkpoint and the records since.
enum class Readout {
  // In closed form from the checkpoint and the records' inputs, equal to the recurrence up to rounding.
  kDirect,
  // The recurrence is run over the records without writing its result: the outputs have the conventional step's bits.
  kExact,
};

// Rows in device memory at addresses that stay, so that a captured graph finds those of any step there.
struct RowArrays {
  int capacity = 0;                   // rows
  int64_t* base = nullptr;            // [capacity]
  int32_t* slot = nullptr;            // [capacity]
  int32_t* history = nullptr;         // [capacity]
  int32_t* checkpoint_in = nullptr;   // [capacity]
  int32_t* checkpoint_out = nullptr;  // [capacity]
  int32_t* token_begin = nullptr;     // [capacity + 1]
  int32_t* flush_limit = nullptr;     // [capacity], or null: the rows have none
};
// Writes rows that lie in host memory, with their token_begin [rows.count + 1], to `to`, queued on the GPU's stream.
// The rest of `to` become padding rows without tokens. A flush limit above 65,535 is written as 65,535, and so is that
// of a row without one. The host's arrays travel with the launches: they may change as soon as the call returns, and it
// waits for nothing.
void put_rows(const StateRows& rows, const int32_t* token_begin, const RowArrays& to, CudaDevice& device);

// Moves the cursors of rows in device memory after a replay step of them, on the GPU. A row whose step flushed
// (StateRows::will_flush) first goes to (base + history, 0), from then on reads checkpoint_out, and has a flush limit
// of `window`; then the first accepted[b] of its tokens, 0 .. tokens_per_row, become committed. Padding rows stay as
// they are.
struct CommitRows {
  int count = 0;                            // B
  const int32_t* slot = nullptr;            // [B]
  int64_t* base = nullptr;                  // [B]
  int32_t* history = nullptr;               // [B]
  int32_t* checkpoint_in = nullptr;         // [B]
  const int32_t* checkpoint_out = nullptr;  // [B]
  int tokens_per_row = 1;                   // T
  int window = 0;                           // L
  const int32_t* accepted = nullptr;        // [B], or null: all T
  int32_t* flush_limit = nullptr;           // [B], or null: none
};
void commit_rows(const CommitRows& args, CudaDevice& device);

}  // namespace replayssm
