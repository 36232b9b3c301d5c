// The plan of one step, and what its end does to the cursors.
#include <algorithm>
#include <limits>

#include "replayssm/core/error.h"
#include "replayssm/state/ledger.h"

namespace replayssm {

const StepPlan& Ledger::begin_step(StepKind kind, std::span<const Handle> rows, std::span<const int> tokens) {
  require(!is_in_step_, "step: one is already begun; commit or abort it first");
  check_step(kind, rows, tokens);

  plan_ = {};
  plan_.kind = kind;
  plan_.tokens_per_row = kind == StepKind::kPrefill ? 0 : tokens[0];
  plan_.rows = {.count = static_cast<int>(rows.size()),
                .slot = row_slot_.data(),
                .base = row_base_.data(),
                .history = row_history_.data(),
                .checkpoint_in = row_checkpoint_in_.data(),
                .checkpoint_out = row_checkpoint_out_.data(),
                .flush_limit = limits_.staggers_flushes ? row_flush_limit_.data() : nullptr};
  plan_.token_begin = row_token_begin_.data();
  plan_.is_flushing = row_is_flushing_.data();
  copies_.clear();
  row_token_begin_[0] = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    if (rows[row] == kPaddingRow) {
      plan_padding(static_cast<int>(row), tokens[row]);
    } else {
      plan_row(static_cast<int>(row), slots_[rows[row].slot], tokens[row]);
    }
  }
  plan_.tokens = row_token_begin_[rows.size()];
  plan_.position = position_.data();
  plan_table();
  is_in_step_ = true;
  return plan_;
}

// Refuses what begin_step cannot plan; after it nothing can fail.
void Ledger::check_step(StepKind kind, std::span<const Handle> rows, std::span<const int> tokens) {
  require(!rows.empty() && rows.size() <= static_cast<size_t>(limits_.max_rows),
          "step: a batch must be 1 to {} rows, given {}", limits_.max_rows, rows.size());
  require(tokens.size() == rows.size(), "step: {} rows need as many token counts, given {}", rows.size(),
          tokens.size());
  ++step_;
  int64_t total = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    const int count = tokens[row];
    const bool is_padding = rows[row] == kPaddingRow;
    if (kind == StepKind::kConventional) {
      require(count == 1, "step: row {} of a conventional step must have 1 token, given {}", row, count);
    } else if (kind == StepKind::kReplay) {
      require(count >= 1 && count <= limits_.window, "step: row {} must have 1 to {} tokens (the window), given {}",
              row, limits_.window, count);
      require(count <= limits_.max_step_tokens, "step: row {} may have at most {} tokens (the longest step), given {}",
              row, limits_.max_step_tokens, count);
      require(count == tokens[0], "step: all rows of a replay step must have {} tokens as row 0, row {} has {}",
              tokens[0], row, count);
    } else {
      require(count >= (is_padding ? 0 : 1), "step: row {} must have at least 1 token, given {}", row, count);
    }
    total += count;
    if (is_padding) continue;
    Slot& slot = usable_slot(rows[row], "step");
    require(slot.step != step_, "step: slot {} is in two rows", rows[row].slot);
    slot.step = step_;
    require(count <= slot.max_tokens - slot.cursor.tokens(),
            "step: row {} has {} tokens and {} more are asked for, its sequence was given room for {}", row,
            slot.cursor.tokens(), count, slot.max_tokens);
  }
  require(total <= std::numeric_limits<int32_t>::max(), "step: a step of {} tokens is too long", total);
  if (static_cast<size_t>(total) > position_.size()) position_.resize(total);
}

void Ledger::plan_row(int row, Slot& slot, int tokens) {
  row_slot_[row] = static_cast<int32_t>(&slot - slots_.data());
  row_base_[row] = slot.cursor.base;
  row_history_[row] = slot.cursor.history;
  row_flush_limit_[row] = slot.flush_limit;
  const bool is_flushing =
      plan_.kind == StepKind::kReplay ? plan_.rows.will_flush(row, tokens, limits_.window) : slot.cursor.history > 0;
  row_is_flushing_[row] = is_flushing;
  plan_.flushes += is_flushing;
  plan_checkpoints(row, slot);
  const int32_t begin = row_token_begin_[row];
  for (int t = 0; t < tokens; ++t) position_[begin + t] = slot.cursor.tokens() + t;
  row_token_begin_[row + 1] = begin + tokens;
  assign_pages(slot, slot.cursor.tokens() + tokens);
}

