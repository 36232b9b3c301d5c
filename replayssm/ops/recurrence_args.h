// Internal to the delta rule and Mamba-2 on GPUs: a call as the kernels that serve both families take it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "replayssm/core/cuda_device.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

enum class Recurrence { kDelta, kDeltaPerChannel, kMamba2 };  // kDelta: one gate a head

// The family's own names: query is q or C, key is k or B, value is v or x, strength is beta or dt'.
template <typename T>
struct RecurrenceArgs {
  StateRows rows;
  int64_t slots = 0, checkpoints = 0;
  float* checkpoint = nullptr;
  CheckpointForm form = CheckpointForm::kWords;
  int heads = 0, key_heads = 0, key_size = 0, values = 0, window = 0, capacity = 0;
  T *ring_key = nullptr, *ring_value = nullptr;
  float *ring_decay = nullptr, *ring_strength = nullptr;
  float* ring_scale = nullptr;  // delta
  const T *query = nullptr, *key = nullptr, *value = nullptr, *z = nullptr;
  int64_t query_stride = 0, key_stride = 0, value_stride = 0, z_stride = 0;
  const float* log_decay = nullptr;  // delta: g
  const float* strength = nullptr;
  float query_factor = 1;        // delta: K^-1/2
  const float* a_log = nullptr;  // Mamba-2
  const float* skip = nullptr;   // Mamba-2: D
  bool are_tokens_just_made = false;
  void* out = nullptr;
  bool has_float_out = false;
  CudaFault* fault = nullptr;
  const char* op = "";
};

// Args, which begins with RecurrenceArgs, with what the families' calls name alike.
template <typename Args, typename Call>
Args recurrence_args(const char* op, const Call& call, CudaDevice& device) {
  Args args;
  args.rows = call.rows;
  args.slots = call.state.slots;
  args.checkpoints = call.state.checkpoints;
  args.checkpoint = call.state.checkpoint;
  args.form = call.state.form;
  args.window = call.state.window;
  args.capacity = call.state.capacity;
  args.ring_decay = call.state.ring_decay;
  args.are_tokens_just_made = call.tokens.are_just_made;
  args.out = call.out;
  args.has_float_out = std::is_same_v<decltype(call.out), float*>;
  args.fault = device.fault();
  args.op = op;
  return args;
}

}  // namespace replayssm
