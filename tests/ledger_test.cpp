// The state pool's decisions, with integers alone: slots, checkpoints, pages, cursors, and a random walk beside a
// model.
#include "replayssm/state/ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

LedgerLimits small_limits(int slots, bool staggers_flushes = false) {
  return {.slots = slots,
          .max_rows = slots + 2,
          .pages = 8 * slots,
          .page_tokens = 4,
          .context_tokens = 64,
          .window = 6,
          .max_step_tokens = 3,
          .staggers_flushes = staggers_flushes};
}

const StepPlan& begin(Ledger& ledger, StepKind kind, const std::vector<Handle>& rows, int tokens) {
  return ledger.begin_step(kind, rows, std::vector<int>(rows.size(), tokens));
}

void replay(Ledger& ledger, const std::vector<Handle>& rows, int tokens, int accepted) {
  begin(ledger, StepKind::kReplay, rows, tokens);
  ledger.commit(std::vector<int>(rows.size(), accepted));
}

// Runs `body`, which must throw Error with `text` in it and leave the ledger's counts alone.
template <typename Body>
void expect_refused(Ledger& ledger, const std::string& text, Body&& body) {
  const PoolCounts before = ledger.counts();
  try {
    body();
    ADD_FAILURE() << "not refused: " << text;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
  EXPECT_EQ(ledger.counts(), before);
  ledger.audit();
}

TEST(Ledger, HandlesAreRefusedOnceTheirUseIsOver) {
  Ledger ledger(small_limits(2)), other(small_limits(2));
  const Handle first = ledger.allocate(8), foreign = other.allocate(8);
  ledger.free(first);
  const Handle second = ledger.allocate(8);
  EXPECT_EQ(second.slot, first.slot);
  for (const Handle handle : {first, foreign, Handle{}, kPaddingRow, Handle{99, 1}, Handle{second.slot, 0}}) {
    expect_refused(ledger, "not a live sequence", [&] { ledger.free(handle); });
    expect_refused(ledger, "not a live sequence", [&] { ledger.reset(handle); });
    expect_refused(ledger, "not a live sequence", [&] { ledger.cursor(handle); });
    expect_refused(ledger, "not a live sequence", [&] { ledger.fork(handle, 8); });
    expect_refused(ledger, "not a live sequence", [&] { ledger.materialise(second, handle, 0); });
    if (handle == kPaddingRow) continue;
    expect_refused(ledger, "not a live sequence", [&] { begin(ledger, StepKind::kReplay, {second, handle}, 1); });
  }
  ledger.free(second);
  expect_refused(ledger, "not a live sequence", [&] { ledger.free(second); });
}

TEST(Ledger, ARequestThatDoesNotFitIsRefusedAtOnce) {
  Ledger ledger(small_limits(2));  // 16 pages of 4 tokens
  expect_refused(ledger, "1 to 64", [&] { ledger.allocate(0); });
  expect_refused(ledger, "of this pool must be 1 to 64 tokens long, given 65", [&] { ledger.allocate(65); });
  const Handle first = ledger.allocate(40);
  EXPECT_EQ(ledger.counts().reserved_pages, 10);
  expect_refused(ledger, "need 7 KV pages of 4 tokens, 6 of 16 are free", [&] { ledger.allocate(25); });
  const Handle second = ledger.allocate(24);
  expect_refused(ledger, "none of 2 is free", [&] { ledger.allocate(1); });
  expect_refused(ledger, "none of 2 is free", [&] { ledger.fork(first, 40); });
  ledger.free(second);
  EXPECT_EQ(ledger.counts().free_slots, 1);
}

TEST(Ledger, PagesAreAssignedAsTokensArriveAndKeptThroughRollback) {
  Ledger ledger(small_limits(2));
  const Handle handle = ledger.allocate(12);
  begin(ledger, StepKind::kPrefill, {handle}, 5);
  ledger.commit();
  EXPECT_EQ(ledger.pages(handle).size(), 2u);
  replay(ledger, {handle}, 3, 3);
  const StepPlan& plan = begin(ledger, StepKind::kReplay, {handle}, 3);
  EXPECT_EQ(ledger.pages(handle).size(), 3u);
  EXPECT_EQ(plan.pages.table_stride, 3);
  EXPECT_EQ(plan.position[2], 10);
  ledger.commit(std::vector<int>{0});
  EXPECT_EQ(ledger.pages(handle).size(), 3u);
  EXPECT_EQ(ledger.cursor(handle).tokens(), 8);
  ledger.reset(handle);
  EXPECT_EQ(ledger.counts().used_pages, 0);
  EXPECT_EQ(ledger.counts().reserved_pages, 3);
}

TEST(Ledger, TheFlushRuleDependsOnHistoryAndTokensAlone) {
  Ledger ledger(small_limits(1));  // L 6, T_max 3
  const Handle handle = ledger.allocate(32);
  replay(ledger, {handle}, 3, 3);
  replay(ledger, {handle}, 3, 1);
  EXPECT_EQ(ledger.cursor(handle), (Cursor{0, 4}));
  EXPECT_EQ(begin(ledger, StepKind::kReplay, {handle}, 2).flushes, 0);  // 4 + 2 = L
  ledger.commit(std::vector<int>{0});
  const StepPlan& plan = begin(ledger, StepKind::kReplay, {handle}, 3);  // 4 + 3 > L
  EXPECT_EQ(plan.flushes, 1);
  EXPECT_EQ(plan.is_flushing[0], 1);
  EXPECT_EQ(plan.rows.history[0], 4);
  EXPECT_EQ(ledger.cursor(handle), (Cursor{0, 4})) << "the cursor moves at the commit";
  ledger.commit(std::vector<int>{0});
  EXPECT_EQ(ledger.cursor(handle), (Cursor{4, 0})) << "nothing accepted, but the fold stays";
  replay(ledger, {handle}, 1, 1);
  begin(ledger, StepKind::kConventional, {handle}, 1);
  ledger.commit();
  EXPECT_EQ(ledger.cursor(handle), (Cursor{6, 0}));
  replay(ledger, {handle}, 2, 2);
  begin(ledger, StepKind::kPrefill, {handle}, 10);
  ledger.commit(std::vector<int>{10});
  EXPECT_EQ(ledger.cursor(handle), (Cursor{18, 0}));
}

// Rows that begin together, by any kind of step, and go on in lockstep; without staggering all flush in one step.
TEST(Ledger, StaggeredRowsFlushInTurn) {
  for (const bool is_staggered : {true, false})
    for (const int tokens : {1, 2, 3})
      for (const int rows : {1, 5, 6, 7, 20}) {
        LedgerLimits limits = small_limits(20, is_staggered);  // L 6
        limits.page_tokens = 0;
        limits.context_tokens = 200;
        Ledger ledger(limits);
        std::vector<Handle> handles;
        for (int row = 0; row < rows; ++row) handles.push_back(ledger.allocate(200));
        int most = 0, last = 0;
        for (int step = 0; step < 50; ++step) {
          if (step == 20 || step == 30) {
            begin(ledger, step == 20 ? StepKind::kConventional : StepKind::kPrefill, handles, 1);
            ledger.commit();
          }
          for (const Handle handle : handles)
            if (step == 40) ledger.reset(handle);
          const StepPlan& plan = begin(ledger, StepKind::kReplay, handles, tokens);
          EXPECT_EQ(plan.rows.flush_limit != nullptr, is_staggered);
          for (int row = 0; row < rows; ++row)
            EXPECT_LE(plan.is_flushing[row] != 0 ? 0 : plan.rows.history[row] + tokens, 6);
          most = std::max(most, plan.flushes);
          if (plan.flushes > 0) last = step;
          ledger.commit();
        }
        EXPECT_GE(last, 43);
        if (is_staggered) {
          EXPECT_LE(most, tokens * ((rows + 5) / 6)) << rows << " rows of " << tokens;
        } else {
          EXPECT_EQ(most, rows);
        }
      }
}

TEST(Ledger, AFlushLimitIsTheSlotsUntilItsFirstFlush) {
  Ledger ledger(small_limits(5, true));  // L 6
  const Handle a = ledger.allocate(40), b = ledger.allocate(40);
  EXPECT_EQ(ledger.flush_limit(a), 6 - a.slot);
  EXPECT_EQ(a.slot, 4);
  replay(ledger, {a}, 3, 0);
  EXPECT_EQ(begin(ledger, StepKind::kReplay, {a}, 3).flushes, 0) << "more tokens than the limit, but no history";
  ledger.commit();
  const Handle child = ledger.fork(a, 40).child;
  EXPECT_EQ(ledger.flush_limit(child), 2) << "as its parent, whatever its slot";
  const StepPlan& plan = begin(ledger, StepKind::kReplay, {a, kPaddingRow, child}, 1);
  EXPECT_EQ(plan.flushes, 2);
  EXPECT_EQ(plan.rows.flush_limit[0], 2);
  ledger.commit(std::vector<int>{0, 0, 1});
  EXPECT_EQ(ledger.flush_limit(a), 6);
  EXPECT_EQ(ledger.flush_limit(child), 6);
  replay(ledger, {a, child}, 3, 3);
  EXPECT_EQ(ledger.cursor(a), (Cursor{3, 3})) << "past its first limit";
  ledger.materialise(a, b, 2);
  EXPECT_EQ(ledger.flush_limit(b), 3);
  EXPECT_EQ(ledger.flush_limit(a), 6);
  begin(ledger, StepKind::kConventional, {a, child}, 1);
  ledger.commit();
  EXPECT_EQ(ledger.flush_limit(a), 2);
  EXPECT_EQ(ledger.flush_limit(child), 6 - child.slot);
  ledger.free(child);
  const Handle restored = ledger.allocate(40);
  ledger.restore(restored, {7, 0});
  EXPECT_EQ(ledger.flush_limit(restored), 6 - restored.slot);
  const Handle other = ledger.allocate(40);
  ledger.restore(other, {7, 5});
  EXPECT_EQ(ledger.flush_limit(other), 6);
  ledger.reset(other);
  EXPECT_EQ(ledger.flush_limit(other), 6 - other.slot);
}

TEST(Ledger, StepsThatCannotBePlannedAreRefused) {
  Ledger ledger(small_limits(2));
  const Handle a = ledger.allocate(4), b = ledger.allocate(32);
  const auto replay_of = [&](std::vector<Handle> rows, int tokens) {
    return [&ledger, rows, tokens] { begin(ledger, StepKind::kReplay, rows, tokens); };
  };
  expect_refused(ledger, "given 0", replay_of({a}, 0));
  expect_refused(ledger, "given -1", replay_of({a}, -1));
  expect_refused(ledger, "the longest step", replay_of({a}, 4));
  expect_refused(ledger, "the window", replay_of({a}, 7));
  expect_refused(ledger, "in two rows", replay_of({a, b, a}, 1));
  expect_refused(ledger, "1 to 4 rows", replay_of({}, 1));
  expect_refused(ledger, "1 to 4 rows", replay_of({a, b, kPaddingRow, kPaddingRow, kPaddingRow}, 1));
  expect_refused(ledger, "must have 1 token", [&] { begin(ledger, StepKind::kConventional, {b}, 2); });
  expect_refused(ledger, "at least 1 token", [&] { begin(ledger, StepKind::kPrefill, {b}, 0); });
  expect_refused(ledger, "room for 4", [&] { begin(ledger, StepKind::kPrefill, {a}, 5); });
  expect_refused(ledger, "as many token counts", [&] {
    ledger.begin_step(StepKind::kReplay, std::vector<Handle>{a, b}, std::vector<int>{1});
  });
  expect_refused(ledger, "row 1 has 2", [&] {
    ledger.begin_step(StepKind::kReplay, std::vector<Handle>{a, b}, std::vector<int>{1, 2});
  });
  replay(ledger, {a, b}, 3, 3);
  expect_refused(ledger, "2 more are asked for", replay_of({b, a}, 2));
  EXPECT_EQ(ledger.cursor(b), (Cursor{0, 3}));
}

TEST(Ledger, CommitTakesZeroToAllTokensAndNothingElse) {
  Ledger ledger(small_limits(2));
  const Handle a = ledger.allocate(32), b = ledger.allocate(32);
  expect_refused(ledger, "no step is begun", [&] { ledger.commit(std::vector<int>{1}); });
  expect_refused(ledger, "no step is begun", [&] { ledger.commit(); });
  expect_refused(ledger, "no step is begun", [&] { ledger.abort_step(); });
  begin(ledger, StepKind::kReplay, {a, b}, 2);
  for (const std::vector<int>& wrong : {std::vector<int>{1, -1}, {1, 3}, {-1, 0}, {3, 0}, {1}, {1, 1, 1}}) {
    expect_refused(ledger, "commit:", [&] { ledger.commit(wrong); });
    EXPECT_EQ(ledger.cursor(a), Cursor{});
  }
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { begin(ledger, StepKind::kReplay, {a}, 1); }, [&] { ledger.free(a); }, [&] { ledger.reset(a); },
           [&] { ledger.allocate(1); }, [&] { ledger.fork(a, 32); }, [&] { ledger.materialise(a, b, 0); }}) {
    expect_refused(ledger, "begun", call);
  }
  ledger.commit(std::vector<int>{0, 2});
  EXPECT_EQ(ledger.cursor(a), (Cursor{0, 0}));
  EXPECT_EQ(ledger.cursor(b), (Cursor{0, 2}));
  begin(ledger, StepKind::kPrefill, {a}, 5);
  expect_refused(ledger, "must accept 5 to 5", [&] { ledger.commit(std::vector<int>{4}); });
  ledger.commit();
}

