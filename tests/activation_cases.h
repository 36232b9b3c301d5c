// The cases of the elementwise products, for any path: the oracle at odd sizes and strides, in place, extremes and bad
// numbers, refusals.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "replayssm/ops/activation.h"
#include "tests/bad_input.h"
#include "tests/paths.h"

namespace replayssm::test {

// Those of models are 512 and 1856 (experts), 9216 (a feed-forward), 128 and 256 (heads).
inline const int64_t kActivationSizes[] = {1, 3, 15, 16, 33, 512, 1000, 1032, 1856, 9216};
inline const int64_t kGatedHeadSizes[] = {1, 3, 15, 16, 33, 128, 256, 1032};

inline double sigmoid_of(float u) {
  return 1 / (1 + std::exp(-static_cast<double>(u)));
}

// What an op writes: an array of its own or one of its operands.
enum class Target { kApart, kFirst, kSecond };

// silu_product of operands that lie side by side in one array, `gap` elements behind each, with as many before the
// first. Sees that nothing else is written.
template <typename Path>
std::vector<float> run_silu_product(Path& path, int64_t size, const std::vector<float>& gate,
                                    const std::vector<float>& up, int64_t gap, Target target) {
  using T = typename Path::T;
  const int64_t tokens = static_cast<int64_t>(gate.size()) / size, width = size + gap;
  const VectorPlaces operands = {tokens, 2, size, 2 * width, width}, results = {tokens, 1, size, width, 0};
  std::vector<float> both;
  for (int64_t n = 0; n < tokens; ++n) {
    both.insert(both.end(), gate.begin() + n * size, gate.begin() + (n + 1) * size);
    both.insert(both.end(), up.begin() + n * size, up.begin() + (n + 1) * size);
  }
  std::vector<float> spread = operands.spread(both);
  spread.insert(spread.begin(), gap, kPoison);
  auto from = path.template elements<T>(spread);
  auto apart = path.template elements<T>(poisoned(tokens * results.stride));
  T* const gates = from.data() + gap;
  T* const ups = gates + width;
  const bool is_apart = target == Target::kApart;
  silu_product(BasicSiluProduct<T>{.tokens = tokens,
                                   .size = size,
                                   .gate = gates,
                                   .up = ups,
                                   .gate_stride = operands.stride,
                                   .up_stride = operands.stride,
                                   .y = is_apart                   ? apart.data()
                                        : target == Target::kFirst ? gates
                                                                   : ups,
                                   .y_stride = is_apart ? results.stride : operands.stride},
               path.device);
  std::vector<float> after = path.template read<T>(from);
  after.erase(after.begin(), after.begin() + gap);
  EXPECT_TRUE(operands.is_clean_between(after));
  const std::vector<float> now = operands.gather(after);
  std::vector<float> y;
  for (int64_t n = 0; n < tokens; ++n)
    for (int64_t which = 0; which < 2; ++which) {
      const int64_t at = (2 * n + which) * size;
      if (!is_apart && which == (target == Target::kFirst ? 0 : 1))
        y.insert(y.end(), now.begin() + at, now.begin() + at + size);
      else
        EXPECT_TRUE(same_bits(std::span(now).subspan(at, size), std::span(both).subspan(at, size)));
    }
  if (!is_apart) return y;
  const std::vector<float> result = path.template read<T>(apart);
  EXPECT_TRUE(results.is_clean_between(result));
  return results.gather(result);
}

template <typename Path>
void silu_product_matches_the_oracle() {
  using T = typename Path::T;
  std::mt19937_64 random(1);
  for (const int64_t size : kActivationSizes) {
    SCOPED_TRACE(size);
    const int64_t count = 9 * size;
    const auto gate = Path::template rounded<T>(random_normal(random, count, 5.0f));
    const auto up = Path::template rounded<T>(random_normal(random, count, 5.0f));
    std::vector<double> expected, swapped;
    for (int64_t i = 0; i < count; ++i) {
      expected.push_back(gate[i] * sigmoid_of(gate[i]) * up[i]);
      swapped.push_back(up[i] * sigmoid_of(up[i]) * gate[i]);
    }
    std::vector<float> bits;
    for (int variant = 0; variant < Path::kVariants; ++variant) {
      Path path(variant);
      const std::vector<float> y = run_silu_product(path, size, gate, up, 0, Target::kApart);
      if (variant == 0) bits = y;
      EXPECT_TRUE(same_bits(y, bits));
      for (const int64_t gap : {0, 1, 16})
        for (const Target target : {Target::kApart, Target::kFirst, Target::kSecond})
          EXPECT_TRUE(same_bits(run_silu_product(path, size, gate, up, gap, target), bits));
    }
    EXPECT_LE(relative_error(bits, expected), Path::kBound);
    EXPECT_GT(relative_error(bits, swapped), Path::kOtherFormula);
  }
}

template <typename Path>
std::vector<float> run_relu2(Path& path, int64_t size, const std::vector<float>& x, int64_t gap, Target target) {
  using T = typename Path::T;
  const int64_t tokens = static_cast<int64_t>(x.size()) / size;
  const VectorPlaces places = {tokens, 1, size, size + gap, 0};
  const std::vector<float> before = places.spread(x);
  auto from = path.template elements<T>(before);
  auto apart = path.template elements<T>(poisoned(before.size()));
  auto& y = target == Target::kApart ? apart : from;
  relu2(BasicRelu2<T>{.tokens = tokens,
                      .size = size,
                      .x = from.data(),
                      .x_stride = places.stride,
                      .y = y.data(),
                      .y_stride = places.stride},
        path.device);
  const std::vector<float> result = path.template read<T>(y);
  EXPECT_TRUE(places.is_clean_between(result));
  return places.gather(result);
}

template <typename Path>
void relu2_matches_the_oracle() {
  using T = typename Path::T;
  std::mt19937_64 random(2);
  for (const int64_t size : kActivationSizes) {
    SCOPED_TRACE(size);
    const auto x = Path::template rounded<T>(random_normal(random, 9 * size, 5.0f));
    std::vector<double> expected;
    for (float value : x) expected.push_back(std::pow(std::max(0.0, static_cast<double>(value)), 2));
    std::vector<float> bits;
    for (int variant = 0; variant < Path::kVariants; ++variant) {
      Path path(variant);
      const std::vector<float> y = run_relu2(path, size, x, 0, Target::kApart);
      if (variant == 0) bits = y;
      EXPECT_TRUE(same_bits(y, bits));
      for (const int64_t gap : {0, 1, 16})
        for (const Target target : {Target::kApart, Target::kFirst})
          EXPECT_TRUE(same_bits(run_relu2(path, size, x, gap, target), bits));
    }
    EXPECT_LE(relative_error(bits, expected), Path::kBound);
  }
}

// x's heads lie together, `gap` elements behind a token's; their gates have as many between them.
template <typename Path>
std::vector<float> run_sigmoid_gate(Path& path, int heads, int64_t size, const std::vector<float>& x,
                                    const std::vector<float>& gate, int64_t gap) {
  using T = typename Path::T;
  const int64_t tokens = static_cast<int64_t>(x.size()) / (heads * size);
  const VectorPlaces places = {tokens, heads, size, heads * size + gap, size};
  const VectorPlaces gate_places = {tokens, heads, size, heads * (2 * size + gap), 2 * size + gap};
  auto array = path.template elements<T>(places.spread(x));
  const auto gates = path.template elements<T>(gate_places.spread(gate));
  sigmoid_gate(BasicSigmoidGate<T>{.tokens = tokens,
                                   .heads = heads,
                                   .size = size,
                                   .gate = gates.data(),
                                   .gate_stride = gate_places.stride,
                                   .gate_head_stride = gate_places.head_stride,
                                   .x = array.data(),
                                   .x_stride = places.stride},
               path.device);
  const std::vector<float> result = path.template read<T>(array);
  EXPECT_TRUE(places.is_clean_between(result));
  return places.gather(result);
}

template <typename Path>
void sigmoid_gate_matches_the_oracle() {
  using T = typename Path::T;
  std::mt19937_64 random(3);
  for (const int heads : {1, 3, 16})
    for (const int64_t size : kGatedHeadSizes) {
      SCOPED_TRACE(testing::Message() << heads << " heads of " << size);
      const int64_t count = 5 * heads * size;
      const auto x = Path::template rounded<T>(random_normal(random, count));
      const auto gate = Path::template rounded<T>(random_normal(random, count, 5.0f));
      std::vector<double> expected;
      for (int64_t i = 0; i < count; ++i) expected.push_back(x[i] * sigmoid_of(gate[i]));
      std::vector<float> bits;
      for (int variant = 0; variant < Path::kVariants; ++variant) {
        Path path(variant);
        const std::vector<float> y = run_sigmoid_gate(path, heads, size, x, gate, 0);
        if (variant == 0) bits = y;
        EXPECT_TRUE(same_bits(y, bits));
        for (const int64_t gap : {1, 16})
          EXPECT_TRUE(same_bits(run_sigmoid_gate(path, heads, size, x, gate, gap), bits));
      }
      EXPECT_LE(relative_error(bits, expected), Path::kBound);
    }
}

// In FP32.
template <typename Path>
void extreme_activations_and_bad_numbers_stay_home() {
  Path path;
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  std::vector<float> y =
      run_sigmoid_gate(path, 1, 6, std::vector<float>(6, 1.0f), {1e30f, -1e30f, 200.0f, -200.0f, nan, 0.0f}, 0);
  EXPECT_FLOAT_EQ(y[0], 1.0f);
  EXPECT_LE(std::abs(y[1]), 1e-30f);
  EXPECT_FLOAT_EQ(y[2], 1.0f);
  EXPECT_LE(std::abs(y[3]), 1e-30f);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_FLOAT_EQ(y[5], 0.5f);

  y = run_silu_product(path, 6, {1e30f, -100.0f, 100.0f, nan, 1.0f, 0.0f}, {2.0f, 1.0f, 1.0f, 1.0f, nan, 1.0f}, 0,
                       Target::kApart);
  EXPECT_FLOAT_EQ(y[0], 2e30f);
  EXPECT_LE(std::abs(y[1]), 1e-30f);
  EXPECT_FLOAT_EQ(y[2], 100.0f);
  EXPECT_TRUE(std::isnan(y[3]) && std::isnan(y[4]));
  EXPECT_EQ(y[5], 0.0f);

  for (const int64_t size : {1, 7, 64}) {  // in the last elements and in whole vectors
    for (const auto& [value, expected] :
         {std::pair(infinity, infinity), {-infinity, 0.0f}, {-3.0f, 0.0f}, {3.0f, 9.0f}, {-0.0f, 0.0f}})
      EXPECT_EQ(run_relu2(path, size, std::vector<float>(size, value), 0, Target::kFirst),
                std::vector<float>(size, expected));
    for (const float value : {nan, -nan}) {
      std::vector<float> x(size, 2.0f);
      x[size / 2] = value;
      y = run_relu2(path, size, x, 0, Target::kFirst);
      for (int64_t i = 0; i < size; ++i) EXPECT_TRUE(i == size / 2 ? std::isnan(y[i]) : y[i] == 4.0f);
    }
  }
}

template <typename Path>
void activations_refuse_wrong_arguments() {
  Path path;
  auto x = path.template elements<float>(std::vector<float>(8, 1.0f));
  const SiluProduct silu{.tokens = 1, .size = 8, .gate = x.data(), .up = x.data(), .y = x.data()};
  const Relu2 relu{.tokens = 1, .size = 8, .x = x.data(), .y = x.data()};
  const SigmoidGate gate{.tokens = 1, .heads = 1, .size = 8, .gate = x.data(), .x = x.data()};
  // Each is right but for what `change` does to it.
  const auto refused = [](auto args, const auto& op, const auto& change, std::string_view what) {
    change(args);
    expect_refusal([&] { op(args); }, what);
  };
  const auto run_silu = [&](const SiluProduct& args) { silu_product(args, path.device); };
  refused(
      silu, run_silu, [](auto& args) { args.tokens = -1; }, "silu_product: expected sizes >= 0, got tokens -1");
  refused(
      silu, run_silu, [](auto& args) { args.size = -2; }, "size -2");
  refused(
      silu, run_silu, [](auto& args) { args.gate = nullptr; }, "silu_product: gate, up and y must not be null");
  refused(
      silu, run_silu, [](auto& args) { args.up = nullptr; }, "must not be null");
  refused(
      silu, run_silu, [](auto& args) { args.y = nullptr; }, "must not be null");
  const auto run_relu = [&](const Relu2& args) { relu2(args, path.device); };
  refused(
      relu, run_relu, [](auto& args) { args.size = -1; }, "relu2: expected sizes >= 0, got tokens 1 and size -1");
  refused(
      relu, run_relu, [](auto& args) { args.x = nullptr; }, "relu2: x and y must not be null");
  refused(
      relu, run_relu, [](auto& args) { args.y = nullptr; }, "must not be null");
  const auto run_gate = [&](const SigmoidGate& args) { sigmoid_gate(args, path.device); };
  refused(
      gate, run_gate, [](auto& args) { args.heads = -1; }, "sigmoid_gate: expected sizes >= 0, got tokens 1, heads -1");
  refused(
      gate, run_gate, [](auto& args) { args.gate = nullptr; }, "sigmoid_gate: gate and x must not be null");
  refused(
      gate, run_gate, [](auto& args) { args.x = nullptr; }, "must not be null");
  // No element, no array.
  EXPECT_NO_THROW(silu_product(SiluProduct{.tokens = 0, .size = 8}, path.device));
  EXPECT_NO_THROW(relu2(Relu2{.tokens = 8, .size = 0}, path.device));
  EXPECT_NO_THROW(sigmoid_gate(SigmoidGate{.tokens = 8, .heads = 0, .size = 8}, path.device));
}

}  // namespace replayssm::test
