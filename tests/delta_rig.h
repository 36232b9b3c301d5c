// A layer of delta-rule state for tests: poisoned memory, a cursor a slot, and the four ops called on chosen rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/ops/delta.h"
#include "tests/arrays.h"
#include "tests/ref/delta.h"

namespace replayssm::test {

// Random inputs of N tokens: keys correlated as in trained models, gates from slow to fast.
struct DeltaInputs {
  DeltaInputs(const DeltaShape& of, int64_t tokens, std::mt19937_64& random, float g_low = -1.5f, float g_high = 0.0f)
      : shape(of),
        q(random_normal(random, tokens * shape.key_heads * shape.key_size)),
        k(random_normal(random, tokens * shape.key_heads * shape.key_size, 1.0f, 0.5f)),
        v(random_normal(random, tokens * shape.heads * shape.value_size)),
        g(random_uniform(random, tokens * shape.heads * shape.gate_size, g_low, g_high)),
        beta(random_uniform(random, tokens * shape.heads, 0.05f, 1.0f)) {}

  // Token `index` of `from` becomes token `to` here.
  void copy(int64_t to, const DeltaInputs& from, int64_t index) {
    const auto part = [&](std::vector<float>& target, const std::vector<float>& source, size_t size) {
      std::memcpy(&target[to * size], &source[index * size], size * sizeof(float));
    };
    part(q, from.q, size_t(shape.key_heads) * shape.key_size);
    part(k, from.k, size_t(shape.key_heads) * shape.key_size);
    part(v, from.v, size_t(shape.heads) * shape.value_size);
    part(g, from.g, size_t(shape.heads) * shape.gate_size);
    part(beta, from.beta, shape.heads);
  }

  // One number of a token's value, key or gate, of its first head.
  void set_value(int64_t token, float value) { v[token * shape.heads * shape.value_size] = value; }
  void set_key(int64_t token, float value) { k[token * shape.key_heads * shape.key_size] = value; }
  void set_gate(int64_t token, float value) { g[token * shape.heads * shape.gate_size] = value; }
  // All inputs of a token but beta; its log-decays get -value.
  void fill(int64_t token, float value) {
    std::fill_n(&q[token * shape.key_heads * shape.key_size], shape.key_heads * shape.key_size, value);
    std::fill_n(&k[token * shape.key_heads * shape.key_size], shape.key_heads * shape.key_size, value);
    std::fill_n(&v[token * shape.heads * shape.value_size], shape.heads * shape.value_size, value);
    std::fill_n(&g[token * shape.heads * shape.gate_size], shape.heads * shape.gate_size, -value);
  }

  DeltaTokens tokens(int64_t first = 0) const {
    const int64_t keys = int64_t(shape.key_heads) * shape.key_size, values = int64_t(shape.heads) * shape.value_size;
    return {&q[first * keys],
            &k[first * keys],
            &v[first * values],
            &g[first * shape.heads * shape.gate_size],
            &beta[first * shape.heads],
            keys,
            keys,
            values};
  }

  std::vector<double> step(ref::DeltaSequence& sequence, int64_t token) const {
    const DeltaTokens t = tokens(token);
    return ref::delta_step(sequence, t.q, t.k, t.v, t.g, t.beta);
  }

  DeltaShape shape;
  std::vector<float> q, k, v, g, beta;
};

class DeltaRig {
 public:
  struct Cursor {
    int64_t base = 0;
    int history = 0;
  };

  DeltaRig(const DeltaShape& shape, int slots, int window, int max_tokens, Device& device)
      : device_(device),
        capacity(window + max_tokens),
        cursors(slots),
        checkpoint(poisoned(size_t(slots) * shape.heads * shape.value_size * shape.key_size)),
        ring_k(poisoned(size_t(slots) * shape.key_heads * capacity * shape.key_size)),
        ring_k_scale(poisoned(size_t(slots) * shape.key_heads * capacity)),
        ring_gram(poisoned(slots * ring_gram_size(shape, capacity))),
        ring_v(poisoned(size_t(slots) * shape.heads * capacity * shape.value_size)),
        ring_decay(poisoned(size_t(slots) * shape.heads * capacity * shape.gate_size)),
        ring_beta(poisoned(size_t(slots) * shape.heads * capacity)) {
    state.shape = shape;
    state.slots = state.checkpoints = slots;
    state.window = window;
    state.capacity = capacity;
    state.checkpoint = checkpoint.data();
    state.ring_k = ring_k.data();
    state.ring_k_scale = ring_k_scale.data();
    if (!ring_gram.empty()) state.ring_gram = ring_gram.data();
    state.ring_v = ring_v.data();
    state.ring_decay = ring_decay.data();
    state.ring_beta = ring_beta.data();
    const size_t bytes = delta_workspace_bytes(shape, capacity, device);
    workspace_ = Buffer<float>(bytes / sizeof(float));
    for (int slot = 0; slot < slots; ++slot) clear(slot);
  }

  size_t state_size() const { return size_t(state.shape.heads) * state.shape.value_size * state.shape.key_size; }
  size_t out_size() const { return size_t(state.shape.heads) * state.shape.value_size; }
  std::span<float> slot_state(int slot) { return {&checkpoint[slot * state_size()], state_size()}; }
  std::vector<float> rings() const {
    std::vector<float> all;
    for (const std::vector<float>* ring : {&ring_k, &ring_k_scale, &ring_gram, &ring_v, &ring_decay, &ring_beta})
      all.insert(all.end(), ring->begin(), ring->end());
    return all;
  }
  void clear(int slot) {
    std::ranges::fill(slot_state(slot), 0.0f);
    cursors[slot] = {};
  }
  bool will_flush(int slot, int tokens) const { return cursors[slot].history + tokens > state.window; }

  // One conventional token a slot.
  std::vector<float> step(const std::vector<int>& slots, const DeltaTokens& tokens) {
    std::vector<float> out = poisoned(slots.size() * out_size());
    delta_step({state, rows(slots), tokens, out.data()}, device_, workspace());
    for (int slot : slots)
      if (slot != kPaddingSlot) cursors[slot] = {cursors[slot].base + cursors[slot].history + 1, 0};
    return out;
  }

  // A window a slot, not yet committed; a flush has moved the cursor to the folded state.
  std::vector<float> decode(const std::vector<int>& slots, int tokens_per_row, const DeltaTokens& tokens,
                            Readout readout) {
    std::vector<float> out = poisoned(slots.size() * tokens_per_row * out_size());
    delta_decode({state, rows(slots), tokens_per_row, tokens, readout, out.data()}, device_, workspace());
    for (int slot : slots)
      if (slot != kPaddingSlot && will_flush(slot, tokens_per_row))
        cursors[slot] = {cursors[slot].base + cursors[slot].history, 0};
    return out;
  }
  void commit(int slot, int accepted) { cursors[slot].history += accepted; }

  std::vector<float> prefill(const std::vector<int>& slots, const std::vector<int32_t>& begin,
                             const DeltaTokens& tokens) {
    std::vector<float> out = poisoned(begin.back() * out_size());
    delta_prefill({state, rows(slots), begin.data(), tokens, out.data()}, device_, workspace());
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
    delta_materialise({state, r}, device_, workspace());
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
  Buffer<float> workspace_;
  std::vector<int32_t> slot_, history_, checkpoint_out_;
  std::vector<int64_t> base_;

 public:
  DeltaState state;
  int capacity;
  std::vector<Cursor> cursors;
  std::vector<float> checkpoint, ring_k, ring_k_scale, ring_gram, ring_v, ring_decay, ring_beta;
};

}  // namespace replayssm::test
