// Who owns which slot, checkpoint and KV page. The plan of a step is in ledger_step.cpp.
#include "replayssm/state/ledger.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

uint64_t next_generation() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// All of 0 .. count-1.
std::vector<int32_t> all_free(int64_t count) {
  std::vector<int32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

int32_t take_last(std::vector<int32_t>& numbers) {
  const int32_t number = numbers.back();
  numbers.pop_back();
  return number;
}

void check_limits(const LedgerLimits& limits) {
  require(limits.slots >= 1, "pool: needs at least 1 slot, given {}", limits.slots);
  require(limits.max_rows >= 1, "pool: needs batches of at least 1 row, given {}", limits.max_rows);
  require(limits.window >= 1 && limits.max_step_tokens >= 1 && limits.max_step_tokens <= limits.window,
          "pool: the longest step must be 1 to the window of {} tokens, given {}", limits.window,
          limits.max_step_tokens);
  require(limits.context_tokens >= 1, "pool: the context must hold at least 1 token, given {}", limits.context_tokens);
  require(limits.page_tokens >= 0 && limits.pages >= 0 && limits.pages <= std::numeric_limits<int32_t>::max(),
          "pool: KV pages must be 0 to 2^31 - 1, given {} of {} tokens", limits.pages, limits.page_tokens);
}

}  // namespace

Ledger::Ledger(const LedgerLimits& limits) : limits_(limits) {
  check_limits(limits_);
  if (limits_.page_tokens == 0) limits_.pages = 0;
  const size_t slots = limits_.slots, rows = limits_.max_rows;
  slots_.resize(slots);
  free_slots_ = all_free(limits_.slots);
  checkpoint_references_.assign(slots, 0);
  free_checkpoints_ = all_free(limits_.slots);
  table_stride_ = pages_for(limits_.context_tokens);
  page_table_ = Buffer<int32_t>(slots * table_stride_);
  page_references_.assign(limits_.pages, 0);
  free_pages_ = all_free(limits_.pages);

  copies_.reserve(rows);
  for (auto* array : {&row_slot_, &row_history_, &row_checkpoint_in_, &row_checkpoint_out_, &row_flush_limit_})
    array->resize(rows);
  row_token_begin_.resize(rows + 1);
  row_base_.resize(rows);
  row_is_flushing_.resize(rows);
  position_.resize(rows * limits_.max_step_tokens);
  plan_table_ = Buffer<int32_t>(rows * table_stride_);
}

int64_t Ledger::pages_for(int64_t tokens) const {
  return limits_.page_tokens == 0 ? 0 : (tokens + limits_.page_tokens - 1) / limits_.page_tokens;
}

bool Ledger::is_live(Handle handle) const {
  return handle.slot >= 0 && handle.slot < limits_.slots && handle.generation != 0 &&
         slots_[handle.slot].generation == handle.generation;
}

const Ledger::Slot& Ledger::live_slot(Handle handle) const {
  require(is_live(handle), "handle: slot {} of generation {} is not a live sequence of this pool", handle.slot,
          handle.generation);
  return slots_[handle.slot];
}

Ledger::Slot& Ledger::usable_slot(Handle handle, const char* verb) {
  const Slot& slot = live_slot(handle);
  require(!slot.is_spoilt, "{}: the state of slot {} was lost when its step was aborted; it can only be freed or reset",
          verb, handle.slot);
  return slots_[handle.slot];
}

void Ledger::require_idle(const char* verb) const {
  require(!is_in_step_, "{}: not while a step is begun; commit or abort it first", verb);
}

Handle Ledger::handle_of(const Slot& slot) const {
  return {static_cast<int32_t>(&slot - slots_.data()), slot.generation};
}

std::span<const int32_t> Ledger::pages(Handle handle) const {
  const Slot& slot = live_slot(handle);
  return {page_table_.data() + handle.slot * table_stride_, static_cast<size_t>(slot.assigned_pages)};
}

// Takes a slot and a checkpoint for a sequence that will share `shared_pages` pages; sharing them is left to the
// caller.
Ledger::Slot& Ledger::admit(int64_t max_tokens, int64_t shared_pages, const char* verb) {
  require(max_tokens >= 1 && max_tokens <= limits_.context_tokens,
          "{}: a sequence of this pool must be 1 to {} tokens long, given {}", verb, limits_.context_tokens,
          max_tokens);
  require(!free_slots_.empty(), "{}: needs 1 slot, none of {} is free", verb, limits_.slots);
  const int64_t needed = pages_for(max_tokens) - shared_pages;
  const int64_t available = static_cast<int64_t>(free_pages_.size()) - reserved_pages_;
  require(needed <= available, "{}: {} tokens need {} KV pages of {} tokens, {} of {} are free", verb, max_tokens,
          needed, limits_.page_tokens, available, limits_.pages);
  Slot& slot = slots_[take_last(free_slots_)];
  slot = Slot{};
  slot.generation = next_generation();
  slot.flush_limit = first_flush_limit(slot);
  slot.max_tokens = max_tokens;
  reserved_pages_ += promised_pages(slot);
  return slot;
}