TEST(Ledger, AnAbortedStepEndsItsSequencesAndNoOther) {
  Ledger ledger(small_limits(3));
  const Handle a = ledger.allocate(16), b = ledger.allocate(16);
  replay(ledger, {a, b}, 2, 2);
  begin(ledger, StepKind::kReplay, {a}, 1);
  ledger.abort_step();
  EXPECT_TRUE(ledger.is_spoilt(a));
  expect_refused(ledger, "can only be freed or reset", [&] { begin(ledger, StepKind::kReplay, {b, a}, 1); });
  expect_refused(ledger, "can only be freed or reset", [&] { ledger.fork(a, 16); });
  expect_refused(ledger, "can only be freed or reset", [&] { ledger.materialise(a, b, 0); });
  replay(ledger, {b}, 1, 1);
  ledger.reset(a);
  replay(ledger, {a, b}, 1, 1);
  EXPECT_EQ(ledger.cursor(a), (Cursor{0, 1}));
  EXPECT_EQ(ledger.cursor(b), (Cursor{0, 4}));
}

TEST(Ledger, SharersThatFlushTogetherInAFullPoolNeverMeet) {
  for (int sharers = 2; sharers <= 4; ++sharers) {
    for (const StepKind kind : {StepKind::kReplay, StepKind::kConventional, StepKind::kPrefill}) {
      Ledger ledger(small_limits(sharers));
      std::vector<Handle> rows = {ledger.allocate(24)};
      replay(ledger, rows, 3, 3);
      replay(ledger, rows, 3, 3);
      while (static_cast<int>(rows.size()) < sharers) rows.push_back(ledger.fork(rows[0], 24).child);
      EXPECT_EQ(ledger.counts().free_slots, 0);
      EXPECT_EQ(ledger.counts().used_checkpoints, 1);
      const int32_t shared = ledger.checkpoint(rows[0]);
      const StepPlan& plan = begin(ledger, kind, rows, 1);
      EXPECT_EQ(plan.flushes, sharers);
      std::set<int32_t> written;
      for (int row = 0; row < sharers; ++row) {
        EXPECT_TRUE(written.insert(plan.rows.checkpoint_out[row]).second) << "two rows write one checkpoint";
        for (int other = 0; other < sharers; ++other) {
          if (other == row) continue;
          EXPECT_NE(plan.rows.checkpoint_out[row], plan.rows.checkpoint_in[other]);
        }
      }
      EXPECT_EQ(ledger.copies().size(), static_cast<size_t>(sharers - 1));
      for (const CheckpointCopy& copy : ledger.copies()) EXPECT_EQ(copy.from, shared);
      ledger.commit();
      ledger.audit();
      EXPECT_EQ(ledger.counts().used_checkpoints, sharers);
    }
  }
}

