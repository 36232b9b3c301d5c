// Elementwise products with an activation on a GPU.
#include <gtest/gtest.h>

#include "tests/activation_cases.h"
#include "tests/bad_input.h"
#include "tests/cuda_path.h"

namespace replayssm::test {
namespace {

class CudaActivation : public CudaTest {};

TEST_F(CudaActivation, SiluProductMatchesTheOracle) {
  silu_product_matches_the_oracle<CudaPath<float>>();
  silu_product_matches_the_oracle<CudaPath<Bf16>>();
  silu_product_matches_the_oracle<CudaPath<Fp16>>();
}

TEST_F(CudaActivation, Relu2MatchesTheOracle) {
  relu2_matches_the_oracle<CudaPath<float>>();
  relu2_matches_the_oracle<CudaPath<Bf16>>();
  relu2_matches_the_oracle<CudaPath<Fp16>>();
}

TEST_F(CudaActivation, SigmoidGateMatchesTheOracle) {
  sigmoid_gate_matches_the_oracle<CudaPath<float>>();
  sigmoid_gate_matches_the_oracle<CudaPath<Bf16>>();
  sigmoid_gate_matches_the_oracle<CudaPath<Fp16>>();
}

TEST_F(CudaActivation, ExtremesAndBadNumbersStayHome) {
  extreme_activations_and_bad_numbers_stay_home<CudaPath<float>>();
}

// The result of a 16-bit type is that of FP32, rounded.
template <typename T>
void results_are_rounded_once() {
  std::mt19937_64 random(4);
  for (const int64_t size : {33, 512}) {
    const auto a = CudaPath<T>::template rounded<T>(random_normal(random, 6 * size, 3.0f));
    const auto b = CudaPath<T>::template rounded<T>(random_normal(random, 6 * size, 3.0f));
    const auto expect_rounded = [](const auto& run) {
      const std::vector<float> given = run(CudaPath<T>()), wide = run(CudaPath<float>());
      EXPECT_TRUE(same_bits(given, CudaPath<T>::template rounded<T>(wide)));
      EXPECT_FALSE(same_bits(given, wide));
    };
    expect_rounded([&](auto path) { return run_silu_product(path, size, a, b, 0, Target::kApart); });
    expect_rounded([&](auto path) { return run_relu2(path, size, a, 0, Target::kApart); });
    expect_rounded([&](auto path) { return run_sigmoid_gate(path, 2, size, a, b, 0); });
  }
}

TEST_F(CudaActivation, ResultsAreRoundedOnce) {
  results_are_rounded_once<Bf16>();
  results_are_rounded_once<Fp16>();
}

TEST_F(CudaActivation, RefusesWrongArguments) {
  activations_refuse_wrong_arguments<CudaPath<float>>();
  CudaPath<Bf16> path;
  auto x = path.elements<Bf16>(std::vector<float>(16, 1.0f));
  Bf16* const odd = reinterpret_cast<Bf16*>(reinterpret_cast<uintptr_t>(x.data()) + 1);
  expect_refusal(
      [&] {
        silu_product(BasicSiluProduct<Bf16>{.tokens = 1, .size = 8, .gate = x.data(), .up = odd, .y = x.data()},
                     path.device);
      },
      "silu_product", "up aligned to 2 bytes");
  expect_refusal([&] { relu2(BasicRelu2<Bf16>{.tokens = 1, .size = 8, .x = x.data(), .y = odd}, path.device); },
                 "relu2", "y aligned to 2 bytes");
  expect_refusal(
      [&] {
        sigmoid_gate(BasicSigmoidGate<Bf16>{.tokens = 1, .heads = 1, .size = 8, .gate = odd, .x = x.data()},
                     path.device);
      },
      "sigmoid_gate", "gate aligned to 2 bytes");
  expect_refusal(
      [&] {
        relu2(BasicRelu2<Bf16>{.tokens = int64_t{1} << 31, .size = 8, .x = x.data(), .y = x.data()}, path.device);
      },
      "relu2", "fewer than 2^31 blocks");
}

}  // namespace
}  // namespace replayssm::test
