// The laws of the state pool, with the real ops on a small hybrid model.
#include "replayssm/state/pool.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "replayssm/core/bf16.h"
#include "replayssm/core/error.h"
#include "tests/allocation.h"
#include "tests/arrays.h"
#include "tests/mini_model.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using test::advance;
using test::checkpoints_of;
using test::kFloat32Bound;
using test::Lane;
using test::mini_layout;
using test::MiniModel;
using test::pool_bits;
using test::relative_error;
using test::relive;
using test::same_bits;

constexpr int kWindow = 6, kMaxStep = 4;

PoolSize slots(const StateLayout& layout, int count) {
  return pool_size(layout, count, layout.context_tokens);
}

// A lane on a new sequence of `pool`.
Lane lane_in(StatePool& pool, uint64_t seed) {
  Lane lane;
  lane.handle = pool.allocate(pool.layout().context_tokens);
  lane.random.seed(seed);
  return lane;
}

// Prefill, then replay steps whose windows and acceptances come from `seed`.
void run_script(MiniModel& model, StatePool& pool, const std::vector<Lane*>& lanes, uint64_t seed, int steps) {
  std::mt19937_64 random(seed);
  const auto pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int step = 0; step < steps; ++step) {
    const int tokens = pick(1, kMaxStep);
    std::vector<int> accepted(lanes.size(), pick(0, tokens));
    advance(model, pool, lanes, StepKind::kReplay, tokens, accepted);
  }
}

void expect_clean_slots(CheckpointForm form) {
  MiniModel model(mini_layout(kWindow, kMaxStep, form));
  StatePool fresh(model.layout(), slots(model.layout(), 3));
  Lane expected = lane_in(fresh, 5);
  advance(model, fresh, {&expected}, StepKind::kPrefill, 2);
  run_script(model, fresh, {&expected}, 9, 40);

  for (const bool is_reset : {false, true}) {
    StatePool pool(model.layout(), slots(model.layout(), 1), {.is_poisoned = true});
    Lane first = lane_in(pool, 4);
    advance(model, pool, {&first}, StepKind::kPrefill, 19);
    run_script(model, pool, {&first}, 8, 40);
    for (const StepKind kind : {StepKind::kReplay, StepKind::kPrefill, StepKind::kReplay}) {
      model.run(pool, kind, {first.handle}, {{MiniModel::kNanToken, MiniModel::kNanToken}});
      pool.commit();
    }
    Lane second;
    if (is_reset) {
      pool.reset(first.handle);
      second = first;
      second.outputs.clear();
      second.random.seed(5);
    } else {
      pool.free(first.handle);
      second = lane_in(pool, 5);
    }
    advance(model, pool, {&second}, StepKind::kPrefill, 2);
    run_script(model, pool, {&second}, 9, 40);
    EXPECT_TRUE(same_bits(second.outputs, expected.outputs)) << "reset " << is_reset;
  }
}

TEST(StatePool, AFreedSlotIsCleanWhenItIsNextUsed) {
  expect_clean_slots(CheckpointForm::kWords);
  expect_clean_slots(CheckpointForm::kPlanes);
}

