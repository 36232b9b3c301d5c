// Which bytes a pool cleans and copies, whatever its storage: against plain loops over records and inputs.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "replayssm/state/sequences.h"
#include "tests/mini_model.h"

namespace replayssm::test {
namespace {

constexpr int kWindow = 6, kMaxStep = 4, kSlots = 3;

// A pool in one block of random bytes.
class BytePool : public SequencePool {
 public:
  BytePool(const StateLayout& layout, const StateStorage& storage, const PoolSize& size)
      : SequencePool(layout, size, storage, {}), bytes(size_t{1} << 18) {
    size_t used = 0;
    place(size, [&](size_t count) {
      std::byte* array = &bytes[used];
      used += (count + 63) / 64 * 64;
      EXPECT_LE(used, bytes.size());
      return array;
    });
    std::mt19937_64 random(3);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  }

  const LayerMemory& layer(int index) const { return memory(index); }
  int layers() const { return static_cast<int>(layout().layers.size()); }
  void materialise(Handle from, Handle to, int records) {
    fold_into(from, to, records, [](const StateRows&) {});
  }

  std::vector<std::byte> bytes;

 private:
  void move(std::span<const PieceMove> moves) override { move_pieces(moves); }
};

// What the pool's bytes should become, kept beside them.
class Expected {
 public:
  explicit Expected(const BytePool& pool) : pool_(pool), bytes_(pool.bytes) {}

  // Number `from` of an array of numbers of `size` bytes each becomes that of number `to`.
  void copy(const std::byte* array, int64_t to, int64_t from, int64_t size) {
    std::byte* own = &bytes_[array - pool_.bytes.data()];
    std::memcpy(own + to * size, own + from * size, size);
  }
  void clear(const std::byte* array, int64_t number, int64_t size) {
    std::memset(&bytes_[array - pool_.bytes.data()] + number * size, 0, size);
  }
  void copy_inputs(Handle from, Handle to, int64_t tokens) {
    for (int index = 0; index < pool_.layers(); ++index) {
      const RecurrentArrays* own = pool_.arrays(index);
      if (own == nullptr) continue;
      const int64_t capacity = own->conv_width - 1 + kMaxStep;
      const int64_t size = own->conv_channels * static_cast<int64_t>(pool_.storage().element_bytes());
      for (int64_t back = 1; back < own->conv_width; ++back) {
        const int64_t input = (tokens - back + capacity) % capacity;
        copy(pool_.layer(index).conv_window, to.slot * capacity + input, from.slot * capacity + input, size);
      }
    }
  }
  bool is_so() const { return bytes_ == pool_.bytes; }

