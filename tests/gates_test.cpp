// The gates of the delta rule and of Mamba-2 on the CPU.
#include "tests/gates_cases.h"

#include <gtest/gtest.h>

namespace replayssm::test {
namespace {

TEST(Gates, DeltaGatesMatchTheFormula) {
  delta_gates_match_the_formula<CpuPath>();
}

TEST(Gates, Mamba2GatesMatchTheFormula) {
  mamba2_gates_match_the_formula<CpuPath>();
}

TEST(Gates, Mamba2GatesKeepWhatIsNoNumber) {
  mamba2_gates_keep_what_is_no_number<CpuPath>();
}

TEST(Gates, RefuseWhatTheContractForbids) {
  gates_refuse_what_the_contract_forbids<CpuPath>();
}

}  // namespace
}  // namespace replayssm::test