// Exact outputs, forks, materialised states and sequences in used slots have the bits that they have with words.
TEST(StatePool, PlanesKeepTheBitsOfWords) {
  std::vector<float> outputs[2];
  std::vector<std::vector<float>> checkpoints[2];
  for (const CheckpointForm form : {CheckpointForm::kWords, CheckpointForm::kPlanes}) {
    const int index = form == CheckpointForm::kPlanes;
    MiniModel model(mini_layout(kWindow, kMaxStep, form));
    model.readout = Readout::kExact;
    StatePool pool(model.layout(), slots(model.layout(), 3), {.is_poisoned = true});
    Lane used = lane_in(pool, 4);
    advance(model, pool, {&used}, StepKind::kPrefill, 19);
    run_script(model, pool, {&used}, 8, 20);
    pool.reset(used.handle);
    Lane lane = lane_in(pool, 1), other = lane_in(pool, 2), child;
    advance(model, pool, {&lane, &other}, StepKind::kPrefill, 37);
    run_script(model, pool, {&lane, &other}, 9, 40);
    advance(model, pool, {&lane}, StepKind::kConventional, 1);
    advance(model, pool, {&lane}, StepKind::kReplay, 3, {3});
    pool.free(used.handle);
    child = lane;
    child.handle = pool.fork(lane.handle, 512);
    pool.materialise(lane.handle, other.handle, 2, model.device(), model.workspace());
    run_script(model, pool, {&other, &lane, &child}, 5, 30);
    for (const Lane* each : {&used, &lane, &other, &child})
      outputs[index].insert(outputs[index].end(), each->outputs.begin(), each->outputs.end());
    for (const Lane* each : {&lane, &other, &child})
      for (const std::vector<float>& layer : checkpoints_of(pool, each->handle)) checkpoints[index].push_back(layer);
  }
  EXPECT_TRUE(same_bits(outputs[0], outputs[1]));
  EXPECT_EQ(checkpoints[0], checkpoints[1]);
}

TEST(StatePool, PoisonIsNoNumberInEitherForm) {
  for (const CheckpointForm form : {CheckpointForm::kWords, CheckpointForm::kPlanes}) {
    StatePool pool(mini_layout(kWindow, kMaxStep, form), PoolSize{1, 1}, {.is_poisoned = true});
    for (const int layer : {0, 2, 4}) {
      const int64_t count = pool.arrays(layer)->checkpoint_floats();
      std::vector<uint16_t> halves(2 * count);
      std::memcpy(halves.data(), pool.checkpoint(layer), count * sizeof(float));
      for (const uint16_t half : halves) ASSERT_TRUE(std::isnan(to_float(Bf16{half})));
      for (int64_t i = 0; i < count; ++i) ASSERT_TRUE(std::isnan(pool.checkpoint(layer)[i]));
      std::vector<float> words(count);
      test::from_planes(halves, count / pool.arrays(layer)->checkpoint[0], words);
      for (const float word : words) ASSERT_TRUE(std::isnan(word));
    }
  }
}

TEST(StatePool, ABatchEqualsItsRowsAlone) {
  for (const int threads : {1, 2}) {
    MiniModel model(mini_layout(kWindow, kMaxStep), threads);
    StatePool pool(model.layout(), slots(model.layout(), 3), {.is_poisoned = true});
    std::vector<Lane> together = {lane_in(pool, 1), lane_in(pool, 2), lane_in(pool, 3)};
    std::vector<Lane> alone(3);
    std::vector<std::unique_ptr<StatePool>> pools;
    for (uint64_t lane = 0; lane < 3; ++lane) {
      pools.push_back(std::make_unique<StatePool>(model.layout(), slots(model.layout(), 2)));
      alone[lane] = lane_in(*pools[lane], lane + 1);
    }
    std::mt19937_64 random(33);
    const auto pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    for (int step = 0; step < 100; ++step) {
      std::vector<int> order = {0, 1, 2};
      std::shuffle(order.begin(), order.end(), random);
      order.resize(pick(1, 3));
      const int tokens = pick(1, kMaxStep);
      std::vector<Lane*> lanes;
      std::vector<int> accepted;
      for (const int lane : order) {
        lanes.push_back(&together[lane]);
        accepted.push_back(pick(0, tokens));
        advance(model, *pools[lane], {&alone[lane]}, StepKind::kReplay, tokens, {accepted.back()});
      }
      advance(model, pool, lanes, StepKind::kReplay, tokens, accepted);
    }
    for (int lane = 0; lane < 3; ++lane) EXPECT_TRUE(same_bits(together[lane].outputs, alone[lane].outputs));
  }
}

