// A layer of Mamba-2 state for tests: poisoned memory, a cursor a slot, and the four ops called on chosen rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/ops/mamba2.h"
#include "tests/arrays.h"
#include "tests/ref/mamba2.h"

namespace replayssm::test {

// A layer's weights, a function of its shape: decays that differ between neighbouring heads by up to 4 times.
struct Mamba2Layer {
  explicit Mamba2Layer(const Mamba2Shape& shape, bool use_d = true) {
    for (int h = 0; h < shape.heads; ++h) {
      a_log.push_back(0.7f * float(h % 3) - 0.6f);
      if (use_d) d.push_back(1.0f - 0.3f * float(h % 5));
    }
  }
  Mamba2Heads heads() const { return {a_log.data(), d.empty() ? nullptr : d.data()}; }

  std::vector<float> a_log, d;
};

// Random inputs of tokens: B and C with a mean, as after a trained layer's silu; log-decays A dt' from g_low to g_high.
struct Mamba2Inputs {
  Mamba2Inputs(const Mamba2Shape& of, int64_t tokens, std::mt19937_64& random, float g_low = -1.5f, float g_high = 0.0f,
               bool use_z = false, bool use_d = true)
      : shape(of),
        layer(of, use_d),
        x(random_normal(random, tokens * shape.heads * shape.head_size)),
        b(random_normal(random, tokens * shape.groups * shape.state_size, 1.0f, 0.5f)),
        c(random_normal(random, tokens * shape.groups * shape.state_size, 1.0f, 0.2f)),
        dt(random_uniform(random, tokens * shape.heads, -g_high, -g_low)) {
    for (size_t i = 0; i < dt.size(); ++i) dt[i] /= std::exp(layer.a_log[i % shape.heads]);
    if (use_z) z = random_normal(random, x.size());
  }

  // Token `index` of `from` becomes token `to` here.
  void copy(int64_t to, const Mamba2Inputs& from, int64_t index) {
    const auto part = [&](std::vector<float>& target, const std::vector<float>& source, size_t size) {
      if (!source.empty()) std::memcpy(&target[to * size], &source[index * size], size * sizeof(float));
    };
    part(x, from.x, size_t(shape.heads) * shape.head_size);
    part(b, from.b, size_t(shape.groups) * shape.state_size);
    part(c, from.c, size_t(shape.groups) * shape.state_size);
    part(dt, from.dt, shape.heads);
    part(z, from.z, size_t(shape.heads) * shape.head_size);
  }

  // One number of a token's value, key or gate, of its first head.
  void set_value(int64_t token, float value) { x[token * shape.heads * shape.head_size] = value; }
  void set_key(int64_t token, float value) { b[token * shape.groups * shape.state_size] = value; }
  void set_gate(int64_t token, float value) { dt[token * shape.heads] = value; }
  // All inputs of a token but z.
  void fill(int64_t token, float value) {
    std::fill_n(&x[token * shape.heads * shape.head_size], shape.heads * shape.head_size, value);
    std::fill_n(&b[token * shape.groups * shape.state_size], shape.groups * shape.state_size, value);
    std::fill_n(&c[token * shape.groups * shape.state_size], shape.groups * shape.state_size, value);
    std::fill_n(&dt[token * shape.heads], shape.heads, value);
  }

  Mamba2Tokens tokens(int64_t first = 0) const {
    const int64_t inner = int64_t(shape.heads) * shape.head_size, keys = int64_t(shape.groups) * shape.state_size;
    return {&x[first * inner],
            &b[first * keys],
            &c[first * keys],
            &dt[first * shape.heads],
            z.empty() ? nullptr : &z[first * inner],
            inner,
            keys,
            keys,
            inner};
  }

  std::vector<double> step(ref::Mamba2Sequence& sequence, int64_t token) const {
    const Mamba2Tokens t = tokens(token);
    return ref::mamba2_step(sequence, t.x, t.b, t.c, t.dt, t.z, layer.heads().a_log, layer.heads().d);
  }

  Mamba2Shape shape;
  Mamba2Layer layer;
  std::vector<float> x, b, c, dt, z;
};

class Mamba2Rig {
 public:
  struct Cursor {
    int64_t base = 0;
    int history = 0;
  };

  Mamba2Rig(const Mamba2Shape& shape, int slots, int window, int max_tokens, Device& device, bool use_d = true)
      : device_(device),
        layer_(shape, use_d),
        capacity(window + max_tokens),
        cursors(slots),
        checkpoint(poisoned(size_t(slots) * shape.heads * shape.head_size * shape.state_size)),
        ring_x(poisoned(size_t(slots) * shape.heads * capacity * shape.head_size)),
        ring_b(poisoned(size_t(slots) * shape.groups * capacity * shape.state_size)),
        ring_dt(poisoned(size_t(slots) * shape.heads * capacity)),
        ring_decay(ring_dt) {
    state.shape = shape;
    state.slots = state.checkpoints = slots;
    state.window = window;
    state.capacity = capacity;
    state.checkpoint = checkpoint.data();
    state.ring_x = ring_x.data();
    state.ring_b = ring_b.data();
    state.ring_dt = ring_dt.data();
    state.ring_decay = ring_decay.data();
    workspace_ = Buffer<float>(mamba2_workspace_bytes(shape, capacity, device) / sizeof(float));
    for (int slot = 0; slot < slots; ++slot) clear(slot);
  }

