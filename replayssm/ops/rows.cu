// Cursors on the device, and the plans of state kernels.
#include "replayssm/ops/rows.cuh"

#include "replayssm/core/error.h"
#include "replayssm/ops/launch.cuh"

namespace replayssm {
namespace {

// Grid covers B; a thread owns a row.
__global__ void commit_rows_kernel(const CommitRows args) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= args.count || args.slot[b] == kPaddingSlot) return;
  int32_t history = args.history[b];
  if (history + args.tokens_per_row > args.window) {
    args.base[b] += history;
    args.checkpoint_in[b] = args.checkpoint_out[b];
    history = 0;
  }
  args.history[b] = history + (args.accepted != nullptr ? args.accepted[b] : args.tokens_per_row);
}

}  // namespace

void commit_rows(const CommitRows& args, CudaDevice& device) {
  require(args.count >= 0 && args.tokens_per_row >= 1 && args.tokens_per_row <= args.window,
          "commit_rows: expected rows >= 0 and 1 to {} tokens a row (the window), got {} and {}", args.window,
          args.count, args.tokens_per_row);
  if (args.count == 0) return;
  launch("commit_rows", commit_rows_kernel, dim3((args.count + 127) / 128), 128, 0, args, device);
}

std::string describe(const StatePlan& plan) {
  return fmt::format("{} slices of 16 rows a block; {} warps a multiprocessor flush", plan.slices, plan.flush_warps);
}

StatePlan state_plan(int64_t slices, int tokens_per_row, CudaDevice& device) {
  const bool is_large = slices > int64_t{device.properties().multiprocessors} * 64;
  // Of Gated DeltaNet 32 heads on an H200, us a step: batch 256, T = 1: 4, 6, 8, 12 flushing warps 229, 202, 200, 216;
  // T = 4 (a quarter of the rows flushes): 768, 585, 490, 405. Batch 32: 4 is best.
  StatePlan plan;
  plan.slices = is_large ? 2 : 1;
  plan.flush_warps = tokens_per_row > 1 ? 12 : is_large ? 8 : 4;
  return plan;
}

}  // namespace replayssm