 private:
  const BytePool& pool_;
  std::vector<std::byte> bytes_;
};

class StateStorages : public testing::TestWithParam<StateStorage> {
 protected:
  StateLayout layout_ = mini_layout(kWindow, kMaxStep);
  PoolSize size_ = pool_size(layout_, kSlots, 64);
};

TEST_P(StateStorages, ACleanSlotIsZeroWhereItIsRead) {
  BytePool pool(layout_, GetParam(), size_);
  Expected expected(pool);
  const Handle handle = pool.allocate(60);
  for (int index = 0; index < pool.layers(); ++index) {
    const RecurrentArrays* own = pool.arrays(index);
    if (own == nullptr) continue;
    expected.clear(pool.layer(index).checkpoint, pool.ledger().checkpoint(handle), own->checkpoint_floats() * 4);
    expected.clear(
        pool.layer(index).conv_window, handle.slot,
        (own->conv_width - 1 + kMaxStep) * own->conv_channels * static_cast<int64_t>(GetParam().element_bytes()));
  }
  EXPECT_TRUE(expected.is_so());
}

TEST_P(StateStorages, AForkTakesTheRecordsAndInputsThatCount) {
  const int64_t element = static_cast<int64_t>(GetParam().element_bytes()), C = kWindow + kMaxStep;
  for (int64_t base = 0; base < 13; ++base) {
    for (int history = 0; history <= kWindow; ++history) {
      BytePool pool(layout_, GetParam(), size_);
      const Handle parent = pool.restore({base, history}, 60);
      Expected expected(pool);
      const Handle child = pool.fork(parent, 60);
      for (int index = 0; index < pool.layers(); ++index) {
        const RecurrentArrays* own = pool.arrays(index);
        if (own == nullptr) {  // only the child's last page is its own
          const auto& attention = std::get<AttentionLayer>(layout_.layers[index]);
          if ((base + history) % layout_.page_tokens == 0) continue;
          const int64_t bytes = element * attention.kv_heads * attention.head_size * layout_.page_tokens;
          for (const std::byte* pages : {pool.layer(index).kv_k, pool.layer(index).kv_v})
            if (pages != nullptr)
              expected.copy(pages, pool.ledger().pages(child).back(), pool.ledger().pages(parent).back(), bytes);
          continue;
        }
        for (size_t i = 0; i < own->ring.size(); ++i) {
          const RingArray& array = own->ring[i];
          const bool is_kept = array.size > 0 && (GetParam().has_squares || !array.is_square);
          ASSERT_EQ(pool.layer(index).ring[i] != nullptr, is_kept) << array.name;
          if (!is_kept) continue;
          for (int64_t head = 0; head < array.heads; ++head)
            for (int64_t record = base; record < base + history; ++record)
              expected.copy(pool.layer(index).ring[i], (child.slot * array.heads + head) * C + record % C,
                            (parent.slot * array.heads + head) * C + record % C,
                            array.size * (array.is_activation ? element : 4));
        }
      }
      expected.copy_inputs(parent, child, base + history);
      ASSERT_TRUE(expected.is_so()) << base << " + " << history;
    }
  }
}

TEST_P(StateStorages, MaterialiseTakesTheInputs) {
  BytePool pool(layout_, GetParam(), size_);
  const Handle from = pool.restore({16, 0}, 60), to = pool.allocate(60);
  Expected expected(pool);
  pool.materialise(from, to, 0);
  expected.copy_inputs(from, to, 16);
  EXPECT_TRUE(expected.is_so());
}

TEST_P(StateStorages, AFlushBesideAForkCopiesWholeCheckpoints) {
  BytePool pool(layout_, GetParam(), size_);
  const Handle parent = pool.restore({5, 2}, 60), child = pool.fork(parent, 60);
  const int32_t shared = pool.ledger().checkpoint(parent);
  Expected expected(pool);
  const std::vector<Handle> rows = {parent, child};
  const std::vector<int> one = {1, 1};
  pool.begin_step(StepKind::kConventional, rows, one);
  pool.commit();
  const int32_t own = pool.ledger().checkpoint(parent);
  EXPECT_EQ(pool.ledger().checkpoint(child), shared);
  for (int index = 0; index < pool.layers(); ++index)
    if (const RecurrentArrays* arrays = pool.arrays(index))
      expected.copy(pool.layer(index).checkpoint, own, shared, arrays->checkpoint_floats() * 4);
  EXPECT_TRUE(expected.is_so());
}

TEST_P(StateStorages, BytesAreThoseOfTheArrays) {
  const SlotBytes bytes = slot_bytes(layout_, GetParam());
  const size_t element = GetParam().element_bytes(), C = kWindow + kMaxStep;
  const size_t squares = GetParam().has_squares ? 4 * 2 * C : 0;
  EXPECT_EQ(bytes.checkpoint, 4u * (4 * 8 * 16 + 3 * 4 * 32 + 4 * 8 * 16));
  EXPECT_EQ(bytes.ring, C * (element * (2 * 16 + 4 * 8 + 3 * 32 + 3 * 4 + 4 * 8 + 2 * 16) +
                             4 * (2 + 4 * 2 + 3 + 3 * 32 + 3 + 4 * 2) + squares));
  EXPECT_EQ(bytes.convolution, element * ((3 + kMaxStep) * 96 + (2 + kMaxStep) * 204 + (3 + kMaxStep) * 96));
  EXPECT_EQ(kv_token_bytes(layout_, GetParam()), element * (2 * 2 * 4 + 6)) << "no values beside the latents";
  EXPECT_EQ(pool_bytes(layout_, {3, 7}, GetParam()), 3 * bytes.total() + 7 * 8 * element * (2 * 2 * 4 + 6));
}

INSTANTIATE_TEST_SUITE_P(All, StateStorages,
                         testing::Values(StateStorage{}, StateStorage{Dtype::kF32, false},
                                         StateStorage{Dtype::kBF16, false}, StateStorage{Dtype::kF16, true}));

}  // namespace
}  // namespace replayssm::test
