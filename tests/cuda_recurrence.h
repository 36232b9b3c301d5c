// What recurrences must keep on a GPU beyond recurrence_laws.h: 16-bit activations, split planes, prefill with the
// step's bits, captured graphs, large batches and pools, faults that only the device sees, the doors. A family is one
// of recurrence_laws.h on CudaMemory<float>, and has
//
//   template <typename T, typename Out> using With;              itself with other types
//   static Shape model_shape();                                  a whole layer of a model
//   INSTANTIATE_TYPED_TEST_SUITE_P(Name, CudaRecurrence, Family);
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/bad_input.h"
#include "tests/cuda_memory.h"
#include "tests/recurrence_laws.h"

namespace replayssm::test {

// The rows of a step in device memory, where a captured graph finds them.
class DeviceRows {
 public:
  DeviceRows(int count, CudaDevice& device)
      : device_(device),
        slot(count, device),
        history(count, device),
        checkpoint_in(count, device),
        checkpoint_out(count, device),
        accepted(count, device),
        flush_limit(count, device),
        base(count, device) {}

  void set(const StateRows& host) {
    slot.upload({host.slot, slot.size()}, device_);
    base.upload({host.base, slot.size()}, device_);
    history.upload({host.history, slot.size()}, device_);
    checkpoint_in.upload({host.checkpoint_in, slot.size()}, device_);
    checkpoint_out.upload({host.checkpoint_out, slot.size()}, device_);
    flush_limit.upload({host.flush_limit, slot.size()}, device_);
  }
  StateRows rows() const {
    return {count(),           slot.data(), base.data(), history.data(), checkpoint_in.data(), checkpoint_out.data(),
            flush_limit.data()};
  }
  CommitRows commit(int tokens_per_row, int window) const {
    return {
        count(),        slot.data(), base.data(),     history.data(),    checkpoint_in.data(), checkpoint_out.data(),
        tokens_per_row, window,      accepted.data(), flush_limit.data()};
  }
  // Whether the device holds what `host` does.
  bool is(const StateRows& host) const {
    const auto same = [&](const auto& buffer, const auto* values) {
      return std::ranges::equal(buffer.download(device_), std::span(values, buffer.size()));
    };
    return same(slot, host.slot) && same(base, host.base) && same(history, host.history) &&
           same(checkpoint_in, host.checkpoint_in) && same(checkpoint_out, host.checkpoint_out) &&
           same(flush_limit, host.flush_limit);
  }

 private:
  int count() const { return static_cast<int>(slot.size()); }

  CudaDevice& device_;