int32_t Ledger::take_checkpoint() {
  const int32_t checkpoint = take_last(free_checkpoints_);
  checkpoint_references_[checkpoint] = 1;
  return checkpoint;
}

void Ledger::release_checkpoint(int32_t checkpoint) {
  if (--checkpoint_references_[checkpoint] == 0) free_checkpoints_.push_back(checkpoint);
}

void Ledger::own_checkpoint(Slot& slot) {
  if (checkpoint_references_[slot.checkpoint] == 1) return;
  const int32_t own = take_checkpoint();
  release_checkpoint(slot.checkpoint);
  slot.checkpoint = own;
}

int32_t Ledger::first_flush_limit(const Slot& slot) const {
  const auto phase = limits_.staggers_flushes ? static_cast<int32_t>((&slot - slots_.data()) % limits_.window) : 0;
  return limits_.window - phase;
}

void Ledger::assign_pages(Slot& slot, int64_t tokens) {
  for (const int64_t count = pages_for(tokens); slot.assigned_pages < count; ++slot.assigned_pages) {
    const int32_t page = take_last(free_pages_);
    page_references_[page] = 1;
    page_row(slot)[slot.assigned_pages] = page;
    --reserved_pages_;
  }
}

void Ledger::drop_pages(Slot& slot) {
  for (int64_t index = 0; index < slot.assigned_pages; ++index) {
    const int32_t page = page_row(slot)[index];
    if (--page_references_[page] == 0) free_pages_.push_back(page);
  }
  reserved_pages_ += slot.assigned_pages;
  slot.assigned_pages = 0;
}

// For a slot that has no pages: its first `count` become the source's.
void Ledger::share_pages(Slot& slot, const Slot& source, int64_t count) {
  const int32_t* pages = page_row(source);
  for (int64_t index = 0; index < count; ++index) {
    ++page_references_[pages[index]];
    page_row(slot)[index] = pages[index];
  }
  slot.assigned_pages = count;
  reserved_pages_ -= count;
}

// Throws unless the slot's promise can be kept after drop_pages and a share of `shared_pages`.
void Ledger::require_pages_after_drop(const Slot& slot, int64_t shared_pages, const char* verb) const {
  const int32_t* pages = page_row(slot);
  const int64_t freed =
      std::count_if(pages, pages + slot.assigned_pages, [this](int32_t page) { return page_references_[page] == 1; });
  const int64_t available = static_cast<int64_t>(free_pages_.size()) + freed - (reserved_pages_ - promised_pages(slot));
  const int64_t needed = pages_for(slot.max_tokens) - shared_pages;
  require(needed <= available, "{}: {} tokens need {} KV pages of {} tokens, {} of {} are free", verb, slot.max_tokens,
          needed, limits_.page_tokens, available, limits_.pages);
}

// Gives `slot`, which shares the source's full pages, a page of its own for the tokens past them.
PageCopy Ledger::split_page(Slot& slot, const Slot& source, int64_t tokens) {
  const int64_t full_pages = slot.assigned_pages;
  assign_pages(slot, tokens);
  if (slot.assigned_pages == full_pages) return {};
  return {page_row(source)[full_pages], page_row(slot)[full_pages]};
}

Handle Ledger::allocate(int64_t max_tokens) {
  require_idle("allocate");
  Slot& slot = admit(max_tokens, 0, "allocate");
  slot.checkpoint = take_checkpoint();
  return handle_of(slot);
}

void Ledger::free(Handle handle) {
  live_slot(handle);
  require_idle("free");
  Slot& slot = slots_[handle.slot];
  drop_pages(slot);
  reserved_pages_ -= promised_pages(slot);
  release_checkpoint(slot.checkpoint);
  slot = Slot{};
  free_slots_.push_back(handle.slot);
}

void Ledger::reset(Handle handle) {
  live_slot(handle);
  require_idle("reset");
  Slot& slot = slots_[handle.slot];
  require_pages_after_drop(slot, 0, "reset");
  drop_pages(slot);
  own_checkpoint(slot);
  slot.cursor = {};
  slot.flush_limit = first_flush_limit(slot);
  slot.rewind_limit = 0;
  slot.is_spoilt = false;
}

Ledger::Fork Ledger::fork(Handle parent_handle, int64_t max_tokens) {
  const Slot& parent = usable_slot(parent_handle, "fork");
  require_idle("fork");
  const int64_t tokens = parent.cursor.tokens();
  require(max_tokens >= tokens, "fork: the parent has {} tokens, the child may have only {}", tokens, max_tokens);
  const int64_t full_pages = limits_.page_tokens == 0 ? 0 : tokens / limits_.page_tokens;
  Slot& child = admit(max_tokens, full_pages, "fork");
  child.checkpoint = parent.checkpoint;
  ++checkpoint_references_[child.checkpoint];
  child.cursor = parent.cursor;
  child.flush_limit = parent.flush_limit;
  child.rewind_limit = tokens;
  share_pages(child, parent, full_pages);
  return {handle_of(child), split_page(child, parent, tokens)};
}

