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
  EXPECT_GE(plan.helpers, 2);
  EXPECT_EQ(plan.unit_values % 16, 0);
  EXPECT_GE(plan.row_warps * plan.warp_rows, plan.unit_values);
  EXPECT_LT((plan.row_warps - 1) * plan.warp_rows, plan.unit_values);
  EXPECT_TRUE(plan.warp_rows == 16 || plan.warp_rows == 32);
  const int parts = (sizes.values + plan.unit_values - 1) / plan.unit_values;
  EXPECT_EQ(plan.units, int64_t{sizes.rows} * sizes.heads * parts);
  EXPECT_EQ(plan.records, sizes.window + sizes.tokens_per_row);
}

TEST(ReplayPlan, IsSoundForEverySize) {
  for (const CudaProperties& gpu : {kHopper, kAmpere, kAda})
    for (int values : {4, 16, 64, 80, 100, 128, 256})
      for (int key_size : {32, 64, 128})
        for (int window : {1, 4, 16, 32, 63})
          for (int tokens : {1, 4, 16})
            for (int rows : {1, 8, 256})
              for (int element_bytes : {2, 4})
                if (tokens <= window) expect_sound({rows, 32, values, key_size, window, tokens, element_bytes}, gpu);
}

// At a serving batch a block has a whole head, where two have room, and records are fetched ahead.
TEST(ReplayPlan, HasWholeHeadsAtServingBatches) {
  const ReplayPlan plan = plan_replay({256, 32, 128, 128, 16, 1, 2}, kHopper);
  EXPECT_EQ(plan.unit_values, 128);
  EXPECT_EQ(plan.blocks, 2);
  EXPECT_EQ(plan.shared.raw_buffers, 2);
  EXPECT_EQ(plan.shared.key_buffers, 2);
}

// Few heads are cut so that all multiprocessors have work.
TEST(ReplayPlan, SpreadsFewHeads) {
  const ReplayPlan plan = plan_replay({1, 32, 128, 128, 16, 1, 2}, kHopper);
  EXPECT_EQ(plan.unit_values, 32);
  EXPECT_EQ(plan.units, 128);
  EXPECT_EQ(plan.warp_rows, 16);
}

TEST(DecodePlan, ChoosesThePath) {
  constexpr int rows = 256;
  const auto path = [&](int gate_size, CheckpointForm form, Readout readout, int window = 16) {
    return plan_decode(DeltaShape{32, gate_size == 1 ? 16 : 32, 128, 128, gate_size}, rows, window, 1, 2, form, readout,
                       kHopper)
        .path;
  };
  EXPECT_EQ(path(1, CheckpointForm::kWords, Readout::kDirect), DecodePath::kReplay);
  EXPECT_EQ(path(1, CheckpointForm::kWords, Readout::kExact), DecodePath::kReplay);
  EXPECT_EQ(path(1, CheckpointForm::kPlanes, Readout::kDirect), DecodePath::kPass);
  EXPECT_EQ(path(1, CheckpointForm::kPlanes, Readout::kExact), DecodePath::kReplay);
  EXPECT_EQ(path(1, CheckpointForm::kWords, Readout::kDirect, 63), DecodePath::kPass);
  EXPECT_EQ(path(128, CheckpointForm::kWords, Readout::kDirect), DecodePath::kPass);
  EXPECT_EQ(path(128, CheckpointForm::kWords, Readout::kExact), DecodePath::kRecurrence);
  EXPECT_EQ(plan_decode(Mamba2Shape{128, 8, 64, 128}, rows, 16, 1, 2, kHopper).path, DecodePath::kReplay);
}

TEST(DecodePlan, DescribesItselfInOneLine) {
  constexpr int rows = 256;
  for (Readout readout : {Readout::kDirect, Readout::kExact})
    for (CheckpointForm form : {CheckpointForm::kWords, CheckpointForm::kPlanes})
      for (int gate_size : {1, 128}) {
        const DecodePlan plan =
            plan_decode(DeltaShape{32, 32, 128, 128, gate_size}, rows, 16, 1, 2, form, readout, kHopper);
        const std::string text = describe(plan);
        EXPECT_FALSE(text.empty());
        EXPECT_EQ(text.find('\n'), std::string::npos);
      }
}

}  // namespace
}  // namespace replayssm::test