TEST(Ledger, AFlushBesideASharerThatDoesNotFlushLeavesTheSharedCheckpoint) {
  Ledger ledger(small_limits(2));
  const Handle parent = ledger.allocate(24);
  replay(ledger, {parent}, 3, 3);
  const Handle child = ledger.fork(parent, 24).child;
  replay(ledger, {parent}, 3, 3);
  const int32_t shared = ledger.checkpoint(parent);
  const StepPlan& plan = begin(ledger, StepKind::kReplay, {child, parent}, 1);  // child 3 + 1, parent 6 + 1 > L
  EXPECT_EQ(plan.is_flushing[0], 0);
  EXPECT_EQ(plan.is_flushing[1], 1);
  EXPECT_EQ(plan.rows.checkpoint_in[0], shared);
  EXPECT_EQ(plan.rows.checkpoint_in[1], shared);
  EXPECT_NE(plan.rows.checkpoint_out[1], shared);
  EXPECT_TRUE(ledger.copies().empty());
  ledger.commit();
  ledger.free(parent);
  replay(ledger, {child}, 3, 3);  // 4 + 3 > L: the sole owner now writes in place
  EXPECT_EQ(ledger.checkpoint(child), shared);
  ledger.audit();
}

TEST(Ledger, ForksShareFullPagesAndSplitTheLast) {
  Ledger ledger(small_limits(2));  // pages of 4
  const Handle parent = ledger.allocate(24);
  begin(ledger, StepKind::kPrefill, {parent}, 10);
  ledger.commit();
  const Ledger::Fork fork = ledger.fork(parent, 12);
  EXPECT_EQ(ledger.pages(fork.child).size(), 3u);
  EXPECT_EQ(ledger.pages(fork.child)[0], ledger.pages(parent)[0]);
  EXPECT_EQ(ledger.pages(fork.child)[1], ledger.pages(parent)[1]);
  EXPECT_EQ(fork.page.from, ledger.pages(parent)[2]);
  EXPECT_EQ(fork.page.to, ledger.pages(fork.child)[2]);
  EXPECT_NE(fork.page.from, fork.page.to);
  EXPECT_EQ(ledger.counts().used_pages, 4);
  ledger.audit();
  expect_refused(ledger, "the child may have only 9", [&] {
    Ledger one(small_limits(2));
    const Handle sequence = one.allocate(10);
    begin(one, StepKind::kPrefill, {sequence}, 10);
    one.commit();
    one.fork(sequence, 9);
  });
  ledger.free(parent);
  EXPECT_EQ(ledger.counts().used_pages, 3);
  ledger.audit();
}

