// Rotary embedding: the oracle up to position 262,144, strides, untouched dimensions, refusals.
#include "replayssm/ops/rope.h"

#include <gtest/gtest.h>

#include "replayssm/core/error.h"
#include "tests/arrays.h"
#include "tests/ref/rope.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

struct Angles {
  Angles(const std::vector<int64_t>& positions, int rotary_size, double theta, Device& device)
      : cosine(poisoned(positions.size() * (rotary_size / 2))), sine(cosine) {
    rope_angles({.tokens = static_cast<int64_t>(positions.size()),
                 .rotary_size = rotary_size,
                 .theta = theta,
                 .position = positions.data(),
                 .cosine = cosine.data(),
                 .sine = sine.data()},
                device);
  }
  std::vector<float> cosine, sine;
};

TEST(Rope, MatchesTheOracleAtAnyPosition) {
  std::mt19937_64 random(1);
  const std::vector<int64_t> positions = {0, 1, 2, 63, 64, 1000, 4095, 65537, 262143, 262144};
  for (auto [size, rotary_size] : {std::pair{256, 64}, {64, 16}, {20, 6}, {8, 8}, {16, 0}}) {
    const int heads = 3;
    const int64_t head_stride = 2 * size, stride = heads * head_stride + 3;
    const std::vector<float> before = random_normal(random, positions.size() * stride);
    std::vector<float> bits;
    for (int threads : {1, 2, 3}) {
      Device device(threads);
      const Angles angles(positions, rotary_size, 1e7, device);
      std::vector<float> x = before;
      rope({.tokens = static_cast<int64_t>(positions.size()),
            .heads = heads,
            .head_size = size,
            .rotary_size = rotary_size,
            .cosine = angles.cosine.data(),
            .sine = angles.sine.data(),
            .x = x.data(),
            .x_stride = stride,
            .x_head_stride = head_stride},
           device);
      if (threads == 1) bits = x;
      EXPECT_TRUE(same_bits(x, bits));
    }
    for (size_t n = 0; n < positions.size(); ++n) {
      for (int h = 0; h < heads; ++h) {
        const size_t at = n * stride + h * head_stride;
        const auto expected = ref::rope(std::span(before).subspan(at, size), rotary_size, 1e7, positions[n]);
        EXPECT_LE(relative_error(std::span(bits).subspan(at, size), expected), kFloat32Bound) << positions[n];
        EXPECT_TRUE(same_bits(std::span(bits).subspan(at + rotary_size, head_stride - rotary_size),
                              std::span(before).subspan(at + rotary_size, head_stride - rotary_size)));
      }
    }
    if (rotary_size == 0) continue;
    // Teeth: the neighbouring position is seen, even the last one's.
    const auto wrong = ref::rope(std::span(before).subspan(9 * stride, size), rotary_size, 1e7, positions[9] - 1);
    EXPECT_GT(relative_error(std::span(bits).subspan(9 * stride, size), wrong), 100 * kFloat32Bound);
  }
}

TEST(Rope, ATokensBitsDependOnItsPositionAlone) {
  std::mt19937_64 random(2);
  Device device(2);
  const std::vector<int64_t> positions = {5, 77777, 12};
  const Angles all(positions, 32, 1e6, device);
  for (size_t n = 0; n < positions.size(); ++n) {
    const Angles one({positions[n]}, 32, 1e6, device);
    EXPECT_TRUE(same_bits(one.cosine, std::span(all.cosine).subspan(n * 16, 16)));
    EXPECT_TRUE(same_bits(one.sine, std::span(all.sine).subspan(n * 16, 16)));
  }
}

TEST(Rope, RefusesWrongArguments) {
  Device device(1);
  float x[8] = {}, cosine[4] = {}, sine[4] = {};
  const int64_t position = 1, negative = -1;
  const auto angles = [&](int size, double theta, const int64_t* at) {
    rope_angles({.tokens = 1, .rotary_size = size, .theta = theta, .position = at, .cosine = cosine, .sine = sine},
                device);
  };
  EXPECT_THROW(angles(3, 1e4, &position), Error);
  EXPECT_THROW(angles(-2, 1e4, &position), Error);
  EXPECT_THROW(angles(4, 0, &position), Error);
  EXPECT_THROW(angles(4, 1e4, &negative), Error);
  EXPECT_THROW(angles(4, 1e4, nullptr), Error);
  const auto rotate = [&](int size, int rotary_size) {
    rope({.tokens = 1,
          .heads = 1,
          .head_size = size,
          .rotary_size = rotary_size,
          .cosine = cosine,
          .sine = sine,
          .x = x},
         device);
  };
  EXPECT_THROW(rotate(8, 3), Error);
  EXPECT_THROW(rotate(4, 6), Error);
  rotate(8, 8);
}

}  // namespace
}  // namespace replayssm