TEST(StatePool, PaddingRowsTouchNoStateAndGiveZeros) {
  MiniModel model(mini_layout(kWindow, kMaxStep));
  StatePool pool(model.layout(), slots(model.layout(), 2), {.max_rows = 4, .is_poisoned = true});
  StatePool other(model.layout(), slots(model.layout(), 2), {.is_poisoned = true});
  Lane lane = lane_in(pool, 1), unpadded = lane_in(other, 1);
  for (const StepKind kind : {StepKind::kReplay, StepKind::kConventional, StepKind::kPrefill}) {
    const std::vector<uint32_t> before = pool_bits(pool);
    const test::Outputs zeros = model.run(pool, kind, {kPaddingRow, kPaddingRow}, {{1}, {2}});
    pool.commit(std::vector<int>{1, 1});
    EXPECT_EQ(pool_bits(pool), before);
    for (const std::vector<float>& row : zeros) {
      for (const float value : row) EXPECT_EQ(value, 0.0f);
    }
    for (int step = 0; step < 9; ++step) {
      const std::vector<int> token = lane.draw(1);
      const test::Outputs padded =
          model.run(pool, kind, {kPaddingRow, lane.handle, kPaddingRow}, {{3}, token, {MiniModel::kNanToken}});
      pool.commit();
      const test::Outputs bare = model.run(other, kind, {unpadded.handle}, {token});
      other.commit();
      EXPECT_TRUE(same_bits(padded[1], bare[0]));
    }
  }
  EXPECT_EQ(pool_bits(pool), pool_bits(other));
}

// Every checkpoint that a flush leaves has the bits of conventional decoding of the accepted tokens. Where flushes are
// staggered, conventional steps between let the slot's first limit come again.
void expect_only_committed_records_folded(bool is_staggered) {
  MiniModel model(mini_layout(kWindow, kMaxStep));
  StatePool pool(model.layout(), slots(model.layout(), 5), {.is_poisoned = true, .staggers_flushes = is_staggered});
  StatePool conventional(model.layout(), slots(model.layout(), 1));
  Lane lane = lane_in(pool, 1);
  const Handle twin = conventional.allocate(512);
  std::mt19937_64 random(2);
  const auto pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int flushes = 0;
  while (pool.cursor(lane.handle).tokens() < 500) {
    const int64_t base = pool.cursor(lane.handle).base;
    const auto before = checkpoints_of(pool, lane.handle);
    const int tokens = pick(1, kMaxStep);
    if (is_staggered && pick(0, 5) == 0)
      advance(model, pool, {&lane}, StepKind::kConventional, 1);
    else
      advance(model, pool, {&lane}, StepKind::kReplay, tokens, {pick(0, tokens)});
    const int64_t folded = pool.cursor(lane.handle).base;
    if (folded == base) {
      EXPECT_EQ(checkpoints_of(pool, lane.handle), before);
      continue;
    }
    ++flushes;
    relive(model, conventional, twin, {lane.past.begin() + base, lane.past.begin() + folded});
    ASSERT_EQ(checkpoints_of(pool, lane.handle), checkpoints_of(conventional, twin)) << "at " << folded;
  }
  EXPECT_GT(flushes, 50);
}

TEST(StatePool, OnlyCommittedRecordsAreEverFolded) {
  expect_only_committed_records_folded(false);
  expect_only_committed_records_folded(true);
}

TEST(StatePool, StaggeredRowsHaveTheBitsOfConventionalOnes) {
  for (const CheckpointForm form : {CheckpointForm::kWords, CheckpointForm::kPlanes}) {
    MiniModel model(mini_layout(kWindow, kMaxStep, form));
    StatePool pool(model.layout(), slots(model.layout(), 8), {.is_poisoned = true, .staggers_flushes = true});
    StatePool conventional(model.layout(), slots(model.layout(), 8));
    test::expect_staggered_rows_are_conventional(
        model, pool, conventional, [](StatePool& of, Handle handle) { return checkpoints_of(of, handle); });
  }
}

