// Random lives of many sequences in one small pool: whatever was called before, every output is conventional
// decoding's.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "replayssm/core/error.h"
#include "replayssm/state/session_file.h"
#include "tests/bad_input.h"
#include "tests/mini_model.h"
#include "tests/walks.h"

namespace replayssm {
namespace {

using test::advance;
using test::Lane;
using test::mini_layout;
using test::MiniModel;
using test::relive;
using test::same_bits;
using test::TemporaryDirectory;

constexpr int kWindow = 5, kMaxStep = 3, kMaxTokens = 60;

// A sequence of the pool and its twin, alone in a pool of its own and decoded conventionally.
struct Pair {
  Lane lane, twin;
  std::unique_ptr<StatePool> twin_pool;
};

class StateWalk {
 public:
  explicit StateWalk(uint64_t seed)
      : model_(mini_layout(kWindow, kMaxStep)),
        pool_(model_.layout(), PoolSize{4, 26},
              {.max_rows = 6, .is_poisoned = true, .staggers_flushes = seed % 2 == 0}),
        random_(seed) {
    model_.readout = Readout::kExact;
  }

  // Runs `calls` random calls; returns how many the pool had to refuse.
  int run(int calls) {
    int refused = 0;
    for (int call = 0; call < calls && !testing::Test::HasFailure(); ++call) {
      const PoolCounts before = pool_.counts();
      try {
        one_call();
      } catch (const Error&) {
        ++refused;
        EXPECT_EQ(pool_.counts(), before);
      }
      pool_.ledger().audit();
      EXPECT_EQ(pool_.counts().live_slots, static_cast<int>(pairs_.size()));
    }
    return refused;
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  size_t any() { return pick(0, static_cast<int>(pairs_.size()) - 1); }

  // The twin is brought up token by token, whatever way the sequence of the pool came to where it is.
  void add(Handle handle, const std::vector<std::pair<StepKind, std::vector<int>>>& past) {
    Pair pair;
    pair.lane.handle = handle;
    pair.lane.past = past;
    pair.lane.random.seed(random_());
    pair.twin = pair.lane;
    pair.twin_pool = std::make_unique<StatePool>(model_.layout(), PoolSize{1, 8});
    pair.twin.handle = pair.twin_pool->allocate(kMaxTokens);
    relive(model_, *pair.twin_pool, pair.twin.handle, past);
    pairs_.push_back(std::move(pair));
  }

  void remove(size_t index) {
    pool_.free(pairs_[index].lane.handle);
    pairs_.erase(pairs_.begin() + index);
  }

  void one_call() {
    const int what = pick(0, 29);
    if (pairs_.empty() || what < 4) {
      add(pool_.allocate(pick(kMaxTokens / 2, kMaxTokens)), {});
    } else if (what < 8) {
      remove(any());
    } else if (what < 9) {
      const size_t index = any();
      pool_.reset(pairs_[index].lane.handle);
      const Handle handle = pairs_[index].lane.handle;
      pairs_.erase(pairs_.begin() + index);
      add(handle, {});
    } else if (what < 12) {
      const Pair& parent = pairs_[any()];
      add(pool_.fork(parent.lane.handle, pick(kMaxTokens / 2, kMaxTokens)), parent.lane.past);
    } else if (what < 14) {
      materialise(any(), any());
    } else if (what < 16) {
      const Pair& saved = pairs_[any()];
      const std::string path = directory_.path("session");
      save_session(pool_, saved.lane.handle, path);
      add(load_session(pool_, path, pick(kMaxTokens / 2, kMaxTokens)), saved.lane.past);
    } else {
      step();
    }
  }

  void materialise(size_t from, size_t to) {
    const Cursor cursor = pool_.cursor(pairs_[from].lane.handle);
    const int records = pick(0, cursor.history);
    const Handle handle = pairs_[to].lane.handle;
    pool_.materialise(pairs_[from].lane.handle, handle, records, model_.device(), model_.workspace());
    auto past = pairs_[from].lane.past;
    past.resize(past.size() - (cursor.history - records));  // the ring's records are the last tokens, one entry each
    pairs_.erase(pairs_.begin() + to);
    add(handle, past);
  }

  void step() {
    std::vector<Pair*> chosen;
    for (Pair& pair : pairs_) {
      if (pick(0, 2) != 0) chosen.push_back(&pair);
    }
    std::shuffle(chosen.begin(), chosen.end(), random_);
    const auto kind = static_cast<StepKind>(pick(0, 9) < 7 ? 2 : pick(0, 1));
    const int tokens = kind == StepKind::kReplay ? pick(1, kMaxStep) : kind == StepKind::kPrefill ? pick(1, 9) : 1;
    std::vector<Lane*> lanes;
    std::vector<int> accepted;
    for (Pair* pair : chosen) {
      lanes.push_back(&pair->lane);
      pair->lane.outputs.clear();
      pair->twin.outputs.clear();
      pair->twin.random = pair->lane.random;
      accepted.push_back(kind == StepKind::kReplay ? pick(0, tokens) : tokens);
    }
    try {
      advance(model_, pool_, lanes, kind, tokens, accepted);
    } catch (const Error&) {
      for (Pair* pair : chosen) pair->lane.random = pair->twin.random;
      throw;
    }
    for (size_t row = 0; row < chosen.size(); ++row) {
      Pair& pair = *chosen[row];
      if (kind == StepKind::kPrefill) {
        advance(model_, *pair.twin_pool, {&pair.twin}, kind, tokens);
        EXPECT_TRUE(same_bits(pair.lane.outputs, pair.twin.outputs));
        continue;
      }
      std::vector<std::vector<float>> of_layer(model_.layout().layers.size());
      for (int token = 0; token < accepted[row]; ++token) {
        pair.twin.outputs.clear();
        advance(model_, *pair.twin_pool, {&pair.twin}, StepKind::kConventional, 1);
        size_t begin = 0;
        for (size_t layer = 0; layer < of_layer.size(); ++layer) {
          const size_t end = begin + test::layer_output_size(model_.layout().layers[layer]);
          of_layer[layer].insert(of_layer[layer].end(), pair.twin.outputs.begin() + begin,
                                 pair.twin.outputs.begin() + end);
          begin = end;
        }
      }
      std::vector<float> expected;
      for (const std::vector<float>& values : of_layer) expected.insert(expected.end(), values.begin(), values.end());
      EXPECT_TRUE(same_bits(pair.lane.outputs, expected)) << "step kind " << static_cast<int>(kind);
    }
  }

  TemporaryDirectory directory_;
  MiniModel model_;
  StatePool pool_;
  std::mt19937_64 random_;
  std::vector<Pair> pairs_;
};

TEST(StateWalk, EveryOutputIsThatOfConventionalDecoding) {
  const int calls = test::walk_length(1000);
  for (uint64_t seed = 1; seed <= 6; ++seed)
    EXPECT_LT(StateWalk(seed).run(calls), calls / 2) << "too few calls did anything";
}

}  // namespace
}  // namespace replayssm
