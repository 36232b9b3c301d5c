// Saved sessions: continuing equals never having stopped, and nothing else than a whole, matching file is accepted.
#include "replayssm/state/session_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "replayssm/core/error.h"
#include "replayssm/core/safetensors.h"
#include "tests/bad_input.h"
#include "tests/mini_model.h"

namespace replayssm {
namespace {

using test::advance;
using test::checkpoints_of;
using test::expect_refusal;
using test::Lane;
using test::mini_layout;
using test::MiniModel;
using test::pool_bits;
using test::relive;
using test::same_bits;
using test::TemporaryDirectory;

constexpr int kWindow = 6, kMaxStep = 4;

PoolSize slots(const StateLayout& layout, int count) {
  return pool_size(layout, count, layout.context_tokens);
}

Lane lane_in(StatePool& pool, uint64_t seed) {
  Lane lane;
  lane.handle = pool.allocate(200);
  lane.random.seed(seed);
  return lane;
}

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void run_script(MiniModel& model, StatePool& pool, Lane& lane, int steps) {
  std::mt19937_64 random(77);
  for (int step = 0; step < steps; ++step) {
    const int tokens = std::uniform_int_distribution<int>(1, kMaxStep)(random);
    advance(model, pool, {&lane}, StepKind::kReplay, tokens, {std::uniform_int_distribution<int>(0, tokens)(random)});
  }
  advance(model, pool, {&lane}, StepKind::kConventional, 1);
  advance(model, pool, {&lane}, StepKind::kPrefill, 7);
}

// The state after `steps` steps of one token each, the last with three rejected drafts behind it.
Lane grown_lane(MiniModel& model, StatePool& pool, int prefill, int steps) {
  Lane lane = lane_in(pool, 1);
  if (prefill > 0) advance(model, pool, {&lane}, StepKind::kPrefill, prefill);
  for (int step = 0; step < steps; ++step) {
    const int drafts = step + 1 == steps ? kMaxStep - 1 : 0;
    advance(model, pool, {&lane}, StepKind::kReplay, 1 + drafts, {1});
  }
  return lane;
}

TEST(SessionFile, LoadAndContinueEqualsContinue) {
  const TemporaryDirectory directory;
  MiniModel model(mini_layout(kWindow, kMaxStep));
  StateLayout other_layout = mini_layout(kWindow, kMaxStep + 1);
  other_layout.page_tokens = 3;
  other_layout.context_tokens = 300;
  MiniModel other_model(other_layout);
  for (const int prefill : {0, 1, 2, 13}) {
    for (int steps = 0; steps <= 2 * kWindow + 1; ++steps) {
      StatePool pool(model.layout(), slots(model.layout(), 2), {.is_poisoned = true});
      pool.allocate(1);
      Lane lane = grown_lane(model, pool, prefill, steps);
      const std::string path = directory.path("session");
      const std::vector<uint32_t> before = pool_bits(pool);
      save_session(pool, lane.handle, path);
      EXPECT_EQ(pool_bits(pool), before);
      lane.outputs.clear();

      Lane same = lane, elsewhere = lane;
      StatePool same_pool(model.layout(), slots(model.layout(), 1), {.is_poisoned = true});
      same.handle = load_session(same_pool, path, 180);
      EXPECT_EQ(same_pool.cursor(same.handle), pool.cursor(lane.handle));
      StatePool other_pool(other_layout, slots(other_layout, 5), {.is_poisoned = true});
      const Handle neighbour = other_pool.allocate(20);
      elsewhere.handle = load_session(other_pool, path, 180);

      run_script(model, pool, lane, 30);
      run_script(model, same_pool, same, 30);
      run_script(other_model, other_pool, elsewhere, 30);
      ASSERT_TRUE(same_bits(same.outputs, lane.outputs)) << prefill << " + " << steps;
      ASSERT_TRUE(same_bits(elsewhere.outputs, lane.outputs)) << prefill << " + " << steps;
      other_pool.free(neighbour);
    }
  }
  EXPECT_EQ(directory.entries(), 1u);
}

TEST(SessionFile, AnotherWindowContinuesWithTheSameStateBits) {
  const TemporaryDirectory directory;
  const std::string path = directory.path("session");
  MiniModel model(mini_layout(kWindow, kMaxStep));
  StatePool pool(model.layout(), slots(model.layout(), 1));
  Lane lane = grown_lane(model, pool, 13, 0);
  advance(model, pool, {&lane}, StepKind::kReplay, 4, {4});
  save_session(pool, lane.handle, path);
  lane.outputs.clear();
  for (const int window : {4, 5, 12}) {
    MiniModel other(mini_layout(window, 2));
    other.readout = Readout::kExact;
    StatePool other_pool(other.layout(), slots(other.layout(), 1), {.is_poisoned = true});
    Lane loaded = lane;
    loaded.handle = load_session(other_pool, path, 200);
    StatePool plain_pool(model.layout(), slots(model.layout(), 1));
    Lane plain = lane;
    plain.handle = plain_pool.allocate(200);
    relive(model, plain_pool, plain.handle, plain.past);
    for (int step = 0; step < 30; ++step) {
      advance(other, other_pool, {&loaded}, StepKind::kReplay, 1);
      advance(model, plain_pool, {&plain}, StepKind::kConventional, 1);
    }
    EXPECT_TRUE(same_bits(loaded.outputs, plain.outputs)) << "window " << window;
  }
  StatePool narrow(mini_layout(3, 3), slots(model.layout(), 1));
  expect_refusal([&] { load_session(narrow, path, 200); }, "4 unfolded records", "window holds 3");
}

// The file holds words, so it does not say in which form they lay, and either form continues it.
TEST(SessionFile, TheFormOfCheckpointsMayDiffer) {
  const TemporaryDirectory directory;
  std::string files[2];
  std::vector<float> outputs;
  for (const CheckpointForm saved : {CheckpointForm::kWords, CheckpointForm::kPlanes}) {
    MiniModel model(mini_layout(kWindow, kMaxStep, saved));
    model.readout = Readout::kExact;
    StatePool pool(model.layout(), slots(model.layout(), 1), {.is_poisoned = true});
    Lane lane = grown_lane(model, pool, 13, kWindow + 2);
    const std::string path = directory.path("session");
    const std::vector<uint32_t> before = pool_bits(pool);
    save_session(pool, lane.handle, path);
    EXPECT_EQ(pool_bits(pool), before);
    files[saved == CheckpointForm::kPlanes] = contents_of(path);
    for (const CheckpointForm loaded : {CheckpointForm::kWords, CheckpointForm::kPlanes}) {
      MiniModel other(mini_layout(kWindow, kMaxStep, loaded));
      other.readout = Readout::kExact;
      StatePool other_pool(other.layout(), slots(other.layout(), 1), {.is_poisoned = true});
      Lane again = lane;
      again.handle = load_session(other_pool, path, 180);
      EXPECT_EQ(checkpoints_of(other_pool, again.handle), checkpoints_of(pool, lane.handle));
      again.outputs.clear();
      run_script(other, other_pool, again, 30);
      if (outputs.empty()) outputs = again.outputs;
      EXPECT_TRUE(same_bits(again.outputs, outputs));
    }
  }
  EXPECT_EQ(files[0], files[1]);
}

// A slot that was used before says nothing of it, byte for byte.
TEST(SessionFile, HoldsNothingOfEarlierSequences) {
  const TemporaryDirectory directory;
  MiniModel model(mini_layout(kWindow, kMaxStep));
  for (int tokens = 0; tokens <= 2 * kWindow; ++tokens) {
    StatePool fresh(model.layout(), slots(model.layout(), 1)),
        used(model.layout(), slots(model.layout(), 1), {.is_poisoned = true});
    used.free(grown_lane(model, used, 40, 5).handle);
    Lane lane = grown_lane(model, fresh, 0, tokens), again = grown_lane(model, used, 0, tokens);
    save_session(fresh, lane.handle, directory.path("fresh"));
    save_session(used, again.handle, directory.path("used"));
    EXPECT_EQ(contents_of(directory.path("fresh")), contents_of(directory.path("used"))) << tokens << " tokens";
  }
}

// Saves a grown session, and offers files that differ from it to a pool that must refuse them and stay as it is.
class SessionRefusal : public testing::Test {
 protected:
  SessionRefusal()
      : model_(mini_layout(kWindow, kMaxStep)),
        pool_(model_.layout(), slots(model_.layout(), 2)),
        path_(directory_.path("session")) {
    Lane lane = grown_lane(model_, pool_, 3, 4);
    save_session(pool_, lane.handle, path_);
    contents_ = contents_of(path_);
  }

