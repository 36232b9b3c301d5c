// Matrix products: the oracle at odd sizes, bits that depend on nothing but the token, strides, refusals.
#include "replayssm/ops/linear.h"

#include <gtest/gtest.h>

#include <limits>

#include "replayssm/core/error.h"
#include "tests/arrays.h"
#include "tests/ref/linear.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

struct LinearCase {
  int64_t tokens, inputs, outputs;
  bool is_bf16;
};

// Every path: fewer inputs than a vector, remainders, several passes over the inputs, one tile to several blocks.
const LinearCase kCases[] = {
    {1, 1, 1, true},     {3, 5, 7, true},      {1, 64, 8, true},     {2, 33, 9, false},   {5, 100, 17, true},
    {6, 256, 24, true},  {7, 256, 24, true},   {8, 769, 11, false},  {64, 768, 16, true}, {67, 1601, 13, true},
    {130, 70, 40, true}, {131, 830, 8, false}, {20, 9216, 16, true}, {1, 9216, 16, true},
};

struct Product {
  Product(const LinearCase& c, uint64_t seed) : shape(c) {
    std::mt19937_64 random(seed);
    x = random_normal(random, c.tokens * c.inputs);
    w = random_normal(random, c.outputs * c.inputs);
    if (c.is_bf16) {
      for (float& value : w) {
        w_bf16.push_back(to_bf16(value));
        value = to_float(w_bf16.back());
      }
    }
  }

  Linear args(const float* from, int64_t tokens, std::vector<float>& y) const {
    Linear linear{.tokens = tokens,
                  .inputs = shape.inputs,
                  .outputs = shape.outputs,
                  .x = from,
                  .x_stride = shape.inputs,
                  .y = y.data(),
                  .y_stride = shape.outputs};
    if (shape.is_bf16)
      linear.weight = w_bf16.data();
    else
      linear.weight_f32 = w.data();
    return linear;
  }

  std::vector<float> run(Device& device) const {
    std::vector<float> y = poisoned(shape.tokens * shape.outputs);
    linear(args(x.data(), shape.tokens, y), device);
    return y;
  }

  LinearCase shape;
  std::vector<float> x, w;
  std::vector<Bf16> w_bf16;
};

TEST(Linear, MatchesTheOracle) {
  Device device(2);
  for (const LinearCase& c : kCases) {
    const Product product(c, 1);
    const auto expected = ref::linear(product.w, product.x, c.tokens, c.inputs, c.outputs);
    EXPECT_LE(relative_error(product.run(device), expected), kFloat32Bound)
        << c.tokens << " x " << c.inputs << " x " << c.outputs;
  }
}

TEST(Linear, OneWrongWeightIsSeen) {
  Device device(1);
  Product product({3, 769, 16, true}, 2);
  const auto expected = ref::linear(product.w, product.x, 3, 769, 16);
  for (int64_t at : {int64_t{0}, int64_t{5 * 769 + 768}, int64_t{15 * 769 + 400}}) {
    const Bf16 right = product.w_bf16[at];
    product.w_bf16[at] = to_bf16(-to_float(right) + 1);
    EXPECT_GT(relative_error(product.run(device), expected), 100 * kFloat32Bound);
    product.w_bf16[at] = right;
  }
}

TEST(Linear, ATokensBitsDependOnNeitherBatchNorPlaceNorThreads) {
  for (const LinearCase& c : kCases) {
    const Product product(c, 3);
    Device one(1);
    std::vector<float> alone = poisoned(c.tokens * c.outputs);
    for (int64_t n = 0; n < c.tokens; ++n) {
      std::vector<float> y = poisoned(c.outputs);
      linear(product.args(product.x.data() + n * c.inputs, 1, y), one);
      std::copy(y.begin(), y.end(), alone.begin() + n * c.outputs);
    }
    for (int threads : {1, 2, 3}) {
      Device device(threads);
      EXPECT_TRUE(same_bits(product.run(device), alone)) << c.tokens << " x " << c.inputs << " threads " << threads;
    }
    // Every suffix of the batch moves each token to another place.
    for (int64_t first : {int64_t{1}, int64_t{2}, c.tokens / 2}) {
      if (first >= c.tokens) continue;
      std::vector<float> y = poisoned((c.tokens - first) * c.outputs);
      linear(product.args(product.x.data() + first * c.inputs, c.tokens - first, y), one);
      EXPECT_TRUE(same_bits(y, std::span(alone).subspan(first * c.outputs))) << c.tokens << " from " << first;
    }
  }
}

