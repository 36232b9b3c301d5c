// Mamba-2 (state-space duality): conventional step, prefill, ReplaySSM decode, materialise.
// Sources: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060); docs/math.md.
//
// Letters as in rows.h, with the family's own names: P head size (a value channel), N state size (a key channel), G
// groups that share B and C. For one slot and head, state S [P, N] (the state channel is contiguous), one token is
//
//   a = e^(A dt'), A = -e^(A_log);   S <- a S + (dt' x) B^T;   y = S C + D x;   with z: y <- y z / (1 + e^-z)
//
// dt' is what mamba2_gates makes of the layer's dt. Everything is FP32. All functions below run the recurrence through
// one update in one order of arithmetic, so a state reached by replay and fold has the bits of the state reached by
// mamba2_step, whatever the batch, the thread count and the windows. Rows may be non-finite: that spoils their own
// outputs and state alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// heads % groups == 0; head h uses the B and C of group h / (H/G). head_size: a multiple of 8, at most 1024.
// state_size: a multiple of 16, at most 256.
struct Mamba2Shape {
  int heads = 0;       // H
  int groups = 0;      // G
  int head_size = 0;   // P
  int state_size = 0;  // N

  friend bool operator==(const Mamba2Shape&, const Mamba2Shape&) = default;
};

// One layer's state for all slots of a pool. The ring keeps the inputs of the recurrence, nothing computed from a read
// of the state. T is the type of the layer's activations: float on the CPU; float, Bf16 or Fp16 on a GPU. x and B are
// kept in it, unrounded.
template <typename T>
struct BasicMamba2State {
  Mamba2Shape shape;
  int64_t slots = 0;
  int64_t checkpoints = 0;
  int window = 0;               // L >= 1
  int capacity = 0;             // C > L
  float* checkpoint = nullptr;  // [checkpoints, H, P, N], or as planes (rows.h)
  T* ring_x = nullptr;          // [slots, H, C, P]
  T* ring_b = nullptr;          // [slots, G, C, N]
  float* ring_dt = nullptr;     // [slots, H, C] dt'
  float* ring_decay = nullptr;  // [slots, H, C] e^(A dt')
  CheckpointForm form = CheckpointForm::kWords;
};
using Mamba2State = BasicMamba2State<float>;

// The layer's weights.
struct Mamba2Heads {
  const float* a_log = nullptr;  // [H] A_log
  const float* d = nullptr;      // [H] D, or null: no such term
};

// The inputs of the tokens of a call. Consecutive tokens of x, b, c and z are `*_stride` elements apart, so that all
// may lie in one row of a projection; within a token heads and groups are contiguous. dt is dense. None may overlap an
// output.
template <typename T>
struct BasicMamba2Tokens {
  const T* x = nullptr;       // [tokens, H, P], x_stride
  const T* b = nullptr;       // [tokens, G, N], b_stride
  const T* c = nullptr;       // [tokens, G, N], c_stride
  const float* dt = nullptr;  // [tokens, H] dt' >= 0
  const T* z = nullptr;       // [tokens, H, P], z_stride; or null: no z gate
  int64_t x_stride = 0, b_stride = 0, c_stride = 0, z_stride = 0;
  // On a GPU, whether the kernel queued just before makes the tokens, has itself waited for all that was queued before
  // it, touches nothing else of the call, and names a row that lies outside: while it runs the call then begins with
  // rows, checkpoints and the outputs of padding rows.
  bool are_just_made = false;
};
using Mamba2Tokens = BasicMamba2Tokens<float>;

// Conventional decoding: one token a row. Folds the row's history, if any, steps, and writes checkpoint_out.
template <typename T, typename Out>
struct BasicMamba2Step {
  BasicMamba2State<T> state;
  StateRows rows;
  Mamba2Heads heads;
  BasicMamba2Tokens<T> tokens;  // B tokens
  Out* out = nullptr;           // [B, H, P]
};
using Mamba2Step = BasicMamba2Step<float, float>;
void mamba2_step(const Mamba2Step& args, Device& device, std::span<std::byte> workspace);

// ReplaySSM: a window of T tokens a row, 1 <= T <= L. Appends the window's records at logical history .. history+T-1.
// A row with history + T > L, or whose history has reached its rows.flush_limit, flushes first: its history is folded
// into checkpoint_out (the caller then moves the cursor to base + history, 0); otherwise no checkpoint is written. A
// flushing row's outputs come from the folded state.
template <typename T, typename Out>
struct BasicMamba2Decode {
  BasicMamba2State<T> state;
  StateRows rows;
  Mamba2Heads heads;
  int tokens_per_row = 1;       // T <= C - L
  BasicMamba2Tokens<T> tokens;  // B * T tokens, a row's together
  // kDirect reads the checkpoint once without writing it, s_j the inclusive prefix sum of A dt' over the n records in
  // view:  y = e^{s_n} S0 C_n + sum_j dt'_j e^{s_n - s_j} (B_j . C_n) x_j + D x_n
  Readout readout = Readout::kDirect;
  Out* out = nullptr;  // [B * T, H, P]
};
using Mamba2Decode = BasicMamba2Decode<float, float>;
void mamba2_decode(const Mamba2Decode& args, Device& device, std::span<std::byte> workspace);

