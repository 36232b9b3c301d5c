// Mamba-2 for tests: random inputs, a layer's state in some memory, and the family that the laws run on.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "replayssm/ops/mamba2.h"
#include "tests/arrays.h"
#include "tests/recurrent_rig.h"
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

  // What a layer keeps in the type of its activations.
  std::vector<std::vector<float>*> elements() { return {&x, &b, &c, &z}; }

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

// One layer's state and the ops on it, for RecurrentRig.
template <typename M>
class Mamba2LayerState {
 public:
  using Memory = M;
  using Element = typename M::Element;
  using Out = typename M::Out;
  using Shape = Mamba2Shape;
  using Tokens = Mamba2Tokens;
  struct StagedTokens : BasicMamba2Tokens<Element> {
    Mamba2Heads heads;
  };
  template <typename T>
  using Array = typename M::template Array<T>;
  static constexpr const char* kName = "mamba2";

  Mamba2LayerState(const Mamba2Shape& of, int slot_count, int window_records, int ring_capacity,
                   typename M::Device& device, const RigOptions& options)
      : memory(device, workspace_bytes(of, ring_capacity, device)),
        shape(of),
        checkpoint((options.checkpoints > 0 ? options.checkpoints : slot_count) * state_size(), memory,
                   options.form == CheckpointForm::kPlanes ? size_t(of.head_size) * of.state_size : 0),
        ring_x(size_t(slot_count) * of.heads * ring_capacity * of.head_size, memory),
        ring_b(size_t(slot_count) * of.groups * ring_capacity * of.state_size, memory),
        ring_dt(size_t(slot_count) * of.heads * ring_capacity, memory),
        ring_decay(size_t(slot_count) * of.heads * ring_capacity, memory),
        layer_(of, options.use_d),
        sizes_{.shape = of,
               .slots = slot_count,
               .checkpoints = options.checkpoints > 0 ? options.checkpoints : slot_count,
               .window = window_records,
               .capacity = ring_capacity,
               .form = options.form} {}

  size_t state_size() const { return size_t(shape.heads) * shape.head_size * shape.state_size; }
  size_t out_size() const { return size_t(shape.heads) * shape.head_size; }
  Mamba2Heads heads() const { return layer_.heads(); }

  // Calls each(array, pointer of `state`) for all arrays.
  template <typename Each>
  void visit(BasicMamba2State<Element>& state, Each&& each) {
    each(checkpoint, state.checkpoint);
    each(ring_x, state.ring_x);
    each(ring_b, state.ring_b);
    each(ring_dt, state.ring_dt);
    each(ring_decay, state.ring_decay);
  }
  // For an op, which may write all of it.
  BasicMamba2State<Element> state() {
    BasicMamba2State<Element> state = sizes_;
    visit(state, [](auto& array, auto*& pointer) { pointer = array.data(); });
    return state;
  }
  std::vector<std::span<const float>> ring_values() const { return {ring_x, ring_b, ring_dt, ring_decay}; }

  // `count` tokens and the layer's weights where an op reads them.
  StagedTokens staged(const Mamba2Tokens& from, int64_t count) {
    const size_t inner = out_size(), keys = size_t(shape.groups) * shape.state_size;
    StagedTokens to;
    to.x_stride = from.x_stride;
    to.b_stride = from.b_stride;
    to.c_stride = from.c_stride;
    to.z_stride = from.z_stride;
    to.x = memory.tokens(from.x, inner, count, to.x_stride);
    to.b = memory.tokens(from.b, keys, count, to.b_stride);
    to.c = memory.tokens(from.c, keys, count, to.c_stride);
    to.dt = memory.array(from.dt, count * shape.heads);
    if (from.z != nullptr) to.z = memory.tokens(from.z, inner, count, to.z_stride);
    to.heads.a_log = memory.array(heads().a_log, shape.heads);
    if (heads().d != nullptr) to.heads.d = memory.array(heads().d, shape.heads);
    return to;
  }

