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

// Both pools are given the same calls; what they answer, refusals too, must be the same, and so must what their pages
// hold: random numbers, which forks and materialise copy.
class TwoPools {
 public:
  TwoPools(CudaDevice& device, uint64_t seed)
      : host_(cuda_mini_layout(kWindow, kMaxStep), kSize, {.max_rows = 6, .staggers_flushes = seed % 2 == 0}),
        pool_(cuda_mini_layout(kWindow, kMaxStep), kSize, device,
              {.max_rows = 6, .element = Dtype::kF32, .staggers_flushes = seed % 2 == 0}),
        workspace_(materialise_workspace_bytes(host_.layout(), cpu_)),
        random_(seed) {
    for_pages([&](float* here, float* there, int64_t count) {
      const std::vector<float> numbers = random_normal(random_, count);
      std::ranges::copy(numbers, here);
      pool_.device().upload(there, numbers.data(), count * sizeof(float));
    });
  }

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
        ASSERT_EQ(pool_.ledger().flush_limit(pair.there), host_.ledger().flush_limit(pair.here));
        ASSERT_EQ(pool_.ledger().checkpoint(pair.there), host_.ledger().checkpoint(pair.here));
        ASSERT_TRUE(std::ranges::equal(pool_.ledger().pages(pair.there), host_.ledger().pages(pair.here)));
      }
    }
    pool_.device().synchronize();
    for_pages([&](float* here, float* there, int64_t count) {
      std::vector<float> numbers(count);
      pool_.device().download(numbers.data(), there, count * sizeof(float));
      EXPECT_TRUE(std::ranges::equal(numbers, std::span(here, count)));
    });
    EXPECT_GT(page_copies_, calls / 100);
  }

 private:
  static constexpr PoolSize kSize = {4, 26};

  // All keys and values of each layer.
  template <typename Visit>
  void for_pages(const Visit& visit) {
    for (int layer = 0; layer < static_cast<int>(host_.layout().layers.size()); ++layer) {
      if (host_.arrays(layer) != nullptr) continue;
      const KvCache here = host_.kv_cache(layer), there = pool_.kv_cache<float>(layer);
      const int64_t count = here.pages * here.kv_heads * here.page_tokens * here.head_size;
      visit(here.k, there.k, count);
      if (here.latent_size == 0) visit(here.v, there.v, count);
    }
  }

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
               [&] { made.there = pool_.fork(parent.there, room); })) {
        pairs_.push_back(made);
        page_copies_ += host_.cursor(made.here).tokens() % host_.layout().page_tokens != 0;
      }
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
  int page_copies_ = 0;
};

TEST_F(CudaPoolWalk, DecidesAsThePoolOnTheCpu) {
  CudaDevice device;
  for (uint64_t seed = 1; seed <= 4; ++seed) TwoPools(device, seed).run(walk_length(1000));
}

// The least that a pool takes: its arrays, its rows and its page tables.
size_t taken_bytes(const CudaStatePool& pool) {
  const size_t rows = pool.row_arrays().capacity;
  return pool.bytes().size() + rows * (28 + 4 * static_cast<size_t>(pool.pages().table_stride));
}

