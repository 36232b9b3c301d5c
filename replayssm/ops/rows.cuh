// Internal to the CUDA paths: a block's row of the batch, faults, and the element types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "replayssm/core/bf16.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/core/fp16.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

__device__ inline float to_number(float value) {
  return value;
}
__device__ inline float to_number(Bf16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ inline float to_number(Fp16 value) {
  return __half2float(__ushort_as_half(value.bits));
}

__device__ inline void store_number(float* to, float value) {
  *to = value;
}
__device__ inline void store_number(Bf16* to, float value) {
  to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ inline void store_number(Fp16* to, float value) {
  to->bits = __half_as_ushort(__float2half_rn(value));
}

// As a T keeps it.
template <typename T>
__device__ inline float as_kept(float value) {
  T kept;
  store_number(&kept, value);
  return to_number(kept);
}

// Four numbers of a kernel's input that lie together.
template <typename T>
struct Quad {
  uint2 bits;  // of two 16-bit pairs
};
template <>
struct Quad<float> {
  uint4 bits;
};

// The streaming load keeps what is read once out of the way of what is not.
template <typename T>
__device__ inline Quad<T> load_quad(const T* from) {
  return {__ldg(reinterpret_cast<const decltype(Quad<T>::bits)*>(from))};
}
// From memory of any kind.
template <typename T>
__device__ inline Quad<T> quad_at(const T* from) {
  return {*reinterpret_cast<const decltype(Quad<T>::bits)*>(from)};
}
template <typename T>
__device__ inline void store_quad(T* to, Quad<T> quad) {
  *reinterpret_cast<decltype(Quad<T>::bits)*>(to) = quad.bits;
}

__device__ inline float4 to_numbers(Quad<float> quad) {
  return make_float4(__uint_as_float(quad.bits.x), __uint_as_float(quad.bits.y), __uint_as_float(quad.bits.z),
                     __uint_as_float(quad.bits.w));
}
__device__ inline float4 to_numbers(Quad<Bf16> quad) {
  return make_float4(__uint_as_float(quad.bits.x << 16), __uint_as_float(quad.bits.x & 0xFFFF0000u),
                     __uint_as_float(quad.bits.y << 16), __uint_as_float(quad.bits.y & 0xFFFF0000u));
}
__device__ inline float4 to_numbers(Quad<Fp16> quad) {
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&quad.bits.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&quad.bits.y));
  return make_float4(low.x, low.y, high.x, high.y);
}

// Tells the host of the first row that names what the pool does not have; `outside`, as CudaFault's, is the host's.
__device__ inline void report_fault(CudaFault* fault, const char* op, int row, int slot, int checkpoint_in,
                                    int checkpoint_out, const char* outside = nullptr) {
  if (atomicCAS(fault->lock, 0, 1) != 0) return;
  fault->op = op;
  fault->row = row;
  fault->slot = slot;
  fault->checkpoint_in = checkpoint_in;
  fault->checkpoint_out = checkpoint_out;
  fault->outside = outside;
  __threadfence_system();
  fault->is_set = 1;
}

// A row of the batch as its blocks see it.
struct Row {
  int slot;
  int history;
  int start;  // ring position of record 0
  int checkpoint_in, checkpoint_out;
  bool is_padding, is_outside;

  // The ring position of record j.
  __device__ int position(int j, int capacity) const {
    const int at = start + j;
    return at < capacity ? at : at - capacity;
  }
};

// Whether all that a row names is there.
__device__ inline bool is_in_pool(int slot, int checkpoint_in, int checkpoint_out, int history, int64_t base,
                                  int64_t slots, int64_t checkpoints, int window) {
  const auto is_in = [](int index, int64_t count) { return index >= 0 && index < count; };
  return is_in(slot, slots) && is_in(checkpoint_in, checkpoints) && is_in(checkpoint_out, checkpoints) &&
         is_in(history, window + 1ll) && base >= 0;
}

// The ring position of a row's record 0. (32-bit remainders are several times faster, and a base passes 2^32 only in
// sequences longer than any context.)
__device__ inline int ring_start(int64_t base, int capacity) {
  return base <= 0xFFFFFFFFll ? static_cast<int>(static_cast<uint32_t>(base) % static_cast<uint32_t>(capacity))
                              : static_cast<int>(base % capacity);
}

__device__ inline Row row_of(const StateRows& rows, int b, int64_t slots, int64_t checkpoints, int window,
                             int capacity) {
  Row row{};
  row.slot = __ldg(rows.slot + b);
  const int64_t base = __ldg(rows.base + b);
  row.history = __ldg(rows.history + b);
  row.checkpoint_in = __ldg(rows.checkpoint_in + b);
  row.checkpoint_out = __ldg(rows.checkpoint_out + b);
  row.is_padding = row.slot == kPaddingSlot;
  row.is_outside = !row.is_padding && !is_in_pool(row.slot, row.checkpoint_in, row.checkpoint_out, row.history, base,
                                                  slots, checkpoints, window);
  row.start = ring_start(base, capacity);
  return row;
}

// As StateRows::will_flush, for row b with `history` records.
__device__ inline bool will_flush(const int32_t* flush_limit, int b, int history, int tokens, int window) {
  return history + tokens > window || (flush_limit != nullptr && history >= __ldg(flush_limit + b));
}

// The row that holds `token`, of those that hold any.
__device__ inline int row_of_token(const int32_t* token_begin, int rows, int64_t token) {
  int low = 0, high = rows;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (token_begin[middle] <= token ? low : high) = middle;
  }
  return low;
}

// y z sigmoid(z)
__device__ inline float gated(float y, float z) {
  return __fmul_rn(y, __fdiv_rn(z, __fadd_rn(1.0f, expf(-z))));
}

}  // namespace replayssm