TEST(StatePool, RollbackMovesNoStateBytes) {
  MiniModel model(mini_layout(kWindow, kMaxStep));
  model.readout = Readout::kExact;
  StatePool conventional(model.layout(), slots(model.layout(), 1));
  Lane plain = lane_in(conventional, 1);
  for (int step = 0; step < 60; ++step) advance(model, conventional, {&plain}, StepKind::kConventional, 1);
  StatePool pool(model.layout(), slots(model.layout(), 1), {.is_poisoned = true});
  Lane lane = lane_in(pool, 1);
  std::mt19937_64 random(3);
  while (lane.past.size() < 60) {
    // Drafts of wrong tokens, all rejected, between the tokens that stay: convolution and ring roll back each time.
    const int drafts = std::uniform_int_distribution<int>(0, kMaxStep)(random);
    if (drafts > 0) {
      model.run(pool, StepKind::kReplay, {lane.handle}, {std::vector<int>(drafts, MiniModel::kNanToken)});
      const std::vector<uint32_t> before = pool_bits(pool);
      pool.commit(std::vector<int>{0});
      EXPECT_EQ(pool_bits(pool), before);
    }
    advance(model, pool, {&lane}, StepKind::kReplay, 1);
  }
  EXPECT_TRUE(same_bits(lane.outputs, plain.outputs));
}

// Runs a lane up to its fork, with `records` unfolded records.
void run_to_fork(MiniModel& model, StatePool& pool, Lane& lane, int records) {
  advance(model, pool, {&lane}, StepKind::kPrefill, 13);
  for (int record = 0; record < records; ++record) advance(model, pool, {&lane}, StepKind::kReplay, 1);
}

// Forks until the pool is full, steps all sharers at once and goes on; each must be as a sequence that never forked.
// Where flushes are staggered, direct readouts are so until a step of another kind.
void expect_forks_continue(int sharers, int records, StepKind kind, CheckpointForm form, bool is_staggered) {
  MiniModel model(mini_layout(kWindow, kMaxStep, form));
  if (is_staggered && kind != StepKind::kReplay) model.readout = Readout::kExact;
  StatePool pool(model.layout(), slots(model.layout(), sharers),
                 {.is_poisoned = true, .staggers_flushes = is_staggered});
  std::vector<Lane> lanes = {lane_in(pool, 1)};
  run_to_fork(model, pool, lanes[0], records);
  while (static_cast<int>(lanes.size()) < sharers) {
    Lane child = lanes[0];
    child.handle = pool.fork(lanes[0].handle, 512);
    child.random.seed(100 + lanes.size());
    lanes.push_back(child);
  }
  EXPECT_EQ(pool.counts().free_slots, 0);
  EXPECT_EQ(pool.counts().used_checkpoints, 1);
  std::vector<Lane*> all;
  for (Lane& lane : lanes) all.push_back(&lane);
  const bool is_written =
      kind != StepKind::kReplay || pool.cursor(lanes[0].handle).history == pool.ledger().flush_limit(lanes[0].handle);
  advance(model, pool, all, kind, 1);
  EXPECT_EQ(pool.counts().used_checkpoints, is_written ? sharers : 1);
  run_script(model, pool, all, 6, 30);
  for (int child = 0; child < sharers; ++child) {
    StatePool alone(model.layout(), slots(model.layout(), sharers), {.staggers_flushes = is_staggered});
    Lane lane = lane_in(alone, 1);  // in the slot that the parent has
    run_to_fork(model, alone, lane, records);
    if (child > 0) lane.random.seed(100 + child);
    advance(model, alone, {&lane}, kind, 1);
    run_script(model, alone, {&lane}, 6, 30);
    EXPECT_TRUE(same_bits(lanes[child].outputs, lane.outputs))
        << sharers << " sharers, child " << child << ", " << records << " records";
  }
}

