// The gates of the delta rule and of Mamba-2 on a GPU.
#include <gtest/gtest.h>

#include "tests/cuda_path.h"
#include "tests/gates_cases.h"

namespace replayssm::test {
namespace {

class CudaGates : public CudaTest {};

TEST_F(CudaGates, DeltaGatesMatchTheFormula) {
  delta_gates_match_the_formula<CudaPath<float>>();
  delta_gates_match_the_formula<CudaPath<Bf16>>();
  delta_gates_match_the_formula<CudaPath<Fp16>>();
}

TEST_F(CudaGates, Mamba2GatesMatchTheFormula) {
  mamba2_gates_match_the_formula<CudaPath<float>>();
  mamba2_gates_match_the_formula<CudaPath<Bf16>>();
  mamba2_gates_match_the_formula<CudaPath<Fp16>>();
}

TEST_F(CudaGates, Mamba2GatesKeepWhatIsNoNumber) {
  mamba2_gates_keep_what_is_no_number<CudaPath<float>>();
  mamba2_gates_keep_what_is_no_number<CudaPath<Bf16>>();
}

TEST_F(CudaGates, RefuseWhatTheContractForbids) {
  gates_refuse_what_the_contract_forbids<CudaPath<float>>();
  CudaPath<Bf16> path;
  const auto a = path.elements<Bf16>(poisoned(8));
  const auto weights = path.elements<float>(poisoned(8));
  auto g = path.elements<float>(poisoned(8));
  const auto odd = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + 1);
  };
  const BasicDeltaGates<Bf16> good = {.tokens = 1,
                                      .heads = 1,
                                      .gate_size = 2,
                                      .a = a.data(),
                                      .b = a.data(),
                                      .a_stride = 2,
                                      .b_stride = 1,
                                      .a_log = weights.data(),
                                      .dt_bias = weights.data(),
                                      .g = g.data(),
                                      .beta = g.data() + 4};
  auto bad = good;
  bad.a = odd(good.a);
  expect_refusal([&] { delta_gates(bad, path.device); }, "delta_gates", "a aligned to 2 bytes");
  bad = good;
  bad.beta = odd(good.beta);
  expect_refusal([&] { delta_gates(bad, path.device); }, "beta aligned to 4 bytes");
  bad = good;
  bad.tokens = int64_t{1} << 31;
  expect_refusal([&] { delta_gates(bad, path.device); }, "fewer than 2^31");
  const BasicMamba2Gates<Bf16> misaligned = {
      .tokens = 1, .heads = 2, .dt = odd(a.data()), .dt_stride = 2, .dt_bias = weights.data(), .out = g.data()};
  expect_refusal([&] { mamba2_gates(misaligned, path.device); }, "mamba2_gates", "dt aligned to 2 bytes");
}

}  // namespace
}  // namespace replayssm::test