  size_t state_size() const { return size_t(state.shape.heads) * state.shape.head_size * state.shape.state_size; }
  size_t out_size() const { return size_t(state.shape.heads) * state.shape.head_size; }
  std::span<float> slot_state(int slot) { return {&checkpoint[slot * state_size()], state_size()}; }
  std::vector<float> rings() const {
    std::vector<float> all;
    for (const std::vector<float>* ring : {&ring_x, &ring_b, &ring_dt, &ring_decay})
      all.insert(all.end(), ring->begin(), ring->end());
    return all;
  }
  void clear(int slot) {
    std::ranges::fill(slot_state(slot), 0.0f);
    cursors[slot] = {};
  }
  bool will_flush(int slot, int tokens) const { return cursors[slot].history + tokens > state.window; }
  Mamba2Heads heads() const { return layer_.heads(); }

  // One conventional token a slot.
  std::vector<float> step(const std::vector<int>& slots, const Mamba2Tokens& tokens) {
    std::vector<float> out = poisoned(slots.size() * out_size());
    mamba2_step({state, rows(slots), heads(), tokens, out.data()}, device_, workspace());
    for (int slot : slots)
      if (slot != kPaddingSlot) cursors[slot] = {cursors[slot].base + cursors[slot].history + 1, 0};
    return out;
  }

  // A window a slot, not yet committed; a flush has moved the cursor to the folded state.
  std::vector<float> decode(const std::vector<int>& slots, int tokens_per_row, const Mamba2Tokens& tokens,
                            Readout readout) {
    std::vector<float> out = poisoned(slots.size() * tokens_per_row * out_size());
    mamba2_decode({state, rows(slots), heads(), tokens_per_row, tokens, readout, out.data()}, device_, workspace());
    for (int slot : slots)
      if (slot != kPaddingSlot && will_flush(slot, tokens_per_row))
        cursors[slot] = {cursors[slot].base + cursors[slot].history, 0};
    return out;
  }
  void commit(int slot, int accepted) { cursors[slot].history += accepted; }

  std::vector<float> prefill(const std::vector<int>& slots, const std::vector<int32_t>& begin,
                             const Mamba2Tokens& tokens) {
    std::vector<float> out = poisoned(begin.back() * out_size());
    mamba2_prefill({state, rows(slots), heads(), begin.data(), tokens, out.data()}, device_, workspace());
    for (size_t b = 0; b < slots.size(); ++b)
      if (slots[b] != kPaddingSlot)
        cursors[slots[b]] = {cursors[slots[b]].base + cursors[slots[b]].history + begin[b + 1] - begin[b], 0};
    return out;
  }

  // The state of `from` with its first `records` records folded, into the checkpoint of slot `to`.
  void materialise(int from, int to, int records) {
    StateRows r = rows({from});
    history_[0] = records;
    checkpoint_out_[0] = to;
    mamba2_materialise({state, r}, device_, workspace());
  }

  // Rows for a call; the checkpoints are the slots' own. Valid until the next call.
  StateRows rows(const std::vector<int>& slots) {
    slot_.assign(slots.begin(), slots.end());
    base_.clear();
    history_.clear();
    for (int slot : slots) {
      // Slots that do not exist are for the op to refuse.
      const Cursor cursor = slot >= 0 && slot < int(cursors.size()) ? cursors[slot] : Cursor();
      base_.push_back(cursor.base);
      history_.push_back(cursor.history);
    }
    checkpoint_out_ = slot_;
    return {int(slots.size()), slot_.data(), base_.data(), history_.data(), slot_.data(), checkpoint_out_.data()};
  }

  std::span<std::byte> workspace() {
    std::ranges::fill(workspace_, kPoison);
    return {reinterpret_cast<std::byte*>(workspace_.data()), workspace_.size() * sizeof(float)};
  }

 private:
  Device& device_;
  Mamba2Layer layer_;
  Buffer<float> workspace_;
  std::vector<int32_t> slot_, history_, checkpoint_out_;
  std::vector<int64_t> base_;

 public:
  Mamba2State state;
  int capacity;
  std::vector<Cursor> cursors;
  std::vector<float> checkpoint, ring_x, ring_b, ring_dt, ring_decay;
};

}  // namespace replayssm::test
