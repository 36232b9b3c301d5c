// Elementwise products and embedding rows: the oracle at odd sizes, in place, bad numbers, refusals.
#include "replayssm/ops/activation.h"

#include <gtest/gtest.h>

#include <limits>

#include "replayssm/core/error.h"
#include "replayssm/ops/embed.h"
#include "tests/arrays.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

double sigmoid_of(float u) {
  return 1 / (1 + std::exp(-static_cast<double>(u)));
}

TEST(Activation, SiluProductMatchesTheOracle) {
  std::mt19937_64 random(1);
  for (int64_t size : {1, 15, 16, 33, 640}) {
    const int64_t tokens = 9, stride = 2 * size + 1;
    const std::vector<float> both = random_normal(random, tokens * stride, 5.0f);
    std::vector<double> expected;
    for (int64_t n = 0; n < tokens; ++n)
      for (int64_t i = 0; i < size; ++i)
        expected.push_back(both[n * stride + i] * sigmoid_of(both[n * stride + i]) * both[n * stride + size + i]);
    std::vector<float> bits;
    for (int threads : {1, 2, 3}) {
      Device device(threads);
      std::vector<float> y = poisoned(tokens * size), in_place = both;
      SiluProduct args{.tokens = tokens,
                       .size = size,
                       .gate = both.data(),
                       .up = both.data() + size,
                       .gate_stride = stride,
                       .up_stride = stride,
                       .y = y.data(),
                       .y_stride = size};
      silu_product(args, device);
      EXPECT_LE(relative_error(y, expected), kFloat32Bound);
      if (threads == 1) bits = y;
      EXPECT_TRUE(same_bits(y, bits));
      args.gate = in_place.data();
      args.up = in_place.data() + size;
      args.y = in_place.data();
      args.y_stride = stride;
      silu_product(args, device);
      for (int64_t n = 0; n < tokens; ++n) {
        EXPECT_TRUE(same_bits(std::span(in_place).subspan(n * stride, size), std::span(y).subspan(n * size, size)));
        EXPECT_TRUE(same_bits(std::span(in_place).subspan(n * stride + size, size + 1),
                              std::span(both).subspan(n * stride + size, size + 1)));
      }
    }
  }
}

TEST(Activation, Relu2MatchesTheOracle) {
  std::mt19937_64 random(4);
  for (int64_t size : {1, 15, 16, 33, 640}) {
    const int64_t tokens = 9, stride = size + 2;
    const std::vector<float> x = random_normal(random, tokens * stride, 5.0f);
    std::vector<double> expected;
    for (int64_t n = 0; n < tokens; ++n)
      for (int64_t i = 0; i < size; ++i) expected.push_back(std::pow(std::max(0.0, double(x[n * stride + i])), 2));
    std::vector<float> bits;
    for (int threads : {1, 2, 3}) {
      Device device(threads);
      std::vector<float> y = poisoned(tokens * size), in_place = x;
      Relu2 args{.tokens = tokens, .size = size, .x = x.data(), .x_stride = stride, .y = y.data(), .y_stride = size};
      relu2(args, device);
      EXPECT_LE(relative_error(y, expected), kFloat32Bound);
      if (threads == 1) bits = y;
      EXPECT_TRUE(same_bits(y, bits));
      args.x = args.y = in_place.data();
      args.y_stride = stride;
      relu2(args, device);
      for (int64_t n = 0; n < tokens; ++n) {
        EXPECT_TRUE(same_bits(std::span(in_place).subspan(n * stride, size), std::span(y).subspan(n * size, size)));
        EXPECT_TRUE(
            same_bits(std::span(in_place).subspan(n * stride + size, 2), std::span(x).subspan(n * stride + size, 2)));
      }
    }
  }
}

