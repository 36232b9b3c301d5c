// The cases of the norms, for any path: the oracle at odd sizes and strides, in place, bits that depend on the vector
// alone, extreme inputs, refusals.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "replayssm/core/error.h"
#include "replayssm/ops/norm.h"
#include "tests/paths.h"
#include "tests/ref/norm.h"

namespace replayssm::test {

// Those of models are 80, 128, 256 (a head), 960, 1024 (a group), 2560, 8192 (a token).
inline const int64_t kNormSizes[] = {1, 3, 15, 16, 17, 80, 128, 256, 960, 1000, 1024, 2560, 8192};

// One of the norms over [tokens, heads, size] vectors, in the path's types.
template <typename Path>
struct NormCase {
  using X = typename Path::X;
  using T = typename Path::T;
  using Out = typename Path::Out;
  enum Form { kRms, kZeroCentred, kSilu, kSigmoid, kGateFirst };

  NormCase(Form of, int64_t n, int64_t h, int64_t s, std::mt19937_64& random, float scale)
      : form(of),
        tokens(n),
        heads(h),
        size(s),
        x(Path::template rounded<X>(random_normal(random, n * h * s, scale))),
        z(Path::template rounded<T>(random_normal(random, n * h * s, 4.0f))),
        weight(random_normal(random, of == kGateFirst ? h * s : s, 0.5f, of == kZeroCentred ? 0.1f : 1.0f)) {}

  std::span<const float> vector(const std::vector<float>& of, int64_t index) const {
    return std::span(of).subspan(index * size, size);
  }

  // What vector `index` becomes under a formula.
  std::vector<double> expected(int64_t index, Form by) const {
    const auto from = vector(x, index), gate = vector(z, index);
    const auto own = by == kGateFirst && form == kGateFirst ? vector(weight, index % heads) : vector(weight, 0);
    switch (by) {
      case kRms:
      case kZeroCentred:
        return ref::rms_norm(from, own, by == kZeroCentred, 1e-6);
      case kSilu:
      case kSigmoid:
        return ref::gated_rms_norm(from, gate, own, by == kSigmoid, 1e-6);
      case kGateFirst:
        return ref::gate_first_rms_norm(from, gate, own, 1e-6);
    }
    return {};
  }

  // Runs the op over given arrays. `gaps` are added to the strides of a token's x, z and y and, for those norms that
  // have it, of a head's x and y.
  std::vector<float> run(Path& path, int64_t x_gap, int64_t z_gap, int64_t y_gap) const {
    const bool has_head_strides = form == kRms || form == kZeroCentred;
    const int64_t x_head = size + (has_head_strides ? x_gap : 0), y_head = size + (has_head_strides ? y_gap : 0);
    const VectorPlaces x_places = {tokens, heads, size, heads * x_head + x_gap, x_head};
    const VectorPlaces z_places = {tokens, heads, size, heads * size + z_gap, size};
    const VectorPlaces y_places = {tokens, heads, size, heads * y_head + y_gap, y_head};
    const auto x_array = path.template elements<X>(x_places.spread(x));
    const auto z_array = path.template elements<T>(z_places.spread(z));
    const auto weights = path.template elements<float>(weight);
    auto y = path.template elements<Out>(poisoned(tokens * y_places.stride));
    if (has_head_strides) {
      rms_norm(BasicRmsNorm<X, Out>{.tokens = tokens,
                                    .heads = static_cast<int>(heads),
                                    .size = size,
                                    .x = x_array.data(),
                                    .x_stride = x_places.stride,
                                    .x_head_stride = x_head,
                                    .weight = weights.data(),
                                    .is_zero_centred = form == kZeroCentred,
                                    .eps = 1e-6f,
                                    .y = y.data(),
                                    .y_stride = y_places.stride,
                                    .y_head_stride = y_head},
               path.device);
    } else if (form == kGateFirst) {
      gate_first_rms_norm(BasicGateFirstRmsNorm<X, T, Out>{.tokens = tokens,
                                                           .groups = static_cast<int>(heads),
                                                           .size = size,
                                                           .x = x_array.data(),
                                                           .z = z_array.data(),
                                                           .x_stride = x_places.stride,
                                                           .z_stride = z_places.stride,
                                                           .weight = weights.data(),
                                                           .eps = 1e-6f,
                                                           .y = y.data(),
                                                           .y_stride = y_places.stride},
                          path.device);
    } else {
      gated_rms_norm(BasicGatedRmsNorm<X, T, Out>{.tokens = tokens,
                                                  .heads = static_cast<int>(heads),
                                                  .size = size,
                                                  .x = x_array.data(),
                                                  .z = z_array.data(),
                                                  .x_stride = x_places.stride,
                                                  .z_stride = z_places.stride,
                                                  .weight = weights.data(),
                                                  .has_sigmoid_gate = form == kSigmoid,
                                                  .eps = 1e-6f,
                                                  .y = y.data(),
                                                  .y_stride = y_places.stride},
                     path.device);
    }
    const std::vector<float> result = path.template read<Out>(y);
    EXPECT_TRUE(y_places.is_clean_between(result));
    return y_places.gather(result);
  }

