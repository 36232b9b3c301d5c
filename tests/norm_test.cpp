// Norms: the oracle at odd sizes and strides, in place, bits that depend on the vector alone, extreme inputs.
#include "replayssm/ops/norm.h"

#include <gtest/gtest.h>

#include <limits>

#include "replayssm/core/error.h"
#include "tests/arrays.h"
#include "tests/ref/norm.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

const int64_t kSizes[] = {1, 3, 15, 16, 17, 80, 128, 256, 1000};

TEST(Norm, RmsNormMatchesTheOracleAndTouchesOnlyItsVectors) {
  std::mt19937_64 random(1);
  for (int64_t size : kSizes) {
    for (bool is_zero_centred : {false, true}) {
      const int64_t tokens = 7, x_head_stride = 2 * size, y_head_stride = size + 1;
      const int heads = 3;
      const int64_t x_stride = heads * x_head_stride + 5, y_stride = heads * y_head_stride + 2;
      const std::vector<float> x = random_normal(random, tokens * x_stride, 3.0f);
      const std::vector<float> weight = random_normal(random, size, 0.5f, is_zero_centred ? 0.1f : 1.0f);
      std::vector<float> bits;
      for (int threads : {1, 2, 3}) {
        Device device(threads);
        std::vector<float> y = poisoned(tokens * y_stride);
        rms_norm({.tokens = tokens,
                  .heads = heads,
                  .size = size,
                  .x = x.data(),
                  .x_stride = x_stride,
                  .x_head_stride = x_head_stride,
                  .weight = weight.data(),
                  .is_zero_centred = is_zero_centred,
                  .eps = 1e-6f,
                  .y = y.data(),
                  .y_stride = y_stride,
                  .y_head_stride = y_head_stride},
                 device);
        size_t poison = 0;
        for (float value : y) poison += std::isnan(value);
        EXPECT_EQ(poison, tokens * (y_stride - heads * size));
        if (threads == 1) bits = y;
        EXPECT_TRUE(same_bits(y, bits));
      }
      for (int64_t n = 0; n < tokens; ++n) {
        for (int h = 0; h < heads; ++h) {
          const auto from = std::span(x).subspan(n * x_stride + h * x_head_stride, size);
          const auto given = std::span(bits).subspan(n * y_stride + h * y_head_stride, size);
          EXPECT_LE(relative_error(given, ref::rms_norm(from, weight, is_zero_centred, 1e-6)), kFloat32Bound);
          // Teeth: the other reading of the weights is far outside.
          EXPECT_GT(relative_error(given, ref::rms_norm(from, weight, !is_zero_centred, 1e-6)), 100 * kFloat32Bound);
        }
      }
    }
  }
}

TEST(Norm, GatedRmsNormMatchesTheOracle) {
  std::mt19937_64 random(2);
  for (int64_t size : kSizes) {
    const int64_t tokens = 5;
    const int heads = 2;
    const int64_t x_stride = heads * size + 3, z_stride = heads * size + 7, y_stride = heads * size + 1;
    const std::vector<float> x = random_normal(random, tokens * x_stride, 0.01f);
    const std::vector<float> z = random_normal(random, tokens * z_stride, 4.0f);
    const std::vector<float> weight = random_normal(random, size, 0.5f, 1.0f);
    for (int i = 0; i < 4; ++i) {
      const bool has_sigmoid_gate = i == 3;
      Device device(i % 3 + 1);
      std::vector<float> y = poisoned(tokens * y_stride);
      gated_rms_norm({.tokens = tokens,
                      .heads = heads,
                      .size = size,
                      .x = x.data(),
                      .z = z.data(),
                      .x_stride = x_stride,
                      .z_stride = z_stride,
                      .weight = weight.data(),
                      .has_sigmoid_gate = has_sigmoid_gate,
                      .eps = 1e-6f,
                      .y = y.data(),
                      .y_stride = y_stride},
                     device);
      for (int64_t n = 0; n < tokens; ++n) {
        for (int h = 0; h < heads; ++h) {
          const auto given = std::span(y).subspan(n * y_stride + h * size, size);
          const auto expected = [&](bool is_sigmoid) {
            return ref::gated_rms_norm(std::span(x).subspan(n * x_stride + h * size, size),
                                       std::span(z).subspan(n * z_stride + h * size, size), weight, is_sigmoid, 1e-6);
          };
          EXPECT_LE(relative_error(given, expected(has_sigmoid_gate)), kFloat32Bound);
          // Teeth: the other gate is far outside.
          EXPECT_GT(relative_error(given, expected(!has_sigmoid_gate)), 100 * kFloat32Bound);
        }
        for (int64_t d = heads * size; d < y_stride; ++d) EXPECT_TRUE(std::isnan(y[n * y_stride + d]));
      }
    }
  }
}

