// The norms on a GPU.
#include <gtest/gtest.h>

#include "tests/bad_input.h"
#include "tests/cuda_path.h"
#include "tests/norm_cases.h"

namespace replayssm::test {
namespace {

class CudaNorm : public CudaTest {};

TEST_F(CudaNorm, RmsNormMatchesTheOracleAndTouchesOnlyItsVectors) {
  rms_norm_matches_the_oracle<CudaPath<float>>();
  rms_norm_matches_the_oracle<CudaPath<Bf16>>();
  rms_norm_matches_the_oracle<CudaPath<Bf16, float>>();
  rms_norm_matches_the_oracle<CudaPath<Bf16, Bf16, float>>();
  rms_norm_matches_the_oracle<CudaPath<Fp16>>();
  rms_norm_matches_the_oracle<CudaPath<Fp16, float>>();
  rms_norm_matches_the_oracle<CudaPath<Fp16, Fp16, float>>();
}

template <typename Run>
void for_all_types(const Run& run) {
  run(CudaPath<float>());
  run(CudaPath<Bf16>());
  run(CudaPath<Bf16, float>());
  run(CudaPath<Bf16, Bf16, float>());
  run(CudaPath<Fp16>());
  run(CudaPath<Fp16, float>());
  run(CudaPath<Fp16, Fp16, float>());
}

TEST_F(CudaNorm, GatedRmsNormMatchesTheOracle) {
  for_all_types([]<typename Path>(const Path&) { gated_rms_norm_matches_the_oracle<Path>(); });
}

TEST_F(CudaNorm, GateFirstRmsNormMatchesTheOracle) {
  for_all_types([]<typename Path>(const Path&) { gate_first_rms_norm_matches_the_oracle<Path>(); });
}

TEST_F(CudaNorm, AVectorsBitsDependOnNothingElse) {
  a_vectors_norm_depends_on_nothing_else<CudaPath<float>>();
  a_vectors_norm_depends_on_nothing_else<CudaPath<Bf16, Bf16, float>>();
}

TEST_F(CudaNorm, InPlaceHasTheSameBits) {
  norms_in_place_have_the_same_bits<CudaPath<float>>();
  norms_in_place_have_the_same_bits<CudaPath<Bf16>>();
}

TEST_F(CudaNorm, ExtremeGatesAndBadNumbersStayHome) {
  extreme_gates_and_bad_numbers_stay_home<CudaPath<float>>();
}

// The norm of x and its parts has the bits of the norm of their sum, which is kept.
TEST_F(CudaNorm, PartsAreAddedFirst) {
  CudaPath<float> path;
  for (const int64_t size : {int64_t{64}, int64_t{2560}, int64_t{17}}) {
    const int64_t tokens = 5, stride = size + 8;
    std::mt19937_64 random(static_cast<uint64_t>(size));
    const std::vector<float> x = random_normal(random, tokens * stride),
                             parts = random_normal(random, 2 * tokens * size);
    std::vector<float> sum = x;
    for (int64_t part = 0; part < 2; ++part)
      for (int64_t n = 0; n < tokens; ++n)
        for (int64_t i = 0; i < size; ++i) sum[n * stride + i] += parts[(part * tokens + n) * size + i];
    const auto weight = path.elements<float>(random_normal(random, size));
    const auto run = [&](DeviceBuffer<float>& from, const float* of_parts, int count) {
      auto y = path.elements<Bf16>(poisoned(tokens * size));
      rms_norm(BasicRmsNorm<float, Bf16>{.tokens = tokens,
                                         .size = size,
                                         .x = from.data(),
                                         .x_stride = stride,
                                         .weight = weight.data(),
                                         .y = y.data(),
                                         .y_stride = size,
                                         .parts = of_parts,
                                         .part_count = count,
                                         .sums = from.data()},
               path.device);
      return path.read<Bf16>(y);
    };
    auto whole = path.elements<float>(sum), cut = path.elements<float>(x);
    const auto in_parts = path.elements<float>(parts);
    const auto expected = run(whole, nullptr, 0);
    EXPECT_EQ(run(cut, in_parts.data(), 2), expected) << size;
    EXPECT_EQ(path.read<float>(cut), sum) << size;
  }
}

TEST_F(CudaNorm, RefusesWrongArguments) {
  norms_refuse_wrong_arguments<CudaPath<float>>();
  CudaPath<Bf16> path;
  const auto x = path.elements<Bf16>(std::vector<float>(16, 1.0f));
  const auto weight = path.elements<float>(std::vector<float>(16, 1.0f));
  auto y = path.elements<Bf16>(poisoned(16));
  const BasicRmsNorm<Bf16, Bf16> good = {.tokens = 1, .size = 8, .x = x.data(), .weight = weight.data(), .y = y.data()};
  const auto odd = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + 1);
  };
  auto bad = good;
  bad.x = odd(x.data());
  expect_refusal([&] { rms_norm(bad, path.device); }, "rms_norm", "x aligned to 2 bytes");
  bad = good;
  bad.weight = odd(weight.data());
  expect_refusal([&] { rms_norm(bad, path.device); }, "weight aligned to 4 bytes");
  bad = good;
  bad.size = 8193;
  expect_refusal([&] { rms_norm(bad, path.device); }, "size of 1 to 8192", "got 8193");
  bad = good;
  bad.part_count = 1;
  expect_refusal([&] { rms_norm(bad, path.device); }, "parts of FP32 vectors");
  bad = good;
  bad.tokens = int64_t{1} << 31;
  expect_refusal([&] { rms_norm(bad, path.device); }, "fewer than 2^31 vectors");
  rms_norm(good, path.device);
  EXPECT_TRUE(std::isfinite(path.read<Bf16>(y)[0]));
}

}  // namespace
}  // namespace replayssm::test
