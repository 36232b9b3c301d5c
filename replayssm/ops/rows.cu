// Cursors on the device, and the plans of state kernels.
#include "replayssm/ops/rows.cuh"

#include <algorithm>

#include "replayssm/core/error.h"
#include "replayssm/ops/launch.cuh"

namespace replayssm {
namespace {

// Grid covers B; a thread owns a row.
__global__ void commit_rows_kernel(const CommitRows args) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= args.count || args.slot[b] == kPaddingSlot) return;
  int32_t history = args.history[b];
  if (history + args.tokens_per_row > args.window || (args.flush_limit != nullptr && history >= args.flush_limit[b])) {
    args.base[b] += history;
    args.checkpoint_in[b] = args.checkpoint_out[b];
    if (args.flush_limit != nullptr) args.flush_limit[b] = args.window;
    history = 0;
  }
  args.history[b] = history + (args.accepted != nullptr ? args.accepted[b] : args.tokens_per_row);
}

constexpr int kLaunchRows = 128;
constexpr int kNoFlushLimit = 0xFFFF;  // more than the records of any ring

struct PutArgs {
  RowArrays to;
  int first;  // of `to`
  int count;  // of the arrays below
  int end;    // of `to`: rows past first + count are padding
  int tokens;
  int64_t base[kLaunchRows];
  int32_t slot[kLaunchRows], history[kLaunchRows], checkpoint_in[kLaunchRows], checkpoint_out[kLaunchRows];
  int32_t token_end[kLaunchRows];
  uint16_t flush_limit[kLaunchRows];
};
static_assert(sizeof(PutArgs) <= 4096, "what the arguments of a kernel have room for on every GPU");

// Grid covers first .. end-1; a thread owns a row.
__global__ void put_rows_kernel(const __grid_constant__ PutArgs args) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, b = args.first + i;
  if (b >= args.end) return;
  const bool is_given = i < args.count;
  args.to.base[b] = is_given ? args.base[i] : 0;
  args.to.slot[b] = is_given ? args.slot[i] : kPaddingSlot;
  args.to.history[b] = is_given ? args.history[i] : 0;
  args.to.checkpoint_in[b] = is_given ? args.checkpoint_in[i] : -1;
  args.to.checkpoint_out[b] = is_given ? args.checkpoint_out[i] : -1;
  args.to.token_begin[b + 1] = is_given ? args.token_end[i] : args.tokens;
  if (args.to.flush_limit != nullptr) args.to.flush_limit[b] = is_given ? args.flush_limit[i] : kNoFlushLimit;
  if (b == 0) args.to.token_begin[0] = 0;
}

}  // namespace

void put_rows(const StateRows& rows, const int32_t* token_begin, const RowArrays& to, CudaDevice& device) {
  require(rows.count >= 0 && rows.count <= to.capacity, "put_rows: expected 0 to {} rows, got {}", to.capacity,
          rows.count);
  int first = 0;
  do {
    PutArgs args;
    args.to = to;
    args.first = first;
    args.count = std::min(kLaunchRows, rows.count - first);
    const bool is_last = first + args.count == rows.count;
    args.end = is_last ? to.capacity : first + args.count;
    args.tokens = token_begin[rows.count];
    std::copy_n(rows.base + first, args.count, args.base);
    std::copy_n(rows.slot + first, args.count, args.slot);
    std::copy_n(rows.history + first, args.count, args.history);
    std::copy_n(rows.checkpoint_in + first, args.count, args.checkpoint_in);
    std::copy_n(rows.checkpoint_out + first, args.count, args.checkpoint_out);
    std::copy_n(token_begin + first + 1, args.count, args.token_end);
    for (int i = 0; i < args.count; ++i)
      args.flush_limit[i] = static_cast<uint16_t>(
          rows.flush_limit == nullptr ? kNoFlushLimit : std::min(rows.flush_limit[first + i], kNoFlushLimit));
    const int blocks = std::max(1, (args.end - first + kLaunchRows - 1) / kLaunchRows);
    launch("put_rows", put_rows_kernel, dim3(blocks), kLaunchRows, 0, args, device);
    first += args.count;
  } while (first < rows.count);
}

void commit_rows(const CommitRows& args, CudaDevice& device) {
  require(args.count >= 0 && args.tokens_per_row >= 1 && args.tokens_per_row <= args.window,
          "commit_rows: expected rows >= 0 and 1 to {} tokens a row (the window), got {} and {}", args.window,
          args.count, args.tokens_per_row);
  if (args.count == 0) return;
  launch("commit_rows", commit_rows_kernel, dim3((args.count + 127) / 128), 128, 0, args, device);
}

}  // namespace replayssm
