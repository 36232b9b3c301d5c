// The delta rule for tests: random inputs, a layer's state in some memory, and the families that the laws run on.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "replayssm/ops/delta.h"
#include "tests/arrays.h"
#include "tests/recurrent_rig.h"
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

  // What a layer keeps in the type of its activations.
  std::vector<std::vector<float>*> elements() { return {&q, &k, &v}; }

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

// One layer's state and the ops on it, for RecurrentRig.
template <typename M>
class DeltaLayerState {
 public:
  using Memory = M;
  using Element = typename M::Element;
  using Out = typename M::Out;
  using Shape = DeltaShape;
  using Tokens = DeltaTokens;
  using StagedTokens = BasicDeltaTokens<Element>;
  template <typename T>
  using Array = typename M::template Array<T>;
  static constexpr const char* kName = "delta";

  DeltaLayerState(const DeltaShape& of, int slot_count, int window_records, int ring_capacity,
                  typename M::Device& device, const RigOptions& options)
      : memory(device, workspace_bytes(of, ring_capacity, device)),
        shape(of),
        checkpoint((options.checkpoints > 0 ? options.checkpoints : slot_count) * state_size(), memory,
                   options.form == CheckpointForm::kPlanes ? size_t(of.value_size) * of.key_size : 0),
        ring_k(size_t(slot_count) * of.key_heads * ring_capacity * of.key_size, memory),
        ring_k_scale(size_t(slot_count) * of.key_heads * ring_capacity, memory),
        ring_gram(slot_count * ring_gram_size(of, ring_capacity), memory),
        ring_v(size_t(slot_count) * of.heads * ring_capacity * of.value_size, memory),
        ring_decay(size_t(slot_count) * of.heads * ring_capacity * of.gate_size, memory),
        ring_beta(size_t(slot_count) * of.heads * ring_capacity, memory),
        sizes_{.shape = of,
               .slots = slot_count,
               .checkpoints = options.checkpoints > 0 ? options.checkpoints : slot_count,
               .window = window_records,
               .capacity = ring_capacity,
               .form = options.form} {}

  size_t state_size() const { return size_t(shape.heads) * shape.value_size * shape.key_size; }
  size_t out_size() const { return size_t(shape.heads) * shape.value_size; }

  // Calls each(array, pointer of `state`) for all arrays.
  template <typename Each>
  void visit(BasicDeltaState<Element>& state, Each&& each) {
    each(checkpoint, state.checkpoint);
    each(ring_k, state.ring_k);
    each(ring_k_scale, state.ring_k_scale);
    each(ring_gram, state.ring_gram);
    each(ring_v, state.ring_v);
    each(ring_decay, state.ring_decay);
    each(ring_beta, state.ring_beta);
  }
  // For an op, which may write all of it.
  BasicDeltaState<Element> state() {
    BasicDeltaState<Element> state = sizes_;
    visit(state, [](auto& array, auto*& pointer) { pointer = array.data(); });
    return state;
  }
  std::vector<std::span<const float>> ring_values() const {
    return {ring_k, ring_k_scale, ring_gram, ring_v, ring_decay, ring_beta};
  }

  // `count` tokens where an op reads them.
  StagedTokens staged(const DeltaTokens& from, int64_t count) {
    const size_t keys = size_t(shape.key_heads) * shape.key_size, values = out_size();
    StagedTokens to = {.q_stride = from.q_stride, .k_stride = from.k_stride, .v_stride = from.v_stride};
    to.q = memory.tokens(from.q, keys, count, to.q_stride);
    to.k = memory.tokens(from.k, keys, count, to.k_stride);
    to.v = memory.tokens(from.v, values, count, to.v_stride);
    to.g = memory.array(from.g, count * shape.heads * shape.gate_size);
    to.beta = memory.array(from.beta, count * shape.heads);
    return to;
  }

  void run_step(const BasicDeltaState<Element>& state, const StateRows& rows, const StagedTokens& tokens, Out* out) {
    delta_step(BasicDeltaStep<Element, Out>{state, rows, tokens, out}, memory.ready(), memory.workspace());
  }
  void run_decode(const BasicDeltaState<Element>& state, const StateRows& rows, int tokens_per_row,
                  const StagedTokens& tokens, Readout readout, Out* out) {
    delta_decode(BasicDeltaDecode<Element, Out>{state, rows, tokens_per_row, tokens, readout, out}, memory.ready(),
                 memory.workspace());
  }
  void run_prefill(const BasicDeltaState<Element>& state, const StateRows& rows, const int32_t* token_begin,
                   const StagedTokens& tokens, Out* out) {
    delta_prefill(BasicDeltaPrefill<Element, Out>{state, rows, token_begin, tokens, out}, memory.ready(),
                  memory.workspace());
  }
  void run_materialise(const BasicDeltaState<Element>& state, const StateRows& rows) {
    delta_materialise(BasicDeltaMaterialise<Element>{state, rows}, memory.ready(), memory.workspace());
  }

