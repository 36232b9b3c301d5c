// The fused step of a recurrent layer on a GPU: the bits of its ops called one after the other, the oracles of all of
// them in a chain, padding and faults, capture, its door.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/bad_input.h"
#include "tests/cuda_layer_rig.h"

namespace replayssm::test {
namespace {

class CudaLayer : public CudaTest {};

int draw(std::mt19937_64& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// The rows of a step in a GPU's memory, at places that stay: a captured step reads what they then hold.
struct LayerRows {
  LayerRows(int rows, CudaDevice& on)
      : device(on), slot(rows, on), history(rows, on), in(rows, on), limit(rows, on), base(rows, on) {}

  void set(const std::vector<int32_t>& slots, const std::vector<int64_t>& bases, const std::vector<int32_t>& histories,
           const std::vector<int32_t>& limits) {
    slot.upload(slots, device);
    in.upload(slots, device);
    base.upload(bases, device);
    history.upload(histories, device);
    limit.upload(limits, device);
  }
  StateRows rows() const {
    return {
        static_cast<int>(slot.size()), slot.data(), base.data(), history.data(), in.data(), in.data(), limit.data()};
  }

  CudaDevice& device;
  DeviceBuffer<int32_t> slot, history, in, limit;
  DeviceBuffer<int64_t> base;
};

// A layer, its state in both forms, and a sequence a slot.
template <template <typename> typename GpuLayer, typename T>
struct LayerWalk {
  using Gpu = GpuLayer<T>;
  using Layer = typename Gpu::Layer;

  LayerWalk(const typename Layer::Shape& shape, const typename Layer::Options& options, const LayerSizes& of,
            uint64_t seed)
      : random(seed),
        sizes(of),
        layer(shape, options, random),
        fused(layer, of, path),
        apart(layer, of, path),
        base(of.slots, 0),
        history(of.slots, 0),
        limit(of.slots),
        inputs(of.slots),
        sequences(of.slots, layer.sequence()) {
    for (int slot = 0; slot < of.slots; ++slot) limit[slot] = of.window - slot % of.window;
  }

  std::vector<float> projected(int tokens) {
    return CudaPath<T>::template rounded<T>(random_normal(random, size_t(tokens) * layer.width));
  }
  void set(LayerRows& rows, const std::vector<int32_t>& slots) const {
    std::vector<int64_t> bases;
    std::vector<int32_t> histories, limits;
    for (int32_t slot : slots) {
      const bool has_cursor = slot >= 0 && slot < sizes.slots;
      bases.push_back(has_cursor ? base[slot] : 0);
      histories.push_back(has_cursor ? history[slot] : 0);
      limits.push_back(has_cursor ? limit[slot] : sizes.window);
    }
    rows.set(slots, bases, histories, limits);
  }
  std::vector<float> run_fused(const StateRows& rows, int tokens_per_row, Readout readout,
                               const std::vector<float>& tokens) {
    const auto given = path.template elements<T>(tokens);
    const int64_t count = int64_t{rows.count} * tokens_per_row;
    auto out = path.template elements<T>(poisoned(count * layer.inner));
    DeviceBuffer<std::byte> workspace(layer_workspace_bytes<T>(layer.shape, count), path.device);
    path.device.fill_words(workspace.data(), std::bit_cast<uint32_t>(kPoison), workspace.size() / 4);
    Gpu::fused(fused.args(rows, tokens_per_row, readout, given.data(), out.data()), path.device,
               {workspace.data(), workspace.size()});
    return path.template read<T>(out);
  }
  std::vector<float> run_apart(const StateRows& rows, int tokens_per_row, Readout readout,
                               const std::vector<float>& tokens) {
    const auto given = path.template elements<T>(tokens);
    auto out = path.template elements<T>(poisoned(int64_t{rows.count} * tokens_per_row * layer.inner));
    Gpu::apart(apart.args(rows, tokens_per_row, readout, given.data(), out.data()), path.device);
    return path.template read<T>(out);
  }

  // The oracles' outputs of a slot's window; `accepted` of its tokens join the sequence.
  std::vector<double> expected(int32_t slot, const std::vector<float>& tokens, int64_t first, int count, int accepted) {
    std::vector<float> all = inputs[slot];
    for (int t = 0; t < count; ++t) {
      const float* from = layer.conv_input(&tokens[(first + t) * layer.width]);
      all.insert(all.end(), from, from + layer.channels);
    }
    const std::vector<float> conv = convolved<T>(all, layer.channels, layer.conv_weight, layer.conv_bias,
                                                 static_cast<int64_t>(all.size()) / layer.channels - count);
    std::vector<double> out;
    typename Layer::Sequence window = sequences[slot];
    for (int t = 0; t < count; ++t) {
      if (t == accepted) sequences[slot] = window;
      const auto y = layer.step(window, &conv[size_t(t) * layer.channels], &tokens[(first + t) * layer.width]);
      out.insert(out.end(), y.begin(), y.end());
    }
    if (accepted == count) sequences[slot] = window;
    all.resize(inputs[slot].size() + size_t(accepted) * layer.channels);
    inputs[slot] = all;
    return out;
  }
  void commit(int32_t slot, int count, int accepted) {
    if (history[slot] + count > sizes.window || history[slot] >= limit[slot]) {
      base[slot] += history[slot];
      history[slot] = 0;
      limit[slot] = sizes.window;
    }
    history[slot] += accepted;
  }

  CudaPath<T> path;
  std::mt19937_64 random;
  LayerSizes sizes;
  Layer layer;
  Gpu fused, apart;
  std::vector<int64_t> base;
  std::vector<int32_t> history, limit;
  std::vector<std::vector<float>> inputs;
  std::vector<typename Layer::Sequence> sequences;
};

// Windows of any length in rows that change places, of which one is padding; any number of tokens is accepted.
template <template <typename> typename GpuLayer, typename T>
void step_equals_its_ops_and_the_oracles(const typename GpuLayer<T>::Shape& shape,
                                         const typename GpuLayer<T>::Layer::Options& options, const LayerSizes& sizes,
                                         int steps) {
  LayerWalk<GpuLayer, T> walk(shape, options, sizes, 31);
  std::vector<int32_t> slots(sizes.slots - 1);
  std::iota(slots.begin(), slots.end(), 1);  // slot 0 is no row's
  slots.push_back(kPaddingSlot);
  const int rows = static_cast<int>(slots.size()), inner = walk.layer.inner;
  LayerRows device_rows(rows, walk.path.device);
  for (int step = 0; step < steps; ++step) {
    SCOPED_TRACE(step);
    std::shuffle(slots.begin(), slots.end(), walk.random);
    const int count = draw(walk.random, 1, sizes.max_tokens);
    const Readout readout = step % 3 == 2 ? Readout::kExact : Readout::kDirect;
    const std::vector<float> tokens = walk.projected(rows * count);
    walk.set(device_rows, slots);
    const std::vector<float> out = walk.run_fused(device_rows.rows(), count, readout, tokens);
    const std::vector<float> apart = walk.run_apart(device_rows.rows(), count, readout, tokens);
    std::vector<float> given;
    std::vector<double> expected;
    for (int b = 0; b < rows; ++b) {
      const size_t first = size_t(b) * count * inner, size = size_t(count) * inner;
      const auto part = std::span(out).subspan(first, size);
      if (slots[b] == kPaddingSlot) {
        for (float value : part) ASSERT_EQ(std::bit_cast<uint32_t>(value), 0u);
        continue;
      }
      ASSERT_TRUE(same_bits(part, std::span(apart).subspan(first, size)));
      const int accepted = draw(walk.random, 0, count);
      const std::vector<double> own = walk.expected(slots[b], tokens, int64_t{b} * count, count, accepted);
      given.insert(given.end(), part.begin(), part.end());
      expected.insert(expected.end(), own.begin(), own.end());
      walk.commit(slots[b], count, accepted);
    }
    ASSERT_LE(relative_error(given, expected), CudaPath<T>::kBound);
    ASSERT_TRUE(walk.fused.memory.bytes() == walk.apart.memory.bytes());
  }
}

template <template <typename> typename GpuLayer>
void step_in_all_types(const typename GpuLayer<float>::Shape& shape,
                       const typename GpuLayer<float>::Layer::Options& options, const LayerSizes& sizes, int steps) {
  step_equals_its_ops_and_the_oracles<GpuLayer, float>(shape, options, sizes, steps);
  step_equals_its_ops_and_the_oracles<GpuLayer, Bf16>(shape, options, sizes, steps);
  step_equals_its_ops_and_the_oracles<GpuLayer, Fp16>(shape, options, sizes, steps);
}

constexpr LayerSizes kSmall = {.slots = 4, .window = 6, .max_tokens = 5};
constexpr LayerSizes kPlain = {.slots = 6, .window = 3, .max_tokens = 1};
constexpr LayerSizes kLong = {.slots = 3, .window = 18, .max_tokens = 16};

TEST_F(CudaLayer, GatedDeltaNet) {
  step_in_all_types<DeltaLayerOnGpu>({4, 2, 32, 16, 1}, {}, kSmall, 30);
  step_in_all_types<DeltaLayerOnGpu>({6, 2, 48, 20, 1}, {.has_conv_bias = true}, kPlain, 12);
  step_in_all_types<DeltaLayerOnGpu>({2, 1, 64, 64, 1}, {}, kLong, 6);
}

TEST_F(CudaLayer, KimiDeltaAttention) {
  step_in_all_types<DeltaLayerOnGpu>({3, 3, 32, 16, 32}, {.has_sigmoid_gate = true}, kSmall, 30);
  step_in_all_types<DeltaLayerOnGpu>({4, 2, 48, 32, 48}, {.lower_bound = -5.0f, .has_sigmoid_gate = true}, kPlain, 12);
}

TEST_F(CudaLayer, Mamba2) {
  step_in_all_types<Mamba2LayerOnGpu>({8, 2, 16, 16}, {}, kSmall, 30);
  step_in_all_types<Mamba2LayerOnGpu>({6, 2, 40, 32}, {.time_step_min = 0.01f, .has_conv_bias = false}, kPlain, 12);
  step_in_all_types<Mamba2LayerOnGpu>({16, 1, 64, 32}, {.time_step_max = 0.5f}, kLong, 6);
}

TEST_F(CudaLayer, ModelShapes) {
  const LayerSizes sizes = {.slots = 4, .window = 4, .max_tokens = 2};
  step_equals_its_ops_and_the_oracles<DeltaLayerOnGpu, Bf16>({32, 16, 128, 128, 1}, {}, sizes, 6);
  step_equals_its_ops_and_the_oracles<DeltaLayerOnGpu, Bf16>({32, 32, 128, 128, 128}, {.has_sigmoid_gate = true}, sizes,
                                                             6);
  step_equals_its_ops_and_the_oracles<Mamba2LayerOnGpu, Bf16>({128, 8, 64, 128}, {}, sizes, 6);
  step_equals_its_ops_and_the_oracles<Mamba2LayerOnGpu, Bf16>({96, 8, 80, 128}, {}, sizes, 6);
}

// Enough rows for two a thread of the convolution, and blocks of gates among many others.
TEST_F(CudaLayer, ManyRows) {
  const LayerSizes sizes = {.slots = 1601, .window = 2, .max_tokens = 1};
  step_equals_its_ops_and_the_oracles<DeltaLayerOnGpu, float>({2, 1, 16, 8, 1}, {}, sizes, 4);
  step_equals_its_ops_and_the_oracles<DeltaLayerOnGpu, Bf16>({2, 1, 16, 8, 16}, {}, sizes, 4);
  step_equals_its_ops_and_the_oracles<Mamba2LayerOnGpu, Bf16>({2, 1, 8, 16}, {}, sizes, 4);
}

// A row outside the pool gives no numbers and touches nothing, not even the convolution's window; it is named.
template <template <typename> typename GpuLayer>
void a_row_outside_the_pool_is_named(const typename GpuLayer<float>::Shape& shape, const std::string& op) {
  for (const int count : {1, 3})
    for (const bool is_checkpoint : {false, true}) {
      LayerWalk<GpuLayer, Bf16> walk(shape, {}, kSmall, 32);
      LayerRows good(3, walk.path.device), bad(3, walk.path.device);
      walk.set(good, {0, kPaddingSlot, 2});
      walk.set(bad, {0, is_checkpoint ? 1 : 4, 2});
      if (is_checkpoint) bad.in.upload(std::vector<int32_t>{0, 4, 2}, walk.path.device);
      const std::vector<float> tokens = walk.projected(3 * count);
      walk.path.throws_faults = false;
      const std::vector<float> out = walk.run_fused(bad.rows(), count, Readout::kDirect, tokens);
      expect_refusal([&] { walk.path.device.synchronize(); }, op, "row 1",
                     is_checkpoint ? "checkpoint in 4" : "slot 4");
      const std::vector<float> expected = walk.run_apart(good.rows(), count, Readout::kDirect, tokens);
      const size_t part = size_t(count) * walk.layer.inner;
      EXPECT_TRUE(same_bits(std::span(out).first(part), std::span(expected).first(part)));
      EXPECT_TRUE(same_bits(std::span(out).last(part), std::span(expected).last(part)));
      for (float value : std::span(out).subspan(part, part)) ASSERT_TRUE(std::isnan(value));
      EXPECT_TRUE(walk.fused.memory.bytes() == walk.apart.memory.bytes());
    }
}

TEST_F(CudaLayer, NamesARowOutsideThePool) {
  a_row_outside_the_pool_is_named<DeltaLayerOnGpu>({4, 2, 32, 16, 1}, "delta_layer_step");
  a_row_outside_the_pool_is_named<Mamba2LayerOnGpu>({8, 2, 16, 16}, "mamba2_layer_step");
}

// Capture runs nothing; a launch serves the slots and cursors that the arrays then hold.
template <template <typename> typename GpuLayer>
void a_captured_step_serves_any_rows(const typename GpuLayer<float>::Shape& shape, int count) {
  using T = Bf16;
  LayerWalk<GpuLayer, T> walk(shape, {}, kSmall, 33);
  CudaDevice& device = walk.path.device;
  const int rows = 3;
  LayerRows device_rows(rows, device);
  walk.set(device_rows, {1, 2, 3});
  const size_t inputs = size_t(rows) * count * walk.layer.width, outputs = size_t(rows) * count * walk.layer.inner;
  DeviceBuffer<T> given(inputs, device), out(outputs, device);
  DeviceBuffer<std::byte> workspace(layer_workspace_bytes<T>(shape, int64_t{rows} * count), device);
  const std::vector<std::byte> before = walk.fused.memory.bytes();
  CudaGraph graph(device, [&] {
    GpuLayer<T>::fused(walk.fused.args(device_rows.rows(), count, Readout::kDirect, given.data(), out.data()), device,
                       {workspace.data(), workspace.size()});
  });
  EXPECT_TRUE(walk.fused.memory.bytes() == before);
  std::vector<int32_t> slots = {0, 1, 2, 3};
  for (int step = 0; step < 12; ++step) {
    std::shuffle(slots.begin(), slots.end(), walk.random);
    const std::vector<int32_t> own(slots.begin(), slots.begin() + rows);
    walk.set(device_rows, own);
    const std::vector<float> tokens = walk.projected(rows * count);
    given.upload(to_elements<T>(tokens), device);
    graph.launch();
    const std::vector<float> results = walk.path.template read<T>(out);
    EXPECT_TRUE(same_bits(results, walk.run_apart(device_rows.rows(), count, Readout::kDirect, tokens)));
    EXPECT_TRUE(walk.fused.memory.bytes() == walk.apart.memory.bytes());
    for (int32_t slot : own) walk.commit(slot, count, draw(walk.random, 0, count));
  }
}

TEST_F(CudaLayer, ACapturedStepServesAnyRows) {
  for (const int count : {1, 3}) {
    a_captured_step_serves_any_rows<DeltaLayerOnGpu>({4, 2, 32, 16, 1}, count);
    a_captured_step_serves_any_rows<Mamba2LayerOnGpu>({8, 2, 16, 16}, count);
  }
}

TEST_F(CudaLayer, NoRowsAreNoWork) {
  CudaDevice device;
  DeltaLayerStep<Bf16> args;
  args.state.shape = {4, 2, 32, 16, 1};
  args.state.window = 2;
  args.state.capacity = 3;
  EXPECT_NO_THROW(delta_layer_step(args, device, {}));
  device.synchronize();
}

// `change` of otherwise good arguments is refused with a line that holds `part`.
template <template <typename> typename GpuLayer>
struct Door {
  explicit Door(const typename GpuLayer<Bf16>::Shape& shape)
      : walk(shape, {}, kSmall, 34),
        rows(2, walk.path.device),
        given(size_t{8} * walk.layer.width, walk.path.device),
        out(size_t{8} * walk.layer.inner, walk.path.device),
        workspace(layer_workspace_bytes<Bf16>(shape, 4), walk.path.device) {
    walk.set(rows, {0, 1});
  }

  template <typename Change>
  void refuses(const std::string& part, const Change& change) {
    auto args = walk.fused.args(rows.rows(), 2, Readout::kDirect, given.data(), out.data());
    change(args);
    expect_refusal(
        [&] {
          GpuLayer<Bf16>::fused(args, walk.path.device, {workspace.data(), workspace.size()});
        },
        "layer_step", part);
  }

  LayerWalk<GpuLayer, Bf16> walk;
  LayerRows rows;
  DeviceBuffer<Bf16> given, out;
  DeviceBuffer<std::byte> workspace;
};

template <template <typename> typename GpuLayer>
void refuses_what_both_forbid(Door<GpuLayer>& door) {
  door.refuses("convolution of width 4", [](auto& args) { args.conv.width = 3; });
  door.refuses("channels", [](auto& args) { args.conv.channels -= 8; });
  door.refuses("window of at least 5 inputs", [](auto& args) { args.conv.capacity = 4; });
  door.refuses("slots", [](auto& args) { args.conv.slots = 3; });
  door.refuses("1 to 6 tokens a row", [](auto& args) { args.tokens_per_row = 0; });
  door.refuses("1 to 16 tokens a row", [](auto& args) {
    args.tokens_per_row = 17;
    args.state.window = 20;
    args.state.capacity = 40;
  });
  door.refuses("z aligned to 16 bytes", [](auto& args) { args.z += 1; });
  door.refuses("z_stride of at least", [](auto& args) { args.z_stride += 4; });
  door.refuses("got 8", [](auto& args) { args.z_stride = 8; });
  door.refuses("out aligned to 16 bytes", [](auto& args) { args.out += 2; });
  door.refuses("norm_weight aligned to 16 bytes", [](auto& args) { args.norm_weight += 1; });
  door.refuses("conv_weight aligned to 16 bytes", [](auto& args) { args.conv_weight += 1; });
  door.refuses("norm_weight is null", [](auto& args) { args.norm_weight = nullptr; });
  door.refuses("null", [](auto& args) { args.rows.checkpoint_in = nullptr; });
  door.refuses("eps", [](auto& args) { args.eps = -1; });
  door.workspace = DeviceBuffer<std::byte>(64, door.walk.path.device);
  door.refuses("workspace", [](auto&) {});
}

TEST_F(CudaLayer, RefusesWhatTheContractForbids) {
  Door<DeltaLayerOnGpu> delta({4, 2, 32, 16, 1});
  delta.refuses("qkv aligned to 16 bytes", [](auto& args) { args.qkv += 1; });
  delta.refuses("qkv_stride of at least", [](auto& args) { args.qkv_stride += 1; });
  delta.refuses("null", [](auto& args) { args.b = nullptr; });
  delta.refuses("lower bound", [](auto& args) { args.lower_bound = 1; });
  refuses_what_both_forbid(delta);
  Door<Mamba2LayerOnGpu> mamba2({8, 2, 16, 16});
  mamba2.refuses("xbc aligned to 16 bytes", [](auto& args) { args.xbc += 1; });
  mamba2.refuses("time_step_min", [](auto& args) { args.time_step_max = -1; });
  refuses_what_both_forbid(mamba2);
}

}  // namespace
}  // namespace replayssm::test
