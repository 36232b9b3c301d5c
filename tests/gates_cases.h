// The cases of the gates of the delta rule and of Mamba-2, for any path: the formulas, bits that depend on the gate
// alone, numbers that are none, refusals.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "replayssm/ops/delta.h"
#include "replayssm/ops/mamba2.h"
#include "tests/bad_input.h"
#include "tests/paths.h"
#include "tests/ref/delta.h"
#include "tests/ref/mamba2.h"

namespace replayssm::test {

// Tokens' gates in rows of a projection: a, then b behind `gap` elements, then as many.
template <typename Path>
struct DeltaGatesRig {
  using T = typename Path::T;

  DeltaGatesRig(int64_t n, int h, int k, int64_t gap, float bound, std::mt19937_64& random)
      : tokens(n),
        heads(h),
        gate_size(k),
        gates(int64_t{h} * k),
        stride(gates + h + 2 * gap),
        b_place(gates + gap),
        lower_bound(bound),
        projected(Path::template rounded<T>(random_normal(random, n * stride, 12.0f))),
        a_log(random_normal(random, h)),
        dt_bias(random_normal(random, gates)) {}

  // g and beta of `count` tokens from `first`.
  std::pair<std::vector<float>, std::vector<float>> run(Path& path, int64_t first, int64_t count) const {
    const auto rows = path.template elements<T>(
        std::vector<float>(projected.begin() + first * stride, projected.begin() + (first + count) * stride));
    const auto rates = path.template elements<float>(a_log), bias = path.template elements<float>(dt_bias);
    auto g = path.template elements<float>(poisoned(count * gates));
    auto beta = path.template elements<float>(poisoned(count * heads));
    delta_gates(BasicDeltaGates<T>{.tokens = count,
                                   .heads = heads,
                                   .gate_size = gate_size,
                                   .a = rows.data(),
                                   .b = rows.data() + b_place,
                                   .a_stride = stride,
                                   .b_stride = stride,
                                   .a_log = rates.data(),
                                   .dt_bias = bias.data(),
                                   .lower_bound = lower_bound,
                                   .g = g.data(),
                                   .beta = beta.data()},
                path.device);
    return {path.template read<float>(g), path.template read<float>(beta)};
  }

  int64_t tokens;
  int heads, gate_size;
  int64_t gates, stride, b_place;
  float lower_bound;
  std::vector<float> projected, a_log, dt_bias;
};

template <typename Path>
void delta_gates_match_the_formula() {
  Path path;
  std::mt19937_64 random(16);
  constexpr int kTokens = 40;
  for (const auto& [heads, gate_size, gap] :
       {std::tuple(6, 1, 1), std::tuple(32, 1, 8), std::tuple(6, 16, 1), std::tuple(8, 48, 8), std::tuple(3, 20, 1)})
    for (const float lower_bound : {0.0f, -5.0f}) {
      SCOPED_TRACE(testing::Message() << heads << " heads, gate size " << gate_size << ", bound " << lower_bound);
      DeltaGatesRig<Path> rig(kTokens, heads, gate_size, gap, lower_bound, random);
      const auto [g, beta] = rig.run(path, 0, kTokens);
      std::vector<double> expected_g, expected_beta;
      for (int t = 0; t < kTokens; ++t) {
        const float* token = &rig.projected[t * rig.stride];
        for (int i = 0; i < rig.gates; ++i)
          expected_g.push_back(ref::delta_gate(token[i], rig.dt_bias[i], rig.a_log[i / gate_size], lower_bound));
        for (int h = 0; h < heads; ++h)
          expected_beta.push_back(1 / (1 + std::exp(-static_cast<double>(token[rig.b_place + h]))));
      }
      EXPECT_LE(relative_error(g, expected_g), kFloat32Bound);
      EXPECT_LE(relative_error(beta, expected_beta), kFloat32Bound);
      EXPECT_TRUE(
          std::ranges::all_of(g, [bound = lower_bound](float x) { return x <= 0 && (bound == 0 || x >= bound); }));
      // A token's gates have the same bits alone, and a NaN stays where it is.
      rig.projected[17 * rig.stride + rig.gates - 1] = std::numeric_limits<float>::quiet_NaN();
      const auto [alone, beta_alone] = rig.run(path, 17, 1);
      EXPECT_TRUE(
          same_bits(std::span(alone).first(rig.gates - 1), std::span(g).subspan(17 * rig.gates, rig.gates - 1)));
      EXPECT_TRUE(std::isnan(alone[rig.gates - 1]));
      EXPECT_TRUE(same_bits(beta_alone, std::span(beta).subspan(17 * heads, heads)));
    }
}

template <typename Path>
std::vector<float> run_mamba2_gates(Path& path, const std::vector<float>& projected, int64_t stride,
                                    const std::vector<float>& dt_bias, float least, float most) {
  using T = typename Path::T;
  const int64_t tokens = static_cast<int64_t>(projected.size()) / stride;
  const auto dt = path.template elements<T>(projected);
  const auto bias = path.template elements<float>(dt_bias);
  auto out = path.template elements<float>(poisoned(tokens * dt_bias.size()));
  mamba2_gates(BasicMamba2Gates<T>{.tokens = tokens,
                                   .heads = static_cast<int>(dt_bias.size()),
                                   .dt = dt.data(),
                                   .dt_stride = stride,
                                   .dt_bias = bias.data(),
                                   .time_step_min = least,
                                   .time_step_max = most,
                                   .out = out.data()},
               path.device);
  return path.template read<float>(out);
}

template <typename Path>
void mamba2_gates_match_the_formula() {
  Path path;
  std::mt19937_64 random(16);
  constexpr int kTokens = 40, kHeads = 19, kStride = 23;
  const std::vector<float> projected =
      Path::template rounded<typename Path::T>(random_normal(random, kTokens * kStride, 12.0f));
  const std::vector<float> dt_bias = random_normal(random, kHeads);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const auto& [least, most] : {std::pair(0.0f, infinity), std::pair(0.01f, 5.0f), std::pair(0.0f, 0.1f)}) {
    const std::vector<float> dt = run_mamba2_gates(path, projected, kStride, dt_bias, least, most);
    std::vector<double> expected;
    for (int t = 0; t < kTokens; ++t)
      for (int h = 0; h < kHeads; ++h) {
        expected.push_back(ref::mamba2_gate(projected[t * kStride + h], dt_bias[h], least, most));
        // One by one too: the small ones, which make the slow heads, vanish in a norm.
        EXPECT_LE(relative_error(std::vector(1, dt[t * kHeads + h]), std::vector(1, expected.back())), kFloat32Bound)
            << projected[t * kStride + h] + dt_bias[h];
      }
    EXPECT_LE(relative_error(dt, expected), kFloat32Bound);
  }
}