TEST(Activation, SigmoidGateMatchesTheOracle) {
  std::mt19937_64 random(2);
  for (int64_t size : {1, 15, 16, 33, 256}) {
    const int64_t tokens = 7, heads = 3, gate_head_stride = 2 * size, gate_stride = heads * gate_head_stride + 5;
    const std::vector<float> gate = random_normal(random, tokens * gate_stride, 5.0f);
    const std::vector<float> before = random_normal(random, tokens * heads * size);
    std::vector<double> expected;
    for (int64_t n = 0; n < tokens; ++n)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < size; ++i)
          expected.push_back(before[(n * heads + h) * size + i] *
                             sigmoid_of(gate[n * gate_stride + h * gate_head_stride + i]));
    std::vector<float> bits;
    for (int threads : {1, 2, 3}) {
      Device device(threads);
      std::vector<float> x = before;
      sigmoid_gate({.tokens = tokens,
                    .heads = static_cast<int>(heads),
                    .size = size,
                    .gate = gate.data(),
                    .gate_stride = gate_stride,
                    .gate_head_stride = gate_head_stride,
                    .x = x.data(),
                    .x_stride = heads * size},
                   device);
      EXPECT_LE(relative_error(x, expected), kFloat32Bound);
      if (threads == 1) bits = x;
      EXPECT_TRUE(same_bits(x, bits));
    }
  }
}

TEST(Activation, ExtremesAndBadNumbers) {
  Device device(1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> gate = {1e30f, -1e30f, 200.0f, -200.0f, nan, 0.0f};
  std::vector<float> x(6, 1.0f);
  sigmoid_gate({.tokens = 1, .heads = 1, .size = 6, .gate = gate.data(), .x = x.data()}, device);
  EXPECT_EQ(x[0], 1.0f);
  EXPECT_LE(x[1], 1e-30f);
  EXPECT_EQ(x[2], 1.0f);
  EXPECT_LE(x[3], 1e-30f);
  EXPECT_TRUE(std::isnan(x[4]));
  EXPECT_EQ(x[5], 0.5f);

  const float infinity = std::numeric_limits<float>::infinity();
  for (int64_t size : {1, 7, 64}) {  // in the last elements and in whole vectors
    for (const auto& [value, expected] :
         {std::pair(infinity, infinity), {-infinity, 0.0f}, {-3.0f, 0.0f}, {3.0f, 9.0f}, {-0.0f, 0.0f}}) {
      std::vector<float> y(size, value);
      relu2({.tokens = 1, .size = size, .x = y.data(), .y = y.data()}, device);
      EXPECT_EQ(y, std::vector<float>(size, expected));
    }
    for (float value : {nan, -nan}) {
      std::vector<float> y(size, value);
      relu2({.tokens = 1, .size = size, .x = y.data(), .y = y.data()}, device);
      for (float given : y) EXPECT_TRUE(std::isnan(given));
    }
  }
}

TEST(Activation, RefusesWrongArguments) {
  Device device(1);
  float x = 1;
  EXPECT_THROW(silu_product({.tokens = -1, .size = 1}, device), Error);
  EXPECT_THROW(silu_product({.tokens = 1, .size = 1, .gate = &x, .up = &x}, device), Error);
  EXPECT_THROW(relu2({.tokens = 1, .size = -1}, device), Error);
  EXPECT_THROW(relu2({.tokens = 1, .size = 1, .x = &x}, device), Error);
  EXPECT_THROW(sigmoid_gate({.tokens = 1, .heads = -1, .size = 1}, device), Error);
  EXPECT_THROW(sigmoid_gate({.tokens = 1, .heads = 1, .size = 1, .x = &x}, device), Error);
}

TEST(Embed, RowsAreExact) {
  std::mt19937_64 random(3);
  const std::vector<float> table = random_normal(random, 5 * 33);
  std::vector<Bf16> halves;
  for (float value : table) halves.push_back(to_bf16(value));
  const std::vector<int32_t> token = {4, 0, 4, 2};
  Device device(2);
  std::vector<float> wide = poisoned(4 * 33), narrow = poisoned(4 * 33);
  Embed args{
      .tokens = 4, .vocabulary = 5, .size = 33, .token = token.data(), .table_f32 = table.data(), .y = wide.data()};
  embed(args, device);
  args.table_f32 = nullptr;
  args.table = halves.data();
  args.y = narrow.data();
  embed(args, device);
  for (size_t n = 0; n < token.size(); ++n) {
    for (int i = 0; i < 33; ++i) {
      EXPECT_EQ(wide[n * 33 + i], table[token[n] * 33 + i]);
      EXPECT_EQ(narrow[n * 33 + i], to_float(halves[token[n] * 33 + i]));
    }
  }
  for (int32_t wrong : {-1, 5}) {
    args.token = &wrong;
    args.tokens = 1;
    EXPECT_THROW(embed(args, device), Error);
  }
  args.token = token.data();
  args.table_f32 = table.data();
  EXPECT_THROW(embed(args, device), Error);
}

}  // namespace
}  // namespace replayssm
