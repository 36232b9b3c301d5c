// Elementwise products on the CPU, and embedding rows: exact, refusals.
#include <gtest/gtest.h>

#include "replayssm/core/error.h"
#include "replayssm/ops/embed.h"
#include "tests/activation_cases.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

TEST(Activation, SiluProductMatchesTheOracle) {
  silu_product_matches_the_oracle<CpuPath>();
}

TEST(Activation, Relu2MatchesTheOracle) {
  relu2_matches_the_oracle<CpuPath>();
}

TEST(Activation, SigmoidGateMatchesTheOracle) {
  sigmoid_gate_matches_the_oracle<CpuPath>();
}

TEST(Activation, ExtremesAndBadNumbersStayHome) {
  extreme_activations_and_bad_numbers_stay_home<CpuPath>();
}

TEST(Activation, RefusesWrongArguments) {
  activations_refuse_wrong_arguments<CpuPath>();
}

TEST(Embed, RowsAreExact) {
  std::mt19937_64 random(3);
  const std::vector<float> table = random_normal(random, 5 * 33);
  std::vector<Bf16> halves;
  for (float value : table) halves.push_back(to_bf16(value));
  const std::vector<int32_t> token = {4, 0, 4, 2};
  Device device(2);
  std::vector<float> wide = poisoned(4 * 33), narrow = poisoned(4 * 33);
  Embed args{
      .tokens = 4, .vocabulary = 5, .size = 33, .token = token.data(), .table_f32 = table.data(), .y = wide.data()};
  embed(args, device);
  args.table_f32 = nullptr;
  args.table = halves.data();
  args.y = narrow.data();
  embed(args, device);
  for (size_t n = 0; n < token.size(); ++n) {
    for (int i = 0; i < 33; ++i) {
      EXPECT_EQ(wide[n * 33 + i], table[token[n] * 33 + i]);
      EXPECT_EQ(narrow[n * 33 + i], to_float(halves[token[n] * 33 + i]));
    }
  }
  for (int32_t wrong : {-1, 5}) {
    args.token = &wrong;
    args.tokens = 1;
    EXPECT_THROW(embed(args, device), Error);
  }
  args.token = token.data();
  args.table_f32 = table.data();
  EXPECT_THROW(embed(args, device), Error);
}

}  // namespace
}  // namespace replayssm