template <typename Path>
void mamba2_gates_keep_what_is_no_number() {
  Path path;
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> dt = {nan, infinity, -infinity, 1.0f, 88.0f, -200.0f, 20.5f}, dt_bias(dt.size(), 0.0f);
  std::vector<float> out = run_mamba2_gates(path, dt, dt.size(), dt_bias, 0.0f, infinity);
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], infinity);
  EXPECT_EQ(out[2], 0.0f);
  EXPECT_GT(out[3], 1.0f);
  EXPECT_EQ(out[4], 88.0f);
  EXPECT_GE(out[5], 0.0f);
  EXPECT_EQ(out[6], 20.5f);
  out = run_mamba2_gates(path, dt, dt.size(), dt_bias, 0.5f, 2.0f);
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], 2.0f);
  EXPECT_EQ(out[2], 0.5f);
}

template <typename Path>
void gates_refuse_what_the_contract_forbids() {
  Path path;
  const auto zeros = path.template elements<float>(std::vector<float>(4));
  auto g = path.template elements<float>(poisoned(2)), beta = path.template elements<float>(poisoned(2));
  const auto delta = [&](float lower_bound, int64_t a_stride) {
    delta_gates(DeltaGates{1, 1, 2, zeros.data(), zeros.data(), a_stride, 1, zeros.data(), zeros.data(), lower_bound,
                           g.data(), beta.data()},
                path.device);
  };
  EXPECT_NO_THROW(delta(-5.0f, 2));
  EXPECT_THROW(delta(5.0f, 2), Error);
  EXPECT_THROW(delta(std::numeric_limits<float>::quiet_NaN(), 2), Error);
  EXPECT_THROW(delta(0.0f, 1), Error);
  const auto mamba2 = [&](float least, float most) {
    mamba2_gates(Mamba2Gates{1, 2, zeros.data(), 2, zeros.data(), least, most, g.data()}, path.device);
  };
  EXPECT_NO_THROW(mamba2(0.0f, 0.5f));
  expect_refusal([&] { mamba2(1.0f, 0.5f); }, "time_step_min <= time_step_max", "got 1 and 0.5");
  expect_refusal([&] { mamba2(-1.0f, 0.5f); }, "time_step_min");
  expect_refusal([&] { mamba2(std::numeric_limits<float>::quiet_NaN(), 0.5f); }, "time_step_min");
}

}  // namespace replayssm::test