PageCopy Ledger::materialise(Handle from, Handle to, int records) {
  const Slot& source = usable_slot(from, "materialise");
  live_slot(to);
  require_idle("materialise");
  require(from.slot != to.slot, "materialise: source and target are both slot {}", to.slot);
  Slot& target = slots_[to.slot];
  require(records >= 0 && records <= source.cursor.history,
          "materialise: records must be 0 to the history of {}, given {}", source.cursor.history, records);
  const int64_t tokens = source.cursor.base + records;
  require(tokens >= source.rewind_limit,
          "materialise: position {} is too old, the convolution inputs before position {} are gone", tokens,
          source.rewind_limit);
  require(tokens <= target.max_tokens, "materialise: position {} is past the target's {} tokens", tokens,
          target.max_tokens);
  const int64_t full_pages = limits_.page_tokens == 0 ? 0 : tokens / limits_.page_tokens;
  require_pages_after_drop(target, full_pages, "materialise");
  drop_pages(target);
  own_checkpoint(target);
  share_pages(target, source, full_pages);
  target.cursor = {tokens, 0};
  target.flush_limit = first_flush_limit(target);
  target.rewind_limit = tokens;
  target.is_spoilt = false;
  return split_page(target, source, tokens);
}

void Ledger::restore(Handle handle, Cursor cursor) {
  Slot& slot = usable_slot(handle, "restore");
  require_idle("restore");
  require(slot.cursor == Cursor{}, "restore: slot {} is not as just allocated", handle.slot);
  require(cursor.base >= 0 && cursor.history >= 0 && cursor.history <= limits_.window,
          "restore: a cursor needs base >= 0 and a history of 0 to {}, given {} and {}", limits_.window, cursor.base,
          cursor.history);
  require(cursor.base <= slot.max_tokens - cursor.history, "restore: {} + {} tokens are more than the sequence's {}",
          cursor.base, cursor.history, slot.max_tokens);
  slot.cursor = cursor;
  if (cursor.history > 0) slot.flush_limit = limits_.window;
  slot.rewind_limit = cursor.tokens();
  assign_pages(slot, cursor.tokens());
}

void Ledger::spoil(Handle handle) {
  live_slot(handle);
  require_idle("spoil");
  slots_[handle.slot].is_spoilt = true;
}

PoolCounts Ledger::counts() const {
  PoolCounts counts;
  counts.slots = limits_.slots;
  counts.free_slots = static_cast<int>(free_slots_.size());
  counts.live_slots = static_cast<int>(
      std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.generation != 0; }));
  counts.free_checkpoints = static_cast<int>(free_checkpoints_.size());
  counts.used_checkpoints = static_cast<int>(std::count_if(checkpoint_references_.begin(), checkpoint_references_.end(),
                                                           [](int32_t references) { return references != 0; }));
  counts.pages = limits_.pages;
  counts.free_pages = static_cast<int64_t>(free_pages_.size());
  counts.used_pages = std::count_if(page_references_.begin(), page_references_.end(),
                                    [](int32_t references) { return references != 0; });
  counts.reserved_pages = reserved_pages_;
  return counts;
}

void Ledger::audit() const {
  std::vector<int32_t> checkpoints(checkpoint_references_.size()), pages(page_references_.size());
  int64_t reserved = 0;
  for (const Slot& slot : slots_) {
    if (slot.generation == 0) continue;
    ++checkpoints[slot.checkpoint];
    for (const int32_t page : this->pages(handle_of(slot))) ++pages[page];
    reserved += promised_pages(slot);
  }
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    require(checkpoints[i] == checkpoint_references_[i], "audit: checkpoint {} is counted {} times, used {} times", i,
            checkpoint_references_[i], checkpoints[i]);
  }
  for (size_t i = 0; i < pages.size(); ++i) {
    require(pages[i] == page_references_[i], "audit: page {} is counted {} times, used {} times", i,
            page_references_[i], pages[i]);
  }
  for (const int32_t page : free_pages_) require(pages[page] == 0, "audit: page {} is free and in use", page);
  for (const int32_t one : free_checkpoints_)
    require(checkpoints[one] == 0, "audit: checkpoint {} is free and in use", one);
  require(reserved == reserved_pages_, "audit: {} pages are reserved, the slots were promised {}", reserved_pages_,
          reserved);
  const PoolCounts now = counts();
  require(now.free_slots + now.live_slots + now.cached_slots == now.slots, "audit: {} slots are free and {} live of {}",
          now.free_slots, now.live_slots, now.slots);
  require(now.free_checkpoints + now.used_checkpoints == now.slots, "audit: {} checkpoints are free and {} used of {}",
          now.free_checkpoints, now.used_checkpoints, now.slots);
  require(now.used_checkpoints <= now.live_slots, "audit: {} checkpoints are used by {} slots", now.used_checkpoints,
          now.live_slots);
  require(now.free_pages + now.used_pages == now.pages, "audit: {} pages are free and {} used of {}", now.free_pages,
          now.used_pages, now.pages);
  require(now.reserved_pages <= now.free_pages, "audit: {} pages are promised, {} are free", now.reserved_pages,
          now.free_pages);
}

}  // namespace replayssm
