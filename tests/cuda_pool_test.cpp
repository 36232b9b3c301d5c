// The laws of the state pool on a GPU, with the real ops on a small model.
#include "replayssm/state/cuda_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/bad_input.h"
#include "tests/cuda_mini_model.h"

namespace replayssm::test {
namespace {

constexpr int kWindow = 6, kMaxStep = 4;

template <typename T>
struct Rig : CudaPoolRig<T> {
  explicit Rig(CheckpointForm form = CheckpointForm::kWords)
      : CudaPoolRig<T>(cuda_mini_layout(kWindow, kMaxStep, form)) {}
};

class CudaPool : public CudaTest {};

template <typename T>
void expect_clean_slots(CheckpointForm form) {
  Rig<T> rig(form);
  const auto fresh = rig.pool(3, /*is_poisoned=*/false);
  Lane expected = cuda_lane(*fresh, 5);
  advance(rig.model, *fresh, {&expected}, StepKind::kPrefill, 2);
  run_cuda_script(rig.model, *fresh, {&expected}, 9, 30);
  for (const bool is_reset : {false, true}) {
    const auto pool = rig.pool(1);
    Lane first = cuda_lane(*pool, 4);
    advance(rig.model, *pool, {&first}, StepKind::kPrefill, 19);
    run_cuda_script(rig.model, *pool, {&first}, 8, 20);
    for (const StepKind kind : {StepKind::kReplay, StepKind::kPrefill, StepKind::kReplay}) {
      rig.model.run(*pool, kind, {first.handle}, {{MiniModel::kNanToken, MiniModel::kNanToken}});
      pool->commit();
    }
    Lane second;
    if (is_reset) {
      pool->reset(first.handle);
      second.handle = first.handle;
      second.random.seed(5);
    } else {
      pool->free(first.handle);
      second = cuda_lane(*pool, 5);
    }
    advance(rig.model, *pool, {&second}, StepKind::kPrefill, 2);
    run_cuda_script(rig.model, *pool, {&second}, 9, 30);
    EXPECT_TRUE(same_bits(second.outputs, expected.outputs)) << "reset " << is_reset;
  }
}

TEST_F(CudaPool, AFreedSlotIsCleanWhenItIsNextUsed) {
  expect_clean_slots<float>(CheckpointForm::kWords);
  expect_clean_slots<Bf16>(CheckpointForm::kPlanes);
  expect_clean_slots<Fp16>(CheckpointForm::kWords);
}

TEST_F(CudaPool, PaddingRowsTouchNoStateAndGiveZeros) {
  Rig<Bf16> rig;
  const auto pool = rig.pool(2, true, 4), other = rig.pool(2, true, 4);
  Lane lane = cuda_lane(*pool, 1), unpadded = cuda_lane(*other, 1);
  for (const StepKind kind : {StepKind::kReplay, StepKind::kConventional, StepKind::kPrefill}) {
    const auto before = pool_bytes_of(*pool);
    const Outputs zeros = rig.model.run(*pool, kind, {kPaddingRow, kPaddingRow}, {{1}, {2}});
    pool->commit(std::vector<int>{1, 1});
    EXPECT_EQ(pool_bytes_of(*pool), before);
    for (const std::vector<float>& row : zeros)
      for (const float value : row) ASSERT_EQ(value, 0.0f);
    for (int step = 0; step < 9; ++step) {
      const std::vector<int> token = lane.draw(1);
      const Outputs padded =
          rig.model.run(*pool, kind, {kPaddingRow, lane.handle, kPaddingRow}, {{3}, token, {MiniModel::kNanToken}});
      pool->commit();
      const Outputs bare = rig.model.run(*other, kind, {unpadded.handle}, {token});
      other->commit();
      EXPECT_TRUE(same_bits(padded[1], bare[0]));
    }
  }
  EXPECT_EQ(pool_bytes_of(*pool), pool_bytes_of(*other));
}

TEST_F(CudaPool, RollbackMovesNoStateBytes) {
  Rig<Bf16> rig;
  rig.model.readout = Readout::kExact;
  const auto conventional = rig.pool(1, false), pool = rig.pool(1);
  Lane plain = cuda_lane(*conventional, 1), lane = cuda_lane(*pool, 1);
  for (int step = 0; step < 60; ++step) advance(rig.model, *conventional, {&plain}, StepKind::kConventional, 1);
  std::mt19937_64 random(3);
  while (lane.past.size() < 60) {
    const int drafts = std::uniform_int_distribution<int>(0, kMaxStep)(random);
    if (drafts > 0) {
      rig.model.run(*pool, StepKind::kReplay, {lane.handle}, {std::vector<int>(drafts, MiniModel::kNanToken)});
      const auto before = pool_bytes_of(*pool);
      pool->commit(std::vector<int>{0});
      EXPECT_EQ(pool_bytes_of(*pool), before);
    }
    advance(rig.model, *pool, {&lane}, StepKind::kReplay, 1);
  }
  EXPECT_TRUE(same_bits(lane.outputs, plain.outputs));
}

template <typename T>
void expect_staggered_rows_are_conventional_in(CheckpointForm form) {
  Rig<T> rig(form);
  const auto pool = rig.pool(8, true, 0, /*staggers_flushes=*/true), conventional = rig.pool(8, false);
  expect_staggered_rows_are_conventional(rig.model, *pool, *conventional, [](const CudaStatePool& of, Handle handle) {
    return checkpoints_of(of, handle);
  });
}

TEST_F(CudaPool, StaggeredRowsHaveTheBitsOfConventionalOnes) {
  expect_staggered_rows_are_conventional_in<float>(CheckpointForm::kWords);
  expect_staggered_rows_are_conventional_in<Bf16>(CheckpointForm::kPlanes);
  expect_staggered_rows_are_conventional_in<Fp16>(CheckpointForm::kWords);
}

// Runs a lane up to its fork, with `records` unfolded records.
template <typename Model>
void run_to_fork(Model& model, CudaStatePool& pool, Lane& lane, int records) {
  advance(model, pool, {&lane}, StepKind::kPrefill, 13);
  for (int record = 0; record < records; ++record) advance(model, pool, {&lane}, StepKind::kReplay, 1);
}

// Forks until the pool is full, steps all sharers at once and goes on; each must be as a sequence that never forked.
// Where flushes are staggered, direct readouts are so until a step of another kind.
template <typename T>
void expect_forks_continue(Rig<T>& rig, int sharers, int records, StepKind kind, bool is_staggered) {
  rig.model.readout = is_staggered && kind != StepKind::kReplay ? Readout::kExact : Readout::kDirect;
  const auto pool = rig.pool(sharers, true, 0, is_staggered);
  std::vector<Lane> lanes = {cuda_lane(*pool, 1)};
  run_to_fork(rig.model, *pool, lanes[0], records);
  while (static_cast<int>(lanes.size()) < sharers) {
    Lane child = lanes[0];
    child.handle = pool->fork(lanes[0].handle, 512);
    child.random.seed(100 + lanes.size());
    lanes.push_back(child);
  }
  EXPECT_EQ(pool->counts().free_slots, 0);
  EXPECT_EQ(pool->counts().used_checkpoints, 1);
  const int64_t tokens = pool->cursor(lanes[0].handle).tokens(), page_tokens = pool->layout().page_tokens;
  EXPECT_EQ(pool->counts().used_pages, tokens / page_tokens + (tokens % page_tokens == 0 ? 0 : sharers));
  std::vector<Lane*> all;
  for (Lane& lane : lanes) all.push_back(&lane);
  const bool is_written =
      kind != StepKind::kReplay || pool->cursor(lanes[0].handle).history == pool->ledger().flush_limit(lanes[0].handle);
  advance(rig.model, *pool, all, kind, 1);
  EXPECT_EQ(pool->counts().used_checkpoints, is_written ? sharers : 1);
  run_cuda_script(rig.model, *pool, all, 6, 12);
  for (int child = 0; child < sharers; ++child) {
    const auto alone = rig.pool(sharers, false, 0, is_staggered);
    Lane lane = cuda_lane(*alone, 1);  // in the slot that the parent has
    run_to_fork(rig.model, *alone, lane, records);
    if (child > 0) lane.random.seed(100 + child);
    advance(rig.model, *alone, {&lane}, kind, 1);
    run_cuda_script(rig.model, *alone, {&lane}, 6, 12);
    EXPECT_TRUE(same_bits(lanes[child].outputs, lane.outputs))
        << sharers << " sharers, child " << child << ", " << records << " records";
  }
}

TEST_F(CudaPool, ForksContinueAsTheParentWould) {
  Rig<float> words;
  Rig<Bf16> planes(CheckpointForm::kPlanes);
  for (const int sharers : {2, 4}) {
    for (int records = 0; records <= kWindow; ++records) {
      for (const StepKind kind : {StepKind::kReplay, StepKind::kConventional, StepKind::kPrefill}) {
        for (const bool is_staggered : {false, true}) {
          expect_forks_continue(words, sharers, records, kind, is_staggered);
          expect_forks_continue(planes, sharers, records, kind, is_staggered);
        }
      }
    }
  }
}

template <typename T>
void expect_materialise_reaches(CheckpointForm form) {
  Rig<T> rig(form);
  int reached = 0;
  for (int records = 0; records <= kWindow; ++records) {
    const auto pool = rig.pool(2);
    Lane from = cuda_lane(*pool, 1), to = cuda_lane(*pool, 2);
    advance(rig.model, *pool, {&to}, StepKind::kPrefill, 40);
    advance(rig.model, *pool, {&from}, StepKind::kPrefill, 5);
    for (const int tokens : {2, 3, 1}) advance(rig.model, *pool, {&from}, StepKind::kReplay, tokens, {tokens});
    const auto source = checkpoints_of(*pool, from.handle);
    const Cursor cursor = pool->cursor(from.handle);
    try {
      pool->materialise(from.handle, to.handle, records);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("too old"), std::string::npos) << error.what();
      EXPECT_LT(records, kWindow - kMaxStep);
      continue;
    }
    ++reached;
    EXPECT_EQ(checkpoints_of(*pool, from.handle), source);
    EXPECT_EQ(pool->cursor(from.handle), cursor);
    EXPECT_EQ(pool->cursor(to.handle), (Cursor{5 + records, 0}));

    const auto alone = rig.pool(1, false);
    Lane twin = cuda_lane(*alone, 7), copy;
    relive(rig.model, *alone, twin.handle, {from.past.begin(), from.past.begin() + 1 + records});
    EXPECT_EQ(checkpoints_of(*pool, to.handle), checkpoints_of(*alone, twin.handle));
    copy.handle = to.handle;
    copy.random.seed(7);
    run_cuda_script(rig.model, *alone, {&twin}, 5, 20);
    run_cuda_script(rig.model, *pool, {&copy}, 5, 20);
    EXPECT_TRUE(same_bits(copy.outputs, twin.outputs)) << records << " records";
  }
  EXPECT_GE(reached, kMaxStep + 1);
}

TEST_F(CudaPool, MaterialiseReachesEveryPositionThatIsHeld) {
  expect_materialise_reaches<float>(CheckpointForm::kWords);
  expect_materialise_reaches<Bf16>(CheckpointForm::kPlanes);
  expect_materialise_reaches<Fp16>(CheckpointForm::kWords);
}

// What the device's rows and page tables hold, against a plan and padding rows past it.
void expect_rows_are(const CudaStatePool& pool, const StepPlan& plan) {
  const RowArrays& at = pool.row_arrays();
  const auto read = [&]<typename E>(const E* from, size_t count) {
    std::vector<E> values(count);
    pool.device().download(values.data(), from, count * sizeof(E));
    return values;
  };
  const auto expect = [&]<typename E>(const char* name, const E* device, const E* host, E padding) {
    std::vector<E> expected(host, host + plan.rows.count);
    expected.resize(at.capacity, padding);
    EXPECT_EQ(read(device, at.capacity), expected) << name;
  };
  expect("slot", at.slot, plan.rows.slot, kPaddingSlot);
  expect("base", at.base, plan.rows.base, int64_t{0});
  expect("history", at.history, plan.rows.history, 0);
  expect("checkpoint_in", at.checkpoint_in, plan.rows.checkpoint_in, -1);
  expect("checkpoint_out", at.checkpoint_out, plan.rows.checkpoint_out, -1);
  if (at.flush_limit != nullptr) expect("flush_limit", at.flush_limit, plan.rows.flush_limit, 0xFFFF);
  std::vector<int32_t> begin(plan.token_begin, plan.token_begin + plan.rows.count + 1);
  begin.resize(at.capacity + 1, plan.tokens);
  EXPECT_EQ(read(at.token_begin, begin.size()), begin) << "token_begin";
  const KvPages pages = pool.pages();
  std::vector<int32_t> table(static_cast<size_t>(at.capacity) * pages.table_stride, -1);
  for (int row = 0; row < plan.rows.count; ++row)
    std::copy_n(plan.pages.page_table + row * plan.pages.table_stride, plan.pages.table_stride,
                table.begin() + row * pages.table_stride);
  EXPECT_EQ(read(pages.page_table, table.size()), table) << "page tables";
}

void expect_rows_of_any_batch(bool is_staggered) {
  Rig<Bf16> rig;
  const auto pool = rig.pool(300, false, 310, is_staggered);
  EXPECT_EQ(pool->row_arrays().flush_limit != nullptr, is_staggered);
  const int32_t none = 0;
  StepPlan before;
  before.token_begin = &none;
  expect_rows_are(*pool, before);
  std::vector<Handle> handles;
  for (int i = 0; i < 300; ++i) handles.push_back(pool->allocate(512));
  std::mt19937_64 random(12);
  for (const int count : {1, 127, 128, 129, 256, 257, 310}) {
    std::ranges::shuffle(handles, random);
    std::vector<Handle> rows(handles.begin(), handles.begin() + std::min(count, 300));
    rows.resize(count, kPaddingRow);
    std::ranges::shuffle(rows, random);
    std::vector<int> tokens;
    for (int b = 0; b < count; ++b) tokens.push_back(std::uniform_int_distribution<int>(1, 5)(random));
    if (count == 128) tokens[5] = 60;  // the steps after it have shorter tables for a while
    expect_rows_are(*pool, pool->begin_step(StepKind::kPrefill, rows, tokens));
    pool->commit();
  }
  const std::vector<Handle> two = {kPaddingRow, handles[0]}, padding = {kPaddingRow};
  for (const std::vector<Handle>& rows : {two, padding, two}) {
    expect_rows_are(*pool, pool->begin_step(StepKind::kConventional, rows, std::vector<int>(rows.size(), 1)));
    pool->commit();
  }
  EXPECT_THROW(pool->rows(311), Error);
}

TEST_F(CudaPool, BeginStepPutsTheRowsOfAnyBatch) {
  expect_rows_of_any_batch(false);
  expect_rows_of_any_batch(true);
}

// The host begins steps far ahead of the GPU; each step's ops see their own rows.
TEST_F(CudaPool, TheHostMayRunAhead) {
  Rig<Bf16> rig;
  const auto pool = rig.pool(200, false);
  std::vector<Handle> rows;
  for (int i = 0; i < 200; ++i) rows.push_back(pool->allocate(512));
  const std::vector<int> one(rows.size(), 1);
  constexpr int kSteps = 100;
  const size_t stride = pool->pages().table_stride, entries = rows.size() * stride;
  DeviceBuffer<int32_t> seen(kSteps * rows.size(), rig.device), seen_pages(kSteps * entries, rig.device);
  std::vector<int32_t> expected, expected_pages(kSteps * entries, -1);
  for (int step = 0; step < kSteps; ++step) {
    const StepPlan& plan = pool->begin_step(StepKind::kReplay, rows, one);
    expected.insert(expected.end(), plan.rows.history, plan.rows.history + rows.size());
    for (size_t row = 0; row < rows.size(); ++row)
      std::copy_n(plan.pages.page_table + row * plan.pages.table_stride, plan.pages.table_stride,
                  expected_pages.begin() + step * entries + row * stride);
    rig.device.copy(seen.data() + step * rows.size(), pool->row_arrays().history, rows.size() * sizeof(int32_t));
    rig.device.copy(seen_pages.data() + step * entries, pool->pages().page_table, entries * sizeof(int32_t));
    pool->commit();
  }
  EXPECT_EQ(seen.download(rig.device), expected);
  EXPECT_EQ(seen_pages.download(rig.device), expected_pages);
}

// Law 16: a captured step launched with other rows, cursors, forks and acceptances, beside steps that are not captured.
template <typename T>
void expect_graph_serves_any_step(CheckpointForm form, Readout readout, bool is_staggered) {
  constexpr int kRows = 4, kTokens = 3, kSlots = 6;
  Rig<T> rig(form);
  rig.model.readout = readout;
  const auto captured = rig.pool(kSlots, true, 0, is_staggered), plain = rig.pool(kSlots, true, 0, is_staggered);
  std::vector<Lane> lanes, twins;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    lanes.push_back(cuda_lane(*captured, seed));
    twins.push_back(cuda_lane(*plain, seed));
  }
  CudaGraph graph(rig.device, [&] { rig.model.queue(*captured, StepKind::kReplay, kRows, kRows * kTokens); });
  EXPECT_EQ(pool_bytes_of(*captured), pool_bytes_of(*plain)) << "a capture runs nothing";
  std::mt19937_64 random(21);
  const auto pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int step = 0; step < 80; ++step) {
    if (step % 5 == 4) {  // another slot set: one goes, another forks
      const size_t gone = pick(0, static_cast<int>(lanes.size()) - 1);
      captured->free(lanes[gone].handle);
      plain->free(twins[gone].handle);
      lanes.erase(lanes.begin() + gone);
      twins.erase(twins.begin() + gone);
      while (static_cast<int>(lanes.size()) < 4 + step % 2) {
        const size_t parent = pick(0, static_cast<int>(lanes.size()) - 1);
        lanes.push_back(lanes[parent]);
        twins.push_back(twins[parent]);
        lanes.back().handle = captured->fork(lanes[parent].handle, 512);
        twins.back().handle = plain->fork(twins[parent].handle, 512);
      }
    }
    std::vector<int> order;
    for (int lane = 0; lane < static_cast<int>(lanes.size()); ++lane) order.push_back(lane);
    std::ranges::shuffle(order, random);
    order.resize(kRows - pick(0, 1));
    std::vector<Handle> rows, twin_rows;
    std::vector<std::vector<int>> tokens;
    std::vector<int> flat, accepted;
    for (int b = 0; b < kRows; ++b) {
      const bool is_padding = b >= static_cast<int>(order.size());
      rows.push_back(is_padding ? kPaddingRow : lanes[order[b]].handle);
      twin_rows.push_back(is_padding ? kPaddingRow : twins[order[b]].handle);
      tokens.push_back(lanes[0].draw(kTokens));
      flat.insert(flat.end(), tokens.back().begin(), tokens.back().end());
      accepted.push_back(pick(0, kTokens));
    }
    const Outputs expected = rig.model.run(*plain, StepKind::kReplay, twin_rows, tokens);
    plain->commit(accepted);
    const std::vector<int> counts(kRows, kTokens);
    const StepPlan& plan = captured->begin_step(StepKind::kReplay, rows, counts);
    rig.model.stage(flat);
    graph.launch();
    const Outputs outputs = rig.model.read(plan);
    captured->commit(accepted);
    for (int b = 0; b < kRows; ++b) ASSERT_TRUE(same_bits(outputs[b], expected[b])) << "step " << step << " row " << b;
  }
  EXPECT_EQ(pool_bytes_of(*captured), pool_bytes_of(*plain));
}