TEST_F(CudaPoolWalk, SizesComeFromABudget) {
  StateLayout layout = cuda_mini_layout(kWindow, kMaxStep);
  layout.context_tokens = 20'000;  // more than the smaller budgets have pages for
  for (const Dtype element : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
    const StateStorage storage = {.element = element, .has_squares = false};
    const SlotBytes bytes = slot_bytes(layout, storage);
    const size_t unit = element == Dtype::kF32 ? 4 : 2, C = kWindow + kMaxStep;
    EXPECT_EQ(bytes.checkpoint, 4u * (4 * 8 * 16 + 3 * 8 * 32 + 4 * 8 * 16));
    EXPECT_EQ(bytes.ring, C * (unit * (2 * 16 + 4 * 8 + 3 * 32 + 3 * 8 + 4 * 8 + 2 * 16) +
                               4 * (2 + 4 * 2 + 3 + 3 * 32 + 3 + 4 * 2)));
    EXPECT_EQ(bytes.convolution, unit * ((3 + kMaxStep) * 96 + (2 + kMaxStep) * 216 + (3 + kMaxStep) * 96));
    const size_t page = 8 * unit * (2 * 2 * 16 + 24);
    EXPECT_EQ(page, 8 * kv_token_bytes(layout, storage));
    CudaDevice device;
    for (const int max_rows : {0, 20}) {
      for (const int64_t longest : {0, 160}) {
        const CudaPoolOptions options = {.max_rows = max_rows, .element = element, .max_sequence_tokens = longest};
        for (const size_t budget : {size_t{200'000}, size_t{1'000'003}, size_t{20'000'000}}) {
          const PoolSize size = fit_cuda_pool(layout, budget, 100, options);
          const CudaStatePool pool(layout, size, device, options);
          EXPECT_LE(taken_bytes(pool), budget);
          const size_t rows = max_rows == 0 ? size.slots + 1 : max_rows, slack = 40 * 256;
          const size_t columns = longest == 0 ? std::min<int64_t>(2500, size.pages + 13) : 20;
          EXPECT_GT((size.slots + 1) * (bytes.total() + 13 * page) + rows * (32 + 4 * columns) + slack, budget);
          ASSERT_GE(size.pages, 13 * size.slots);
          EXPECT_TRUE(size.pages == (longest == 0 ? 2500 : 20) * size.slots ||
                      taken_bytes(pool) + page + 4 * rows + slack > budget)
              << "a page more would have fitted and been of use";
        }
        expect_refusal([&] { fit_cuda_pool(layout, bytes.total() + 13 * page, 100, options); },
                       "one slot of 100 tokens", std::to_string(bytes.checkpoint) + " for checkpoints",
                       std::to_string(13 * page) + " for keys and values", "the budget is");
      }
    }
    expect_refusal([&] { fit_cuda_pool(layout, 1'000'000, 20'001); },
                   "tokens per slot must be 1 to 20000, given 20001");
    expect_refusal([&] { fit_cuda_pool(layout, 1'000'000, 161, {.max_sequence_tokens = 160}); }, "1 to 160, given 161");
  }
  layout.layers.resize(1);
  const PoolSize size = fit_cuda_pool(layout, size_t{1} << 40, 100);
  EXPECT_EQ(size.slots, 65535) << "as many as rows";
  EXPECT_EQ(size.pages, 0);
}

TEST_F(CudaPoolWalk, Refusals) {
  CudaDevice device;
  const StateLayout layout = cuda_mini_layout(kWindow, kMaxStep);
  const auto build = [&](const StateLayout& of, const PoolSize& size, const CudaPoolOptions& options = {}) {
    return CudaStatePool(of, size, device, options).counts();
  };
  StateLayout large = layout;
  large.layers = {DeltaLayer{{.heads = 64, .key_heads = 16, .key_size = 128, .value_size = 128}, 2 * 2048 + 8192, 4}};
  expect_refusal([&] { build(large, {1 << 24, 0}); }, "16777216 slots need a max_rows of at most", "65535");
  expect_refusal(
      [&] {
        build(large, {1 << 24, 0}, {.max_rows = 8});
      },
      "16777216 slots need", "for checkpoints", "for rings", "for convolution windows", "0 for keys and values",
      "are free", "slots fit into");
  EXPECT_EQ(build(large, {3, 0}).free_slots, 3) << "the device is as it was";
  large.layers.push_back(AttentionLayer{8, 128});
  large.context_tokens = int64_t{1} << 24;
  expect_refusal(
      [&] {
        build(large, {100, 10'000'000});
      },
      "100 slots and 10000000 KV pages need",
      std::to_string(size_t{10'000'000} * 8 * 2 * 2 * 8 * 128) + " for keys and values", "are free",
      "slots of 800000 tokens each fit into");
  expect_refusal([&] { build(large, {1, 1 << 26}); }, "KV pages on a GPU must be 1 to 33554431, given 67108864");
  expect_refusal([&] { build(layout, {2, 0}); }, "KV pages on a GPU must be 1 to", "given 0");
  expect_refusal([&] { build(layout, {0, 8}); }, "slots must be 1 to", "0");
  expect_refusal([&] { build(layout, {2, 8}, {.max_rows = 65536}); }, "max_rows", "0 to 65535, given 65536");
  expect_refusal([&] { build(layout, {2, 8}, {.element = Dtype::kF64}); }, "F32, BF16 or F16", "F64");
  expect_refusal([&] { build(layout, {2, 8}, {.max_sequence_tokens = 513}); }, "0 to the context of 512, given 513");
  StateLayout other = layout;
  other.window = 62;
  expect_refusal([&] { build(other, {2, 8}); }, "at most 64 records", "62 and 3");
  other = layout;
  std::get<DeltaLayer>(other.layers[0]).shape.key_size = 256;
  expect_refusal([&] { build(other, {2, 8}); }, "key size", "256");
  other = layout;
  other.context_tokens = int64_t{1} << 31;
  expect_refusal(
      [&] {
        build(other, {2, 8}, {.max_sequence_tokens = int64_t{1} << 31});
      },
      "attention on a GPU", "2147483648");
  other.layers.clear();
  expect_refusal([&] { build(other, {2, 8}); }, "no layer keeps state");

  CudaStatePool pool(layout, pool_size(layout, 2, 40), device, {.element = Dtype::kF16});
  EXPECT_EQ(pool.delta_state<Fp16>(0).ring_gram, nullptr) << "a GPU does not use it";
  EXPECT_EQ(pool.kv_cache<Fp16>(1).pages, 10);
  EXPECT_EQ(pool.kv_cache<Fp16>(3).v, nullptr) << "a latent layer keeps no values";
  expect_refusal([&] { pool.delta_state<float>(0); }, "are F16, asked for as F32");
  expect_refusal([&] { pool.mamba2_state<Bf16>(4); }, "are F16, asked for as BF16");
  expect_refusal([&] { pool.conv_state<Bf16>(4); }, "are F16, asked for as BF16");
  expect_refusal([&] { pool.kv_cache<Bf16>(1); }, "are F16, asked for as BF16");
  expect_refusal([&] { pool.mamba2_state<Fp16>(0); }, "layer 0 has no state of Mamba-2");
  expect_refusal([&] { pool.kv_cache<Fp16>(0); }, "layer 0 has no keys and values");
  expect_refusal([&] { pool.delta_state<Fp16>(5); }, "layer must be 0 to 4, given 5");
  expect_refusal([&] { pool.rows(3); }, "0 to 2 rows, got 3");
}

// A sequence is no longer than the page tables, whose width stays.
TEST_F(CudaPoolWalk, PageTablesBoundSequences) {
  CudaDevice device;
  const StateLayout layout = cuda_mini_layout(kWindow, kMaxStep);
  const auto stride = [&](const PoolSize& size, int64_t longest) {
    return CudaStatePool(layout, size, device, {.max_sequence_tokens = longest}).pages().table_stride;
  };
  EXPECT_EQ(stride({2, 200}, 0), 64) << "the context";
  EXPECT_EQ(stride({2, 10}, 0), 10) << "all pages";
  EXPECT_EQ(stride({2, 10}, 50), 7);
  EXPECT_EQ(stride({2, 10}, 512), 64);
  CudaStatePool pool(layout, {3, 26}, device, {.max_sequence_tokens = 50});
  const PoolCounts before = pool.counts();
  expect_refusal([&] { pool.allocate(51); }, "allocate", "of this pool must be 1 to 50 tokens long, given 51");
  expect_refusal([&] { pool.restore({30, 2}, 51); }, "1 to 50 tokens long, given 51");
  EXPECT_EQ(pool.counts(), before);
  const Handle whole = pool.allocate(50);
  expect_refusal([&] { pool.fork(whole, 51); }, "fork", "1 to 50 tokens long, given 51");
  pool.allocate(50);
  pool.allocate(50);
  EXPECT_EQ(pool.counts().reserved_pages, 21);
  CudaStatePool few(layout, {3, 10}, device);
  few.allocate(40);
  expect_refusal([&] { few.allocate(48); }, "48 tokens need 6 KV pages of 8 tokens, 5 of 10 are free");
  StateLayout bare = layout;
  bare.layers = {layout.layers[0], layout.layers[4]};
  CudaStatePool without(bare, {2, 7}, device);
  EXPECT_EQ(without.pages().page_table, nullptr);
  EXPECT_EQ(without.pages().table_stride, 0);
  EXPECT_EQ(without.counts().pages, 0);
  without.begin_step(StepKind::kConventional, std::vector<Handle>{without.allocate(512)}, std::vector<int>{1});
  without.commit();
  device.synchronize();
}

}  // namespace
}  // namespace replayssm::test
