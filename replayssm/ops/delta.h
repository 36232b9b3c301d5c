// The delta rule (Gated DeltaNet, Kimi Delta Attention): conventional step, prefill, ReplaySSM decode, materialise.
// Sources: Yang et al., "Gated Delta Networks" (arXiv 2412.06464); Kimi Linear (arXiv 2510.26692); docs/math.md.
//
// For one slot and value head, state S [V, K] (a row is a value channel; the key channel is contiguous), one token is
//
//   q^ = q / sqrt(|q|^2 + 1e-6) * K^-1/2        k^ = k / sqrt(|k|^2 + 1e-6)
//   S <- S Diag(e^g);  d = beta (v - S k^);  S <- S + d k^^T;  o = S q^
//
// g <= 0 is one number a head (Gated DeltaNet, gate_size 1) or one a key channel (KDA, gate_size K). Everything is
// FP32. All functions below run the recurrence through one update in one order of arithmetic, so a state reached by
// replay and fold has the bits of the state reached by delta_step, whatever the batch, the thread count and the
// windows. Rows may be non-finite: that spoils their own outputs and state alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// value_size: a multiple of 4. key_size: a multiple of 16, at most 256. heads % key_heads == 0. gate_size: 1 or
// key_size.
struct DeltaShape {
  int heads = 0;       // H
  int key_heads = 0;   // G
  int key_size = 0;    // K
  int value_size = 0;  // V
  int gate_size = 1;

  friend bool operator==(const DeltaShape&, const DeltaShape&) = default;
};

// One layer's state for all slots of a pool. The ring keeps the inputs of the recurrence, nothing computed from a read
// of the state: k raw, with 1 / sqrt(|k|^2 + 1e-6) beside it; the decays e^g; and, with one gate a head, the products
// of each record's k^ with the k^ of older records of its window, which depend on no query. T is the type of the
// layer's activations: float on the CPU; float, Bf16 or Fp16 on a GPU. k and v are kept in it, unrounded.
template <typename T>
struct BasicDeltaState {
  DeltaShape shape;
  int64_t slots = 0;
  int64_t checkpoints = 0;
  int window = 0;                 // L >= 1
  int capacity = 0;               // C > L
  float* checkpoint = nullptr;    // [checkpoints, H, V, K], or as planes (rows.h)
  T* ring_k = nullptr;            // [slots, G, C, K]
  float* ring_k_scale = nullptr;  // [slots, G, C]
  float* ring_gram = nullptr;     // [slots, G, C, C]  row: the later record's position, column: the earlier one's;
                                  // null if gate_size > 1; a GPU does not use it
  T* ring_v = nullptr;            // [slots, H, C, V]
  float* ring_decay = nullptr;    // [slots, H, C, gate_size]
  float* ring_beta = nullptr;     // [slots, H, C]
  CheckpointForm form = CheckpointForm::kWords;
};
using DeltaState = BasicDeltaState<float>;

// The inputs of N tokens. Consecutive tokens of q, k and v are `*_stride` elements apart, so that all three may lie in
// one row of a projection; within a token heads are contiguous. g and beta are dense. None may overlap an output.
template <typename T>
struct BasicDeltaTokens {
  const T* q = nullptr;         // [N, G, K], q_stride
  const T* k = nullptr;         // [N, G, K], k_stride
  const T* v = nullptr;         // [N, H, V], v_stride
  const float* g = nullptr;     // [N, H, gate_size] log-decay, <= 0
  const float* beta = nullptr;  // [N, H]
  int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  // On a GPU, whether the kernel queued just before makes the tokens, has itself waited for all that was queued before
  // it, touches nothing else of the call, and names a row that lies outside: while it runs the call then begins with
  // rows, checkpoints and the outputs of padding rows.
  bool are_just_made = false;
};
using DeltaTokens = BasicDeltaTokens<float>;

// Conventional decoding: one token a row. Folds the row's history, if any, steps, and writes checkpoint_out.
template <typename T, typename Out>
struct BasicDeltaStep {
  BasicDeltaState<T> state;
  StateRows rows;
  BasicDeltaTokens<T> tokens;  // N = B
  Out* out = nullptr;          // [B, H, V]
};
using DeltaStep = BasicDeltaStep<float, float>;
void delta_step(const DeltaStep& args, Device& device, std::span<std::byte> workspace);

// ReplaySSM: a window of T tokens a row, 1 <= T <= L. Appends the window's records at logical history .. history+T-1.
// A row with history + T > L, or whose history has reached its rows.flush_limit, flushes first: its history is folded
// into checkpoint_out (the caller then moves the cursor to base + history, 0); otherwise no checkpoint is written. A
// flushing row's outputs come from the folded state.
template <typename T, typename Out>
struct BasicDeltaDecode {
  BasicDeltaState<T> state;
  StateRows rows;
  int tokens_per_row = 1;      // T <= C - L
  BasicDeltaTokens<T> tokens;  // N = B * T, a row's tokens together
  // kDirect pulls the query back through the records, and reads the checkpoint once without writing it:
  //   w = q^;  for the records j in view, newest first:  c_j = beta_j (k^_j.w);  w <- Diag(e^{g_j}) (w - c_j k^_j)
  //   o = S0 w + sum_j c_j v_j
  // With one gate a head the same is solved from the kept products, s_j the inclusive prefix sum of g:
  //   c_j = beta_j (k^_j.q^ - sum_{i>j} c_i k^_j.k^_i)
  //   o = e^{s_n} S0 (q^ - sum_j c_j k^_j) + sum_j e^{s_n - s_j} c_j v_j
  Readout readout = Readout::kDirect;
  Out* out = nullptr;  // [B * T, H, V]
};
using DeltaDecode = BasicDeltaDecode<float, float>;
void delta_decode(const DeltaDecode& args, Device& device, std::span<std::byte> workspace);

