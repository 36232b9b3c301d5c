// Internal to the delta rule and Mamba-2 on GPUs: a prefill of either family as one kernel runs it, and how the work is
// cut. The plan is arithmetic of the host, there without CUDA too.
#pragma once

#include <cstdint>
#include <string>

#include "replayssm/core/cuda_device.h"
#include "replayssm/ops/recurrence_args.h"

namespace replayssm {

template <typename T>
struct PrefillArgs : RecurrenceArgs<T> {
  const int32_t* token_begin = nullptr;
  // How the launch cuts the work.
  int unit_values = 0;  // rows of a block
  int helpers = 0;      // warps of a block beside those of the rows
};

// How the rows of heads are spread over blocks.
struct PrefillPlan {
  int unit_slices = 1;  // slices of 16 rows that a block has
  int warp_slices = 1;  // of which a warp owns one or two
  int helpers = 0;      // further warps of a block, which make tokens ready beside those that own rows
  int64_t blocks = 0;

  int row_warps() const { return unit_slices / warp_slices; }
  int threads() const { return 32 * (row_warps() + helpers); }
};
// The shared memory of a block: its own and, for each of its rows, more.
struct PrefillBytes {
  int block = 0, value = 0;
};
PrefillPlan plan_prefill(int rows, int heads, int values, const PrefillBytes& bytes, const CudaProperties& gpu);

// One line.
std::string describe(const PrefillPlan& plan);

// The same with the kernel's own bytes: for inputs T, and of Mamba-2 with or without z. Defined with CUDA alone.
template <Recurrence kRecurrence, typename T>
PrefillPlan plan_prefill(int rows, int heads, int values, int key_size, bool has_z, const CudaProperties& gpu);

template <Recurrence kRecurrence, typename T>
void launch_prefill(PrefillArgs<T> args, CudaDevice& device);

}  // namespace replayssm