TEST_F(CudaPool, AGraphServesAnyStep) {
  expect_graph_serves_any_step<float>(CheckpointForm::kWords, Readout::kDirect, false);
  expect_graph_serves_any_step<float>(CheckpointForm::kWords, Readout::kDirect, true);
  expect_graph_serves_any_step<Bf16>(CheckpointForm::kPlanes, Readout::kDirect, true);
  expect_graph_serves_any_step<Bf16>(CheckpointForm::kWords, Readout::kExact, false);
}

// Cursors that commit_rows moves on the GPU stand where commit and the next begin_step put them.
TEST_F(CudaPool, CommitRowsMeetsTheLedger) {
  constexpr int kTokens = 3;
  Rig<Bf16> rig;
  const auto pool = rig.pool(6, true, 0, /*staggers_flushes=*/true);
  std::vector<Handle> rows = {pool->allocate(512), kPaddingRow, pool->allocate(512)};
  rows.push_back(pool->fork(rows[0], 512));
  const int count = static_cast<int>(rows.size());
  const std::vector<int> tokens(rows.size(), kTokens);
  std::mt19937_64 random(5);
  const RowArrays& at = pool->row_arrays();
  DeviceBuffer<int32_t> accepted_there(rows.size(), rig.device);
  for (int step = 0; step < 60; ++step) {
    const auto read = [&](const int32_t* from) {
      std::vector<int32_t> values(rows.size());
      rig.device.download(values.data(), from, values.size() * sizeof(int32_t));
      return values;
    };
    pool->begin_step(StepKind::kReplay, rows, tokens);
    std::vector<int> accepted;
    for (int b = 0; b < count; ++b) accepted.push_back(std::uniform_int_distribution<int>(0, kTokens)(random));
    accepted_there.upload(accepted, rig.device);
    commit_rows({count, at.slot, at.base, at.history, at.checkpoint_in, at.checkpoint_out, kTokens, kWindow,
                 accepted_there.data(), at.flush_limit},
                rig.device);
    pool->commit(accepted);
    const std::vector<int32_t> history = read(at.history), in = read(at.checkpoint_in), limit = read(at.flush_limit);
    std::vector<int64_t> base(rows.size());
    rig.device.download(base.data(), at.base, base.size() * sizeof(int64_t));
    for (int b = 0; b < count; ++b) {
      if (rows[b] == kPaddingRow) continue;
      ASSERT_EQ((Cursor{base[b], history[b]}), pool->cursor(rows[b])) << step;
      ASSERT_EQ(in[b], pool->ledger().checkpoint(rows[b])) << step;
      ASSERT_EQ(limit[b], pool->ledger().flush_limit(rows[b])) << step;
    }
    if (step % 20 == 19) {
      pool->free(rows[3]);
      rows[3] = pool->fork(rows[2], 512);
    }
  }
}

TEST_F(CudaPool, AnAbortedStepLeavesTheForksOfItsSequencesAlone) {
  Rig<float> rig;
  const auto pool = rig.pool(2), other = rig.pool(1, false);
  Lane parent = cuda_lane(*pool, 1), alone = cuda_lane(*other, 1);
  run_to_fork(rig.model, *pool, parent, 4);
  run_to_fork(rig.model, *other, alone, 4);
  Lane child = parent;
  child.handle = pool->fork(parent.handle, 512);
  rig.model.run(*pool, StepKind::kReplay, {parent.handle}, {std::vector<int>(4, MiniModel::kNanToken)});
  pool->abort_step();
  EXPECT_THROW(pool->fork(parent.handle, 512), Error);
  pool->reset(parent.handle);
  run_cuda_script(rig.model, *pool, {&child}, 2, 20);
  run_cuda_script(rig.model, *other, {&alone}, 2, 20);
  EXPECT_TRUE(same_bits(child.outputs, alone.outputs));
}

}  // namespace
}  // namespace replayssm::test