TEST(Norm, GateFirstRmsNormMatchesTheOracle) {
  std::mt19937_64 random(5);
  for (int64_t size : kSizes) {
    const int64_t tokens = 5;
    const int groups = 3;
    const int64_t x_stride = groups * size + 3, z_stride = groups * size + 7, y_stride = groups * size + 1;
    const std::vector<float> x = random_normal(random, tokens * x_stride, 0.01f);
    const std::vector<float> z = random_normal(random, tokens * z_stride, 4.0f);
    const std::vector<float> weight = random_normal(random, groups * size, 0.5f, 1.0f);
    std::vector<float> bits;
    for (int threads : {1, 2, 3}) {
      Device device(threads);
      std::vector<float> y = poisoned(tokens * y_stride);
      gate_first_rms_norm({.tokens = tokens,
                           .groups = groups,
                           .size = size,
                           .x = x.data(),
                           .z = z.data(),
                           .x_stride = x_stride,
                           .z_stride = z_stride,
                           .weight = weight.data(),
                           .eps = 1e-6f,
                           .y = y.data(),
                           .y_stride = y_stride},
                          device);
      if (threads == 1) bits = y;
      EXPECT_TRUE(same_bits(y, bits));
    }
    for (int64_t n = 0; n < tokens; ++n) {
      for (int g = 0; g < groups; ++g) {
        const auto from = std::span(x).subspan(n * x_stride + g * size, size);
        const auto gate = std::span(z).subspan(n * z_stride + g * size, size);
        const auto own = std::span(weight).subspan(g * size, size);
        const auto given = std::span(bits).subspan(n * y_stride + g * size, size);
        EXPECT_LE(relative_error(given, ref::gate_first_rms_norm(from, gate, own, 1e-6)), kFloat32Bound);
        // Teeth: the gate after the norm, or another group's weights, is far outside.
        EXPECT_GT(relative_error(given, ref::gated_rms_norm(from, gate, own, false, 1e-6)), 100 * kFloat32Bound);
        const auto other = std::span(weight).subspan((g + 1) % groups * size, size);
        EXPECT_GT(relative_error(given, ref::gate_first_rms_norm(from, gate, other, 1e-6)), 100 * kFloat32Bound);
      }
      for (int64_t i = groups * size; i < y_stride; ++i) EXPECT_TRUE(std::isnan(bits[n * y_stride + i]));
    }
  }
}