TEST(StatePool, ForksContinueAsTheParentWould) {
  for (int sharers = 2; sharers <= 4; ++sharers) {
    for (int records = 0; records <= kWindow; ++records) {
      for (const StepKind kind : {StepKind::kReplay, StepKind::kConventional, StepKind::kPrefill}) {
        for (const CheckpointForm form : {CheckpointForm::kWords, CheckpointForm::kPlanes})
          for (const bool is_staggered : {false, true})
            expect_forks_continue(sharers, records, kind, form, is_staggered);
      }
    }
  }
}

TEST(StatePool, MaterialiseReachesEveryPositionThatIsHeld) {
  MiniModel model(mini_layout(kWindow, kMaxStep));
  int reached = 0;
  for (int records = 0; records <= kWindow; ++records) {
    StatePool pool(model.layout(), slots(model.layout(), 2), {.is_poisoned = true});
    Lane from = lane_in(pool, 1), to = lane_in(pool, 2);
    advance(model, pool, {&to}, StepKind::kPrefill, 40);
    advance(model, pool, {&from}, StepKind::kPrefill, 5);
    for (const int tokens : {2, 3, 1}) advance(model, pool, {&from}, StepKind::kReplay, tokens, {tokens});
    const auto source = checkpoints_of(pool, from.handle);
    const Cursor cursor = pool.cursor(from.handle);
    try {
      pool.materialise(from.handle, to.handle, records, model.device(), model.workspace());
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("too old"), std::string::npos) << error.what();
      EXPECT_LT(records, kWindow - kMaxStep);
      EXPECT_EQ(pool.cursor(to.handle), (Cursor{40, 0}));
      continue;
    }
    ++reached;
    EXPECT_EQ(checkpoints_of(pool, from.handle), source);
    EXPECT_EQ(pool.cursor(from.handle), cursor);
    EXPECT_EQ(pool.cursor(to.handle), (Cursor{5 + records, 0}));

    StatePool alone(model.layout(), slots(model.layout(), 1));
    Lane twin = lane_in(alone, 7), copy;
    relive(model, alone, twin.handle, {from.past.begin(), from.past.begin() + 1 + records});
    EXPECT_EQ(checkpoints_of(pool, to.handle), checkpoints_of(alone, twin.handle));
    copy.handle = to.handle;
    copy.random.seed(7);
    run_script(model, alone, {&twin}, 5, 30);
    run_script(model, pool, {&copy}, 5, 30);
    EXPECT_TRUE(same_bits(copy.outputs, twin.outputs)) << records << " records";
    run_script(model, pool, {&from}, 4, 20);

    StatePool again(model.layout(), slots(model.layout(), 1));
    Lane same = lane_in(again, 1);
    advance(model, again, {&same}, StepKind::kPrefill, 5);
    for (const int tokens : {2, 3, 1}) advance(model, again, {&same}, StepKind::kReplay, tokens, {tokens});
    run_script(model, again, {&same}, 4, 20);
    EXPECT_TRUE(same_bits(from.outputs, same.outputs)) << "the source";
  }
  EXPECT_GE(reached, kMaxStep + 1);
}

TEST(StatePool, ABadNumberStaysHome) {
  MiniModel model(mini_layout(kWindow, kMaxStep));
  StatePool pool(model.layout(), slots(model.layout(), 3), {.is_poisoned = true});
  Lane lane = lane_in(pool, 1), sick = lane_in(pool, 2);
  StatePool other(model.layout(), slots(model.layout(), 1));
  Lane alone = lane_in(other, 1);
  run_script(model, pool, {&lane, &sick}, 3, 5);
  run_script(model, other, {&alone}, 3, 5);
  Lane child = lane;
  child.handle = pool.fork(sick.handle, 512);
  for (int step = 0; step < 40; ++step) {
    const std::vector<int> tokens = lane.draw(2);
    const StepKind kind = step % 7 == 6 ? StepKind::kPrefill : StepKind::kReplay;
    const test::Outputs outputs =
        model.run(pool, kind, {sick.handle, lane.handle}, {{MiniModel::kNanToken, MiniModel::kNanToken}, tokens});
    pool.commit();
    const test::Outputs bare = model.run(other, kind, {alone.handle}, {tokens});
    other.commit();
    EXPECT_TRUE(same_bits(outputs[1], bare[0]));
    EXPECT_TRUE(std::isnan(outputs[0].front()));
  }
  const test::Outputs outputs = model.run(pool, StepKind::kReplay, {child.handle}, {{1}});
  for (const float value : outputs[0]) EXPECT_TRUE(std::isfinite(value)) << "a fork from before is not sick";
}

