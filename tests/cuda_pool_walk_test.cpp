// A pool on a GPU beside one on the CPU: the same decisions through random lives; and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/bad_input.h"
#include "tests/cuda_mini_model.h"
#include "tests/walks.h"

namespace replayssm::test {
namespace {

constexpr int kWindow = 5, kMaxStep = 3, kMaxTokens = 60;

class CudaPoolWalk : public CudaTest {};

// Both pools are given the same calls; what they answer, refusals too, must be the same.
class TwoPools {
 public:
  TwoPools(CudaDevice& device, uint64_t seed)
      : host_(cuda_mini_layout(kWindow, kMaxStep), PoolSize{4, 0}, {.max_rows = 6}),
        pool_(cuda_mini_layout(kWindow, kMaxStep), PoolSize{4, 0}, device, {.max_rows = 6}),
        workspace_(materialise_workspace_bytes(host_.layout(), cpu_)),
        random_(seed) {}

  void run(int calls) {
    for (int call = 0; call < calls && !testing::Test::HasFailure(); ++call) {
      one_call();
      host_.ledger().audit();
      pool_.ledger().audit();
      ASSERT_EQ(pool_.counts(), host_.counts());
      ASSERT_EQ(pool_.counts().live_slots, static_cast<int>(pairs_.size()));
      for (const Pair& pair : pairs_) {
        ASSERT_EQ(pair.there.slot, pair.here.slot);
        ASSERT_EQ(pool_.cursor(pair.there), host_.cursor(pair.here));
        ASSERT_EQ(pool_.ledger().checkpoint(pair.there), host_.ledger().checkpoint(pair.here));
      }
    }
    pool_.device().synchronize();
  }

 private:
  struct Pair {
    Handle here, there;
  };

  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  size_t any() { return pick(0, static_cast<int>(pairs_.size()) - 1); }

  // Whether both took the call; they must agree, in words too.
  template <typename Here, typename There>
  bool both(Here&& here, There&& there) {
    const auto answer = [](auto&& call) {
      try {
        call();
        return std::string();
      } catch (const Error& error) {
        return std::string(error.what());
      }
    };
    const std::string refused_here = answer(here), refused_there = answer(there);
    EXPECT_EQ(refused_there, refused_here);
    return refused_here.empty();
  }

  void one_call() {
    const int what = pick(0, 19);
    const int64_t room = pick(kMaxTokens / 2, kMaxTokens);
    Pair made;
    if (pairs_.empty() || what < 4) {
      if (both([&] { made.here = host_.allocate(room); }, [&] { made.there = pool_.allocate(room); }))
        pairs_.push_back(made);
    } else if (what < 7) {
      const size_t index = any();
      host_.free(pairs_[index].here);
      pool_.free(pairs_[index].there);
      pairs_.erase(pairs_.begin() + index);
    } else if (what < 8) {
      const Pair& pair = pairs_[any()];
      both([&] { host_.reset(pair.here); }, [&] { pool_.reset(pair.there); });
    } else if (what < 11) {
      const Pair parent = pairs_[any()];
      if (both([&] { made.here = host_.fork(parent.here, room); },
               [&] { made.there = pool_.fork(parent.there, room); }))
        pairs_.push_back(made);
    } else if (what < 13) {
      const Pair &from = pairs_[any()], &to = pairs_[any()];
      const int records = pick(0, kWindow);
      both(
          [&] {
            host_.materialise(from.here, to.here, records, cpu_, {workspace_.data(), workspace_.size()});
          },
          [&] { pool_.materialise(from.there, to.there, records); });
    } else {
      step();
    }
  }

  void step() {
    std::vector<Handle> here, there;
    std::vector<int> tokens, accepted;
    const auto kind = static_cast<StepKind>(pick(0, 2));
    const int same = pick(1, kind == StepKind::kReplay ? kMaxStep : 1);
    for (const Pair& pair : pairs_) {
      if (pick(0, 2) == 0) continue;
      here.push_back(pair.here);
      there.push_back(pair.there);
    }
    if (pick(0, 2) == 0) {
      here.push_back(kPaddingRow);
      there.push_back(kPaddingRow);
    }
    for (size_t b = 0; b < here.size(); ++b) {
      tokens.push_back(kind == StepKind::kPrefill ? pick(1, 9) : same);
      accepted.push_back(kind == StepKind::kReplay ? pick(0, tokens[b]) : tokens[b]);
    }
    if (!both([&] { host_.begin_step(kind, here, tokens); }, [&] { pool_.begin_step(kind, there, tokens); })) return;
    if (pick(0, 9) == 0) {
      host_.abort_step();
      pool_.abort_step();
    } else {
      both([&] { host_.commit(accepted); }, [&] { pool_.commit(accepted); });
    }
  }