  template <typename... Parts>
  void expect_refused_by(StatePool& pool, const std::string& path, int64_t max_tokens, const Parts&... parts) {
    const PoolCounts counts = pool.counts();
    const std::vector<uint32_t> bits = pool_bits(pool);
    expect_refusal([&] { load_session(pool, path, max_tokens); }, parts...);
    EXPECT_EQ(pool.counts(), counts);
    EXPECT_EQ(pool_bits(pool), bits);
    pool.ledger().audit();
  }

  // A new file each time: cutting an old one short first waits for the disk on some file systems.
  std::string write(const std::string& name, const std::string& contents) const {
    std::filesystem::remove(directory_.path(name));
    return directory_.write(name, contents);
  }

  // The same file with one metadata entry changed, or left out.
  std::string with_metadata(const std::string& key, const std::string* value) {
    const SafetensorsFile file(path_);
    std::map<std::string, std::string> metadata = file.metadata();
    metadata.erase(key);
    if (value != nullptr) metadata[key] = *value;
    const std::string path = directory_.path("changed");
    write_safetensors(path, file.tensors(), metadata);
    return path;
  }

  TemporaryDirectory directory_;
  MiniModel model_;
  StatePool pool_;
  std::string path_, contents_;
};

TEST_F(SessionRefusal, AMismatchSaysWhichAndBothValues) {
  StateLayout layout = model_.layout();
  layout.model = "another";
  StatePool another(layout, slots(layout, 1));
  expect_refused_by(another, path_, 200, "model", "'mini'", "'another'");

  layout = model_.layout();
  std::get<DeltaLayer>(layout.layers[2]).shape.value_size = 8;
  StatePool wider(layout, slots(layout, 1));
  expect_refused_by(wider, path_, 200, "layers", "delta 3x3x4x32x32", "delta 3x3x8x32x32");

  const std::string other = "other";
  for (const char* key : {"format", "version", "precision"}) {
    expect_refused_by(pool_, with_metadata(key, &other), 200, key, "'other'");
  }
  for (const char* key : {"format", "version", "precision", "model", "layers", "checksum"}) {
    expect_refused_by(pool_, with_metadata(key, nullptr), 200, key);
  }
  expect_refused_by(pool_, with_metadata("base", nullptr), 200, "checksum");
  const std::string two = "2";
  expect_refused_by(pool_, with_metadata("history", &two), 200, "corrupt", "checksum");
}

TEST_F(SessionRefusal, WhatDoesNotFitIsRefused) {
  expect_refused_by(pool_, path_, 6, "7 tokens", "only 6");
  expect_refused_by(pool_, path_, 513, "1 to 512");
  pool_.allocate(1);
  expect_refused_by(pool_, path_, 200, "none of 2 is free");
  StatePool small(model_.layout(), PoolSize{1, 2});
  expect_refused_by(small, path_, 17, "3 KV pages", "2 of 2 are free");
  expect_refused_by(small, directory_.path("missing"), 16, "missing");
  expect_refused_by(small, directory_.path(), 16, directory_.path());
}

TEST_F(SessionRefusal, ATruncatedFileIsRefused) {
  StatePool pool(model_.layout(), slots(model_.layout(), 1));
  for (size_t length = 0; length < contents_.size(); length += length < 4000 ? 13 : 997) {
    expect_refused_by(pool, write("truncated", contents_.substr(0, length)), 200, "truncated");
  }
}

TEST_F(SessionRefusal, AFlippedBitOfTheDataIsRefused) {
  StatePool pool(model_.layout(), slots(model_.layout(), 1));
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, contents_.data(), sizeof header_bytes);
  int flips = 0;
  for (size_t byte = sizeof header_bytes + header_bytes; byte < contents_.size(); byte += 31, ++flips) {
    std::string flipped = contents_;
    flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << byte % 8));
    expect_refused_by(pool, write("flipped", flipped), 200, "corrupt", "checksum");
  }
  EXPECT_GT(flips, 100);
}

TEST_F(SessionRefusal, OnlyALiveSequenceBetweenStepsIsSaved) {
  const std::string path = directory_.path("never");
  const Handle handle = pool_.allocate(100);
  model_.run(pool_, StepKind::kReplay, {handle}, {{1}});
  expect_refusal([&] { save_session(pool_, handle, path); }, "step is begun");
  expect_refusal([&] { load_session(pool_, path_, 100); }, "step is begun");
  pool_.abort_step();
  expect_refusal([&] { save_session(pool_, handle, path); }, "aborted");
  pool_.free(handle);
  expect_refusal([&] { save_session(pool_, handle, path); }, "not a live sequence");
  EXPECT_EQ(directory_.entries(), 1u);
  const Handle again = pool_.allocate(100);
  expect_refusal([&] { save_session(pool_, again, directory_.path("no/such/folder")); }, "no/such/folder");
}

}  // namespace
}  // namespace replayssm