 public:
  DeviceBuffer<int32_t> slot, history, checkpoint_in, checkpoint_out, accepted, flush_limit;
  DeviceBuffer<int64_t> base;
};

// Rows of many lengths, an empty and a padding one among them, with records in their rings, in two goes.
template <typename Family>
void prefill_has_the_bits_of_steps(const typename Family::Shape& shape) {
  using Rig = typename Family::Rig;
  using Inputs = typename Family::Inputs;
  CudaDevice device;
  std::mt19937_64 random(31);
  Rig prefilled(shape, 3, 6, 2, device), stepped(shape, 3, 6, 2, device);
  const Inputs early(shape, 6, random, -0.4f, 0.0f);
  for (Rig* rig : {&prefilled, &stepped}) {
    rig->decode({0, 1, 2}, 2, early.tokens(), Readout::kDirect);
    for (int slot : {1, 2}) rig->commit(slot, slot);
  }
  const std::vector<int> slots = {2, kPaddingSlot, 0, 1};
  for (const std::vector<int32_t>& begin : {std::vector<int32_t>{0, 1, 4, 41, 41}, {0, 67, 68, 68, 85}}) {
    const Inputs inputs(shape, begin.back(), random, -0.4f, 0.0f);
    const std::vector<float> out = prefilled.prefill(slots, begin, inputs.tokens());
    std::vector<float> expected;
    for (size_t b = 0; b < slots.size(); ++b) {
      const int count = begin[b + 1] - begin[b];
      if (slots[b] == kPaddingSlot) {
        expected.resize(expected.size() + count * stepped.out_size(), 0.0f);
        continue;
      }
      auto& cursor = stepped.cursors[slots[b]];
      if (count == 0) stepped.materialise(slots[b], slots[b], cursor.history);
      if (count == 0) cursor = {cursor.base + cursor.history, 0};
      for (int t = begin[b]; t < begin[b + 1]; ++t) append(expected, stepped.step({slots[b]}, inputs.tokens(t)));
    }
    EXPECT_TRUE(same_bits(out, expected));
    EXPECT_TRUE(same_memory(prefilled, stepped));
  }
}

// Lengths about those of a prefill's chunks, each after every number of records that the ring may hold.
template <typename Family>
void prefill_in_chunks_has_the_bits_of_steps(const typename Family::Shape& shape, CheckpointForm form) {
  constexpr int kSlots = 7, kWindow = 6;
  using Rig = typename Family::Rig;
  using Inputs = typename Family::Inputs;
  CudaDevice device;
  std::mt19937_64 random(44);
  Rig prefilled(shape, kSlots, kWindow, kWindow, device, {.form = form}),
      stepped(shape, kSlots, kWindow, kWindow, device);
  const std::vector<int> slots = {0, 1, 2, 3, 4, 5, 6};
  for (const int length : {1, 15, 16, 17, 31, 32, 33, 48, 100}) {
    SCOPED_TRACE(length);
    const Inputs early(shape, kSlots * kWindow, random, -0.4f, 0.0f);
    for (Rig* rig : {&prefilled, &stepped}) {
      rig->decode(slots, kWindow, early.tokens(), Readout::kExact);
      for (int slot : slots) rig->commit(slot, slot);
    }
    // A token less for every other row, and one row without any.
    std::vector<int32_t> begin = {0};
    for (int slot : slots) begin.push_back(begin.back() + (slot == 3 ? 0 : length - slot % 2));
    const Inputs inputs(shape, begin.back(), random, -0.4f, 0.0f);
    const std::vector<float> out = prefilled.prefill(slots, begin, inputs.tokens());
    std::vector<float> expected;
    for (int slot : slots) {
      auto& cursor = stepped.cursors[slot];
      if (begin[slot] == begin[slot + 1]) {
        stepped.materialise(slot, slot, cursor.history);
        cursor = {cursor.base + cursor.history, 0};
      }
      for (int t = begin[slot]; t < begin[slot + 1]; ++t) append(expected, stepped.step({slot}, inputs.tokens(t)));
    }
    ASSERT_TRUE(same_bits(out, expected));
    ASSERT_TRUE(same_memory(prefilled, stepped));
  }
}

// Batches of sizes for which rows are cut into units and warps in other ways, beside each row alone.
template <typename Family>
void prefilled_batches_are_their_rows(const typename Family::Shape& shape, const std::vector<int>& batches) {
  using Rig = typename Family::Rig;
  CudaDevice device;
  std::mt19937_64 random(45);
  const int slot_count = *std::ranges::max_element(batches);
  Rig batch(shape, slot_count, 4, 1, device), alone(shape, slot_count, 4, 1, device);
  for (const int rows : batches) {
    SCOPED_TRACE(rows);
    std::vector<int> slots(rows);
    std::vector<int32_t> begin = {0};
    for (int b = 0; b < rows; ++b) {
      slots[b] = b;
      begin.push_back(begin.back() + std::uniform_int_distribution<int>(0, 40)(random));
    }
    const typename Family::Inputs early(shape, rows, random, -0.4f, 0.0f),
        inputs(shape, begin.back(), random, -0.4f, 0.0f);
    for (Rig* rig : {&batch, &alone}) {
      rig->decode(slots, 1, early.tokens(), Readout::kExact);
      for (int slot : slots) rig->commit(slot, slot % 2);
    }
    const std::vector<float> out = batch.prefill(slots, begin, inputs.tokens());
    std::vector<float> expected;
    for (int b = 0; b < rows; ++b)
      append(expected, alone.prefill({b}, {0, begin[b + 1] - begin[b]}, inputs.tokens(begin[b])));
    ASSERT_TRUE(same_bits(out, expected));
    ASSERT_TRUE(same_memory(batch, alone));
  }
}

// All ways to an output: what is written in 16 bits is what is written in 32, rounded.
template <typename Family, typename T>
void short_outputs_are_long_ones_rounded(const typename Family::Shape& shape) {
  using Long = typename Family::template With<T, float>;
  using Short = typename Family::template With<T, T>;
  CudaDevice device;
  std::mt19937_64 random(32);
  typename Long::Rig full(shape, 4, 5, 3, device);
  typename Short::Rig rounded(shape, 4, 5, 3, device);
  const auto expect_rounded = [](const std::vector<float>& given, const std::vector<float>& from) {
    EXPECT_TRUE(same_bits(given, to_floats<T>(to_elements<T>(from))));
  };
  for (int step = 0; step < 8; ++step) {
    const typename Long::Inputs inputs(shape, 6, random, -0.4f, 0.0f);
    for (const Readout readout : {Readout::kDirect, Readout::kExact}) {
      const std::vector<int> slots = {readout == Readout::kDirect ? 0 : 1, kPaddingSlot};
      expect_rounded(rounded.decode(slots, 3, inputs.tokens(), readout),
                     full.decode(slots, 3, inputs.tokens(), readout));
    }
    expect_rounded(rounded.step({2, 3}, inputs.tokens()), full.step({2, 3}, inputs.tokens()));
    expect_rounded(rounded.prefill({3, 2}, {0, 2, 6}, inputs.tokens()),
                   full.prefill({3, 2}, {0, 2, 6}, inputs.tokens()));
    for (int slot : {0, 1}) {
      rounded.commit(slot, step % 4);
      full.commit(slot, step % 4);
    }
  }
}

// Law 16: a captured step and the move of its cursors, launched with other rows, cursors, flush limits, forks and
// acceptances, beside steps that are not captured and whose cursors the host moves.
template <typename Family>
void graph_serves_any_rows(const typename Family::Shape& shape, int tokens_per_row, Readout readout,
                           CheckpointForm form) {
  constexpr int kRows = 4, kSlots = 6, kWindow = 7, kLaunches = 200;
  using Rig = typename Family::Rig;
  using Inputs = typename Family::Inputs;
  CudaDevice device;
  std::mt19937_64 random(35);
  const RigOptions options = {.checkpoints = 2 * kSlots, .form = form};  // those past the slots serve forks
  Rig captured(shape, kSlots, kWindow, tokens_per_row, device, options);
  Rig plain(shape, kSlots, kWindow, tokens_per_row, device, options);
  plain.flush_limits.assign(kSlots, kWindow);
  DeviceRows rows(kRows, device);
  std::vector<int> slots = {3, 0, kPaddingSlot, 5};
  std::vector<int32_t> accepted(kRows, 0);
  rows.set(plain.rows(slots));
  rows.accepted.upload(accepted, device);
  const auto stage = [&](const Inputs& inputs) {
    captured.memory.begin();
    const auto tokens = captured.staged(inputs.tokens(), kRows * tokens_per_row);
    auto* out = captured.memory.results(kRows * tokens_per_row * captured.out_size());
    captured.memory.ready();
    return std::pair(tokens, out);
  };
  const auto [tokens, out] = stage(Inputs(shape, kRows * tokens_per_row, random));
  const auto state = captured.state();
  CudaGraph graph(device, [&, tokens = tokens, out = out] {
    captured.run_decode(state, rows.rows(), tokens_per_row, tokens, readout, out);
    commit_rows(rows.commit(tokens_per_row, kWindow), device);
  });
  device.synchronize();
  EXPECT_TRUE(same_memory(captured, plain));
  EXPECT_TRUE(rows.is(plain.rows(slots)));
  for (float value : captured.memory.read_results()) ASSERT_TRUE(std::isnan(value));
  for (int launch = 0; launch < kLaunches; ++launch) {
    if (launch % 3 == 1) {
      std::vector<int> pool = {0, 1, 2, 3, 4, 5, kPaddingSlot};
      std::ranges::shuffle(pool, random);
      slots.assign(pool.begin(), pool.begin() + kRows);
      for (int slot : slots)
        if (slot != kPaddingSlot && random() % 2 == 0)
          plain.checkpoint_out[slot] = (plain.checkpoint_in[slot] + kSlots) % (2 * kSlots);
      for (int32_t& limit : plain.flush_limits)
        if (random() % 2 == 0) limit = std::uniform_int_distribution<int32_t>(1, kWindow)(random);
      rows.set(plain.rows(slots));
    }
    for (int32_t& count : accepted) count = std::uniform_int_distribution<int>(0, tokens_per_row)(random);
    rows.accepted.upload(accepted, device);
    const Inputs inputs(shape, kRows * tokens_per_row, random, -0.4f, 0.0f);
    ASSERT_EQ(stage(inputs).second, out);
    captured.state();  // the launch writes it
    graph.launch();
    const std::vector<float> given = captured.memory.finish();
    ASSERT_TRUE(same_bits(given, plain.decode(slots, tokens_per_row, inputs.tokens(), readout))) << launch;
    for (int b = 0; b < kRows; ++b)
      if (slots[b] != kPaddingSlot) plain.commit(slots[b], accepted[b]);
    ASSERT_TRUE(rows.is(plain.rows(slots))) << launch;
  }
  EXPECT_TRUE(same_memory(captured, plain));
}

template <typename Family>
class CudaRecurrence : public CudaTest {};
TYPED_TEST_SUITE_P(CudaRecurrence);

// Law 3 for a whole layer of a model, in FP32 and as models run it.
TYPED_TEST_P(CudaRecurrence, ReplayIsExactOver2000TokensOfAModel) {
  ReplayWalk walk = {.window = 16, .max_tokens = 8, .tokens = 2000, .seed = 36, .look_every = 9, .has_oracle = false};
  replay_beside_step<TypeParam>(TypeParam::model_shape(), walk);
  walk.tokens = 300;
  walk.has_limits = true;
  replay_beside_step<typename TypeParam::template With<Bf16, Bf16>>(TypeParam::model_shape(), walk);
}

template <typename Family>
void replay_every_shape() {
  for (const auto& c : Family::shapes()) {
    SCOPED_TRACE(c.name);
    replay_beside_step<Family>(c.shape, {.window = 16, .max_tokens = 4, .tokens = 30, .seed = 38, .has_limits = true});
  }
  for (const bool has_limits : {false, true})
    replay_beside_step<Family>(Family::shape(2, 1, 32, 8),
                               {.window = 40, .max_tokens = 16, .tokens = 150, .seed = 39, .has_limits = has_limits});
}

TYPED_TEST_P(CudaRecurrence, Bf16ReplayMatchesOracleForEveryShape) {
  replay_every_shape<typename TypeParam::template With<Bf16, float>>();
  replay_every_shape<typename TypeParam::template With<Bf16, Bf16>>();
}

TYPED_TEST_P(CudaRecurrence, Fp16ReplayMatchesOracleForEveryShape) {
  replay_every_shape<typename TypeParam::template With<Fp16, float>>();
  replay_every_shape<typename TypeParam::template With<Fp16, Fp16>>();
}

TYPED_TEST_P(CudaRecurrence, ShortOutputsAreLongOnesRounded) {
  for (const auto& shape : {TypeParam::shape(4, 2, 32, 16), TypeParam::shape(3, 1, 48, 16 + TypeParam::kValueUnit),
                            TypeParam::shape(4, 2, 128, 64)}) {
    short_outputs_are_long_ones_rounded<TypeParam, Bf16>(shape);
    short_outputs_are_long_ones_rounded<TypeParam, Fp16>(shape);
  }
}

TYPED_TEST_P(CudaRecurrence, PrefillHasTheBitsOfSteps) {
  for (const auto& c : TypeParam::shapes()) {
    SCOPED_TRACE(c.name);
    prefill_has_the_bits_of_steps<TypeParam>(c.shape);
    prefill_has_the_bits_of_steps<typename TypeParam::template With<Bf16, Bf16>>(c.shape);
  }
}

TYPED_TEST_P(CudaRecurrence, PrefillInChunksHasTheBitsOfSteps) {
  using Short = typename TypeParam::template With<Bf16, Bf16>;
  const auto small = TypeParam::shape(3, 1, 48, 16 + TypeParam::kValueUnit), large = TypeParam::shape(4, 2, 128, 64);
  prefill_in_chunks_has_the_bits_of_steps<TypeParam>(small, CheckpointForm::kWords);
  prefill_in_chunks_has_the_bits_of_steps<TypeParam>(large, CheckpointForm::kPlanes);
  prefill_in_chunks_has_the_bits_of_steps<Short>(small, CheckpointForm::kPlanes);
  prefill_in_chunks_has_the_bits_of_steps<Short>(large, CheckpointForm::kWords);
}

// On an H200 these batches take every way to cut rows, and of some heads the last slice is not whole.
TYPED_TEST_P(CudaRecurrence, PrefilledBatchesAreTheirRows) {
  using Short = typename TypeParam::template With<Bf16, Bf16>;
  prefilled_batches_are_their_rows<Short>(TypeParam::shape(16, 8, 128, 120), {2, 4, 8, 16});
  prefilled_batches_are_their_rows<Short>(TypeParam::shape(16, 16, 64, 64), {40});
  prefilled_batches_are_their_rows<TypeParam>(TypeParam::shape(16, 4, 112, 128), {16});
  prefilled_batches_are_their_rows<Short>(TypeParam::shape(32, 4, 128, 16), {70});
}

TYPED_TEST_P(CudaRecurrence, PlanesAreWords) {
  for (const auto& shape : {TypeParam::shape(4, 2, 32, 16), TypeParam::shape(3, 1, 48, 16 + TypeParam::kValueUnit),
                            TypeParam::shape(4, 2, 128, 64)}) {
    planes_are_words<typename TypeParam::template With<Bf16, Bf16>>(shape);
  }
}

// Every word but the NaNs comes back from the tests' own planes: all exponents, both signs, carries into the first.
TYPED_TEST_P(CudaRecurrence, PlanesHoldEveryWord) {
  std::vector<float> words;
  for (uint32_t high = 0; high < 0x10000u; ++high)
    for (uint32_t low : {0x0u, 0x1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
      if (const float value = std::bit_cast<float>(high << 16 | low); !std::isnan(value)) words.push_back(value);
  words.push_back(kPoison);
  std::vector<float> back(words.size());
  from_planes(to_planes(words, words.size() / 3), words.size() / 3, back);
  EXPECT_TRUE(same_bits(words, back));
}

TYPED_TEST_P(CudaRecurrence, AGraphServesAnyRows) {
  using Short = typename TypeParam::template With<Bf16, Bf16>;
  const auto small = TypeParam::shape(4, 2, 32, 16), large = TypeParam::shape(2, 1, 128, 64);
  graph_serves_any_rows<TypeParam>(small, 1, Readout::kDirect, CheckpointForm::kWords);
  graph_serves_any_rows<TypeParam>(large, 3, Readout::kExact, CheckpointForm::kWords);
  graph_serves_any_rows<Short>(small, 2, Readout::kExact, CheckpointForm::kPlanes);
  graph_serves_any_rows<Short>(large, 4, Readout::kDirect, CheckpointForm::kPlanes);
}

// Law 17: a batch of `slots` rows, of many cursors and with padding rows, has the bits of the groups whose sizes come
// in turn; a step of `tokens` tokens at a time, direct and exact readouts in turn. With limits a slot first flushes at
// a history of its own.
template <typename Family>
void batch_is_its_groups(const typename Family::Shape& shape, int slot_count, int window, int tokens, int steps,
                         const std::vector<int>& sizes, bool has_limits = false) {
  using Rig = typename Family::Rig;
  CudaDevice device;
  std::mt19937_64 random(40);
  Rig batch(shape, slot_count, window, tokens, device), groups(shape, slot_count, window, tokens, device);
  std::vector<int> slots(slot_count);
  for (int slot = 0; slot < slot_count; ++slot) slots[slot] = slot % 37 == 5 ? kPaddingSlot : slot;
  for (int slot = 0; has_limits && slot < slot_count; ++slot) batch.flush_limits.push_back(window - slot % window);
  groups.flush_limits = batch.flush_limits;
  for (int step = 0; step < steps; ++step) {
    const Readout readout = step % 2 == 0 ? Readout::kDirect : Readout::kExact;
    std::ranges::shuffle(slots, random);
    const typename Family::Inputs inputs(shape, slot_count * tokens, random, -0.4f, 0.0f);
    const std::vector<float> out = batch.decode(slots, tokens, inputs.tokens(), readout);
    std::vector<float> expected;
    for (int begin = 0, i = 0; begin < slot_count; ++i) {
      const int size = std::min(sizes[i % sizes.size()], slot_count - begin);
      const std::vector<int> group(slots.begin() + begin, slots.begin() + begin + size);
      append(expected, groups.decode(group, tokens, inputs.tokens(begin * tokens), readout));
      begin += size;
    }
    ASSERT_TRUE(same_bits(out, expected)) << step;
    for (int slot : slots) {
      if (slot == kPaddingSlot) continue;
      const int accepted = std::uniform_int_distribution<int>(0, tokens)(random);
      batch.commit(slot, accepted);
      groups.commit(slot, accepted);
    }
  }
  const typename Family::Inputs inputs(shape, slot_count, random);
  std::vector<float> expected;
  for (int b = 0; b < slot_count; ++b) append(expected, groups.step({slots[b]}, inputs.tokens(b)));
  EXPECT_TRUE(same_bits(batch.step(slots, inputs.tokens()), expected));
  EXPECT_TRUE(same_memory(batch, groups));
}

TYPED_TEST_P(CudaRecurrence, LargeBatchesAreTheirRows) {
  for (const bool has_limits : {false, true})
    batch_is_its_groups<TypeParam>(TypeParam::shape(2, 1, 128, 16), 300, 5, 2, 8, {1, 40, 7, 130, 2, 64, 56},
                                   has_limits);
}

// On an H200 units of whole heads, of which a block has several in turn, and of 32 rows in small groups.
TYPED_TEST_P(CudaRecurrence, ServingBatchesAreTheirRows) {
  using Short = typename TypeParam::template With<Bf16, Bf16>;
  const std::vector<int> sizes = {1, 7, 2, 8, 5};
  const auto whole = TypeParam::shape(32, 16, 128, 128);
  batch_is_its_groups<Short>(whole, 48, 5, 1, 12, sizes);
  batch_is_its_groups<Short>(whole, 48, 16, 1, 20, sizes, /*has_limits=*/true);
  batch_is_its_groups<Short>(whole, 48, 16, 2, 20, sizes);
  batch_is_its_groups<Short>(whole, 48, 21, 4, 12, sizes);
  // Units of whole heads in the batch and parts of unequal sizes in its groups are of different kernels.
  using Long = typename TypeParam::template With<Bf16, float>;
  for (int tokens : {1, 4}) batch_is_its_groups<Long>(TypeParam::shape(32, 8, 128, 112), 40, 7, tokens, 16, sizes);
  // Rows in an order of the kernel's own.
  batch_is_its_groups<Short>(TypeParam::shape(8, 4, 128, 128), 400, 6, 1, 9, {1, 130, 7, 64, 2, 40}, true);
  batch_is_its_groups<Short>(TypeParam::shape(32, 8, 128, 80), 40, 8, 2, 12, sizes);
  batch_is_its_groups<Short>(TypeParam::shape(32, 4, 64, 128), 40, 24, 4, 12, sizes);
}

// Law 8: a slot so far out that its offsets pass 2^31 elements in every array. Of its pool that slot alone is there:
// the arrays begin as far before it.
TYPED_TEST_P(CudaRecurrence, OffsetsPast2To31) {
  constexpr int32_t kSlot = 1 << 24;
  constexpr int kWindow = 15, kTokens = kWindow + 2;  // the last but one flushes
  const auto shape = TypeParam::model_shape();
  CudaDevice device;
  std::mt19937_64 random(41);
  typename TypeParam::Rig near(shape, 1, kWindow, 1, device), far(shape, 1, kWindow, 1, device);
  const typename TypeParam::Inputs inputs(shape, kTokens + 4, random);
  auto& cursor = near.cursors[0];
  // One call on the far slot, with the cursor of the near one.
  const auto call = [&](int token, int count, auto&& run) {
    const int32_t history = cursor.history;
    far.memory.begin();
    const StateRows rows = far.memory.rows({1, &kSlot, &cursor.base, &history, &kSlot, &kSlot});
    const auto staged = far.staged(inputs.tokens(token), count);
    auto* out = far.memory.results(count * far.out_size());
    auto state = far.state();
    state.slots = state.checkpoints = kSlot + 1;
    far.visit(state, [&](const auto& slot, auto*& pointer) {
      const uintptr_t offset = uintptr_t{kSlot} * slot.size() * sizeof(*pointer);
      using Pointer = std::remove_reference_t<decltype(pointer)>;
      if (slot.size() > 0) pointer = reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(pointer) - offset);
    });
    run(state, rows, staged, out);
    return far.memory.finish();
  };
  for (int t = 0; t < kTokens; ++t) {
    const Readout readout = t % 2 == 0 ? Readout::kDirect : Readout::kExact;
    const std::vector<float> out =
        call(t, 1, [&](const auto& state, const StateRows& rows, const auto& staged, auto* to) {
          far.run_decode(state, rows, 1, staged, readout, to);
        });
    EXPECT_TRUE(same_bits(out, near.decode({0}, 1, inputs.tokens(t), readout))) << t;
    near.commit(0, 1);
  }
  const std::vector<float> stepped =
      call(kTokens, 1, [&](const auto& state, const StateRows& rows, const auto& staged, auto* to) {
        far.run_step(state, rows, staged, to);
      });
  EXPECT_TRUE(same_bits(stepped, near.step({0}, inputs.tokens(kTokens))));
  const std::vector<float> prefilled =
      call(kTokens + 1, 3, [&](const auto& state, const StateRows& rows, const auto& staged, auto* to) {
        const int32_t begin[] = {0, 3};
        far.run_prefill(state, rows, far.memory.array(begin, 2), staged, to);
      });
  EXPECT_TRUE(same_bits(prefilled, near.prefill({0}, {0, 3}, inputs.tokens(kTokens + 1))));
  EXPECT_TRUE(same_memory(near, far));
}

// A row outside the pool: NaN for its outputs, one error that names it, and nothing else touched, whichever op.
TYPED_TEST_P(CudaRecurrence, ARowOutsideThePoolIsNamed) {
  using Short = typename TypeParam::template With<Bf16, Bf16>;
  using Rig = typename Short::Rig;
  using Inputs = typename Short::Inputs;
  struct Fault {
    void (*spoil)(Rig&, std::vector<int>&);
    const char* name;
  };
  const Fault faults[] = {
      {[](Rig&, std::vector<int>& slots) { slots[1] = 3; }, "slot 3"},
      {[](Rig&, std::vector<int>& slots) { slots[1] = -2; }, "slot -2"},
      {[](Rig& rig, std::vector<int>&) { rig.checkpoint_in[1] = 1 << 30; }, "checkpoint in 1073741824"},
      {[](Rig& rig, std::vector<int>&) { rig.checkpoint_out[1] = -1; }, "checkpoint out -1"}};
  using Call = std::vector<float> (*)(Rig&, const std::vector<int>&, const Inputs&);
  const std::pair<const char*, Call> calls[] = {
      {"_step",
       [](Rig& rig, const std::vector<int>& slots, const Inputs& inputs) { return rig.step(slots, inputs.tokens()); }},
      {"_decode", [](Rig& rig, const std::vector<int>& slots,
                     const Inputs& inputs) { return rig.decode(slots, 2, inputs.tokens(), Readout::kDirect); }},
      {"_decode", [](Rig& rig, const std::vector<int>& slots,
                     const Inputs& inputs) { return rig.decode(slots, 2, inputs.tokens(), Readout::kExact); }},
      {"_prefill", [](Rig& rig, const std::vector<int>& slots, const Inputs& inputs) {
         return rig.prefill(slots, {0, 2, 5, 6}, inputs.tokens());
       }}};
  const auto shape = TypeParam::shape(4, 2, 32, 16);
  CudaDevice device;
  std::mt19937_64 random(42);
  const Inputs early(shape, 6, random), inputs(shape, 6, random);
  for (const Fault& fault : faults)
    for (const auto& [op, call] : calls) {
      SCOPED_TRACE(std::string(fault.name) + op);
      Rig good(shape, 3, 2, 2, device), bad(shape, 3, 2, 2, device);
      for (Rig* rig : {&good, &bad}) {
        rig->decode({0, 1, 2}, 2, early.tokens(), Readout::kDirect);
        for (int slot : {0, 1, 2}) rig->commit(slot, slot);
      }
      std::vector<int> slots = {2, 1, 0};
      fault.spoil(bad, slots);
      const std::vector<float> expected = call(good, {2, kPaddingSlot, 0}, inputs);
      expect_refusal([&, call = call] { call(bad, slots, inputs); }, std::string(Rig::kName) + op, "row 1", fault.name);
      const std::vector<float> out = bad.memory.read_results();
      ASSERT_EQ(out.size(), expected.size());
      size_t bad_values = 0;
      for (size_t i = 0; i < out.size(); ++i) {
        if (std::isnan(out[i])) {
          ++bad_values;
          EXPECT_EQ(expected[i], 0.0f);  // the padding row of `good`
        } else {
          EXPECT_EQ(out[i], expected[i]);
        }
      }
      EXPECT_EQ(bad_values, static_cast<size_t>(std::ranges::count(expected, 0.0f)));
      EXPECT_TRUE(same_memory(good, bad));
      EXPECT_NO_THROW(device.synchronize());
    }
  Rig rig(shape, 3, 2, 2, device), untouched(shape, 3, 2, 2, device);
  expect_refusal([&] { rig.materialise(0, 3, 0); }, std::string(Rig::kName) + "_materialise", "row 0",
                 "checkpoint out 3");
  EXPECT_TRUE(same_memory(rig, untouched));
}

// What the host can see is refused before anything is queued.
TYPED_TEST_P(CudaRecurrence, RefusesWhatTheContractForbids) {
  using Short = typename TypeParam::template With<Bf16, Bf16>;
  using Rig = typename Short::Rig;
  const auto shape = TypeParam::shape(4, 2, 32, 16);
  CudaDevice device;
  std::mt19937_64 random(43);
  Rig rig(shape, 2, 20, 18, device), untouched(shape, 2, 20, 18, device);
  const typename Short::Inputs inputs(shape, 40, random);
  const std::string decode_name = std::string(Rig::kName) + "_decode";
  rig.memory.begin();
  const StateRows rows = rig.memory.rows(rig.rows({0, 1}));
  const auto tokens = rig.staged(inputs.tokens(), 40);
  Bf16* out = rig.memory.results(40 * rig.out_size());
  const auto decode = [&](const auto& state, int tokens_per_row, Bf16* to) {
    rig.run_decode(state, rows, tokens_per_row, tokens, Readout::kDirect, to);
  };
  const auto state = rig.state();
  for (const int key_size : {144, 256}) {
    auto wide = state;
    wide.shape = TypeParam::shape(4, 2, key_size, 16);
    expect_refusal([&] { decode(wide, 1, out); }, decode_name, "16 to 128", std::to_string(key_size));
    expect_refusal([&] { rig.run_step(wide, rows, tokens, out); }, "16 to 128", std::to_string(key_size));
    expect_refusal([&] { rig.run_materialise(wide, rows); }, "16 to 128", std::to_string(key_size));
  }
  auto odd = state;
  odd.shape = TypeParam::shape(4, 2, 24, 16);
  expect_refusal([&] { decode(odd, 1, out); }, "multiple of 16", "24");
  odd.shape = TypeParam::shape(4, 2, 32, 18);
  expect_refusal([&] { decode(odd, 1, out); }, "18");
  auto long_window = state;
  long_window.window = 63;
  long_window.capacity = 80;
  expect_refusal([&] { decode(long_window, 2, out); }, decode_name, "window", "63");
  expect_refusal([&] { decode(state, 17, out); }, decode_name, "16", "17");
  expect_refusal([&] { decode(state, 0, out); }, decode_name, "got 0");
  expect_refusal([&] { decode(state, 21, out); }, decode_name, "21");
  expect_refusal([&] { decode(state, 1, out + 1); }, decode_name, "16 bytes", "out");
  expect_refusal([&] { decode(state, 1, nullptr); }, decode_name, "null");
  // The checkpoint and what is kept as activations, one after the other.
  int arrays = 0;
  auto bent = state;
  rig.visit(bent, [&](auto&, auto*& pointer) {
    auto* const whole = pointer;
    if (!std::is_same_v<decltype(pointer), Bf16*&> && static_cast<void*>(pointer) != bent.checkpoint) return;
    ++arrays;
    ++pointer;
    expect_refusal([&] { decode(bent, 1, out); }, decode_name, "16 bytes");
    pointer = nullptr;
    expect_refusal([&] { decode(bent, 1, out); }, decode_name, "null");
    pointer = whole;
  });
  EXPECT_EQ(arrays, 3);
  device.synchronize();
  for (float value : rig.memory.read_results()) ASSERT_TRUE(std::isnan(value));
  EXPECT_TRUE(same_memory(rig, untouched));
  // A batch of nothing is no error.
  EXPECT_TRUE(rig.decode({}, 1, inputs.tokens(), Readout::kDirect).empty());
  EXPECT_TRUE(rig.step({}, inputs.tokens()).empty());
  EXPECT_TRUE(rig.prefill({}, {0}, inputs.tokens()).empty());
}

REGISTER_TYPED_TEST_SUITE_P(CudaRecurrence, ReplayIsExactOver2000TokensOfAModel, Bf16ReplayMatchesOracleForEveryShape,
                            Fp16ReplayMatchesOracleForEveryShape, ShortOutputsAreLongOnesRounded,
                            PrefillHasTheBitsOfSteps, PrefillInChunksHasTheBitsOfSteps, PrefilledBatchesAreTheirRows,
                            PlanesAreWords, PlanesHoldEveryWord, AGraphServesAnyRows, LargeBatchesAreTheirRows,
                            ServingBatchesAreTheirRows, OffsetsPast2To31, ARowOutsideThePoolIsNamed,
                            RefusesWhatTheContractForbids);

}  // namespace replayssm::test
