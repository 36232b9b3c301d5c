// Matrix products on a GPU: the oracle in every type, strides, sums added, heads, capture, the same bits again,
// refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
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