TEST(Ledger, AResetWhosePagesWentToAForkMayBeRefused) {
  LedgerLimits limits = small_limits(2);
  limits.pages = 5;
  Ledger ledger(limits);
  const Handle parent = ledger.allocate(16);
  begin(ledger, StepKind::kPrefill, {parent}, 16);
  ledger.commit();
  const Handle child = ledger.fork(parent, 20).child;
  expect_refused(ledger, "reset: 16 tokens need 4 KV pages", [&] { ledger.reset(parent); });
  EXPECT_EQ(ledger.cursor(parent).tokens(), 16);
  ledger.free(child);
  ledger.reset(parent);
  EXPECT_EQ(ledger.counts().reserved_pages, 4);
}

TEST(Ledger, MaterialiseReachesBackAsFarAsTheConvolutionInputs) {
  Ledger ledger(small_limits(2));  // L 6, T_max 3
  const Handle from = ledger.allocate(32), to = ledger.allocate(32);
  begin(ledger, StepKind::kPrefill, {from}, 5);
  ledger.commit();
  replay(ledger, {from}, 3, 3);
  replay(ledger, {from}, 2, 2);  // 10 tokens, inputs for positions from 7 on
  expect_refused(ledger, "0 to the history of 5, given 6", [&] { ledger.materialise(from, to, 6); });
  expect_refused(ledger, "0 to the history of 5, given -1", [&] { ledger.materialise(from, to, -1); });
  expect_refused(ledger, "position 6 is too old", [&] { ledger.materialise(from, to, 1); });
  expect_refused(ledger, "both slot", [&] { ledger.materialise(from, from, 2); });
  const PageCopy page = ledger.materialise(from, to, 2);
  EXPECT_EQ(ledger.cursor(to), (Cursor{7, 0}));
  EXPECT_EQ(ledger.cursor(from), (Cursor{5, 5}));
  EXPECT_EQ(page.from, ledger.pages(from)[1]) << "full in the source, not full in the target";
  EXPECT_NE(ledger.checkpoint(from), ledger.checkpoint(to));
  ledger.audit();
  ledger.materialise(from, to, 5);
  EXPECT_EQ(ledger.cursor(to), (Cursor{10, 0}));
  ledger.audit();
}

