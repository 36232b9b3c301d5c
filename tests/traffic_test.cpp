// The bytes of state that steps move, against counts by hand for a small layer.
#include "replayssm/state/traffic.h"

#include <gtest/gtest.h>

#include <vector>

namespace replayssm {
namespace {

// A checkpoint of 2 x 4 x 16 = 128 numbers, records of 17 + 2 (4 + 2) = 29, 24 inputs of a convolution.
StateLayout small_layout(int gate_size) {
  StateLayout layout;
  layout.layers = {
      DeltaLayer{{.heads = 2, .key_heads = 1, .key_size = 16, .value_size = 4, .gate_size = gate_size}, 24, 4},
      AttentionLayer{1, 16}};
  layout.window = 16;
  layout.max_step_tokens = 2;
  layout.context_tokens = 100;
  return layout;
}

StateTraffic traffic(StepKind kind, std::vector<int32_t> slots, std::vector<int32_t> history, int tokens,
                     std::vector<uint8_t> is_flushing, Readout readout = Readout::kDirect, int gate_size = 1,
                     CheckpointForm form = CheckpointForm::kWords) {
  std::vector<int32_t> token_begin;
  for (size_t row = 0; row <= slots.size(); ++row) token_begin.push_back(static_cast<int32_t>(row) * tokens);
  StepPlan plan;
  plan.kind = kind;
  plan.rows.count = static_cast<int>(slots.size());
  plan.rows.slot = slots.data();
  plan.rows.history = history.data();
  plan.token_begin = token_begin.data();
  plan.is_flushing = is_flushing.data();
  StateLayout layout = small_layout(gate_size);
  layout.form = form;
  return step_traffic(layout, plan, readout);
}

void expect_numbers(const StateTraffic& given, size_t read, size_t written) {
  EXPECT_EQ(given.read_bytes, read * 4);
  EXPECT_EQ(given.written_bytes, written * 4);
}

TEST(StateTraffic, ConventionalReadsAndWritesTheCheckpoint) {
  expect_numbers(traffic(StepKind::kConventional, {0}, {0}, 1, {0}), 128 + 72, 128 + 24);
}

TEST(StateTraffic, ReplayReadsItAndWritesRecords) {
  expect_numbers(traffic(StepKind::kReplay, {0}, {3}, 2, {0}), 128 + 3 * 29 + 3 + 72, 2 * 29 + 2 * 3 + 1 + 2 * 24);
  expect_numbers(traffic(StepKind::kReplay, {0}, {3}, 2, {0}, Readout::kExact), 128 + 3 * 29 + 72,
                 2 * 29 + 2 * 3 + 1 + 2 * 24);
}

// Records of 17 + 2 (4 + 16 + 1) = 59 and no products.
TEST(StateTraffic, AGateAChannelKeepsMoreDecaysAndNoProducts) {
  expect_numbers(traffic(StepKind::kReplay, {0}, {3}, 2, {0}, Readout::kDirect, 16), 128 + 3 * 59 + 72,
                 2 * 59 + 2 * 24);
}

TEST(StateTraffic, AFlushWritesTheCheckpoint) {
  expect_numbers(traffic(StepKind::kReplay, {0}, {16}, 1, {1}), 128 + 16 * 29 + 72, 128 + 29 + 24);
}

TEST(StateTraffic, ADirectReadoutOfPlanesReadsHalf) {
  const auto planes = [](StepKind kind, int history, int tokens, bool is_flushing, Readout readout) {
    return traffic(kind, {0}, {history}, tokens, {is_flushing}, readout, 1, CheckpointForm::kPlanes);
  };
  expect_numbers(planes(StepKind::kReplay, 3, 2, false, Readout::kDirect), 64 + 3 * 29 + 3 + 72,
                 2 * 29 + 2 * 3 + 1 + 2 * 24);
  expect_numbers(planes(StepKind::kReplay, 3, 2, false, Readout::kExact), 128 + 3 * 29 + 72,
                 2 * 29 + 2 * 3 + 1 + 2 * 24);
  expect_numbers(planes(StepKind::kReplay, 16, 1, true, Readout::kDirect), 128 + 16 * 29 + 72, 128 + 29 + 24);
  expect_numbers(planes(StepKind::kConventional, 0, 1, false, Readout::kDirect), 128 + 72, 128 + 24);
  expect_numbers(planes(StepKind::kPrefill, 0, 50, false, Readout::kDirect), 128 + 72, 128 + 5 * 24);
}

TEST(StateTraffic, PrefillKeepsTheLastInputs) {
  expect_numbers(traffic(StepKind::kPrefill, {0}, {0}, 50, {0}), 128 + 72, 128 + 5 * 24);
}

TEST(StateTraffic, PaddingRowsMoveNothing) {
  expect_numbers(traffic(StepKind::kConventional, {kPaddingSlot, 4}, {0, 0}, 1, {0, 0}), 128 + 72, 128 + 24);
}

}  // namespace
}  // namespace replayssm