TEST(StatePool, AnAbortedStepLeavesTheForksOfItsSequencesAlone) {
  MiniModel model(mini_layout(kWindow, kMaxStep));
  StatePool pool(model.layout(), slots(model.layout(), 2), {.is_poisoned = true});
  StatePool other(model.layout(), slots(model.layout(), 1));
  Lane parent = lane_in(pool, 1), alone = lane_in(other, 1);
  for (const auto& [model_pool, lane] : {std::pair{&pool, &parent}, {&other, &alone}}) {
    advance(model, *model_pool, {lane}, StepKind::kPrefill, 13);
    advance(model, *model_pool, {lane}, StepKind::kReplay, 4, {4});
  }
  Lane child = parent;
  child.handle = pool.fork(parent.handle, 512);
  model.run(pool, StepKind::kReplay, {parent.handle}, {std::vector<int>(4, MiniModel::kNanToken)});
  pool.abort_step();
  EXPECT_THROW(pool.fork(parent.handle, 512), Error);
  pool.reset(parent.handle);
  run_script(model, pool, {&child}, 2, 20);
  run_script(model, other, {&alone}, 2, 20);
  EXPECT_TRUE(same_bits(child.outputs, alone.outputs));
}

// The element offset of slot 2048's checkpoint is 2^31. Only that slot's pages are touched.
TEST(StatePool, OffsetsPastTwoToThe31AreReached) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "8 GiB of address space cost 1 GiB of shadow memory";
#endif
  StateLayout layout = mini_layout(kWindow, kMaxStep);
  layout.layers = {DeltaLayer{{.heads = 64, .key_heads = 16, .key_size = 128, .value_size = 128}, 2 * 2048 + 8192, 4}};
  MiniModel model(layout);
  std::unique_ptr<StatePool> large;
  try {
    large = std::make_unique<StatePool>(layout, PoolSize{2049, 0});
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  StatePool small(layout, PoolSize{1, 0});
  Lane lane = lane_in(*large, 1), alone = lane_in(small, 1);
  ASSERT_EQ(lane.handle.slot, 2048);
  for (const auto& [pool, one] : {std::pair{large.get(), &lane}, {&small, &alone}}) {
    advance(model, *pool, {one}, StepKind::kPrefill, 5);
    run_script(model, *pool, {one}, 1, 8);
    advance(model, *pool, {one}, StepKind::kConventional, 1);
  }
  EXPECT_TRUE(same_bits(lane.outputs, alone.outputs));
  EXPECT_EQ(checkpoints_of(*large, lane.handle), checkpoints_of(small, alone.handle));
}

TEST(StatePool, AStepAllocatesNothing) {
  MiniModel model(mini_layout(kWindow, kMaxStep));
  StatePool pool(model.layout(), slots(model.layout(), 3), {.max_rows = 4});
  const Handle parent = pool.allocate(512), other = pool.allocate(512);
  const std::vector<Handle> rows = {parent, pool.fork(parent, 512), kPaddingRow, other};
  const std::vector<int> longest(4, kMaxStep), one(4, 1), none(4, 0), prompt(4, kMaxStep);
  const test::AllocationLimit limit(0);
  for (int step = 0; step < 40; ++step) {
    pool.begin_step(StepKind::kReplay, rows, longest);
    pool.commit(step % 3 == 0 ? none : one);
    pool.begin_step(StepKind::kConventional, rows, one);
    pool.commit();
    pool.begin_step(StepKind::kPrefill, rows, prompt);
    pool.commit();
  }
  EXPECT_EQ(limit.used_bytes(), 0u);
}

