// How a prefill's rows are spread over blocks: arithmetic of the host, there without CUDA too.
#include "replayssm/ops/prefill.h"

#include <algorithm>
#include <utility>

#include "replayssm/core/error.h"
#include "replayssm/ops/tiles.h"

namespace replayssm {
namespace {

// What a token costs, in instructions of a multiprocessor: for each slice; for each block, which makes it ready; and at
// the least, for its updates follow one another.
constexpr int64_t kSliceWork = 320, kBlockWork = 200, kLeastWork = 2000;
// The registers of a multiprocessor have room for so many slices.
constexpr int kResidentSlices = 16;
constexpr int kHelpers = 2;

}  // namespace

PrefillPlan plan_prefill(int rows, int heads, int values, const PrefillBytes& bytes, const CudaProperties& gpu) {
  const int slices = static_cast<int>(ceiling_quotient(values, kSliceRows));
  PrefillPlan plan;
  std::pair<int64_t, int64_t> least = {};  // work of the busiest multiprocessor, in rounds of blocks; without waits
  int64_t at_once = 0;                     // its blocks
  for (const int most : {8, 4, 2, 1}) {
    const int unit_slices = std::min(most, slices);
    const int64_t blocks = int64_t{rows} * heads * ceiling_quotient(slices, unit_slices);
    const int64_t all = ceiling_quotient(blocks, gpu.multiprocessors);
    const int64_t block_bytes = bytes.block + int64_t{bytes.value} * unit_slices * kSliceRows + kReservedBytes;
    const int64_t shared = static_cast<int64_t>(gpu.shared_bytes_per_multiprocessor) / block_bytes;
    const int64_t resident = std::clamp<int64_t>(shared, 1, kResidentSlices / unit_slices);
    const int64_t block_work = unit_slices * kSliceWork + kBlockWork;
    const auto round = [&](int64_t count) { return count == 0 ? 0 : std::max(count * block_work, kLeastWork); };
    const std::pair<int64_t, int64_t> work = {all / resident * round(resident) + round(all % resident),
                                              all * block_work};
    if (most < 8 && work >= least) continue;
    least = work;
    at_once = std::min(all, resident);
    plan.unit_slices = unit_slices;
    plan.blocks = blocks;
  }
  // Two slices a warp read a token's vectors once for both, and leave a scheduler half as many warps. Warps that make
  // tokens ready shorten a token's way where schedulers have little else to do.
  if (at_once * plan.unit_slices >= kResidentSlices && plan.unit_slices % 2 == 0)
    plan.warp_slices = 2;
  else if (at_once * (plan.unit_slices + kHelpers) <= kResidentSlices && plan.unit_slices <= 4)
    plan.helpers = kHelpers;
  return plan;
}

std::string describe(const PrefillPlan& plan) {
  return fmt::format("prefill: {} blocks of {} slices of 16 rows, {} warps of {} and {} that make tokens ready",
                     plan.blocks, plan.unit_slices, plan.row_warps(), plan.warp_slices, plan.helpers);
}

}  // namespace replayssm
