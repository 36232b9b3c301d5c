// How a layer's step is cut into launches: every token, channel, gate and vector has its threads, and the bytes are
// those of the arrays.
#include <gtest/gtest.h>

#include "replayssm/ops/layer_step.h"

namespace replayssm::test {
namespace {

const CudaProperties kGpu = {.name = "a GPU", .compute_major = 9, .multiprocessors = 132};

TEST(LayerPlan, GatedDeltaNetAtEveryBatch) {
  const DeltaShape shape = {32, 16, 128, 128, 1};
  for (const int rows : {1, 2, 31, 32, 255, 256, 512})
    for (const int tokens_per_row : {1, 4}) {
      const LayerPlan plan = plan_layer(shape, rows, tokens_per_row, 2, kGpu);
      const int64_t tokens = int64_t{rows} * tokens_per_row, each = plan.conv_rows_a_thread;
      EXPECT_TRUE(each == 1 || (each == 2 && tokens_per_row == 1));
      EXPECT_EQ(plan.conv_blocks, (rows + each - 1) / each * 8);  // of 8192 channels, 1024 a block
      EXPECT_GE(plan.gate_blocks * 128, tokens * 64);
      EXPECT_LT((plan.gate_blocks - 1) * 128, tokens * 64);
      EXPECT_EQ(plan.norm_vector_threads, 16);
      EXPECT_GE(plan.norm_blocks * plan.norm_block_threads, tokens * 32 * 16);
      EXPECT_LT((plan.norm_blocks - 1) * plan.norm_block_threads, tokens * 32 * 16);
      EXPECT_EQ(plan.norm_bytes, tokens * 4096 * (4 + 2 + 2));
      EXPECT_EQ(plan.prepare_bytes, 8192 * 2 * (3 * tokens + 3 * rows) + tokens * 64 * (2 + 4) + int64_t{4} * 8192 * 4);
    }
  EXPECT_EQ(plan_layer(shape, 256, 1, 2, kGpu).conv_rows_a_thread, 2);
  EXPECT_EQ(plan_layer(shape, 32, 1, 2, kGpu).conv_rows_a_thread, 1);
}

TEST(LayerPlan, AGroupOfMamba2IsABlock) {
  const LayerPlan plan = plan_layer(Mamba2Shape{96, 8, 80, 128}, 7, 1, 2, kGpu);  // groups of 960 channels
  EXPECT_EQ(plan.conv_blocks, 7 * 10);
  EXPECT_EQ(plan.gate_blocks, 6);
  EXPECT_EQ(plan.norm_blocks, 7 * 8);
  EXPECT_EQ(plan.norm_block_threads, 128);
  EXPECT_EQ(plan.norm_vector_threads, 128);
}

TEST(LayerPlan, DescribesItselfInALine) {
  const std::string line = describe(plan_layer(DeltaShape{32, 32, 128, 128, 128}, 256, 1, 2, kGpu));
  for (const char* part : {"1536 + 1088 blocks of 128 threads", "2 rows a thread", "16 a vector", "MB"})
    EXPECT_NE(line.find(part), std::string::npos) << line;
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace replayssm::test