  Device cpu_{1};
  StatePool host_;
  CudaStatePool pool_;
  Buffer<std::byte> workspace_;
  std::mt19937_64 random_;
  std::vector<Pair> pairs_;
};

TEST_F(CudaPoolWalk, DecidesAsThePoolOnTheCpu) {
  CudaDevice device;
  for (uint64_t seed = 1; seed <= 4; ++seed) TwoPools(device, seed).run(walk_length(1000));
}

TEST_F(CudaPoolWalk, SizesComeFromABudget) {
  const StateLayout layout = cuda_mini_layout(kWindow, kMaxStep);
  for (const Dtype element : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
    const StateStorage storage = {.element = element, .has_squares = false};
    const SlotBytes bytes = slot_bytes(layout, storage);
    const size_t unit = element == Dtype::kF32 ? 4 : 2, C = kWindow + kMaxStep;
    EXPECT_EQ(bytes.checkpoint, 4u * (4 * 8 * 16 + 3 * 8 * 32 + 4 * 8 * 16));
    EXPECT_EQ(bytes.ring, C * (unit * (2 * 16 + 4 * 8 + 3 * 32 + 3 * 8 + 4 * 8 + 2 * 16) +
                               4 * (2 + 4 * 2 + 3 + 3 * 32 + 3 + 4 * 2)));
    EXPECT_EQ(bytes.convolution, unit * ((3 + kMaxStep) * 96 + (2 + kMaxStep) * 216 + (3 + kMaxStep) * 96));
    CudaDevice device;
    for (const int max_rows : {0, 20}) {
      const CudaPoolOptions options = {.max_rows = max_rows, .element = element};
      for (const size_t budget : {size_t{100'000}, size_t{1'000'003}, size_t{20'000'000}}) {
        const PoolSize size = fit_cuda_pool(layout, budget, options);
        const CudaStatePool pool(layout, size, device, options);
        EXPECT_LE(pool.bytes().size(), budget);
        EXPECT_GT(pool.bytes().size() + 2 * bytes.total() + 40 * 256 + 28 * (max_rows + size.slots), budget);
      }
      expect_refusal([&] { fit_cuda_pool(layout, bytes.total(), options); }, std::to_string(bytes.total()), "budget");
    }
  }
}

TEST_F(CudaPoolWalk, Refusals) {
  CudaDevice device;
  const StateLayout layout = cuda_mini_layout(kWindow, kMaxStep);
  const auto build = [&](const StateLayout& of, int slots, const CudaPoolOptions& options = {}) {
    return CudaStatePool(of, PoolSize{slots, 0}, device, options).counts();
  };
  StateLayout large = layout;
  large.layers = {DeltaLayer{{.heads = 64, .key_heads = 16, .key_size = 128, .value_size = 128}, 2 * 2048 + 8192, 4}};
  expect_refusal([&] { build(large, 1 << 24); }, "16777216 slots need a max_rows of at most", "65535");
  expect_refusal([&] { build(large, 1 << 24, {.max_rows = 8}); }, "16777216 slots need", "for checkpoints", "for rings",
                 "for convolution windows", "are free", "slots fit into");
  EXPECT_EQ(build(large, 3).free_slots, 3) << "the device is as it was";
  expect_refusal([&] { build(layout, 0); }, "slots must be 1 to", "0");
  expect_refusal([&] { build(layout, 2, {.element = Dtype::kF64}); }, "F32, BF16 or F16", "F64");
  StateLayout other = layout;
  other.layers.push_back(AttentionLayer{2, 4});
  expect_refusal([&] { build(other, 2); }, "layer 3", "keys and values");
  other = layout;
  other.window = 62;
  expect_refusal([&] { build(other, 2); }, "at most 64 records", "62 and 3");
  other = layout;
  std::get<DeltaLayer>(other.layers[0]).shape.key_size = 256;
  expect_refusal([&] { build(other, 2); }, "key size", "256");
  other.layers.clear();
  expect_refusal([&] { build(other, 2); }, "no layer keeps state");

  CudaStatePool pool(layout, PoolSize{2, 0}, device, {.element = Dtype::kF16});
  EXPECT_EQ(pool.delta_state<Fp16>(0).ring_gram, nullptr) << "a GPU does not use it";
  expect_refusal([&] { pool.delta_state<float>(0); }, "are F16, asked for as F32");
  expect_refusal([&] { pool.mamba2_state<Bf16>(2); }, "are F16, asked for as BF16");
  expect_refusal([&] { pool.conv_state<Bf16>(2); }, "are F16, asked for as BF16");
  expect_refusal([&] { pool.mamba2_state<Fp16>(0); }, "layer 0 has no state of Mamba-2");
  expect_refusal([&] { pool.delta_state<Fp16>(3); }, "layer must be 0 to 2, given 3");
  expect_refusal([&] { pool.rows(3); }, "0 to 2 rows, got 3");
}

}  // namespace
}  // namespace replayssm::test
