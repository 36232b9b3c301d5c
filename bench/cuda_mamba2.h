// Mamba-2 as a timed op on a GPU: its state, its inputs and its calls.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "bench/cuda_layer.h"
#include "bench/cuda_memory.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/ops/prefill.h"
#include "replayssm/ops/replay_plan.h"

namespace replayssm::bench {

template <typename T, typename Out>
class CudaMamba2 {
 public:
  using Shape = Mamba2Shape;
  using Input = T;
  using Output = Out;

  CudaMamba2(const Mamba2Shape& shape, const CudaLayerSize& size, CudaArena& arena) : tokens_(size.tokens) {
    const int64_t H = shape.heads, G = shape.groups, P = shape.head_size, N = shape.state_size;
    const int64_t C = size.window + size.tokens_per_row;
    state_.shape = shape;
    state_.slots = state_.checkpoints = size.slots;
    state_.window = size.window;
    state_.capacity = static_cast<int>(C);
    state_.form = size.form;
    state_.checkpoint = take_checkpoint(arena, size.slots * H * P * N, size.form);
    state_.ring_x = arena.take_uniform<T>(size.slots * H * C * P, -1, 1);
    state_.ring_b = arena.take_uniform<T>(size.slots * G * C * N, -1, 1);
    state_.ring_dt = arena.take_uniform<float>(size.slots * H * C, 0, 0.1f);
    state_.ring_decay = arena.take_uniform<float>(size.slots * H * C, 0.9f, 1);
    heads_ = {arena.take_uniform<float>(H, -1, 1), arena.take_uniform<float>(H, -1, 1)};
    inputs_.x_stride = H * P;
    inputs_.b_stride = inputs_.c_stride = G * N;
    inputs_.x = arena.take_uniform<T>(tokens_ * H * P, -1, 1);
    inputs_.b = arena.take_uniform<T>(tokens_ * G * N, -1, 1);
    inputs_.c = arena.take_uniform<T>(tokens_ * G * N, -1, 1);
    inputs_.dt = arena.take_uniform<float>(tokens_ * H, 0, 0.1f);
    out_ = arena.take<Out>(out_count());
  }

  static CudaLayerBytes bytes(const Mamba2Shape& shape) {
    const double keys = shape.groups * shape.state_size, values = shape.heads * shape.head_size;
    return {4.0 * values * shape.state_size, sizeof(T) * (keys + values) + 8.0 * shape.heads,
            sizeof(T) * (2 * keys + values) + 4.0 * shape.heads + sizeof(Out) * values};
  }

  void step(const StateRows& rows, CudaDevice& device) {
    mamba2_step<T, Out>({state_, rows, heads_, inputs_, out_}, device, {});
  }
  void decode(const StateRows& rows, int tokens_per_row, Readout readout, CudaDevice& device) {
    mamba2_decode<T, Out>({state_, rows, heads_, tokens_per_row, inputs_, readout, out_}, device, {});
  }
  void prefill(const StateRows& rows, const int32_t* token_begin, CudaDevice& device) {
    mamba2_prefill<T, Out>({state_, rows, heads_, token_begin, inputs_, out_}, device, {});
  }

  // How a decoding step is run; without a readout: a conventional one.
  std::string plan(const StateRows& rows, int tokens_per_row, std::optional<Readout> readout,
                   CudaDevice& device) const {
    if (!readout) return describe(DecodePlan{});
    return describe(plan_decode(state_.shape, rows.count, state_.window, tokens_per_row, sizeof(T), state_.form,
                                device.properties()));
  }

  std::string prefill_plan(int sequences, CudaDevice& device) const {
    const Mamba2Shape& shape = state_.shape;
    return describe(plan_prefill<Recurrence::kMamba2, T>(sequences, shape.heads, shape.head_size, shape.state_size,
                                                         /*has_z=*/false, device.properties()));
  }

  const BasicMamba2State<T>& state() const { return state_; }
  const Mamba2Heads& heads() const { return heads_; }
  Out* out() { return out_; }
  size_t out_count() const { return static_cast<size_t>(tokens_ * state_.shape.heads * state_.shape.head_size); }

 private:
  int64_t tokens_;
  BasicMamba2State<T> state_;
  Mamba2Heads heads_;
  BasicMamba2Tokens<T> inputs_;
  Out* out_ = nullptr;
};

}  // namespace replayssm::bench