// Prefill: row b holds tokens token_begin[b] .. token_begin[b+1]-1 (possibly none). Folds the row's history, runs the
// tokens in chunks of matrix products from that state, writes checkpoint_out. Equal to mamba2_step up to rounding.
template <typename T, typename Out>
struct BasicMamba2Prefill {
  BasicMamba2State<T> state;
  StateRows rows;
  Mamba2Heads heads;
  const int32_t* token_begin = nullptr;  // [B + 1], non-decreasing from 0
  BasicMamba2Tokens<T> tokens;           // token_begin[B] tokens
  Out* out = nullptr;                    // [token_begin[B], H, P]
};
using Mamba2Prefill = BasicMamba2Prefill<float, float>;
void mamba2_prefill(const Mamba2Prefill& args, Device& device, std::span<std::byte> workspace);

// checkpoint_out[b] <- checkpoint_in[b] with the first rows.history[b] records folded in. The source keeps its bits
// unless both name one checkpoint.
template <typename T>
struct BasicMamba2Materialise {
  BasicMamba2State<T> state;
  StateRows rows;
};
using Mamba2Materialise = BasicMamba2Materialise<float>;
void mamba2_materialise(const Mamba2Materialise& args, Device& device, std::span<std::byte> workspace);

// The same four on a GPU, queued on its stream. Every pointer is of device memory, those of `rows` and token_begin too,
// and is read when the work runs: no call depends on a cursor's value, and a captured call serves any. Types (T, Out):
// (float, float), (Bf16, Bf16), (Bf16, float), (Fp16, Fp16), (Fp16, float); all arithmetic is FP32 whatever they are.
// state_size: a multiple of 16, at most 128; window + tokens_per_row at most 64; tokens_per_row at most 16. Pointers
// and strides are multiples of 16 bytes (dt excepted), workspace may be empty. A prefill runs the step's
// update token by token: its outputs and state have the bits of that many steps. A row whose slot or checkpoint lies
// outside the pool has NaN for outputs, and CudaDevice::synchronize names it. Where a decode's records have no room in
// a block's shared memory, a direct readout is an exact one.
template <typename T, typename Out>
void mamba2_step(const BasicMamba2Step<T, Out>& args, CudaDevice& device, std::span<std::byte> workspace);
template <typename T, typename Out>
void mamba2_decode(const BasicMamba2Decode<T, Out>& args, CudaDevice& device, std::span<std::byte> workspace);
template <typename T, typename Out>
void mamba2_prefill(const BasicMamba2Prefill<T, Out>& args, CudaDevice& device, std::span<std::byte> workspace);
template <typename T>
void mamba2_materialise(const BasicMamba2Materialise<T>& args, CudaDevice& device, std::span<std::byte> workspace);

// The bytes of `workspace` that any of the four needs for layers of this shape and capacity. Contents are scratch.
size_t mamba2_workspace_bytes(const Mamba2Shape& shape, int capacity, Device& device);

// dt' = min(max(softplus(dt + dt_bias), time_step_min), time_step_max), softplus(u) = log(1 + e^u), u itself above 20.
// Computed and kept in FP32; a NaN stays one.
template <typename T>
struct BasicMamba2Gates {
  int64_t tokens = 0;
  int heads = 0;          // H
  const T* dt = nullptr;  // [tokens, H], dt_stride
  int64_t dt_stride = 0;
  const float* dt_bias = nullptr;  // [H]
  float time_step_min = 0.0f;      // 0 <= time_step_min <= time_step_max
  float time_step_max = std::numeric_limits<float>::infinity();
  float* out = nullptr;  // [tokens, H]
};
using Mamba2Gates = BasicMamba2Gates<float>;
void mamba2_gates(const Mamba2Gates& args, Device& device);

// The same on a GPU, queued on its stream, for T of float, Bf16 and Fp16. Every pointer is of device memory; dt_bias
// may be read before the work queued earlier is done.
template <typename T>
void mamba2_gates(const BasicMamba2Gates<T>& args, CudaDevice& device);

// Throws Error unless `shape` is one that the functions above accept.
void check_shape(const Mamba2Shape& shape);

}  // namespace replayssm