// Corrupts one kind of state after a common past and returns the largest error of a layer's next output.
template <typename Corrupt>
double error_after(Corrupt&& corrupt) {
  std::vector<std::vector<float>> outputs;
  for (const bool is_corrupted : {false, true}) {
    MiniModel model(mini_layout(kWindow, kMaxStep));
    StatePool pool(model.layout(), slots(model.layout(), 1));
    Lane lane = lane_in(pool, 1);
    advance(model, pool, {&lane}, StepKind::kPrefill, 13);
    advance(model, pool, {&lane}, StepKind::kReplay, 4, {4});
    lane.outputs.clear();
    if (is_corrupted) corrupt(model, pool);
    advance(model, pool, {&lane}, StepKind::kReplay, 1);
    outputs.push_back(lane.outputs);
  }
  double error = 0;
  size_t begin = 0;
  for (const StateLayer& layer : mini_layout(kWindow, kMaxStep).layers) {
    const size_t width = test::layer_output_size(layer);
    error = std::max(error, relative_error(std::span(outputs[1]).subspan(begin, width),
                                           std::span(outputs[0]).subspan(begin, width)));
    begin += width;
  }
  return error;
}

// What a fault of bookkeeping does: an array's part is another token's, here its own with the sign turned.
void spoil(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = -values[i];
}

TEST(StatePool, ACorruptedStateIsSeen) {
  EXPECT_EQ(error_after([](MiniModel&, StatePool&) {}), 0.0) << "the test itself";
  EXPECT_GT(error_after([](MiniModel& model, StatePool&) { model.history_shift = -1; }), kFloat32Bound) << "cursor";
  constexpr int kRecord = (13 + 2) % (kWindow + kMaxStep);  // where record 2 of the ring lies
  for (const int layer : {0, 2, 4}) {
    EXPECT_GT(error_after([layer](MiniModel&, StatePool& pool) {
                spoil(pool.checkpoint(layer), pool.arrays(layer)->checkpoint[2]);
              }),
              kFloat32Bound)
        << "checkpoint of layer " << layer;
    const StateLayout layout = mini_layout(kWindow, kMaxStep);
    const std::vector<RingArray> ring = recurrent_arrays(layout.layers[layer], layout.ring_capacity())->ring;
    for (size_t i = 0; i < ring.size(); ++i) {
      const RingArray& array = ring[i];
      if (array.size == 0) continue;
      EXPECT_GT(error_after([&](MiniModel&, StatePool& pool) {
                  float* record = pool.ring(layer, i) + kRecord * array.size;
                  if (array.is_square)
                    spoil(record + kRecord - 1, 1);
                  else
                    spoil(record, array.size);
                }),
                kFloat32Bound)
          << array.name << " of layer " << layer;
    }
    EXPECT_GT(error_after([layer](MiniModel&, StatePool& pool) {
                const Conv1dState conv = pool.conv_state(layer);
                spoil(conv.window + 16 % conv.capacity * conv.channels, conv.channels);  // the last token's input
              }),
              kFloat32Bound)
        << "convolution";
  }
  EXPECT_GT(error_after([](MiniModel&, StatePool& pool) {
              const KvCache cache = pool.kv_cache(1);
              spoil(cache.v, cache.pages * cache.kv_heads * cache.page_tokens * cache.head_size);
            }),
            kFloat32Bound)
      << "keys and values";
  EXPECT_GT(error_after([](MiniModel&, StatePool& pool) {
              const KvCache cache = pool.kv_cache(3);
              spoil(cache.k, cache.pages * cache.kv_heads * cache.page_tokens * cache.head_size);
            }),
            kFloat32Bound)
      << "latents";
}