  M memory;
  DeltaShape shape;
  Array<float> checkpoint;
  Array<Element> ring_k;
  Array<float> ring_k_scale, ring_gram;
  Array<Element> ring_v;
  Array<float> ring_decay, ring_beta;

 private:
  static size_t workspace_bytes(const DeltaShape& of, int ring_capacity, Device& device) {
    return delta_workspace_bytes(of, ring_capacity, device);
  }
  static size_t workspace_bytes(const DeltaShape&, int, CudaDevice&) { return 0; }

  BasicDeltaState<Element> sizes_;  // without the arrays
};

using DeltaRig = RecurrentRig<DeltaLayerState<HostMemory>>;

// Gated DeltaNet or, with a gate a channel, KDA, for the laws.
template <bool kIsPerChannel, typename M = HostMemory>
struct DeltaFamily {
  using Memory = M;
  using Shape = DeltaShape;
  using Inputs = typename M::template RoundedInputs<DeltaInputs>;
  using Rig = RecurrentRig<DeltaLayerState<M>>;
  using Oracle = ref::DeltaSequence;
  static constexpr int kValueUnit = 4;

  // Head ratios 1 to 4 and a large one; 1, 2 and 8 key heads; sizes that are no powers of two; the models' own.
  static std::vector<NamedShape<DeltaShape>> shapes() {
    std::vector<NamedShape<DeltaShape>> all = {
        {"small", shape(4, 2, 32, 16)},
        {"ratio 1", shape(2, 2, 64, 64)},
        {"ratio 1, key heads 8", shape(8, 8, 16, 16)},
        {"ratio 2, key heads 8", shape(16, 8, 64, 8)},
        {"ratio 3, value 80", shape(6, 2, 128, 80)},
        {"ratio 4, key 256", shape(4, 1, 256, 12)},
        {"least", shape(3, 3, 16, 4)},
        {"key 48, value 20", shape(2, 1, 48, 20)},
        {"19 heads of one key head", shape(19, 1, 16, 8)},
        kIsPerChannel ? NamedShape<DeltaShape>{"kimi-linear-48b part", shape(2, 2, 128, 128)}
                      : NamedShape<DeltaShape>{"qwen3.5-4b part", shape(4, 2, 128, 128)}};
    std::erase_if(all, [](const auto& c) { return c.shape.key_size > M::kMaxKeySize; });
    return all;
  }
  static DeltaShape shape(int heads, int groups, int key_size, int value_size) {
    return {heads, groups, key_size, value_size, kIsPerChannel ? key_size : 1};
  }
  static ref::DeltaSequence oracle(const DeltaShape& shape) {
    return {shape.heads, shape.key_heads, shape.key_size, shape.value_size, shape.gate_size};
  }
  static std::vector<Corruption<Rig>> corruptions() {
    std::vector<Corruption<Rig>> kinds = {
        {"checkpoint", [](Rig& rig) { rig.checkpoint[5] += 1.0f; }},
        {"ring k", [](Rig& rig) { rig.ring_k[position(rig) * 32] += 2.0f; }},
        {"ring k scale", [](Rig& rig) { rig.ring_k_scale[position(rig)] *= 1.5f; }},
        {"ring v", [](Rig& rig) { rig.ring_v[position(rig) * 8] += 2.0f; }},
        {"ring decay", [](Rig& rig) { rig.ring_decay[position(rig) * rig.shape.gate_size] -= 0.5f; }},
        {"ring beta", [](Rig& rig) { rig.ring_beta[position(rig)] *= 0.5f; }}};
    // With a gate a channel there are no products to keep.
    if (!kIsPerChannel && M::kUsesGram)
      kinds.push_back({"ring gram", [](Rig& rig) {
                         const int64_t row = (rig.cursors[0].base + 2) % rig.capacity;
                         rig.ring_gram[row * rig.capacity + position(rig)] += 0.5f;
                       }});
    return kinds;
  }

 private:
  // The ring position of a record that is in view.
  static int64_t position(const Rig& rig) { return (rig.cursors[0].base + 1) % rig.capacity; }
};

}  // namespace replayssm::test
