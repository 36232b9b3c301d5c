// Mamba-2 on a GPU: the laws, and what is its own.
#include <gtest/gtest.h>

#include "tests/cuda_recurrence.h"
#include "tests/mamba2_laws.h"

namespace replayssm::test {
namespace {

template <typename T = float, typename Out = T>
struct CudaMamba2Family : Mamba2Family<CudaMemory<T, Out>> {
  using Base = Mamba2Family<CudaMemory<T, Out>>;
  template <typename U, typename O>
  using With = CudaMamba2Family<U, O>;

  static Mamba2Shape model_shape() { return {128, 8, 64, 128}; }
  static std::vector<NamedShape<Mamba2Shape>> shapes() {
    std::vector<NamedShape<Mamba2Shape>> all = Base::shapes();
    all.push_back({"state 112, head 40", {5, 5, 40, 112}});
    all.push_back({"nemotron-3-nano-4b", {96, 8, 80, 128}});
    all.push_back({"nemotron-3-super", model_shape()});
    return all;
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(CudaMamba2, RecurrenceLaws, CudaMamba2Family<>);
INSTANTIATE_TYPED_TEST_SUITE_P(CudaMamba2, CudaRecurrence, CudaMamba2Family<>);

class CudaMamba2 : public CudaTest {};

TEST_F(CudaMamba2, SkipAndGateMatchOracle) {
  skip_and_gate_match_oracle<CudaMamba2Family<>>();
  skip_and_gate_match_oracle<CudaMamba2Family<Bf16>>();
  skip_and_gate_match_oracle<CudaMamba2Family<Fp16, float>>();
}

TEST_F(CudaMamba2, StridesAndSeparateCheckpoints) {
  strides_and_separate_checkpoints<CudaMamba2Family<>>();
  strides_and_separate_checkpoints<CudaMamba2Family<Bf16>>();
}

TEST_F(CudaMamba2, RefusesTokensThatTheContractForbids) {
  using Rig = CudaMamba2Family<Fp16>::Rig;
  using Tokens = BasicMamba2Tokens<Fp16>;
  const Mamba2Shape shape = {4, 2, 16, 32};
  CudaDevice device;
  std::mt19937_64 random(52);
  Rig rig(shape, 1, 4, 1, device);
  const Mamba2Inputs inputs(shape, 2, random, -1.5f, 0.0f, /*use_z=*/true);
  rig.memory.begin();
  const StateRows rows = rig.memory.rows(rig.rows({0}));
  const Rig::StagedTokens good = rig.staged(inputs.tokens(), 2);
  Fp16* out = rig.memory.results(rig.out_size());
  const auto refuse = [&](const Rig::StagedTokens& tokens, const std::string& part) {
    expect_refusal([&] { rig.run_step(rig.state(), rows, tokens, out); }, "mamba2_step", part);
  };
  for (auto member : {&Tokens::x, &Tokens::b, &Tokens::c, &Tokens::z}) {
    Rig::StagedTokens tokens = good;
    tokens.*member = good.*member + 4;
    refuse(tokens, "16 bytes");
    if (member == &Tokens::z) continue;  // which may be missing
    tokens.*member = nullptr;
    refuse(tokens, "null");
  }
  for (auto member : {&Tokens::x_stride, &Tokens::b_stride, &Tokens::c_stride, &Tokens::z_stride}) {
    Rig::StagedTokens tokens = good;
    tokens.*member = 68;
    refuse(tokens, "68");
    tokens.*member = 56;
    refuse(tokens, "56");
  }
  Rig::StagedTokens tokens = good;
  tokens.heads.a_log = nullptr;
  refuse(tokens, "a_log");
  tokens = good;
  ++tokens.dt;  // which may lie anywhere
  rig.run_step(rig.state(), rows, tokens, out);
  EXPECT_TRUE(is_finite(rig.memory.finish()));
}

}  // namespace
}  // namespace replayssm::test