// In place, a token alone, and tokens that are no numbers beside it.
TEST(Norm, GateFirstRmsNormOfATokenDependsOnNothingElse) {
  std::mt19937_64 random(6);
  const int64_t tokens = 300, size = 33, width = 2 * size;
  std::vector<float> x = random_normal(random, tokens * width);
  const std::vector<float> z = random_normal(random, tokens * width), weight = random_normal(random, width);
  Device device(3);
  std::vector<float> y = poisoned(tokens * width);
  GateFirstRmsNorm args{.tokens = tokens,
                        .groups = 2,
                        .size = size,
                        .x = x.data(),
                        .z = z.data(),
                        .x_stride = width,
                        .z_stride = width,
                        .weight = weight.data(),
                        .y = y.data(),
                        .y_stride = width};
  gate_first_rms_norm(args, device);
  std::vector<float> in_place = x;
  for (int64_t n = 1; n < tokens; n += 2) in_place[n * width] = std::numeric_limits<float>::quiet_NaN();
  args.x = args.y = in_place.data();
  gate_first_rms_norm(args, device);
  std::vector<float> alone = poisoned(width);
  for (int64_t n = 0; n < tokens; ++n) {
    const auto expected = std::span(y).subspan(n * width, width), given = std::span(in_place).subspan(n * width, width);
    if (n % 2 == 0) {
      EXPECT_TRUE(same_bits(given, expected));
    }
    // The spoilt group is no number from end to end; the token's other group keeps its bits.
    for (int64_t i = 0; i < size && n % 2 == 1; ++i) EXPECT_TRUE(std::isnan(given[i]));
    EXPECT_TRUE(same_bits(given.subspan(size), expected.subspan(size)));
    args.tokens = 1;
    args.x = x.data() + n * width;
    args.z = z.data() + n * width;
    args.y = alone.data();
    gate_first_rms_norm(args, device);
    EXPECT_TRUE(same_bits(alone, expected));
  }
}

TEST(Norm, ATokensBitsDependOnNothingElse) {
  std::mt19937_64 random(3);
  const int64_t tokens = 300, size = 80;
  const std::vector<float> x = random_normal(random, tokens * size), z = random_normal(random, tokens * size);
  const std::vector<float> weight = random_normal(random, size);
  Device device(3);
  std::vector<float> y = poisoned(tokens * size), gated = poisoned(tokens * size);
  RmsNorm args{.tokens = tokens,
               .size = size,
               .x = x.data(),
               .x_stride = size,
               .weight = weight.data(),
               .y = y.data(),
               .y_stride = size};
  GatedRmsNorm gated_args{.tokens = tokens,
                          .heads = 1,
                          .size = size,
                          .x = x.data(),
                          .z = z.data(),
                          .x_stride = size,
                          .z_stride = size,
                          .weight = weight.data(),
                          .y = gated.data(),
                          .y_stride = size};
  rms_norm(args, device);
  gated_rms_norm(gated_args, device);
  std::vector<float> alone = poisoned(size);
  for (int64_t n = 0; n < tokens; n += 13) {
    args.tokens = gated_args.tokens = 1;
    args.x = gated_args.x = x.data() + n * size;
    gated_args.z = z.data() + n * size;
    args.y = gated_args.y = alone.data();
    rms_norm(args, device);
    EXPECT_TRUE(same_bits(alone, std::span(y).subspan(n * size, size)));
    gated_rms_norm(gated_args, device);
    EXPECT_TRUE(same_bits(alone, std::span(gated).subspan(n * size, size)));
  }
}

TEST(Norm, InPlaceHasTheSameBits) {
  std::mt19937_64 random(4);
  Device device(2);
  std::vector<float> x = random_normal(random, 9 * 33), y = poisoned(9 * 33);
  const std::vector<float> weight = random_normal(random, 33), z = random_normal(random, 9 * 33);
  RmsNorm args{
      .tokens = 9, .size = 33, .x = x.data(), .x_stride = 33, .weight = weight.data(), .y = y.data(), .y_stride = 33};
  rms_norm(args, device);
  std::vector<float> in_place = x;
  args.x = args.y = in_place.data();
  rms_norm(args, device);
  EXPECT_TRUE(same_bits(in_place, y));

  GatedRmsNorm gated{.tokens = 9,
                     .heads = 1,
                     .size = 33,
                     .x = x.data(),
                     .z = z.data(),
                     .x_stride = 33,
                     .z_stride = 33,
                     .weight = weight.data(),
                     .y = y.data(),
                     .y_stride = 33};
  gated_rms_norm(gated, device);
  in_place = x;
  gated.x = gated.y = in_place.data();
  gated_rms_norm(gated, device);
  EXPECT_TRUE(same_bits(in_place, y));
}