TEST(Ledger, PaddingRowsNameNothing) {
  Ledger ledger(small_limits(1));
  const Handle handle = ledger.allocate(8);
  const StepPlan& plan = begin(ledger, StepKind::kReplay, {kPaddingRow, handle, kPaddingRow}, 2);
  EXPECT_EQ(plan.rows.slot[0], kPaddingSlot);
  EXPECT_EQ(plan.rows.slot[2], kPaddingSlot);
  EXPECT_EQ(plan.rows.checkpoint_in[0], -1);
  EXPECT_EQ(plan.rows.checkpoint_out[2], -1);
  EXPECT_EQ(plan.pages.page_table[0], -1);
  EXPECT_EQ(plan.tokens, 6);
  ledger.commit(std::vector<int>{0, 1, 2});
  EXPECT_EQ(ledger.cursor(handle), (Cursor{0, 1}));
}

// What a walk knows of one sequence, kept beside the ledger.
struct Expected {
  Cursor cursor;
  int64_t max_tokens;
  int32_t flush_limit;
};

// Seeded random calls; cursors and flush limits follow a model of a few lines, and all counts are recounted after every
// call.
class RandomWalk {
 public:
  RandomWalk(uint64_t seed, bool is_staggered)
      : random_(seed), is_staggered_(is_staggered), ledger_(small_limits(4, is_staggered)) {}

