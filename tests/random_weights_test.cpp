// Weights made up from a config: every layout runs and stays finite, a seed is a model, BF16 is the rounding of FP32.
#include "replayssm/model/random_weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/arrays.h"
#include "tests/model_rig.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

std::vector<float> logits_of(const char* name, uint64_t seed, bool is_bf16) {
  ModelFixture fixture(fixture_directory(name));
  WeightStore<Buffer> store;
  fixture.weights = random_weights(fixture.config, seed, is_bf16, store);
  ModelRig rig(fixture);
  const Handle row = rig.pool.allocate(100);
  const std::vector<int32_t> token = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9};
  std::vector<float> logits = rig.prefill(row, token);
  for (const int32_t next : {3, 2, 3, 8}) {
    const std::vector<float> more = rig.decode(Decoder::kDirect, {row}, {next});
    logits.insert(logits.end(), more.begin(), more.end());
  }
  return logits;
}

TEST(RandomWeights, EveryLayoutStaysFiniteAndASeedIsAModel) {
  for (const char* name : kModels) {
    const std::vector<float> logits = logits_of(name, 1, false);
    double squares = 0;
    for (const float logit : logits) {
      ASSERT_TRUE(std::isfinite(logit)) << name;
      squares += static_cast<double>(logit) * static_cast<double>(logit);
    }
    EXPECT_GT(squares, 0) << name;
    EXPECT_TRUE(same_bits(logits_of(name, 1, false), logits)) << name;
    EXPECT_FALSE(same_bits(logits_of(name, 2, false), logits)) << name;
  }
}

TEST(RandomWeights, Bf16IsFp32Rounded) {
  const ModelConfig config = read_config(fixture_directory("qwen3_5_moe-tiny"));
  WeightStore<Buffer> store;
  const Weights rounded = random_weights(config, 1, true, store), full = random_weights(config, 1, false, store);
  ASSERT_TRUE(rounded.embedding.is_bf16());
  ASSERT_EQ(rounded.embedding.bf16.size(), full.embedding.f32.size());
  for (size_t i = 0; i < full.embedding.f32.size(); ++i)
    ASSERT_EQ(rounded.embedding.bf16[i].bits, to_bf16(full.embedding.f32[i]).bits);
}

}  // namespace
}  // namespace replayssm