void Ledger::plan_padding(int row, int tokens) {
  row_slot_[row] = kPaddingSlot;
  row_base_[row] = 0;
  row_history_[row] = 0;
  row_flush_limit_[row] = limits_.window;
  row_is_flushing_[row] = 0;
  row_checkpoint_in_[row] = row_checkpoint_out_[row] = -1;
  const int32_t begin = row_token_begin_[row];
  for (int t = 0; t < tokens; ++t) position_[begin + t] = t;
  row_token_begin_[row + 1] = begin + tokens;
}

// A row that writes a checkpoint which others refer to writes a free one instead. If all the others did so earlier in
// this step, the last one writes in place, while they still read: they then read a copy, made before the step in the
// checkpoints that they write.
void Ledger::plan_checkpoints(int row, Slot& slot) {
  const int32_t in = slot.checkpoint;
  row_checkpoint_in_[row] = row_checkpoint_out_[row] = in;
  const bool is_writing = plan_.kind != StepKind::kReplay || row_is_flushing_[row];
  if (!is_writing) return;
  if (checkpoint_references_[in] > 1) {
    own_checkpoint(slot);
    row_checkpoint_out_[row] = slot.checkpoint;
    return;
  }
  for (int earlier = 0; earlier < row; ++earlier) {
    if (row_checkpoint_in_[earlier] != in) continue;
    copies_.push_back({in, row_checkpoint_out_[earlier]});
    row_checkpoint_in_[earlier] = row_checkpoint_out_[earlier];
  }
}

void Ledger::plan_table() {
  int64_t stride = 0;
  for (int row = 0; row < plan_.rows.count; ++row) {
    if (row_slot_[row] >= 0) stride = std::max(stride, slots_[row_slot_[row]].assigned_pages);
  }
  for (int row = 0; row < plan_.rows.count; ++row) {
    int32_t* entries = plan_table_.data() + row * stride;
    int64_t count = 0;
    if (row_slot_[row] >= 0) {
      const Slot& slot = slots_[row_slot_[row]];
      count = slot.assigned_pages;
      std::copy_n(page_table_.data() + row_slot_[row] * table_stride_, count, entries);
    }
    std::fill(entries + count, entries + stride, -1);
  }
  plan_.pages = {plan_table_.data(), static_cast<int>(stride)};
}

void Ledger::commit() {
  require(is_in_step_, "commit: no step is begun");
  for (int row = 0; row < plan_.rows.count; ++row) {
    if (row_slot_[row] < 0) continue;
    Slot& slot = slots_[row_slot_[row]];
    const int tokens = row_token_begin_[row + 1] - row_token_begin_[row];
    if (plan_.kind == StepKind::kReplay) {
      advance_replay(row, slot, tokens);
    } else {
      slot.cursor = {slot.cursor.tokens() + tokens, 0};
      slot.flush_limit = first_flush_limit(slot);
      slot.rewind_limit = slot.cursor.base;
    }
  }
  is_in_step_ = false;
}

void Ledger::commit(std::span<const int> accepted) {
  require(is_in_step_, "commit: no step is begun");
  require(accepted.size() == static_cast<size_t>(plan_.rows.count), "commit: {} rows need as many counts, given {}",
          plan_.rows.count, accepted.size());
  const bool is_replay = plan_.kind == StepKind::kReplay;
  for (int row = 0; row < plan_.rows.count; ++row) {
    const int tokens = row_token_begin_[row + 1] - row_token_begin_[row];
    require(accepted[row] >= (is_replay ? 0 : tokens) && accepted[row] <= tokens,
            "commit: row {} must accept {} to {} tokens, given {}", row, is_replay ? 0 : tokens, tokens, accepted[row]);
  }
  if (!is_replay) return commit();
  for (int row = 0; row < plan_.rows.count; ++row) {
    if (row_slot_[row] >= 0) advance_replay(row, slots_[row_slot_[row]], accepted[row]);
  }
  is_in_step_ = false;
}

void Ledger::advance_replay(int row, Slot& slot, int accepted) {
  const int64_t end = slot.cursor.tokens() + plan_.tokens_per_row;
  slot.rewind_limit = std::max(slot.rewind_limit, end - limits_.max_step_tokens);
  if (row_is_flushing_[row]) {
    slot.cursor = {slot.cursor.tokens(), 0};
    slot.flush_limit = limits_.window;
  }
  slot.cursor.history += accepted;
}

void Ledger::abort_step() {
  require(is_in_step_, "abort: no step is begun");
  for (int row = 0; row < plan_.rows.count; ++row) {
    if (row_slot_[row] >= 0) slots_[row_slot_[row]].is_spoilt = true;
  }
  is_in_step_ = false;
}

}  // namespace replayssm
