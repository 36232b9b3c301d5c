// The delta rule as a timed op: its state, its inputs, and calls that step through the cursor's cycle.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bench/cursor_cycle.h"
#include "bench/op_memory.h"
#include "replayssm/core/buffer.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/delta.h"

namespace replayssm::bench {

// A layer's state for `sets` batches, larger together than the caches, and their cursors spread evenly over the cycle.
class DeltaBench {
 public:
  DeltaBench(const DeltaShape& shape, int batch, int window, int tokens, CheckpointForm form, Device& device)
      : shape_(shape), batch_(batch), tokens_(tokens), device_(device) {
    const int64_t state_floats = int64_t{shape.heads} * shape.value_size * shape.key_size;
    sets_ = rotating_sets(batch * state_floats);
    const int64_t slots = int64_t{sets_} * batch;
    const int64_t C = window + tokens;
    state_.shape = shape;
    state_.slots = state_.checkpoints = slots;
    state_.window = window;
    state_.capacity = static_cast<int>(C);
    const auto place = [&](Buffer<float>& buffer, int64_t per_slot, float low, float high) {
      buffer = Buffer<float>(slots * per_slot);
      fill_random(buffer, low, high, static_cast<uint32_t>(per_slot));
      return buffer.data();
    };
    state_.form = form;
    state_.checkpoint = place(checkpoint_, state_floats, -1, 1);
    if (form == CheckpointForm::kPlanes) make_planes(checkpoint_);
    state_.ring_k = place(k_, shape.key_heads * C * shape.key_size, -1, 1);
    state_.ring_k_scale = place(k_scale_, shape.key_heads * C, 0.05f, 0.1f);
    state_.ring_gram = place(gram_, ring_gram_size(shape, state_.capacity), -0.1f, 0.1f);
    state_.ring_v = place(v_, shape.heads * C * shape.value_size, -1, 1);
    state_.ring_decay = place(decay_, shape.heads * C * shape.gate_size, 0.9f, 1);
    state_.ring_beta = place(beta_, shape.heads * C, 0, 1);
    cycle_ = std::max(1, window / tokens);
    base_.assign(slots, 0);
    history_.assign(slots, 0);
    for (int64_t slot = 0; slot < slots; ++slot) slot_.push_back(static_cast<int32_t>(slot));
    workspace_ = Buffer<std::byte>(delta_workspace_bytes(shape, state_.capacity, device));
    reserve_tokens(int64_t{batch} * tokens);
  }

  float* memory() { return checkpoint_.data(); }
  size_t memory_floats() const { return checkpoint_.size(); }
  int cycle() const { return cycle_; }
  // Bytes of state and ring that the calls since the last take_bytes() had to move, and their tokens' inputs and
  // outputs.
  double take_bytes() { return std::exchange(bytes_, 0.0); }

  void spread_cursors() {
    for (size_t slot = 0; slot < slot_.size(); ++slot)
      history_[slot] = static_cast<int32_t>(slot % cycle_ + 1) * tokens_;
  }
  void clear_history() { std::ranges::fill(history_, 0); }

  void step() {
    delta_step({state_, next_rows(), inputs(), out_.data()}, device_, workspace());
    bytes_ += batch_ * (2 * state_bytes() + token_bytes());
  }

  void decode(Readout readout) {
    const StateRows rows = next_rows();
    delta_decode({state_, rows, tokens_, inputs(), readout, out_.data()}, device_, workspace());
    const bool is_half_read = state_.form == CheckpointForm::kPlanes && readout == Readout::kDirect;
    for (int b = 0; b < batch_; ++b) {
      int32_t& history = history_[set_ * batch_ + b];
      const bool is_flush = history + tokens_ > state_.window;
      bytes_ += states_moved(is_flush, is_half_read) * state_bytes() + history * record_bytes() +
                tokens_ * (record_bytes() + token_bytes());
      if (is_flush) {
        base_[set_ * batch_ + b] += history;
        history = 0;
      }
      history += tokens_;
    }
  }

  void prefill(int prompt_tokens) {
    reserve_tokens(int64_t{batch_} * prompt_tokens);
    std::vector<int32_t> begin;
    for (int b = 0; b <= batch_; ++b) begin.push_back(b * prompt_tokens);
    set_ = sets_ - 1;  // always the first set: a prompt's state has just been cleared, so it is in the cache
    delta_prefill({state_, next_rows(), begin.data(), inputs(), out_.data()}, device_, workspace());
    bytes_ += batch_ * (2 * state_bytes() + prompt_tokens * token_bytes());
  }

 private:
  double state_bytes() const { return 4.0 * shape_.heads * shape_.value_size * shape_.key_size; }
  double record_bytes() const {
    return 4.0 * (shape_.key_heads * (shape_.key_size + 1) + shape_.heads * (shape_.value_size + 1 + shape_.gate_size));
  }
  double token_bytes() const {
    return 4.0 * (2 * shape_.key_heads * shape_.key_size + 2 * shape_.heads * shape_.value_size +
                  shape_.heads * (1 + shape_.gate_size));
  }

  void reserve_tokens(int64_t tokens) {
    if (q_in_.size() >= static_cast<size_t>(tokens * shape_.key_heads * shape_.key_size)) return;
    const auto place = [&](Buffer<float>& buffer, int64_t per_token, float low, float high) {
      buffer = Buffer<float>(tokens * per_token);
      fill_random(buffer, low, high, static_cast<uint32_t>(per_token) + 1);
    };
    place(q_in_, shape_.key_heads * shape_.key_size, -1, 1);
    place(k_in_, shape_.key_heads * shape_.key_size, -1, 1);
    place(v_in_, shape_.heads * shape_.value_size, -1, 1);
    place(g_in_, shape_.heads * shape_.gate_size, -0.1f, 0);
    place(beta_in_, shape_.heads, 0, 1);
    place(out_, shape_.heads * shape_.value_size, 0, 0);
  }

  DeltaTokens inputs() const {
    const int64_t keys = int64_t{shape_.key_heads} * shape_.key_size;
    return {q_in_.data(),    k_in_.data(), v_in_.data(), g_in_.data(),
            beta_in_.data(), keys,         keys,         int64_t{shape_.heads} * shape_.value_size};
  }

  std::span<std::byte> workspace() { return {workspace_.data(), workspace_.size()}; }

  StateRows next_rows() {
    set_ = (set_ + 1) % sets_;
    const int64_t first = int64_t{set_} * batch_;
    return {batch_, &slot_[first], &base_[first], &history_[first], &slot_[first], &slot_[first]};
  }

  DeltaShape shape_;
  int batch_, tokens_, sets_ = 0, set_ = 0, cycle_ = 1;
  Device& device_;
  DeltaState state_;
  double bytes_ = 0;
  Buffer<float> checkpoint_, k_, k_scale_, gram_, v_, decay_, beta_;
  Buffer<float> q_in_, k_in_, v_in_, g_in_, beta_in_, out_;
  Buffer<std::byte> workspace_;
  std::vector<int32_t> slot_, history_;
  std::vector<int64_t> base_;
};

}  // namespace replayssm::bench
