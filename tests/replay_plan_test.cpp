// How replay steps are cut for GPUs: what holds of every plan.
#include "replayssm/ops/replay_plan.h"

#include <gtest/gtest.h>

#include <string>

namespace replayssm::test {
namespace {

CudaProperties gpu_of(int multiprocessors, size_t shared_bytes, size_t block_bytes) {
  CudaProperties gpu;
  gpu.multiprocessors = multiprocessors;
  gpu.shared_bytes_per_multiprocessor = shared_bytes;
  gpu.shared_bytes_per_block = block_bytes;
  return gpu;
}
const CudaProperties kHopper = gpu_of(132, 233472, 232448);
const CudaProperties kAmpere = gpu_of(108, 167936, 166912);
const CudaProperties kAda = gpu_of(142, 102400, 101376);

void expect_sound(const ReplaySizes& sizes, const CudaProperties& gpu) {
  const ReplayPlan plan = plan_replay(sizes, gpu);
  SCOPED_TRACE(describe({DecodePath::kReplay, plan}));
  if (plan.blocks == 0) return;
  EXPECT_LE(plan.shared.bytes, static_cast<int>(gpu.shared_bytes_per_block));
  EXPECT_LE(plan.threads(), 256);
  EXPECT_LE(plan.blocks * plan.warps, 16);
  EXPECT_EQ(plan.unit_values % 16, 0);
  EXPECT_EQ(plan.warps * 16, plan.unit_values);
  const int parts = (sizes.values + plan.unit_values - 1) / plan.unit_values;
  EXPECT_EQ(plan.units, int64_t{sizes.rows} * sizes.heads * parts);
  EXPECT_EQ(plan.records, sizes.window + sizes.tokens_per_row);
  EXPECT_GT(plan.places, kLead);
  EXPECT_GE(plan.key_places, 1);
  EXPECT_LE(plan.key_places, kLead) << "a walk's keys stay until it is done";
  // Neighbouring quads of these vectors differ in one bit of their addresses (staged.cuh).
  for (const int vectors : {plan.shared.decays, plan.shared.keys, plan.shared.queries}) EXPECT_EQ(vectors % 128, 0);
}

TEST(ReplayPlan, IsSoundForEverySize) {
  for (const CudaProperties& gpu : {kHopper, kAmpere, kAda})
    for (int values : {4, 16, 64, 80, 100, 128, 256})
      for (int key_size : {32, 64, 128})
        for (int window : {1, 4, 16, 32, 63})
          for (int tokens : {1, 4, 16})
            for (int rows : {1, 8, 256})
              for (int element_bytes : {2, 4})
                for (int gate_size : {1, key_size})
                  for (const CheckpointForm form : {CheckpointForm::kWords, CheckpointForm::kPlanes})
                    if (tokens <= window)
                      expect_sound({rows, 32, values, key_size, window, tokens, element_bytes, gate_size, form}, gpu);
}

// Else a batch would have other bits than its rows alone: of a direct readout, which the other path does not have.
TEST(ReplayPlan, HasAKernelForAllBatchesOrNone) {
  for (const CudaProperties& gpu : {kHopper, kAmpere, kAda})
    for (int values : {16, 64, 128})
      for (int window = 1; window <= 63; ++window)
        for (int tokens : {1, 4, 6, 13, 14, 16})
          for (int element_bytes : {2, 4})
            for (int gate_size : {1, 128})
              for (const CheckpointForm form : {CheckpointForm::kWords, CheckpointForm::kPlanes}) {
                if (tokens > window) continue;
                const auto has_kernel = [&](int rows) {
                  return plan_replay({rows, 32, values, 128, window, tokens, element_bytes, gate_size, form}, gpu)
                             .blocks > 0;
                };
                for (int rows : {8, 512, 513})
                  EXPECT_EQ(has_kernel(rows), has_kernel(1))
                      << values << " x 128, L " << window << ", T " << tokens << ", " << rows << " rows";
              }
}

// At a serving batch a block has a whole head, where two have room.
TEST(ReplayPlan, HasWholeHeadsAtServingBatches) {
  const ReplayPlan plan = plan_replay({256, 32, 128, 128, 16, 1, 2}, kHopper);
  EXPECT_EQ(plan.unit_values, 128);
  EXPECT_EQ(plan.blocks, 2);
  EXPECT_EQ(plan_replay({256, 32, 128, 128, 8, 1, 2, 128}, kHopper).blocks, 2) << "with a gate a channel";
  EXPECT_EQ(plan_replay({256, 32, 128, 128, 16, 4, 2, 1, CheckpointForm::kPlanes}, kHopper).blocks, 2) << "four tokens";
  EXPECT_EQ(plan_replay({256, 32, 128, 128, 8, 4, 2, 128}, kHopper).blocks, 2) << "four tokens, a gate a channel";
}

// Few heads are cut so that all multiprocessors have work.
TEST(ReplayPlan, SpreadsFewHeads) {
  const ReplayPlan plan = plan_replay({1, 32, 128, 128, 16, 1, 2}, kHopper);
  EXPECT_EQ(plan.unit_values, 32);
  EXPECT_EQ(plan.units, 128);
}

TEST(DecodePlan, ChoosesThePath) {
  constexpr int rows = 256;
  const auto path = [&](int gate_size, int window, int tokens, int element_bytes) {
    return plan_decode(DeltaShape{32, 32, 128, 128, gate_size}, rows, window, tokens, element_bytes,
                       CheckpointForm::kWords, kHopper)
        .path;
  };
  EXPECT_EQ(path(1, 16, 1, 2), DecodePath::kReplay);
  EXPECT_EQ(path(128, 16, 1, 2), DecodePath::kReplay);
  EXPECT_EQ(path(1, 48, 16, 4), DecodePath::kReplay);
  EXPECT_EQ(path(128, 48, 16, 4), DecodePath::kRecurrence) << "records of 1.5 KiB have no room";
  EXPECT_EQ(plan_decode(Mamba2Shape{128, 8, 64, 128}, rows, 16, 1, 2, CheckpointForm::kWords, kHopper).path,
            DecodePath::kReplay);
}

TEST(DecodePlan, DescribesItselfInOneLine) {
  constexpr int rows = 256;
  for (int gate_size : {1, 128})
    for (int tokens : {1, 16}) {
      const std::string text = describe(
          plan_decode(DeltaShape{32, 32, 128, 128, gate_size}, rows, 48, tokens, 4, CheckpointForm::kWords, kHopper));
      EXPECT_FALSE(text.empty());
      EXPECT_EQ(text.find('\n'), std::string::npos);
    }
}

}  // namespace
}  // namespace replayssm::test
