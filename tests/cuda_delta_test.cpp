// The delta rule on a GPU: the laws for one gate a head (GDN) and a gate a channel (KDA), and what is its own.
#include <gtest/gtest.h>

#include "tests/cuda_recurrence.h"
#include "tests/delta_rig.h"

namespace replayssm::test {
namespace {

template <bool kIsPerChannel, typename T = float, typename Out = T>
struct CudaDeltaFamily : DeltaFamily<kIsPerChannel, CudaMemory<T, Out>> {
  using Base = DeltaFamily<kIsPerChannel, CudaMemory<T, Out>>;
  template <typename U, typename O>
  using With = CudaDeltaFamily<kIsPerChannel, U, O>;

  static DeltaShape model_shape() { return Base::shape(32, kIsPerChannel ? 32 : 16, 128, 128); }
  static std::vector<NamedShape<DeltaShape>> shapes() {
    std::vector<NamedShape<DeltaShape>> all = Base::shapes();
    all.push_back({"key 112, value 36", Base::shape(5, 5, 112, 36)});
    all.push_back({kIsPerChannel ? "kimi-linear-48b" : "qwen3.5-4b", model_shape()});
    return all;
  }
};

using CudaGdnFamily = CudaDeltaFamily<false>;
using CudaKdaFamily = CudaDeltaFamily<true>;
INSTANTIATE_TYPED_TEST_SUITE_P(CudaGdn, RecurrenceLaws, CudaGdnFamily);
INSTANTIATE_TYPED_TEST_SUITE_P(CudaKda, RecurrenceLaws, CudaKdaFamily);
INSTANTIATE_TYPED_TEST_SUITE_P(CudaGdn, CudaRecurrence, CudaGdnFamily);
INSTANTIATE_TYPED_TEST_SUITE_P(CudaKda, CudaRecurrence, CudaKdaFamily);

class CudaDelta : public CudaTest {};
// Inputs with room between the tokens, each its own, and a checkpoint that a row reads but does not write.
template <typename Family>
void strides_and_separate_checkpoints() {
  using Rig = typename Family::Rig;
  constexpr int kTokens = 9;
  const DeltaShape shape = Family::shape(4, 2, 32, 16);
  CudaDevice device;
  std::mt19937_64 random(51);
  const typename Family::Inputs inputs(shape, kTokens + 4, random, -0.5f, 0.0f);
  const int64_t keys = int64_t{2} * 32, values = int64_t{4} * 16;
  const auto spread = [](const std::vector<float>& dense, int64_t width, int64_t stride) {
    std::vector<float> spaced = poisoned(dense.size() / width * stride);
    for (size_t i = 0; i < dense.size(); ++i) spaced[i / width * stride + i % width] = dense[i];
    return spaced;
  };
  const std::vector<float> q = spread(inputs.q, keys, keys + 8), k = spread(inputs.k, keys, keys + 24);
  const std::vector<float> v = spread(inputs.v, values, values + 40);
  const auto strided = [&](int t) {
    DeltaTokens tokens = inputs.tokens(t);
    tokens.q = &q[t * (keys + 8)];
    tokens.k = &k[t * (keys + 24)];
    tokens.v = &v[t * (values + 40)];
    tokens.q_stride = keys + 8;
    tokens.k_stride = keys + 24;
    tokens.v_stride = values + 40;
    return tokens;
  };
  Rig dense(shape, 2, 4, 2, device), rig(shape, 2, 4, 2, device);
  EXPECT_TRUE(same_bits(dense.prefill({0}, {0, kTokens}, inputs.tokens()), rig.prefill({0}, {0, kTokens}, strided(0))));
  EXPECT_TRUE(same_memory(dense, rig));
  const std::vector<float> source(rig.slot_state(0).begin(), rig.slot_state(0).end());
  rig.checkpoint_out[0] = 1;
  EXPECT_TRUE(same_bits(dense.step({0}, inputs.tokens(kTokens)), rig.step({0}, strided(kTokens))));
  EXPECT_TRUE(same_bits(rig.slot_state(0), source));
  EXPECT_TRUE(same_bits(dense.slot_state(0), rig.slot_state(1)));
  EXPECT_TRUE(same_bits(dense.decode({0}, 2, inputs.tokens(kTokens + 1), Readout::kDirect),
                        rig.decode({0}, 2, strided(kTokens + 1), Readout::kDirect)));
}

TEST_F(CudaDelta, StridesAndSeparateCheckpoints) {
  strides_and_separate_checkpoints<CudaGdnFamily>();
  strides_and_separate_checkpoints<CudaKdaFamily>();
  strides_and_separate_checkpoints<CudaDeltaFamily<false, Bf16>>();
}

// A key or a query whose squares overflow is normalised to zero, however it is read out.
template <typename Family>
void large_tokens_stay_finite(float large, int key_size, int tokens) {
  const DeltaShape shape = Family::shape(4, 2, key_size, 16);
  CudaDevice device;
  std::mt19937_64 random(52);
  typename Family::Rig rig(shape, 1, 8, tokens, device);
  for (int step = 0; step < 6; ++step) {
    typename Family::Inputs inputs(shape, tokens, random);
    for (int t = 0; t < tokens; t += 2)
      for (int i = 0; i < 2 * key_size; ++i) {
        if (step % 3 != 0) inputs.k[t * 2 * key_size + i] = i % 2 == 0 ? large : -large;
        if (step % 3 != 1) inputs.q[t * 2 * key_size + i] = large;
      }
    EXPECT_TRUE(is_finite(rig.decode({0}, tokens, inputs.tokens(), step < 4 ? Readout::kDirect : Readout::kExact)))
        << step;
    rig.commit(0, std::max(1, tokens - 1));
  }
}

TEST_F(CudaDelta, LargeTokensStayFinite) {
  for (const int key_size : {64, 128})
    for (const int tokens : {1, 4}) {
      large_tokens_stay_finite<CudaGdnFamily>(3e38f, key_size, tokens);
      large_tokens_stay_finite<CudaKdaFamily>(3e38f, key_size, tokens);
      large_tokens_stay_finite<CudaDeltaFamily<false, Bf16>>(3e38f, key_size, tokens);
      large_tokens_stay_finite<CudaDeltaFamily<true, Bf16>>(1e25f, key_size, tokens);
    }
}

TEST_F(CudaDelta, RefusesTokensThatTheContractForbids) {
  using Rig = CudaDeltaFamily<false, Fp16>::Rig;
  const DeltaShape shape = {4, 2, 32, 16, 1};
  CudaDevice device;
  std::mt19937_64 random(52);
  Rig rig(shape, 1, 4, 1, device);
  const DeltaInputs inputs(shape, 2, random);
  rig.memory.begin();
  const StateRows rows = rig.memory.rows(rig.rows({0}));
  const BasicDeltaTokens<Fp16> good = rig.staged(inputs.tokens(), 2);
  Fp16* out = rig.memory.results(rig.out_size());
  const auto refuse = [&](const BasicDeltaTokens<Fp16>& tokens, const std::string& part) {
    expect_refusal([&] { rig.run_step(rig.state(), rows, tokens, out); }, "delta_step", part);
  };
  for (auto member : {&BasicDeltaTokens<Fp16>::q, &BasicDeltaTokens<Fp16>::k, &BasicDeltaTokens<Fp16>::v}) {
    BasicDeltaTokens<Fp16> tokens = good;
    tokens.*member = nullptr;
    refuse(tokens, "null");
    tokens.*member = good.*member + 4;
    refuse(tokens, "16 bytes");
  }
  for (auto member :
       {&BasicDeltaTokens<Fp16>::q_stride, &BasicDeltaTokens<Fp16>::k_stride, &BasicDeltaTokens<Fp16>::v_stride}) {
    BasicDeltaTokens<Fp16> tokens = good;
    tokens.*member = 68;
    refuse(tokens, "68");
    tokens.*member = 56;
    refuse(tokens, "56");
  }
  BasicDeltaTokens<Fp16> gates = good;  // which may lie anywhere
  ++gates.g;
  ++gates.beta;
  rig.run_step(rig.state(), rows, gates, out);
  EXPECT_TRUE(is_finite(rig.memory.finish()));
}

}  // namespace
}  // namespace replayssm::test
