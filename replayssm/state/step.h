// What the users of a state pool hold in their hands: handles, cursors, and the plan of one step.
#pragma once

#include <cstdint>

#include "replayssm/ops/attention.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// Names one use of one slot, from allocate, fork or load to free. The generation is unique in the process, so a handle
// that outlived its use, or that came from another pool, is refused wherever it is given.
struct Handle {
  int32_t slot = -2;
  uint64_t generation = 0;

  friend bool operator==(const Handle&, const Handle&) = default;
};

// A row of a batch that belongs to no sequence: it reads and writes no state, and its outputs are zeros.
inline constexpr Handle kPaddingRow{kPaddingSlot, 0};

// Where a sequence stands, the same for all its layers: `base` tokens are folded into the checkpoint, `history` more
// are committed records of the ring. Their sum is the length of the KV cache and the position of the next token.
struct Cursor {
  int64_t base = 0;
  int32_t history = 0;

  int64_t tokens() const { return base + history; }
  friend bool operator==(const Cursor&, const Cursor&) = default;
};

// The three ways to run tokens. Conventional and prefill fold the history, if any, and leave every token in the
// checkpoint: base += history + tokens, history = 0. Replay folds only if history + tokens > L or the history has
// reached the row's flush limit (base += history, history = 0) and appends the tokens as records, of which commit()
// keeps as many as it is told.
enum class StepKind {
  kPrefill,       // any number of tokens a row
  kConventional,  // one token a row
  kReplay,        // the same 1 .. T_max tokens in every row
};

// One step over B rows, ready for the ops. The arrays belong to the pool and stay as they are until its next step; the
// cursors in `rows` are those from before the step; flush limits are there if the pool staggers flushes. Padding rows
// have slot kPaddingSlot, a cursor of 0, checkpoints -1, page table entries -1 and positions 0, 1, ...
struct StepPlan {
  StepKind kind = StepKind::kReplay;
  StateRows rows;
  int tokens_per_row = 0;                // T of conventional and replay steps; 0 for prefill
  int tokens = 0;                        // N
  const int32_t* token_begin = nullptr;  // [B + 1]
  const int64_t* position = nullptr;     // [N] position of each token in its sequence
  KvPages pages;                         // covers the positions of the step's tokens; entries past a row's pages are -1
  const uint8_t* is_flushing = nullptr;  // [B] 1 if the row's history is folded into its checkpoint_out
  int flushes = 0;                       // how many rows flush
};

}  // namespace replayssm