TEST(Norm, ExtremeGatesAndBadNumbersStayHome) {
  Device device(1);
  const std::vector<float> weight(4, 1.0f), x = {1, 1, 1, 1, 1, 1, 1, 1};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> z = {1e30f, -1e30f, -100.0f, 100.0f, nan, 1.0f, 2.0f, 3.0f};
  std::vector<float> y = poisoned(8);
  gated_rms_norm({.tokens = 2,
                  .heads = 1,
                  .size = 4,
                  .x = x.data(),
                  .z = z.data(),
                  .x_stride = 4,
                  .z_stride = 4,
                  .weight = weight.data(),
                  .eps = 0,
                  .y = y.data(),
                  .y_stride = 4},
                 device);
  EXPECT_FLOAT_EQ(y[0], 1e30f);
  EXPECT_LE(std::abs(y[1]), 1e-7f);
  EXPECT_LE(std::abs(y[2]), 1e-30f);
  EXPECT_FLOAT_EQ(y[3], 100.0f);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_TRUE(std::isfinite(y[5]));
  y = poisoned(8);
  gated_rms_norm({.tokens = 2,
                  .heads = 1,
                  .size = 4,
                  .x = x.data(),
                  .z = z.data(),
                  .x_stride = 4,
                  .z_stride = 4,
                  .weight = weight.data(),
                  .has_sigmoid_gate = true,
                  .eps = 0,
                  .y = y.data(),
                  .y_stride = 4},
                 device);
  EXPECT_FLOAT_EQ(y[0], 1);
  EXPECT_LE(std::abs(y[1]), 1e-30f);
  EXPECT_LE(std::abs(y[2]), 1e-30f);
  EXPECT_FLOAT_EQ(y[3], 1);
  EXPECT_TRUE(std::isnan(y[4]));
}

TEST(Norm, RefusesWrongArguments) {
  Device device(1);
  const std::vector<float> x(8, 1.0f);
  std::vector<float> y = poisoned(8);
  const RmsNorm good{.tokens = 1, .size = 8, .x = x.data(), .weight = x.data(), .y = y.data()};
  const auto refused = [&](auto change) {
    RmsNorm bad = good;
    change(bad);
    EXPECT_THROW(rms_norm(bad, device), Error);
    GatedRmsNorm gated{.tokens = bad.tokens,
                       .heads = bad.heads,
                       .size = bad.size,
                       .x = bad.x,
                       .z = bad.x,
                       .weight = bad.weight,
                       .eps = bad.eps,
                       .y = bad.y};
    EXPECT_THROW(gated_rms_norm(gated, device), Error);
    const GateFirstRmsNorm gate_first{.tokens = bad.tokens,
                                      .groups = bad.heads,
                                      .size = bad.size,
                                      .x = bad.x,
                                      .z = bad.x,
                                      .weight = bad.weight,
                                      .eps = bad.eps,
                                      .y = bad.y};
    EXPECT_THROW(gate_first_rms_norm(gate_first, device), Error);
  };
  refused([](RmsNorm& a) { a.tokens = -1; });
  refused([](RmsNorm& a) { a.heads = -1; });
  refused([](RmsNorm& a) { a.size = 0; });
  refused([](RmsNorm& a) { a.eps = -1; });
  refused([](RmsNorm& a) { a.x = nullptr; });
  refused([](RmsNorm& a) { a.weight = nullptr; });
  refused([](RmsNorm& a) { a.y = nullptr; });
  EXPECT_TRUE(std::isnan(y[0]));
}

}  // namespace
}  // namespace replayssm