  void run_step(const BasicMamba2State<Element>& state, const StateRows& rows, const StagedTokens& tokens, Out* out) {
    mamba2_step(BasicMamba2Step<Element, Out>{state, rows, tokens.heads, tokens, out}, memory.ready(),
                memory.workspace());
  }
  void run_decode(const BasicMamba2State<Element>& state, const StateRows& rows, int tokens_per_row,
                  const StagedTokens& tokens, Readout readout, Out* out) {
    mamba2_decode(BasicMamba2Decode<Element, Out>{state, rows, tokens.heads, tokens_per_row, tokens, readout, out},
                  memory.ready(), memory.workspace());
  }
  void run_prefill(const BasicMamba2State<Element>& state, const StateRows& rows, const int32_t* token_begin,
                   const StagedTokens& tokens, Out* out) {
    mamba2_prefill(BasicMamba2Prefill<Element, Out>{state, rows, tokens.heads, token_begin, tokens, out},
                   memory.ready(), memory.workspace());
  }
  void run_materialise(const BasicMamba2State<Element>& state, const StateRows& rows) {
    mamba2_materialise(BasicMamba2Materialise<Element>{state, rows}, memory.ready(), memory.workspace());
  }

  M memory;
  Mamba2Shape shape;
  Array<float> checkpoint;
  Array<Element> ring_x, ring_b;
  Array<float> ring_dt, ring_decay;

 private:
  static size_t workspace_bytes(const Mamba2Shape& of, int ring_capacity, Device& device) {
    return mamba2_workspace_bytes(of, ring_capacity, device);
  }
  static size_t workspace_bytes(const Mamba2Shape&, int, CudaDevice&) { return 0; }

  Mamba2Layer layer_;
  BasicMamba2State<Element> sizes_;  // without the arrays
};

using Mamba2Rig = RecurrentRig<Mamba2LayerState<HostMemory>>;

// For the laws.
template <typename M = HostMemory>
struct Mamba2Family {
  using Memory = M;
  using Shape = Mamba2Shape;
  using Inputs = typename M::template RoundedInputs<Mamba2Inputs>;
  using Rig = RecurrentRig<Mamba2LayerState<M>>;
  using Oracle = ref::Mamba2Sequence;
  static constexpr int kValueUnit = 8;

  // Head ratios 1 to 4 and one that is cut into parts; 1, 2 and 8 groups; sizes that are no powers of two.
  static std::vector<NamedShape<Mamba2Shape>> shapes() {
    std::vector<NamedShape<Mamba2Shape>> all = {{"small", {4, 2, 8, 32}},
                                                {"ratio 1, groups 8", {8, 8, 16, 16}},
                                                {"ratio 2, groups 8", {16, 8, 8, 64}},
                                                {"ratio 3, head 80", {6, 2, 80, 128}},
                                                {"ratio 4, state 256", {4, 1, 8, 256}},
                                                {"least", {3, 3, 8, 16}},
                                                {"state 48, head 24", {2, 1, 24, 48}},
                                                {"19 heads of one group", {19, 1, 8, 16}},
                                                {"nemotron-3-nano part", {12, 2, 64, 128}}};
    std::erase_if(all, [](const auto& c) { return c.shape.state_size > M::kMaxKeySize; });
    return all;
  }
  static Mamba2Shape shape(int heads, int groups, int key_size, int value_size) {
    return {heads, groups, value_size, key_size};
  }
  static ref::Mamba2Sequence oracle(const Mamba2Shape& shape) {
    return {shape.heads, shape.groups, shape.head_size, shape.state_size};
  }
  static std::vector<Corruption<Rig>> corruptions() {
    return {{"checkpoint", [](Rig& rig) { rig.checkpoint[5] += 2.0f; }},
            {"ring x", [](Rig& rig) { rig.ring_x[position(rig) * 8] += 4.0f; }},
            {"ring b", [](Rig& rig) { rig.ring_b[position(rig) * 32] += 4.0f; }},
            {"ring decay", [](Rig& rig) { rig.ring_decay[position(rig)] *= 0.5f; }},
            {"ring dt", [](Rig& rig) { rig.ring_dt[position(rig)] += 0.5f; }}};
  }

 private:
  // The ring position of a record that is in view.
  static int64_t position(const Rig& rig) { return (rig.cursors[0].base + 1) % rig.capacity; }
};

}  // namespace replayssm::test
