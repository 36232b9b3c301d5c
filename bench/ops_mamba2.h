// A layer of Mamba-2 for timed runs: its state for several batches, their cursors, and its calls.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "bench/cursor_cycle.h"
#include "bench/op_memory.h"
#include "replayssm/ops/mamba2.h"

namespace replayssm::bench {

// A layer's state for `sets` batches, larger together than the caches, and their cursors spread evenly over the cycle.
class Mamba2Bench {
 public:
  Mamba2Bench(const Mamba2Shape& shape, int batch, int window, int tokens, CheckpointForm form, Device& device)
      : shape_(shape), batch_(batch), tokens_(tokens), device_(device) {
    const int64_t state_floats = int64_t{shape.heads} * shape.head_size * shape.state_size;
    sets_ = rotating_sets(batch * state_floats);
    const int64_t slots = int64_t{sets_} * batch;
    state_.shape = shape;
    state_.slots = state_.checkpoints = slots;
    state_.window = window;
    const int C = state_.capacity = window + tokens;
    state_.form = form;
    state_.checkpoint = place(checkpoint_, slots * state_floats, -1, 1);
    if (form == CheckpointForm::kPlanes) make_planes(checkpoint_);
    state_.ring_x = place(x_, slots * shape.heads * C * shape.head_size, -1, 1);
    state_.ring_b = place(b_, slots * shape.groups * C * shape.state_size, -1, 1);
    state_.ring_dt = place(dt_, slots * shape.heads * C, 0, 0.1f);
    state_.ring_decay = place(decay_, slots * shape.heads * C, 0.9f, 1);
    heads_ = {place(a_log_, shape.heads, -1, 1), place(d_, shape.heads, -1, 1)};
    cycle_ = std::max(1, window / tokens);
    base_.assign(slots, 0);
    history_.assign(slots, 0);
    for (int64_t slot = 0; slot < slots; ++slot) slot_.push_back(static_cast<int32_t>(slot));
    workspace_ = Buffer<std::byte>(mamba2_workspace_bytes(shape, C, device));
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
    mamba2_step({state_, next_rows(), heads_, inputs(), out_.data()}, device_, workspace());
    bytes_ += batch_ * (2 * state_bytes() + token_bytes());
  }

  void decode(Readout readout) {
    const StateRows rows = next_rows();
    mamba2_decode({state_, rows, heads_, tokens_, inputs(), readout, out_.data()}, device_, workspace());
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
    mamba2_prefill({state_, next_rows(), heads_, begin.data(), inputs(), out_.data()}, device_, workspace());
    bytes_ += batch_ * (2 * state_bytes() + prompt_tokens * token_bytes());
  }

 private:
  double state_bytes() const { return 4.0 * shape_.heads * shape_.head_size * shape_.state_size; }
  double record_bytes() const {
    return 4.0 * (shape_.groups * shape_.state_size + shape_.heads * (shape_.head_size + 2));
  }
  double token_bytes() const {
    return 4.0 * (2 * shape_.groups * shape_.state_size + shape_.heads * (2 * shape_.head_size + 1));
  }

  static float* place(Buffer<float>& buffer, int64_t count, float low, float high) {
    buffer = Buffer<float>(count);
    fill_random(buffer, low, high, static_cast<uint32_t>(count));
    return buffer.data();
  }

  void reserve_tokens(int64_t tokens) {
    if (dt_in_.size() >= static_cast<size_t>(tokens * shape_.heads)) return;
    place(x_in_, tokens * shape_.heads * shape_.head_size, -1, 1);
    place(b_in_, tokens * shape_.groups * shape_.state_size, -1, 1);
    place(c_in_, tokens * shape_.groups * shape_.state_size, -1, 1);
    place(dt_in_, tokens * shape_.heads, 0, 0.1f);
    place(out_, tokens * shape_.heads * shape_.head_size, 0, 0);
  }

  Mamba2Tokens inputs() const {
    const int64_t inner = int64_t{shape_.heads} * shape_.head_size, keys = int64_t{shape_.groups} * shape_.state_size;
    return {x_in_.data(), b_in_.data(), c_in_.data(), dt_in_.data(), nullptr, inner, keys, keys, 0};
  }

  std::span<std::byte> workspace() { return {workspace_.data(), workspace_.size()}; }

  StateRows next_rows() {
    set_ = (set_ + 1) % sets_;
    const int64_t first = int64_t{set_} * batch_;
    return {batch_, &slot_[first], &base_[first], &history_[first], &slot_[first], &slot_[first]};
  }

  Mamba2Shape shape_;
  int batch_, tokens_, sets_ = 0, set_ = 0, cycle_ = 1;
  Device& device_;
  Mamba2State state_;
  Mamba2Heads heads_;
  double bytes_ = 0;
  Buffer<float> checkpoint_, x_, b_, dt_, decay_, a_log_, d_;
  Buffer<float> x_in_, b_in_, c_in_, dt_in_, out_;
  Buffer<std::byte> workspace_;
  std::vector<int32_t> slot_, history_;
  std::vector<int64_t> base_;
};

}  // namespace replayssm::bench
