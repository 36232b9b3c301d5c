// The short convolution on the CPU.
#include <gtest/gtest.h>

#include "tests/conv1d_cases.h"

namespace replayssm::test {
namespace {

TEST(Conv1d, EverySplitMatchesOracle) {
  every_split_matches_the_oracle<CpuPath>();
}

TEST(Conv1d, RollsBack) {
  conv1d_rolls_back<CpuPath>(37);
}

TEST(Conv1d, BatchThreadsAndPaddingAreNothing) {
  conv1d_batch_and_padding_are_nothing<CpuPath>(600);
}

TEST(Conv1d, WindowsEqualTokens) {
  conv1d_windows_equal_tokens<CpuPath>(40, {1, 2, 4, 5, 16}, {1, 2, 3, 40});
}

TEST(Conv1d, ExtremeInputsAreFinite) {
  extreme_conv1d_inputs_are_finite<CpuPath>();
}

TEST(Conv1d, FarPositionsArePlacesInTheRing) {
  far_positions_are_places_in_the_ring<CpuPath>();
}

TEST(Conv1d, ACorruptedWindowIsSeen) {
  a_corrupted_conv1d_window_is_seen<CpuPath>();
}

TEST(Conv1d, RefusesWhatTheContractForbids) {
  conv1d_refuses_sizes<CpuPath>();
  CpuPath path;
  std::mt19937_64 random(5);
  ConvRig<CpuPath> rig(16, 4, 1, 1, random, path);
  const std::vector<float> x(16);
  EXPECT_THROW(rig.run({1}, {0, 1}, x), Error);
  EXPECT_THROW(rig.run({-2}, {0, 1}, x), Error);
}

}  // namespace
}  // namespace replayssm::test
