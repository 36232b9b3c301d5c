// The delta rule as a timed op on a GPU: its state, its inputs and its calls.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "bench/cuda_layer.h"
#include "bench/cuda_memory.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/prefill.h"
#include "replayssm/ops/replay_plan.h"

namespace replayssm::bench {

template <typename T, typename Out>
class CudaDelta {
 public:
  using Shape = DeltaShape;
  using Input = T;
  using Output = Out;

  CudaDelta(const DeltaShape& shape, const CudaLayerSize& size, CudaArena& arena) : tokens_(size.tokens) {
    const int64_t H = shape.heads, G = shape.key_heads, C = size.window + size.tokens_per_row;
    state_.shape = shape;
    state_.slots = state_.checkpoints = size.slots;
    state_.window = size.window;
    state_.capacity = static_cast<int>(C);
    state_.form = size.form;
    state_.checkpoint = take_checkpoint(arena, size.slots * H * shape.value_size * shape.key_size, size.form);
    state_.ring_k = arena.take_uniform<T>(size.slots * G * C * shape.key_size, -1, 1);
    state_.ring_k_scale = arena.take_uniform<float>(size.slots * G * C, 0.05f, 0.1f);
    state_.ring_v = arena.take_uniform<T>(size.slots * H * C * shape.value_size, -1, 1);
    state_.ring_decay = arena.take_uniform<float>(size.slots * H * C * shape.gate_size, 0.9f, 1);
    state_.ring_beta = arena.take_uniform<float>(size.slots * H * C, 0, 1);
    inputs_.q_stride = inputs_.k_stride = G * shape.key_size;
    inputs_.v_stride = H * shape.value_size;
    inputs_.q = arena.take_uniform<T>(tokens_ * G * shape.key_size, -1, 1);
    inputs_.k = arena.take_uniform<T>(tokens_ * G * shape.key_size, -1, 1);
    inputs_.v = arena.take_uniform<T>(tokens_ * H * shape.value_size, -1, 1);
    inputs_.g = arena.take_uniform<float>(tokens_ * H * shape.gate_size, -0.1f, 0);
    inputs_.beta = arena.take_uniform<float>(tokens_ * H, 0, 1);
    out_ = arena.take<Out>(out_count());
  }

  static CudaLayerBytes bytes(const DeltaShape& shape) {
    const double keys = shape.key_heads * shape.key_size, values = shape.heads * shape.value_size;
    const double gates = 4.0 * shape.heads * (shape.gate_size + 1);
    return {4.0 * values * shape.key_size, sizeof(T) * (keys + values) + 4.0 * shape.key_heads + gates,
            sizeof(T) * (2 * keys + values) + gates + sizeof(Out) * values};
  }

  void step(const StateRows& rows, CudaDevice& device) {
    delta_step<T, Out>({state_, rows, inputs_, out_}, device, {});
  }
  void decode(const StateRows& rows, int tokens_per_row, Readout readout, CudaDevice& device) {
    delta_decode<T, Out>({state_, rows, tokens_per_row, inputs_, readout, out_}, device, {});
  }
  void prefill(const StateRows& rows, const int32_t* token_begin, CudaDevice& device) {
    delta_prefill<T, Out>({state_, rows, token_begin, inputs_, out_}, device, {});
  }

  // How a decoding step is run; without a readout: a conventional one.
  std::string plan(const StateRows& rows, int tokens_per_row, std::optional<Readout> readout,
                   CudaDevice& device) const {
    if (!readout) return describe(DecodePlan{});
    return describe(plan_decode(state_.shape, rows.count, state_.window, tokens_per_row, sizeof(T), state_.form,
                                device.properties()));
  }

  std::string prefill_plan(int sequences, CudaDevice& device) const {
    const DeltaShape& shape = state_.shape;
    const auto plan = [&]<Recurrence kRecurrence>() {
      return describe(plan_prefill<kRecurrence, T>(sequences, shape.heads, shape.value_size, shape.key_size,
                                                   /*has_z=*/false, device.properties()));
    };
    return shape.gate_size > 1 ? plan.template operator()<Recurrence::kDeltaPerChannel>()
                               : plan.template operator()<Recurrence::kDelta>();
  }

  const BasicDeltaState<T>& state() const { return state_; }
  Out* out() { return out_; }
  size_t out_count() const { return static_cast<size_t>(tokens_ * state_.shape.heads * state_.shape.value_size); }

 private:
  int64_t tokens_;
  BasicDeltaState<T> state_;
  BasicDeltaTokens<T> inputs_;
  Out* out_ = nullptr;
};

}  // namespace replayssm::bench