// Prefill: row b holds tokens token_begin[b] .. token_begin[b+1]-1 (possibly none). Folds the row's history, runs the
// tokens in chunks of matrix products from that state, writes checkpoint_out. Equal to delta_step up to rounding.
template <typename T, typename Out>
struct BasicDeltaPrefill {
  BasicDeltaState<T> state;
  StateRows rows;
  const int32_t* token_begin = nullptr;  // [B + 1], non-decreasing from 0
  BasicDeltaTokens<T> tokens;            // N = token_begin[B]
  Out* out = nullptr;                    // [N, H, V]
};
using DeltaPrefill = BasicDeltaPrefill<float, float>;
void delta_prefill(const DeltaPrefill& args, Device& device, std::span<std::byte> workspace);

// checkpoint_out[b] <- checkpoint_in[b] with the first rows.history[b] records folded in. The source keeps its bits
// unless both name one checkpoint.
template <typename T>
struct BasicDeltaMaterialise {
  BasicDeltaState<T> state;
  StateRows rows;
};
using DeltaMaterialise = BasicDeltaMaterialise<float>;
void delta_materialise(const DeltaMaterialise& args, Device& device, std::span<std::byte> workspace);

// The same four on a GPU, queued on its stream. Every pointer is of device memory, those of `rows` and token_begin too,
// and is read when the work runs: no call depends on a cursor's value, and a captured call serves any. Types (T, Out):
// (float, float), (Bf16, Bf16), (Bf16, float), (Fp16, Fp16), (Fp16, float); all arithmetic is FP32 whatever they are.
// key_size: a multiple of 16, at most 128; window + tokens_per_row at most 64; tokens_per_row at most 16. Pointers and
// strides are multiples of 16 bytes (beta and one gate a head excepted), workspace may be empty. A prefill runs the
// step's update token by token: its outputs and state have the bits of that many steps. A row whose slot or checkpoint
// lies outside the pool has NaN for outputs, and CudaDevice::synchronize names it. Where a decode's records have no
// room in a block's shared memory, a direct readout is an exact one.
template <typename T, typename Out>
void delta_step(const BasicDeltaStep<T, Out>& args, CudaDevice& device, std::span<std::byte> workspace);
template <typename T, typename Out>
void delta_decode(const BasicDeltaDecode<T, Out>& args, CudaDevice& device, std::span<std::byte> workspace);
template <typename T, typename Out>
void delta_prefill(const BasicDeltaPrefill<T, Out>& args, CudaDevice& device, std::span<std::byte> workspace);
template <typename T>
void delta_materialise(const BasicDeltaMaterialise<T>& args, CudaDevice& device, std::span<std::byte> workspace);

// The bytes of `workspace` that any of the four needs for layers of this shape and capacity. Contents are scratch.
size_t delta_workspace_bytes(const DeltaShape& shape, int capacity, Device& device);

// The gates, computed and kept in FP32: beta = sigmoid(b), and with x = a + dt_bias
//
//   g = -exp(A_log) softplus(x)                    if lower_bound is 0 (Gated DeltaNet, Kimi Linear)
//   g = lower_bound * sigmoid(exp(A_log) x)        if lower_bound < 0: a scale of the sigmoid, not a clamp
//
// A NaN among a gate's operands gives a NaN. Throws Error for sizes, strides and a bound outside this.
template <typename T>
struct BasicDeltaGates {
  int64_t tokens = 0;    // N
  int heads = 0;         // H
  int gate_size = 1;     // 1 or K
  const T* a = nullptr;  // [N, H, gate_size], a_stride: the gates' pre-activation
  const T* b = nullptr;  // [N, H], b_stride
  int64_t a_stride = 0, b_stride = 0;
  const float* a_log = nullptr;    // [H]
  const float* dt_bias = nullptr;  // [H, gate_size]
  float lower_bound = 0;           // <= 0
  float* g = nullptr;              // [N, H, gate_size]
  float* beta = nullptr;           // [N, H]
};
using DeltaGates = BasicDeltaGates<float>;
void delta_gates(const DeltaGates& args, Device& device);

// The same on a GPU, queued on its stream, for T of float, Bf16 and Fp16. Every pointer is of device memory; a_log and
// dt_bias may be read before the work queued earlier is done. A gate's bits do not depend on where it lies.
template <typename T>
void delta_gates(const BasicDeltaGates<T>& args, CudaDevice& device);

// The FP32 values of ring_gram for one slot: 0 if it is null.
inline size_t ring_gram_size(const DeltaShape& shape, int capacity) {
  return shape.gate_size > 1 ? 0 : static_cast<size_t>(shape.key_heads) * capacity * capacity;
}

// Throws Error unless `shape` is one that the functions above accept.
void check_shape(const DeltaShape& shape);

}  // namespace replayssm
