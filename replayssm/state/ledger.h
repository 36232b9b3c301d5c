// The decisions of a state pool, in integers alone: which slot, checkpoint and KV page belongs to whom, where each
// cursor stands, what a step reads and writes. No byte of state is touched here; sequences.h moves the bytes that a
// decision asks for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/state/step.h"

namespace replayssm {

struct LedgerLimits {
  int slots = 0;
  int max_rows = 0;            // the longest batch, padding rows included
  int64_t pages = 0;           // KV pages, 0 .. 2^31 - 1
  int page_tokens = 0;         // 0: no layer keeps keys and values, pages are not counted
  int64_t context_tokens = 0;  // the most tokens of a sequence
  int window = 0;              // L
  int max_step_tokens = 0;     // T_max
  bool staggers_flushes = false;
};

// free_slots + live_slots + cached_slots = slots, free_checkpoints + used_checkpoints = slots,
// free_pages + used_pages = pages and reserved_pages <= free_pages hold whenever no call is running.
struct PoolCounts {
  int slots = 0, free_slots = 0, live_slots = 0;
  int cached_slots = 0;  // kept for a prefix store; today always 0
  int free_checkpoints = 0, used_checkpoints = 0;
  int64_t pages = 0, free_pages = 0, used_pages = 0;
  int64_t reserved_pages = 0;  // free pages that are promised to live slots

  friend bool operator==(const PoolCounts&, const PoolCounts&) = default;
};

struct CheckpointCopy {
  int32_t from = 0, to = 0;
};

// `from` < 0: nothing to copy.
struct PageCopy {
  int32_t from = -1, to = -1;
};

// Every call that throws Error leaves the ledger as it was. While a step is begun only commit, abort_step and the
// questions are answered; everything else is an Error.
//
// Checkpoints. There are as many as slots, and they are counted by reference: a fork refers to its parent's. A live
// slot refers to exactly one, so the checkpoints in use never outnumber the live slots, and whenever a checkpoint has
// two references at least one checkpoint is free. So the flush of a slot that shares its checkpoint always finds one to
// write, even in a full pool: a fork's checkpoint is reserved by this counting, without a list of reservations.
//
// Pages. A slot is admitted with a promise of pages for all its max_tokens; they are assigned as its tokens arrive.
// Full pages of committed tokens are never written again and may be shared by reference; the page that the next token
// goes to belongs to one slot.
//
// Flush limits (rows.h), if staggers_flushes. Where records begin anew other than by a flush (allocate, reset, prefill,
// a conventional step, the target of materialise), slot s gets the limit L - s % L: of rows in lockstep whose slots
// follow one another, about T in L then flush in each step of T tokens. After a flush the limit is L, which keeps them
// so. A fork has its parent's limit. A slot that is restored with records has L: how many they are is its phase.
class Ledger {
 public:
  explicit Ledger(const LedgerLimits& limits);

  Handle allocate(int64_t max_tokens);
  void free(Handle handle);

  // The slot becomes as just allocated, with the same handle and max_tokens. Pages that it shared with a fork stay with
  // the fork, so the promise may need pages that are not there any more: then Error.
  void reset(Handle handle);

  struct Fork {
    Handle child;
    PageCopy page;  // the parent's last page, if it is not full
  };
  Fork fork(Handle parent, int64_t max_tokens);

  // `to` drops what it held and will stand at (from.base + records, 0): it gets a checkpoint of its own, shares
  // `from`'s full pages up to there and copies the page that is not full.
  PageCopy materialise(Handle from, Handle to, int records);

  // For a slot at (0, 0): puts the cursor there and assigns the pages of its tokens, which the caller then fills.
  void restore(Handle handle, Cursor cursor);

  // As SequencePool's. The copies of copies() are due before the step's ops run.
  const StepPlan& begin_step(StepKind kind, std::span<const Handle> rows, std::span<const int> tokens);
  std::span<const CheckpointCopy> copies() const { return copies_; }
  void commit();
  void commit(std::span<const int> accepted);
  void abort_step();