TEST(StatePool, SizesComeFromABudgetOrACount) {
  const StateLayout layout = mini_layout(kWindow, kMaxStep);
  const SlotBytes bytes = slot_bytes(layout);
  const int C = kWindow + kMaxStep;
  EXPECT_EQ(bytes.checkpoint, 4u * (4 * 8 * 16 + 3 * 4 * 32 + 4 * 8 * 16));
  EXPECT_EQ(bytes.ring,
            4u * C * (2 * (16 + 1 + C) + 4 * (8 + 2) + 3 * (32 + 1) + 3 * (4 + 32 + 1) + 4 * 8 + 2 * 16 + 4 * 2));
  EXPECT_EQ(bytes.convolution, 4u * ((3 + kMaxStep) * 96 + (2 + kMaxStep) * 204 + (3 + kMaxStep) * 96));
  EXPECT_EQ(kv_token_bytes(layout), 2u * 4 * 2 * 4 + 4 * 6);  // no values beside the latents
  const size_t one = pool_bytes(layout, pool_size(layout, 1, 100));
  EXPECT_EQ(one, bytes.total() + 13 * 8 * kv_token_bytes(layout));
  for (const size_t budget : {one, one + 1, 2 * one - 1, 2 * one, 7 * one + 1000, 100 * one}) {
    const PoolSize size = fit_pool(layout, budget, 100);
    EXPECT_EQ(size.slots, static_cast<int>(budget / one));
    EXPECT_GE(size.pages, 13 * size.slots);
    EXPECT_LE(pool_bytes(layout, size), budget);
    EXPECT_TRUE(size.pages == 64 * size.slots || pool_bytes(layout, size) + 8 * kv_token_bytes(layout) > budget)
        << "a page more would have fitted and been of use";
  }
  try {
    fit_pool(layout, one - 1, 100);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(one)), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(std::to_string(one - 1)), std::string::npos) << error.what();
  }
  EXPECT_THROW(pool_size(layout, 0, 100), Error);
  EXPECT_THROW(pool_size(layout, 1, 513), Error);
}

TEST(StatePool, ABadLayoutIsRefused) {
  const auto refused = [](auto&& change) {
    StateLayout layout = mini_layout(kWindow, kMaxStep);
    change(layout);
    EXPECT_THROW(check_layout(layout), Error);
    EXPECT_THROW(StatePool(layout, PoolSize{1, 1}), Error);
  };
  check_layout(mini_layout(kWindow, kMaxStep));
  refused([](StateLayout& layout) { layout.layers.clear(); });
  refused([](StateLayout& layout) { layout.window = 0; });
  refused([](StateLayout& layout) { layout.max_step_tokens = 0; });
  refused([](StateLayout& layout) { layout.max_step_tokens = layout.window + 1; });
  refused([](StateLayout& layout) { layout.page_tokens = 0; });
  refused([](StateLayout& layout) { layout.context_tokens = 0; });
  refused([](StateLayout& layout) { std::get<DeltaLayer>(layout.layers[0]).conv_width = 1; });
  refused([](StateLayout& layout) { std::get<DeltaLayer>(layout.layers[0]).shape.heads = 3; });
  refused([](StateLayout& layout) { std::get<AttentionLayer>(layout.layers[1]).kv_heads = 0; });
  refused([](StateLayout& layout) { std::get<AttentionLayer>(layout.layers[3]).latent_size = 7; });
  refused([](StateLayout& layout) { std::get<AttentionLayer>(layout.layers[3]).latent_size = -1; });
  StatePool pool(mini_layout(kWindow, kMaxStep), PoolSize{1, 1});
  EXPECT_NE(pool.delta_state(0).ring_gram, nullptr);
  EXPECT_EQ(pool.delta_state(2).ring_gram, nullptr) << "a gate a channel needs no products";
  EXPECT_THROW(pool.delta_state(1), Error);
  EXPECT_THROW(pool.conv_state(3), Error);
  EXPECT_THROW(pool.kv_cache(0), Error);
  EXPECT_THROW(pool.kv_cache(-1), Error);
}

}  // namespace
}  // namespace replayssm
