// Matrix products on a GPU: the oracle in every type, strides, sums added, heads, capture, the same bits again, norms
// and activations in a product's launch, refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "replayssm/ops/linear.h"
#include "replayssm/ops/random_fill.h"
#include "tests/arrays.h"
#include "tests/bad_input.h"
#include "tests/cuda_memory.h"
#include "tests/ref/linear.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

class CudaLinearTest : public CudaTest {};

struct LinearCase {
  int64_t tokens, inputs, outputs;
  int64_t x_padding = 0, y_padding = 0;
};

// A decoding step's, a prompt's, odd sizes, rows that are parts of wider ones.
constexpr LinearCase kCases[] = {{1, 2560, 384}, {2, 64, 64},           {3, 5, 7},      {8, 256, 1000},
                                 {33, 100, 17},  {64, 768, 520, 8, 16}, {256, 512, 96}, {300, 96, 40, 3, 5}};

template <typename T>
bool are_equal(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Inputs and an output that was something before, in T and Out.
template <typename T, typename Out>
struct LinearRig {
  LinearRig(const LinearCase& sizes, int heads_, CudaDevice& gpu) : c(sizes), heads(heads_), device(gpu) {
    std::mt19937_64 random(static_cast<uint64_t>(c.tokens * 31 + c.inputs));
    x = to_elements<T>(random_normal(random, c.tokens * x_stride()));
    w = to_elements<T>(random_normal(random, heads * c.outputs * c.inputs));
    before = to_elements<Out>(random_normal(random, c.tokens * y_stride()));
  }

  int64_t x_stride() const { return heads * c.inputs + c.x_padding; }
  int64_t y_stride() const { return heads * c.outputs + c.y_padding; }

  BasicLinear<T, Out> args(const DeviceBuffer<T>& weight, const DeviceBuffer<T>& from, const DeviceBuffer<Out>& to,
                           bool is_added) const {
    return {.tokens = c.tokens,
            .inputs = c.inputs,
            .outputs = c.outputs,
            .weight = weight.data(),
            .x = from.data(),
            .x_stride = x_stride(),
            .y = to.data(),
            .y_stride = y_stride(),
            .is_added = is_added,
            .heads = heads,
            .x_step = c.inputs,
            .y_step = c.outputs};
  }

  std::vector<Out> run(bool is_added, MatrixProducts& products, bool is_captured = false) const {
    const DeviceBuffer<T> weight(std::span<const T>(w), device), from(std::span<const T>(x), device);
    const DeviceBuffer<Out> to(std::span<const Out>(before), device);
    if (is_captured) {
      CudaGraph graph(device, [&] { linear(args(weight, from, to, is_added), products); });
      graph.launch();
      device.synchronize();
    } else {
      linear(args(weight, from, to, is_added), products);
    }
    return to.download(device);
  }

  void check(const std::vector<Out>& found, bool is_added) const {
    std::vector<float> got;
    std::vector<double> expected;
    for (int head = 0; head < heads; ++head) {
      std::vector<float> own_w, own_x;
      for (int64_t i = 0; i < c.outputs * c.inputs; ++i) own_w.push_back(to_float(w[head * c.outputs * c.inputs + i]));
      for (int64_t n = 0; n < c.tokens; ++n)
        for (int64_t i = 0; i < c.inputs; ++i) own_x.push_back(to_float(x[n * x_stride() + head * c.inputs + i]));
      const std::vector<double> y = ref::linear(own_w, own_x, c.tokens, c.inputs, c.outputs);
      for (int64_t n = 0; n < c.tokens; ++n)
        for (int64_t o = 0; o < c.outputs; ++o) {
          const int64_t at = n * y_stride() + head * c.outputs + o;
          expected.push_back(y[n * c.outputs + o] + (is_added ? to_float(before[at]) : 0.0));
          got.push_back(to_float(found[at]));
        }
    }
    EXPECT_LE(relative_error(got, expected), sizeof(Out) == 2 ? kBf16Bound : kFloat32Bound)
        << c.tokens << " x " << c.inputs << " x " << c.outputs << ", " << heads << " heads";
    // What lies between the rows stays.
    for (int64_t n = 0; n < c.tokens; ++n)
      for (int64_t at = n * y_stride() + heads * c.outputs; at < (n + 1) * y_stride(); ++at)
        EXPECT_EQ(to_float(found[at]), to_float(before[at]));
  }

  LinearCase c;
  int heads;
  CudaDevice& device;
  std::vector<T> x, w;
  std::vector<Out> before;
};

// A part's sums are those of a product of its inputs alone, and together they are the product's.
template <typename T>
void check_parts(const LinearCase& c, int parts, CudaDevice& device) {
  MatrixProducts products(device);
  std::mt19937_64 random(static_cast<uint64_t>(c.inputs));
  const std::vector<T> x = to_elements<T>(random_normal(random, c.tokens * c.inputs));
  const std::vector<T> w = to_elements<T>(random_normal(random, c.outputs * c.inputs));
  const DeviceBuffer<T> from(std::span<const T>(x), device), weight(std::span<const T>(w), device);
  const int64_t step = c.tokens * c.outputs + 16;
  const DeviceBuffer<float> to(std::span<const float>(poisoned(parts * step)), device);
  linear(BasicLinear<T, float>{.tokens = c.tokens,
                               .inputs = c.inputs,
                               .outputs = c.outputs,
                               .weight = weight.data(),
                               .x = from.data(),
                               .x_stride = c.inputs,
                               .y = to.data(),
                               .y_stride = c.outputs,
                               .parts = parts,
                               .y_step = step},
         products);
  const std::vector<float> found = to.download(device);
  const int64_t size = c.inputs / parts;
  for (int part = 0; part < parts; ++part) {
    std::vector<float> own_w, own_x;
    for (int64_t o = 0; o < c.outputs; ++o)
      for (int64_t i = 0; i < size; ++i) own_w.push_back(to_float(w[o * c.inputs + part * size + i]));
    for (int64_t n = 0; n < c.tokens; ++n)
      for (int64_t i = 0; i < size; ++i) own_x.push_back(to_float(x[n * c.inputs + part * size + i]));
    const std::vector<float> got(found.begin() + part * step, found.begin() + part * step + c.tokens * c.outputs);
    EXPECT_LE(relative_error(got, ref::linear(own_w, own_x, c.tokens, size, c.outputs)), kFloat32Bound)
        << c.tokens << " x " << c.inputs << " x " << c.outputs << ", part " << part << " of " << parts;
  }
}

TEST_F(CudaLinearTest, PartsOfTheInputsMatchTheOracle) {
  CudaDevice device;
  for (const LinearCase& c : {LinearCase{3, 64, 32}, LinearCase{1, 256, 40}, LinearCase{200, 1024, 96}})
    for (const int parts : {1, 2, 4}) {
      check_parts<float>(c, parts, device);
      check_parts<Bf16>(c, parts, device);
    }
}

template <typename T, typename Out>
void check_type(CudaDevice& device) {
  MatrixProducts products(device);
  for (const LinearCase& c : kCases) {
    for (const int heads : {1, 3})
      for (const bool is_added : {false, true}) {
        // cuBLASLt adds the products of such sums one after the other: 2.6e-6.
        if (sizeof(Out) == 4 && c.inputs > 1024 && (sizeof(T) == 4 || heads > 1)) continue;
        const LinearRig<T, Out> rig(c, heads, device);
        const std::vector<Out> found = rig.run(is_added, products);
        rig.check(found, is_added);
        EXPECT_TRUE(are_equal(rig.run(is_added, products), found));
        EXPECT_TRUE(are_equal(rig.run(is_added, products, true), found));
        MatrixProducts others(device);
        EXPECT_TRUE(are_equal(rig.run(is_added, others), found));
      }
  }
}

TEST_F(CudaLinearTest, MatchesTheOracleInEveryType) {
  CudaDevice device;
  check_type<float, float>(device);
  check_type<Bf16, Bf16>(device);
  check_type<Bf16, float>(device);
}

// One token's numbers are nothing to another's: not even if they are none.
TEST_F(CudaLinearTest, ABadTokenStaysAlone) {
  CudaDevice device;
  MatrixProducts products(device);
  for (const int64_t tokens : {2, 8, 64}) {
    LinearRig<Bf16, float> rig({tokens, 256, 264}, 1, device);
    const std::vector<float> clean = rig.run(false, products);
    for (int64_t i = 0; i < rig.c.inputs; ++i) rig.x[rig.x_stride() + i] = to_bf16(i % 2 == 0 ? NAN : INFINITY);
    const std::vector<float> found = rig.run(false, products);
    for (int64_t n = 0; n < tokens; ++n) {
      const auto row = [&](const std::vector<float>& all) {
        return std::span(all).subspan(n * rig.y_stride(), rig.c.outputs);
      };
      if (n == 1) continue;
      EXPECT_TRUE(same_bits(row(found), row(clean))) << tokens << " tokens, token " << n;
    }
  }
}

struct FusionCase {
  int64_t tokens, inputs, outputs;
  bool has_norm;
  std::optional<Activation> activation = {};
  bool is_added = false, is_zero_centred = false;

  int64_t results() const { return activation == Activation::kSwiGlu ? outputs / 2 : outputs; }
};

// Sixteen lanes of rms_norm, a warp, warps of which the last is not full, all that a fused norm may have.
constexpr int64_t kFusedInputs[] = {104, 256, 2304, 2560, 3136, 4096};
// A single group of rows, an odd number of them, one that is not full, several a block.
constexpr int64_t kFusedOutputs[] = {2, 36, 1002, 7002};

// What every case takes the first numbers of.
struct FusionInputs {
  explicit FusionInputs(CudaDevice& device)
      : weight(static_cast<size_t>(std::end(kFusedInputs)[-1] * std::end(kFusedOutputs)[-1]), device),
        x(2 * kStride, device),
        hidden(2 * kStride, device),
        norm_weight(kStride, device) {
    const auto fill = [&]<typename T>(const DeviceBuffer<T>& to, uint64_t seed, float scale) {
      random_fill(RandomFill<T>{.count = to.size(), .seed = seed, .low = -scale, .high = scale, .y = to.data()},
                  device);
    };
    fill(weight, 1, 0.05f);
    fill(x, 2, 1.0f);
    fill(hidden, 3, 4.0f);
    fill(norm_weight, 4, 2.0f);
  }

  static constexpr size_t kStride = 4096 + 8;
  DeviceBuffer<Bf16> weight, x;
  DeviceBuffer<float> hidden, norm_weight;
};

template <typename Out>
void activate(Activation activation, const BasicLinear<Bf16, Out>& product, CudaDevice& device) {
  if (activation == Activation::kSwiGlu)
    silu_product(BasicSiluProduct<Out>{.tokens = product.tokens,
                                       .size = product.outputs / 2,
                                       .gate = product.y,
                                       .up = product.y + product.outputs / 2,
                                       .gate_stride = product.y_stride,
                                       .up_stride = product.y_stride,
                                       .y = product.y,
                                       .y_stride = product.y_stride},
                 device);
  else
    relu2(BasicRelu2<Out>{.tokens = product.tokens,
                          .size = product.outputs,
                          .x = product.y,
                          .x_stride = product.y_stride,
                          .y = product.y,
                          .y_stride = product.y_stride},
          device);
}

// One launch gives the bits of op after op, and touches nothing else.
template <typename Out>
void check_fused(const FusionCase& c, const FusionInputs& inputs, MatrixProducts& products, CudaDevice& device) {
  const int64_t x_stride = c.inputs + 8, y_stride = c.outputs + 5;
  const std::vector<Bf16> no_normal(c.tokens * x_stride, to_bf16(kPoison));
  const std::vector<Out> before(c.tokens * y_stride, to_element<Out>(c.is_added ? 0.5f : kPoison));
  const DeviceBuffer<Bf16> normal(no_normal, device), untouched(no_normal, device);
  const DeviceBuffer<Out> apart(before, device), together(before, device);
  BasicRmsNorm<float, Bf16> norm{.tokens = c.tokens,
                                 .size = c.inputs,
                                 .x = inputs.hidden.data(),
                                 .x_stride = x_stride,
                                 .weight = inputs.norm_weight.data(),
                                 .is_zero_centred = c.is_zero_centred,
                                 .y = normal.data(),
                                 .y_stride = x_stride};
  BasicLinear<Bf16, Out> product{.tokens = c.tokens,
                                 .inputs = c.inputs,
                                 .outputs = c.outputs,
                                 .weight = inputs.weight.data(),
                                 .x = c.has_norm ? normal.data() : inputs.x.data(),
                                 .x_stride = x_stride,
                                 .y = apart.data(),
                                 .y_stride = y_stride,
                                 .is_added = c.is_added};
  if (c.has_norm) rms_norm(norm, device);
  linear(product, products);
  if (c.activation) activate(*c.activation, product, device);

  product.activation = c.activation;
  product.y = together.data();
  if (c.has_norm) {
    norm.y = untouched.data();
    product.x = untouched.data();
    product.norm = &norm;
  }
  ASSERT_TRUE(can_fuse(product));
  linear(product, products);

  const std::vector<Out> expected = apart.download(device), found = together.download(device);
  EXPECT_TRUE(are_equal(untouched.download(device), no_normal));
  EXPECT_TRUE(std::isfinite(to_float(found[0])));
  for (int64_t n = 0; n < c.tokens; ++n)
    for (int64_t at = n * y_stride, last = at + c.results(), end = at + y_stride; at < end; ++at)
      ASSERT_EQ(std::memcmp(&found[at], at < last ? &expected[at] : &before[at], sizeof(Out)), 0)
          << c.tokens << " x " << c.inputs << " x " << c.outputs << (c.has_norm ? ", norm" : "") << ", activation "
          << (c.activation ? static_cast<int>(*c.activation) : -1) << ": token " << n << ", " << at - n * y_stride
          << ": " << to_float(found[at]) << ", not " << to_float(expected[at]);
}

template <typename Out>
void check_all_fused(const FusionInputs& inputs, int64_t tokens, MatrixProducts& products, CudaDevice& device) {
  for (const int64_t width : kFusedInputs)
    for (const int64_t outputs : kFusedOutputs)
      for (const bool has_norm : {false, true}) {
        for (const bool is_added : {false, true})
          check_fused<Out>({tokens, width, outputs, has_norm, {}, is_added, !is_added}, inputs, products, device);
        for (const Activation activation : {Activation::kSwiGlu, Activation::kRelu2})
          check_fused<Out>({tokens, width, outputs, has_norm, activation}, inputs, products, device);
      }
}

TEST_F(CudaLinearTest, ANormAndAnActivationInOneLaunchHaveTheBitsOfTheirOps) {
  CudaDevice device;
  MatrixProducts products(device);
  FusionInputs inputs(device);
  for (const int64_t tokens : {1, 2}) {
    check_all_fused<Bf16>(inputs, tokens, products, device);
    check_all_fused<float>(inputs, tokens, products, device);
  }
  // The second token's numbers are none: the first's stay as they are.
  std::vector<float> hidden = inputs.hidden.download(device);
  const int64_t width = kFusedInputs[3];
  hidden[width + 8 + 300] = NAN;
  inputs.hidden.upload(hidden, device);
  for (const std::optional<Activation> activation : {std::optional<Activation>(), {Activation::kSwiGlu}})
    check_fused<Bf16>({2, width, kFusedOutputs[1], true, activation}, inputs, products, device);
}

TEST_F(CudaLinearTest, RefusesWhatItCannotFuse) {
  CudaDevice device;
  MatrixProducts products(device);
  const FusionInputs memory(device);
  const DeviceBuffer<float> y(256, device);
  const BasicRmsNorm<float, Bf16> norm{.tokens = 1,
                                       .size = 64,
                                       .x = memory.hidden.data(),
                                       .x_stride = 64,
                                       .weight = memory.norm_weight.data(),
                                       .y = memory.x.data(),
                                       .y_stride = 64};
  const BasicLinear<Bf16, float> good{.tokens = 1,
                                      .inputs = 64,
                                      .outputs = 16,
                                      .weight = memory.weight.data(),
                                      .x = memory.x.data(),
                                      .x_stride = 64,
                                      .y = y.data(),
                                      .y_stride = 16};
  const auto refused = [&](auto change, bool is_fusable, const char* part) {
    BasicRmsNorm<float, Bf16> changed_norm = norm;
    BasicLinear<Bf16, float> args = good;
    args.norm = &changed_norm;
    change(args, changed_norm);
    EXPECT_EQ(can_fuse(args), is_fusable) << part;
    expect_refusal([&] { linear(args, products); }, "linear", part);
  };
  refused([](auto& a, auto& n) { a.tokens = n.tokens = 3; }, false, "got 3 tokens");
  refused([](auto& a, auto&) { a.heads = 2; }, false, "2 heads");
  refused([](auto& a, auto&) { a.weight += 1; }, false, "aligned to 16 bytes");
  refused([](auto&, auto& n) { n.x += 1; }, false, "aligned to 16 bytes");
  refused([](auto& a, auto& n) { a.inputs = a.x_stride = n.size = 4104; }, false, "at most 4096 elements");
  refused(
      [](auto& a, auto&) {
        a.norm = nullptr;
        a.activation = Activation::kRelu2;
        a.x += 1;
      },
      false, "aligned to 16 bytes");
  refused([](auto&, auto& n) { n.size = 56; }, true, "1 of 1 heads of 56 elements");
  refused([](auto&, auto& n) { n.heads = 2; }, true, "1 of 2 heads");
  refused([](auto&, auto& n) { n.tokens = 2; }, true, "got 2 of");
  refused([](auto&, auto& n) { n.y += 8; }, true, "to another array");
  refused([](auto&, auto& n) { n.weight = nullptr; }, true, "null");
  refused([](auto&, auto& n) { n.eps = -1; }, true, "eps >= 0");
  refused(
      [](auto& a, auto&) {
        a.activation = Activation::kRelu2;
        a.is_added = true;
      },
      true, "got both");
  refused(
      [](auto& a, auto&) {
        a.activation = Activation::kSwiGlu;
        a.outputs = 15;
      },
      true, "even number of outputs");
  refused(
      [](auto& a, auto&) {
        a.activation = Activation::kSwiGlu;
        a.y_stride = 7;
      },
      true, "8 for y");
  BasicLinear<float, float> wide{.tokens = 1,
                                 .inputs = 64,
                                 .outputs = 16,
                                 .weight = memory.hidden.data(),
                                 .x = memory.norm_weight.data(),
                                 .x_stride = 64,
                                 .y = y.data(),
                                 .y_stride = 16};
  wide.activation = Activation::kRelu2;
  EXPECT_FALSE(can_fuse(wide));
  expect_refusal([&] { linear(wide, products); }, "linear", "in BF16");
}

TEST_F(CudaLinearTest, RefusesBadArguments) {
  CudaDevice device;
  MatrixProducts products(device);
  const DeviceBuffer<float> memory(64, device);
  const BasicLinear<float, float> good{.tokens = 2,
                                       .inputs = 4,
                                       .outputs = 4,
                                       .weight = memory.data(),
                                       .x = memory.data() + 16,
                                       .x_stride = 4,
                                       .y = memory.data() + 32,
                                       .y_stride = 4};
  const auto refused = [&](auto change, const char* part) {
    BasicLinear<float, float> args = good;
    change(args);
    expect_refusal([&] { linear(args, products); }, "linear", part);
  };
  refused([](auto& a) { a.tokens = -1; }, "-1 tokens");
  refused([](auto& a) { a.inputs = 0; }, "inputs");
  refused([](auto& a) { a.heads = 0; }, "0 heads");
  refused([](auto& a) { a.parts = 3; }, "3 parts of 4 inputs");
  refused([](auto& a) { a.parts = 2, a.is_added = true; }, "added");
  refused([](auto& a) { a.weight = nullptr; }, "null");
  refused([](auto& a) { a.x_stride = 3; }, "at least 4 for x");
  refused([](auto& a) { a.y_stride = 3; }, "4 for y");
  BasicLinear<float, float> none = good;
  none.tokens = 0;
  none.x = nullptr;
  linear(none, products);
}

TEST_F(CudaLinearTest, RandomNumbersAreTheCpus) {
  CudaDevice device;
  const auto check = [&]<typename T>(T) {
    const DeviceBuffer<T> there(100'003, device);
    random_fill(RandomFill<T>{.count = there.size(), .seed = 5, .low = -3, .high = 2, .y = there.data()}, device);
    std::vector<T> here(there.size());
    random_fill(RandomFill<T>{.count = here.size(), .seed = 5, .low = -3, .high = 2, .y = here.data()});
    EXPECT_TRUE(are_equal(there.download(device), here));
    double sum = 0;
    for (const T value : here) {
      ASSERT_TRUE(to_float(value) >= -3 && to_float(value) <= 2);
      sum += to_float(value);
    }
    EXPECT_NEAR(sum / static_cast<double>(here.size()), -0.5, kFaultBound);
  };
  check(float());
  check(Bf16());
}

}  // namespace
}  // namespace replayssm