  // Marks a slot whose bytes are in doubt: only free and reset accept it.
  void spoil(Handle handle);

  const LedgerLimits& limits() const { return limits_; }
  bool is_live(Handle handle) const;
  bool is_spoilt(Handle handle) const { return live_slot(handle).is_spoilt; }
  bool is_in_step() const { return is_in_step_; }
  Cursor cursor(Handle handle) const { return live_slot(handle).cursor; }
  int64_t max_tokens(Handle handle) const { return live_slot(handle).max_tokens; }
  int32_t checkpoint(Handle handle) const { return live_slot(handle).checkpoint; }
  int32_t flush_limit(Handle handle) const { return live_slot(handle).flush_limit; }  // L if nothing staggers them
  std::span<const int32_t> pages(Handle handle) const;
  PoolCounts counts() const;

  // Recounts every reference; throws Error naming the first count that is wrong. For tests.
  void audit() const;

 private:
  struct Slot {
    uint64_t generation = 0;  // 0: free
    bool is_spoilt = false;
    Cursor cursor;
    int32_t checkpoint = -1;
    int32_t flush_limit = 0;
    int64_t max_tokens = 0;
    // The convolutions hold the inputs that a continuation from here on needs; a position before it has lost some.
    int64_t rewind_limit = 0;
    int64_t assigned_pages = 0;  // entries of the slot's row of page_table_
    uint64_t step = 0;           // the last step that named the slot
  };

  const Slot& live_slot(Handle handle) const;
  Slot& usable_slot(Handle handle, const char* verb);
  void require_idle(const char* verb) const;
  int32_t* page_row(const Slot& slot) { return page_table_.data() + (&slot - slots_.data()) * table_stride_; }
  const int32_t* page_row(const Slot& slot) const {
    return page_table_.data() + (&slot - slots_.data()) * table_stride_;
  }

  int64_t pages_for(int64_t tokens) const;
  int64_t promised_pages(const Slot& slot) const { return pages_for(slot.max_tokens) - slot.assigned_pages; }
  Slot& admit(int64_t max_tokens, int64_t shared_pages, const char* verb);
  int32_t take_checkpoint();
  void release_checkpoint(int32_t checkpoint);
  void own_checkpoint(Slot& slot);
  int32_t first_flush_limit(const Slot& slot) const;
  void assign_pages(Slot& slot, int64_t tokens);
  void drop_pages(Slot& slot);
  void share_pages(Slot& slot, const Slot& source, int64_t count);
  void require_pages_after_drop(const Slot& slot, int64_t shared_pages, const char* verb) const;
  PageCopy split_page(Slot& slot, const Slot& source, int64_t tokens);
  Handle handle_of(const Slot& slot) const;

  void check_step(StepKind kind, std::span<const Handle> rows, std::span<const int> tokens);
  void plan_row(int row, Slot& slot, int tokens);
  void plan_padding(int row, int tokens);
  void plan_checkpoints(int row, Slot& slot);
  void plan_table();
  void advance_replay(int row, Slot& slot, int accepted);

  LedgerLimits limits_;
  std::vector<Slot> slots_;
  std::vector<int32_t> free_slots_;  // the last is taken next
  std::vector<int32_t> checkpoint_references_;
  std::vector<int32_t> free_checkpoints_;
  Buffer<int32_t> page_table_;  // [slots, table_stride_]
  int64_t table_stride_ = 0;
  std::vector<int32_t> page_references_;
  std::vector<int32_t> free_pages_;
  int64_t reserved_pages_ = 0;

  bool is_in_step_ = false;
  uint64_t step_ = 0;
  StepPlan plan_;
  std::vector<CheckpointCopy> copies_;
  std::vector<int32_t> row_slot_, row_history_, row_checkpoint_in_, row_checkpoint_out_, row_flush_limit_,
      row_token_begin_;
  std::vector<int64_t> row_base_, position_;
  std::vector<uint8_t> row_is_flushing_;
  Buffer<int32_t> plan_table_;  // [max_rows, table_stride_]
};

}  // namespace replayssm
