// The gates of the delta rule and of Mamba-2 on the GPU, for kernels: a thread owns a pack of eight gates of one head,
// or one gate.
#pragma once

#include "replayssm/ops/delta.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/ops/pack.cuh"

namespace replayssm {

// g <- the gates of x, what they are before the activation; `rate` is e^A_log.
template <int kCount>
__device__ inline void delta_gates_of(const float (&x)[kCount], float rate, float lower_bound, float (&g)[kCount]) {
  if (lower_bound == 0.0f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) g[i] = -(rate * softplus(x[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) g[i] = lower_bound * sigmoid(rate * x[i]);
  }
}

// How a call's gates are spread over threads: first those of the packs, then one for each beta.
struct DeltaGateTiles {
  PackPlace place;
  uint32_t packs;  // a token
};
template <typename T>
DeltaGateTiles gate_tiles(const BasicDeltaGates<T>& args) {
  const uintptr_t places = reinterpret_cast<uintptr_t>(args.a) | reinterpret_cast<uintptr_t>(args.dt_bias) |
                           reinterpret_cast<uintptr_t>(args.g) | static_cast<uintptr_t>(args.a_stride) * sizeof(T);
  return {args.gate_size % kPackSize == 0 && places % 16 == 0 ? PackPlace::kAligned : PackPlace::kAnywhere,
          static_cast<uint32_t>(delta_gate_packs(args.heads, args.gate_size))};
}
struct Mamba2GateTiles {};  // one thread a head
template <typename T>
Mamba2GateTiles gate_tiles(const BasicMamba2Gates<T>&) {
  return {};
}

template <typename T>
int64_t gate_threads(const BasicDeltaGates<T>& args) {
  return args.tokens * delta_gate_threads(args.heads, args.gate_size);
}
template <typename T>
int64_t gate_threads(const BasicMamba2Gates<T>& args) {
  return args.tokens * args.heads;
}

// The pack `index` of a call with more than one gate a head.
template <typename T>
__device__ inline void make_gate_pack(const BasicDeltaGates<T>& args, DeltaGateTiles tiles, uint32_t index) {
  const PackPlace place = tiles.place;
  const uint32_t token = index / tiles.packs, in_token = index % tiles.packs, of_head = tiles.packs / args.heads;
  const int head = static_cast<int>(in_token / of_head), first = static_cast<int>(in_token % of_head) * kPackSize;
  const int64_t gate = static_cast<int64_t>(head) * args.gate_size + first;
  const int count = args.gate_size - first;
  float x[kPackSize], g[kPackSize];
  load_constants(args.dt_bias + gate, place, count, x);
  const float rate = expf(args.a_log[head]);
  const Pack<T> a = load_pack(args.a + token * args.a_stride + gate, place, count);
#pragma unroll
  for (int i = 0; i < kPackSize; ++i) x[i] = element(a, i) + x[i];
  delta_gates_of(x, rate, args.lower_bound, g);
  store_pack(pack_of<float>(g), args.g + (token * static_cast<int64_t>(args.heads) * args.gate_size + gate), place,
             count);
}

// What thread `thread` of gate_threads(args) makes; nothing from there on.
template <typename T>
__device__ inline void make_gates(const BasicDeltaGates<T>& args, DeltaGateTiles tiles, int64_t thread) {
  const int64_t packs = args.tokens * tiles.packs;
  if (thread >= packs) {
    const auto index = static_cast<uint32_t>(thread - packs);
    const uint32_t token = index / args.heads, head = index % args.heads;
    if (token < args.tokens) args.beta[index] = sigmoid(to_number(args.b[token * args.b_stride + head]));
  } else if (args.gate_size > 1) {
    make_gate_pack(args, tiles, static_cast<uint32_t>(thread));
  } else {
    const auto index = static_cast<uint32_t>(thread);
    const uint32_t token = index / args.heads, head = index % args.heads;
    const float x[1] = {to_number(args.a[token * args.a_stride + head]) + args.dt_bias[head]};
    float g[1];
    delta_gates_of(x, expf(args.a_log[head]), args.lower_bound, g);
    args.g[index] = g[0];
  }
}

template <typename T>
__device__ inline void make_gates(const BasicMamba2Gates<T>& args, Mamba2GateTiles, int64_t thread) {
  const auto index = static_cast<uint32_t>(thread);
  const uint32_t token = index / args.heads, head = index % args.heads;
  if (token >= args.tokens) return;
  const float u = to_number(args.dt[token * args.dt_stride + head]) + args.dt_bias[head];
  float dt = softplus(u);
  // Comparisons, not fminf and fmaxf: those drop a NaN.
  if (dt < args.time_step_min) dt = args.time_step_min;
  if (dt > args.time_step_max) dt = args.time_step_max;
  args.out[index] = dt;
}

}  // namespace replayssm