  Form form;
  int64_t tokens, heads, size;
  std::vector<float> x, z, weight;
};

// Against the oracle in dense and in odd places, which must give the same bits; another formula is far outside.
template <typename Path>
void norm_matches_the_oracle(typename NormCase<Path>::Form form, typename NormCase<Path>::Form other, float scale) {
  std::mt19937_64 random(1 + form);
  for (int64_t size : kNormSizes) {
    SCOPED_TRACE(size);
    const NormCase<Path> norm(form, 5, 3, size, random, scale);
    std::vector<float> bits;
    for (int variant = 0; variant < Path::kVariants; ++variant) {
      Path path(variant);
      const std::vector<float> dense = norm.run(path, 0, 0, 0);
      EXPECT_TRUE(same_bits(dense, norm.run(path, 16, 8, 24)));
      EXPECT_TRUE(same_bits(dense, norm.run(path, 5, 7, 1)));
      if (variant == 0) bits = dense;
      EXPECT_TRUE(same_bits(dense, bits));
    }
    for (int64_t index = 0; index < norm.tokens * norm.heads; ++index) {
      const auto given = norm.vector(bits, index);
      EXPECT_LE(relative_error(given, norm.expected(index, form)), Path::kBound);
      EXPECT_GT(relative_error(given, norm.expected(index, other)), Path::kOtherFormula);
      if (form != NormCase<Path>::kGateFirst) continue;
      const auto neighbour = norm.vector(norm.weight, (index + 1) % norm.heads);
      EXPECT_GT(relative_error(given, ref::gate_first_rms_norm(norm.vector(norm.x, index), norm.vector(norm.z, index),
                                                               neighbour, 1e-6)),
                Path::kOtherFormula);
    }
  }
}

template <typename Path>
void rms_norm_matches_the_oracle() {
  using Case = NormCase<Path>;
  norm_matches_the_oracle<Path>(Case::kRms, Case::kZeroCentred, 3.0f);
  norm_matches_the_oracle<Path>(Case::kZeroCentred, Case::kRms, 3.0f);
}
template <typename Path>
void gated_rms_norm_matches_the_oracle() {
  using Case = NormCase<Path>;
  norm_matches_the_oracle<Path>(Case::kSilu, Case::kSigmoid, 0.01f);
  norm_matches_the_oracle<Path>(Case::kSigmoid, Case::kSilu, 0.01f);
}
template <typename Path>
void gate_first_rms_norm_matches_the_oracle() {
  using Case = NormCase<Path>;
  norm_matches_the_oracle<Path>(Case::kGateFirst, Case::kSilu, 0.01f);
}

// A token alone, and tokens that are no numbers beside it.
template <typename Path>
void a_vectors_norm_depends_on_nothing_else() {
  using Case = NormCase<Path>;
  for (const auto form : {Case::kRms, Case::kSilu, Case::kGateFirst})
    for (const int64_t size : {33, 80, 128, 264}) {
      SCOPED_TRACE(size);
      std::mt19937_64 random(6);
      Path path(Path::kVariants - 1);
      Case norm(form, 70, 2, size, random, 1.0f);
      const std::vector<float> clean = norm.run(path, 0, 0, 0), x = norm.x, z = norm.z;
      for (int64_t n = 1; n < norm.tokens; n += 2) norm.x[n * 2 * size] = std::numeric_limits<float>::quiet_NaN();
      const std::vector<float> spoilt = norm.run(path, 0, 0, 0);
      norm.tokens = 1;
      for (int64_t index = 0; index < 140; ++index) {
        const int64_t n = index / 2;
        const auto given = norm.vector(spoilt, index), expected = norm.vector(clean, index);
        if (n % 2 == 0 || index % 2 == 1) {
          EXPECT_TRUE(same_bits(given, expected));
        } else {
          EXPECT_TRUE(std::ranges::all_of(given, [](float value) { return std::isnan(value); }));
        }
        if (index % 26 != 0) continue;
        norm.x.assign(x.begin() + index * size, x.begin() + (index + 2) * size);
        norm.z.assign(z.begin() + index * size, z.begin() + (index + 2) * size);
        EXPECT_TRUE(same_bits(norm.run(path, 0, 0, 0), std::span(clean).subspan(index * size, 2 * size)));
      }
    }
}

// y may be x.
template <typename Path>
void norms_in_place_have_the_same_bits() {
  using T = typename Path::T;
  std::mt19937_64 random(4);
  for (const int64_t size : {33, 128, 1024}) {
    Path path;
    const auto x = Path::template rounded<T>(random_normal(random, 9 * size));
    const auto z = path.template elements<T>(random_normal(random, 9 * size));
    const auto weight = path.template elements<float>(random_normal(random, size));
    auto from = path.template elements<T>(x);
    const auto expect_same = [&](auto args, const auto& op) {
      auto apart = path.template elements<T>(poisoned(9 * size)), in_place = path.template elements<T>(x);
      args.y = apart.data();
      op(args);
      args.x = args.y = in_place.data();
      op(args);
      EXPECT_TRUE(same_bits(path.template read<T>(in_place), path.template read<T>(apart)));
    };
    expect_same(
        BasicRmsNorm<T, T>{
            .tokens = 9, .size = size, .x = from.data(), .x_stride = size, .weight = weight.data(), .y_stride = size},
        [&](const auto& args) { rms_norm(args, path.device); });
    expect_same(BasicGatedRmsNorm<T, T, T>{.tokens = 9,
                                           .heads = 1,
                                           .size = size,
                                           .x = from.data(),
                                           .z = z.data(),
                                           .x_stride = size,
                                           .z_stride = size,
                                           .weight = weight.data(),
                                           .y_stride = size},
                [&](const auto& args) { gated_rms_norm(args, path.device); });
    expect_same(BasicGateFirstRmsNorm<T, T, T>{.tokens = 9,
                                               .groups = 1,
                                               .size = size,
                                               .x = from.data(),
                                               .z = z.data(),
                                               .x_stride = size,
                                               .z_stride = size,
                                               .weight = weight.data(),
                                               .y_stride = size},
                [&](const auto& args) { gate_first_rms_norm(args, path.device); });
  }
}

// In FP32.
template <typename Path>
void extreme_gates_and_bad_numbers_stay_home() {
  Path path;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto weight = path.template elements<float>(std::vector<float>(4, 1.0f));
  const auto x = path.template elements<float>(std::vector<float>(8, 1.0f));
  const auto z = path.template elements<float>({1e30f, -1e30f, -100.0f, 100.0f, nan, 1.0f, 2.0f, 3.0f});
  const auto norm = [&](bool has_sigmoid_gate) {
    auto y = path.template elements<float>(poisoned(8));
    gated_rms_norm(GatedRmsNorm{.tokens = 2,
                                .heads = 1,
                                .size = 4,
                                .x = x.data(),
                                .z = z.data(),
                                .x_stride = 4,
                                .z_stride = 4,
                                .weight = weight.data(),
                                .has_sigmoid_gate = has_sigmoid_gate,
                                .eps = 0,
                                .y = y.data(),
                                .y_stride = 4},
                   path.device);
    return path.template read<float>(y);
  };
  std::vector<float> y = norm(false);
  EXPECT_FLOAT_EQ(y[0], 1e30f);
  EXPECT_LE(std::abs(y[1]), 1e-7f);
  EXPECT_LE(std::abs(y[2]), 1e-30f);
  EXPECT_FLOAT_EQ(y[3], 100.0f);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_TRUE(std::isfinite(y[5]));
  y = norm(true);
  EXPECT_FLOAT_EQ(y[0], 1);
  EXPECT_LE(std::abs(y[1]), 1e-30f);
  EXPECT_LE(std::abs(y[2]), 1e-30f);
  EXPECT_FLOAT_EQ(y[3], 1);
  EXPECT_TRUE(std::isnan(y[4]));
}

template <typename Path>
void norms_refuse_wrong_arguments() {
  Path path;
  const auto x = path.template elements<float>(std::vector<float>(8, 1.0f));
  auto y = path.template elements<float>(poisoned(8));
  const RmsNorm good{.tokens = 1, .size = 8, .x = x.data(), .weight = x.data(), .y = y.data()};
  const auto refused = [&](auto change) {
    RmsNorm bad = good;
    change(bad);
    EXPECT_THROW(rms_norm(bad, path.device), Error);
    EXPECT_THROW(gated_rms_norm(GatedRmsNorm{.tokens = bad.tokens,
                                             .heads = bad.heads,
                                             .size = bad.size,
                                             .x = bad.x,
                                             .z = bad.x,
                                             .weight = bad.weight,
                                             .eps = bad.eps,
                                             .y = bad.y},
                                path.device),
                 Error);
    EXPECT_THROW(gate_first_rms_norm(GateFirstRmsNorm{.tokens = bad.tokens,
                                                      .groups = bad.heads,
                                                      .size = bad.size,
                                                      .x = bad.x,
                                                      .z = bad.x,
                                                      .weight = bad.weight,
                                                      .eps = bad.eps,
                                                      .y = bad.y},
                                     path.device),
                 Error);
  };
  refused([](RmsNorm& a) { a.tokens = -1; });
  refused([](RmsNorm& a) { a.heads = -1; });
  refused([](RmsNorm& a) { a.size = 0; });
  refused([](RmsNorm& a) { a.eps = -1; });
  refused([](RmsNorm& a) { a.x = nullptr; });
  refused([](RmsNorm& a) { a.weight = nullptr; });
  refused([](RmsNorm& a) { a.y = nullptr; });
  EXPECT_TRUE(std::isnan(path.template read<float>(y)[0]));
}

}  // namespace replayssm::test
