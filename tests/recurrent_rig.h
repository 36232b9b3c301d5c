// A layer of recurrent state for tests: poisoned memory, a cursor a slot, and the four ops called on chosen rows. What
// a family's arrays and ops are is said in delta_rig.h and mamba2_rig.h, where the memory is here and in cuda_memory.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/rows.h"
#include "tests/arrays.h"
#include "tests/planes.h"
#include "tests/tolerance.h"

namespace replayssm::test {

struct RigOptions {
  bool use_d = true;    // Mamba-2's D
  int checkpoints = 0;  // 0: as many as slots
  CheckpointForm form = CheckpointForm::kWords;
};

template <typename Shape>
struct NamedShape {
  const char* name;
  Shape shape;
};

// Spoils one stored number of a rig.
template <typename Rig>
struct Corruption {
  const char* name;
  void (*corrupt)(Rig&);
};

class HostMemory;

// An array of a layer's state on the CPU, at first poison.
template <typename T>
class HostArray {
 public:
  // plane_head_size: the words of a head of a checkpoint that is kept as planes; else 0.
  HostArray(size_t count, HostMemory&, size_t plane_head_size = 0)
      : plane_head_size_(plane_head_size), values_(poisoned(count)) {}

  size_t size() const { return values_.size(); }
  float& operator[](size_t index) { return values()[index]; }
  std::span<float> values() {
    join();
    is_changed_ = true;
    return values_;
  }
  std::span<const float> values() const {
    join();
    return values_;
  }
  operator std::span<const float>() const { return values(); }

  // For an op, which may write it.
  T* data() {
    if (plane_head_size_ == 0) return values_.empty() ? nullptr : values_.data();
    if (is_changed_) planes_ = to_planes(values_, plane_head_size_);
    is_changed_ = false;
    is_stale_ = true;
    return reinterpret_cast<T*>(planes_.data());
  }

 private:
  void join() const {
    if (is_stale_) from_planes(planes_, plane_head_size_, values_);
    is_stale_ = false;
  }

  size_t plane_head_size_;
  mutable std::vector<T> values_;
  std::vector<uint16_t> planes_;
  mutable bool is_stale_ = false;  // the values are older
  bool is_changed_ = true;         // the planes are
};

// The CPU's memory: an op gets the arrays of a test as they are.
class HostMemory {
 public:
  using Device = replayssm::Device;
  using Element = float;
  using Out = float;
  template <typename T>
  using Array = HostArray<T>;
  template <typename Inputs>
  using RoundedInputs = Inputs;
  static constexpr int kMaxKeySize = 256;
  static constexpr int kMaxRecords = 1 << 16;   // a window and a step's tokens together
  static constexpr bool kUsesGram = true;       // of keys with one gate a head, kept in the ring
  static constexpr bool kPrefillSteps = false;  // a prefill runs the step's update token by token
  static constexpr double kOutBound = kFloat32Bound;
  static const char* missing() { return nullptr; }
  static Device device(int threads) { return Device(threads); }

  HostMemory(Device& device, size_t workspace_bytes) : device_(device), workspace_(workspace_bytes / sizeof(float)) {}

  // A call: begin, its arguments and results, then the op with ready() and workspace(), then finish.
  void begin() {}
  StateRows rows(const StateRows& rows) { return rows; }
  template <typename T>
  const T* array(const T* values, size_t) {
    return values;
  }
  const float* tokens(const float* values, size_t, int64_t, int64_t&) { return values; }
  float* results(size_t count) {
    results_ = poisoned(count);
    return results_.data();
  }
  Device& ready() { return device_; }
  std::span<std::byte> workspace() {
    std::ranges::fill(workspace_, kPoison);
    return {reinterpret_cast<std::byte*>(workspace_.data()), workspace_.size() * sizeof(float)};
  }
  std::vector<float> finish() { return std::move(results_); }

 private:
  Device& device_;
  Buffer<float> workspace_;
  std::vector<float> results_;
};

// State: the family's arrays in a memory, with
//   memory; shape; checkpoint; state(); visit(state, each); state_size(), out_size();
//   staged(tokens, count); step, decode, prefill and materialise as run_*(state, arguments)
template <typename State>
class RecurrentRig : public State {
 public:
  using Device = typename State::Memory::Device;
  using Shape = typename State::Shape;
  using Tokens = typename State::Tokens;
  struct Cursor {
    int64_t base = 0;
    int history = 0;
  };

  // The checkpoint of a slot is the one of its number, until a test says otherwise.
  RecurrentRig(const Shape& of, int slots, int window, int max_tokens, Device& device, const RigOptions& options = {})
      : State(of, slots, window, window + max_tokens, device, options),
        capacity(window + max_tokens),
        cursors(slots),
        window_(window) {
    for (int slot = 0; slot < slots; ++slot) {
      checkpoint_in.push_back(slot);
      checkpoint_out.push_back(slot);
      clear(slot);
    }
  }

