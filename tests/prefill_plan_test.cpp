// How a prefill's rows are spread over blocks: every slice has a warp, and few rows are cut finer than many.
#include <gtest/gtest.h>

#include <algorithm>

#include "replayssm/ops/prefill.h"

namespace replayssm::test {
namespace {

const CudaProperties kGpu = {
    .name = "a GPU", .compute_major = 9, .multiprocessors = 132, .shared_bytes_per_multiprocessor = 228 * 1024};
const PrefillBytes kBytes = {.block = 42000, .value = 128};  // one gate a head, key size 128, BF16

TEST(PrefillPlan, EverySliceHasAWarp) {
  for (const int rows : {1, 2, 3, 8, 31, 256})
    for (const int heads : {1, 5, 32})
      for (const int values : {4, 16, 20, 72, 80, 128, 500}) {
        const PrefillPlan plan = plan_prefill(rows, heads, values, kBytes, kGpu);
        const int slices = (values + 15) / 16;
        const int units = (slices + plan.unit_slices - 1) / plan.unit_slices;
        EXPECT_EQ(plan.blocks, int64_t{rows} * heads * units);
        EXPECT_LE(plan.unit_slices, std::min(slices, 8));
        EXPECT_EQ(plan.row_warps() * plan.warp_slices, plan.unit_slices);
        EXPECT_LE(plan.threads(), plan.warp_slices == 1 ? 256 : 128);
      }
}

TEST(PrefillPlan, FewRowsAreCutFiner) {
  const auto plan = [](int rows) { return plan_prefill(rows, 32, 128, kBytes, kGpu); };
  EXPECT_EQ(plan(1).blocks, 128);  // a block a multiprocessor
  EXPECT_EQ(plan(1).unit_slices, 2);
  EXPECT_EQ(plan(1).warp_slices, 1);
  EXPECT_EQ(plan(1).helpers, 2);
  EXPECT_EQ(plan(8).blocks, 256);
  EXPECT_EQ(plan(8).unit_slices, 8);
  EXPECT_EQ(plan(8).warp_slices, 2);
  EXPECT_EQ(plan(8).helpers, 0);
}

// Where shared memory has room for four blocks of two slices, five are not begun.
TEST(PrefillPlan, BlocksAreResidentTogether) {
  const PrefillPlan plan = plan_prefill(5, 32, 128, kBytes, kGpu);
  EXPECT_EQ(plan.unit_slices, 4);
  EXPECT_EQ(plan.blocks, 320);
}

TEST(PrefillPlan, DescribesItselfInALine) {
  const std::string line = describe(plan_prefill(8, 32, 128, kBytes, kGpu));
  for (const char* part : {"256 blocks", "8 slices", "4 warps of 2"})
    EXPECT_NE(line.find(part), std::string::npos) << line;
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace replayssm::test