TEST(Linear, StridesAndResidual) {
  Device device(2);
  const LinearCase c{11, 37, 10, true};
  const Product product(c, 4);
  const int64_t x_stride = 50, y_stride = 13;
  std::vector<float> x = poisoned(c.tokens * x_stride), y = poisoned(c.tokens * y_stride);
  std::mt19937_64 random(5);
  const std::vector<float> residual = random_normal(random, c.tokens * c.outputs);
  for (int64_t n = 0; n < c.tokens; ++n) {
    std::copy_n(product.x.begin() + n * c.inputs, c.inputs, x.begin() + n * x_stride);
    std::copy_n(residual.begin() + n * c.outputs, c.outputs, y.begin() + n * y_stride);
  }
  Linear args = product.args(x.data(), c.tokens, y);
  args.x_stride = x_stride;
  args.y_stride = args.residual_stride = y_stride;
  args.residual = y.data();
  linear(args, device);
  const std::vector<float> plain = product.run(device);
  for (int64_t n = 0; n < c.tokens; ++n) {
    for (int64_t o = 0; o < c.outputs; ++o)
      EXPECT_EQ(y[n * y_stride + o], plain[n * c.outputs + o] + residual[n * c.outputs + o]);
    for (int64_t o = c.outputs; o < y_stride; ++o) EXPECT_TRUE(std::isnan(y[n * y_stride + o]));
  }
}

TEST(Linear, ABadNumberStaysInItsToken) {
  Device device(2);
  Product product({9, 100, 24, true}, 6);
  const std::vector<float> expected = product.run(device);
  product.x[4 * 100 + 99] = std::numeric_limits<float>::infinity();
  const std::vector<float> given = product.run(device);
  for (int64_t n = 0; n < 9; ++n) {
    if (n == 4)
      EXPECT_FALSE(std::isfinite(given[n * 24]));
    else
      EXPECT_TRUE(same_bits(std::span(given).subspan(n * 24, 24), std::span(expected).subspan(n * 24, 24)));
  }
}

TEST(Linear, NothingToDo) {
  Device device(2);
  linear({.tokens = 0, .inputs = 4, .outputs = 4, .weight_f32 = &kPoison}, device);
  std::vector<float> y = poisoned(3);
  linear({.tokens = 1, .inputs = 0, .outputs = 3, .y = y.data(), .y_stride = 3}, device);
  EXPECT_EQ(y, std::vector<float>(3, 0.0f));
}

TEST(Linear, RefusesWrongArguments) {
  Device device(1);
  const Product product({3, 8, 8, false}, 7);
  std::vector<float> y = poisoned(24);
  const Linear good = product.args(product.x.data(), 3, y);
  const auto refused = [&](auto change) {
    Linear bad = good;
    change(bad);
    EXPECT_THROW(linear(bad, device), Error);
  };
  refused([](Linear& a) { a.tokens = -1; });
  refused([](Linear& a) { a.x_stride = 7; });
  refused([](Linear& a) { a.y_stride = 7; });
  refused([](Linear& a) { a.residual = a.x; });
  refused([](Linear& a) { a.weight_f32 = nullptr; });
  refused([](Linear& a) { a.weight = reinterpret_cast<const Bf16*>(a.weight_f32); });
  refused([](Linear& a) { a.x = nullptr; });
  refused([](Linear& a) { a.y = nullptr; });
  for (float value : y) EXPECT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace replayssm