  std::span<float> slot_state(int slot) {
    return this->checkpoint.values().subspan(slot * this->state_size(), this->state_size());
  }
  std::span<const float> slot_state(int slot) const {
    return this->checkpoint.values().subspan(slot * this->state_size(), this->state_size());
  }
  std::vector<float> rings() const {
    std::vector<float> all;
    for (const std::span<const float> ring : this->ring_values()) all.insert(all.end(), ring.begin(), ring.end());
    return all;
  }
  void clear(int slot) {
    std::ranges::fill(slot_state(slot), 0.0f);
    cursors[slot] = {};
  }
  bool will_flush(int slot, int tokens) const {
    const int history = cursors[slot].history;
    return history + tokens > window_ || (!flush_limits.empty() && history >= flush_limits[slot]);
  }

  // One conventional token a slot.
  std::vector<float> step(const std::vector<int>& slots, const Tokens& tokens) {
    const Call call = begin(slots, tokens, slots.size());
    this->run_step(this->state(), call.rows, call.tokens, call.out);
    std::vector<float> out = this->memory.finish();
    for (int slot : slots)
      if (slot != kPaddingSlot) move_to(slot, 1);
    return out;
  }

  // A window a slot, not yet committed; a flush has moved the cursor to the folded state, and the slot's limit to L.
  std::vector<float> decode(const std::vector<int>& slots, int tokens_per_row, const Tokens& tokens, Readout readout) {
    const Call call = begin(slots, tokens, slots.size() * tokens_per_row);
    this->run_decode(this->state(), call.rows, tokens_per_row, call.tokens, readout, call.out);
    std::vector<float> out = this->memory.finish();
    for (int slot : slots) {
      if (slot == kPaddingSlot || !will_flush(slot, tokens_per_row)) continue;
      move_to(slot, 0);
      if (!flush_limits.empty()) flush_limits[slot] = window_;
    }
    return out;
  }
  void commit(int slot, int accepted) { cursors[slot].history += accepted; }

  std::vector<float> prefill(const std::vector<int>& slots, const std::vector<int32_t>& token_begin,
                             const Tokens& tokens) {
    const Call call = begin(slots, tokens, token_begin.back());
    const int32_t* begins = this->memory.array(token_begin.data(), token_begin.size());
    this->run_prefill(this->state(), call.rows, begins, call.tokens, call.out);
    std::vector<float> out = this->memory.finish();
    for (size_t b = 0; b < slots.size(); ++b)
      if (slots[b] != kPaddingSlot) move_to(slots[b], token_begin[b + 1] - token_begin[b]);
    return out;
  }

  // The state of `from` with its first `records` records folded, into checkpoint `to`.
  void materialise(int from, int to, int records) {
    StateRows host = rows({from});
    history_[0] = records;
    out_[0] = to;
    this->memory.begin();
    this->memory.results(0);
    this->run_materialise(this->state(), this->memory.rows(host));
    this->memory.finish();
  }

  // Rows for a call, in the test's memory. Valid until the next call.
  StateRows rows(const std::vector<int>& slots) {
    slot_.assign(slots.begin(), slots.end());
    in_ = out_ = slot_;
    base_.assign(slots.size(), 0);
    history_.assign(slots.size(), 0);
    limit_.assign(slots.size(), 0);
    for (size_t b = 0; b < slots.size(); ++b) {
      // Slots that do not exist are for the op to refuse.
      if (slots[b] < 0 || slots[b] >= static_cast<int>(cursors.size())) continue;
      base_[b] = cursors[slots[b]].base;
      history_[b] = cursors[slots[b]].history;
      in_[b] = checkpoint_in[slots[b]];
      out_[b] = checkpoint_out[slots[b]];
      if (!flush_limits.empty()) limit_[b] = flush_limits[slots[b]];
    }
    return {static_cast<int>(slots.size()),
            slot_.data(),
            base_.data(),
            history_.data(),
            in_.data(),
            out_.data(),
            flush_limits.empty() ? nullptr : limit_.data()};
  }

 private:
  struct Call {
    StateRows rows;
    typename State::StagedTokens tokens;
    typename State::Memory::Out* out;
  };
  Call begin(const std::vector<int>& slots, const Tokens& tokens, size_t count) {
    this->memory.begin();
    return {this->memory.rows(rows(slots)), this->staged(tokens, static_cast<int64_t>(count)),
            this->memory.results(count * this->out_size())};
  }
  // After a write of the slot's checkpoint: its history and `tokens` more are in it.
  void move_to(int slot, int tokens) {
    cursors[slot] = {cursors[slot].base + cursors[slot].history + tokens, 0};
    checkpoint_in[slot] = checkpoint_out[slot];
  }

 public:
  int capacity;
  std::vector<Cursor> cursors;
  std::vector<int32_t> checkpoint_in, checkpoint_out;
  std::vector<int32_t> flush_limits;  // of the slots; empty: rows have none

 private:
  int window_;
  std::vector<int32_t> slot_, history_, in_, out_, limit_;
  std::vector<int64_t> base_;
};

}  // namespace replayssm::test
