// The norms on the CPU.
#include <gtest/gtest.h>

#include "tests/norm_cases.h"

namespace replayssm::test {
namespace {

TEST(Norm, RmsNormMatchesTheOracleAndTouchesOnlyItsVectors) {
  rms_norm_matches_the_oracle<CpuPath>();
}

TEST(Norm, GatedRmsNormMatchesTheOracle) {
  gated_rms_norm_matches_the_oracle<CpuPath>();
}

TEST(Norm, GateFirstRmsNormMatchesTheOracle) {
  gate_first_rms_norm_matches_the_oracle<CpuPath>();
}

TEST(Norm, AVectorsBitsDependOnNothingElse) {
  a_vectors_norm_depends_on_nothing_else<CpuPath>();
}

TEST(Norm, InPlaceHasTheSameBits) {
  norms_in_place_have_the_same_bits<CpuPath>();
}

TEST(Norm, ExtremeGatesAndBadNumbersStayHome) {
  extreme_gates_and_bad_numbers_stay_home<CpuPath>();
}

TEST(Norm, RefusesWrongArguments) {
  norms_refuse_wrong_arguments<CpuPath>();
}

}  // namespace
}  // namespace replayssm::test
