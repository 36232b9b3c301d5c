// Internal to the delta rule and Mamba-2 on GPUs: a prefill of either family as one kernel runs it, and how the work is
// cut. The plan is arithmetic of the host, there without CUDA too.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "replayssm/core/cuda_device.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

enum class Recurrence { kDelta, kDeltaPerChannel, kMamba2 };

// The family's own names: query is q or C, key is k or B, value is v or x, strength is beta or dt'.
template <typename T>
struct PrefillArgs {
  StateRows rows;
  int64_t slots = 0, checkpoints = 0;
  float* checkpoint = nullptr;
  CheckpointForm form = CheckpointForm::kWords;
  int heads = 0, key_heads = 0, key_size = 0, values = 0, window = 0, capacity = 0;
  const T *ring_key = nullptr, *ring_value = nullptr;
  const float *ring_decay = nullptr, *ring_strength = nullptr;
  const float* ring_scale = nullptr;  // delta
  const int32_t* token_begin = nullptr;
  const T *query = nullptr, *key = nullptr, *value = nullptr, *z = nullptr;
  int64_t query_stride = 0, key_stride = 0, value_stride = 0, z_stride = 0;
  const float* log_decay = nullptr;  // delta: g
  const float* strength = nullptr;
  const float* a_log = nullptr;  // Mamba-2
  const float* skip = nullptr;   // Mamba-2: D
  void* out = nullptr;
  bool has_float_out = false;
  CudaFault* fault = nullptr;
  const char* op = "";
  // How the launch cuts the work.
  int unit_values = 0;  // rows of a block
  int helpers = 0;      // warps of a block beside those of the rows
};

// What the families' prefills have in common.
template <typename T, typename Prefill>
PrefillArgs<T> prefill_args(const char* op, const Prefill& prefill, CudaDevice& device) {
  PrefillArgs<T> args;
  args.rows = prefill.rows;
  args.slots = prefill.state.slots;
  args.checkpoints = prefill.state.checkpoints;
  args.checkpoint = prefill.state.checkpoint;
  args.form = prefill.state.form;
  args.window = prefill.state.window;
  args.capacity = prefill.state.capacity;
  args.ring_decay = prefill.state.ring_decay;
  args.token_begin = prefill.token_begin;
  args.out = prefill.out;
  args.has_float_out = std::is_same_v<decltype(prefill.out), float*>;
  args.fault = device.fault();
  args.op = op;
  return args;
}

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

template <Recurrence kRecurrence, typename T>
void launch_prefill(PrefillArgs<T> args, CudaDevice& device);

}  // namespace replayssm