  void run(int calls) {
    for (int call = 0; call < calls; ++call) {
      const PoolCounts before = ledger_.counts();
      try {
        one_call();
      } catch (const Error&) {
        ++refused_;
        EXPECT_EQ(ledger_.counts(), before);
      }
      ledger_.audit();
      EXPECT_EQ(ledger_.counts().live_slots, static_cast<int>(sequences_.size()));
      for (const auto& [generation, sequence] : sequences_) {
        EXPECT_EQ(ledger_.cursor(sequence.first), sequence.second.cursor);
        EXPECT_EQ(ledger_.flush_limit(sequence.first), sequence.second.flush_limit);
      }
    }
    EXPECT_LT(refused_, calls / 2) << "too few calls did anything";
    for (const auto& [generation, sequence] : sequences_) ledger_.free(sequence.first);
    const PoolCounts end = ledger_.counts();
    EXPECT_EQ(end.free_slots, end.slots);
    EXPECT_EQ(end.free_checkpoints, end.slots);
    EXPECT_EQ(end.free_pages, end.pages);
    EXPECT_EQ(end.reserved_pages, 0);
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  Handle any() {
    auto at = sequences_.begin();
    std::advance(at, pick(0, static_cast<int>(sequences_.size()) - 1));
    return at->second.first;
  }

  int32_t first_limit(Handle handle) const { return is_staggered_ ? 6 - handle.slot % 6 : 6; }

  void add(Handle handle, Expected expected) { sequences_[handle.generation] = {handle, expected}; }

  void one_call() {
    const int what = pick(0, 19);
    if (sequences_.empty() || what < 3) {
      const int64_t max_tokens = pick(1, 48);
      const Handle handle = ledger_.allocate(max_tokens);
      add(handle, {{}, max_tokens, first_limit(handle)});
    } else if (what < 5) {
      const Handle handle = any();
      ledger_.free(handle);
      sequences_.erase(handle.generation);
    } else if (what < 6) {
      const Handle handle = any();
      ledger_.reset(handle);
      sequences_[handle.generation].second.cursor = {};
      sequences_[handle.generation].second.flush_limit = first_limit(handle);
    } else if (what < 9) {
      const Handle parent = any();
      const int64_t max_tokens = pick(1, 64);
      const Handle child = ledger_.fork(parent, max_tokens).child;
      const Expected& of_parent = sequences_[parent.generation].second;
      add(child, {of_parent.cursor, max_tokens, of_parent.flush_limit});
    } else if (what < 11) {
      const Handle from = any(), to = any();
      const Cursor cursor = sequences_[from.generation].second.cursor;
      const int records = pick(0, cursor.history);
      ledger_.materialise(from, to, records);
      sequences_[to.generation].second.cursor = {cursor.base + records, 0};
      sequences_[to.generation].second.flush_limit = first_limit(to);
    } else if (what < 12) {
      const Cursor cursor{pick(0, 20), pick(0, 7)};
      const Handle handle = ledger_.allocate(24);
      try {
        ledger_.restore(handle, cursor);
      } catch (const Error&) {
        ledger_.free(handle);
        throw;
      }
      add(handle, {cursor, 24, cursor.history > 0 ? 6 : first_limit(handle)});
    } else {
      step();
    }
  }

  void step() {
    std::vector<Handle> rows;
    for (const auto& [generation, sequence] : sequences_) {
      if (pick(0, 2) != 0) rows.push_back(sequence.first);
    }
    if (pick(0, 3) == 0) rows.push_back(kPaddingRow);
    std::shuffle(rows.begin(), rows.end(), random_);
    const auto kind = static_cast<StepKind>(pick(0, 9) < 7 ? 2 : pick(0, 1));
    const int tokens = kind == StepKind::kReplay ? pick(1, 3) : kind == StepKind::kPrefill ? pick(1, 9) : 1;
    begin(ledger_, kind, rows, tokens);
    std::vector<int> accepted(rows.size(), tokens);
    if (kind == StepKind::kReplay) {
      for (int& count : accepted) count = pick(0, tokens);
    }
    if (pick(0, 30) == 0) {
      ledger_.abort_step();
      for (const Handle row : rows) {
        if (row == kPaddingRow) continue;
        ledger_.free(row);
        sequences_.erase(row.generation);
      }
      return;
    }
    ledger_.commit(accepted);
    for (size_t row = 0; row < rows.size(); ++row) {
      if (rows[row] == kPaddingRow) continue;
      auto& [cursor, max_tokens, limit] = sequences_[rows[row].generation].second;
      if (kind != StepKind::kReplay) {
        cursor = {cursor.tokens() + tokens, 0};
        limit = first_limit(rows[row]);
        continue;
      }
      if (cursor.history + tokens > 6 || cursor.history >= limit) {
        cursor = {cursor.tokens(), 0};
        limit = 6;
      }
      cursor.history += accepted[row];
    }
  }

  std::mt19937_64 random_;
  bool is_staggered_;
  Ledger ledger_;
  std::map<uint64_t, std::pair<Handle, Expected>> sequences_;
  int refused_ = 0;
};

TEST(Ledger, CountsAreConservedOverRandomWalks) {
  for (uint64_t seed = 1; seed <= 20; ++seed)
    for (const bool is_staggered : {false, true}) RandomWalk(seed, is_staggered).run(1000);
}

}  // namespace
}  // namespace replayssm
