// Eight consecutive elements of an array, which a thread loads and stores together, and the functions of one number
// that several kernels share. Accurate to a few units in the last place; a NaN stays one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "replayssm/ops/rows.cuh"
#include "replayssm/ops/tiles.h"

namespace replayssm {

// As they lie in memory: 16 bytes, of FP32 32.
template <typename T>
struct Pack {
  static constexpr int kQuads = sizeof(T) / 2;
  uint4 quads[kQuads];
};

template <typename T>
__device__ inline uint32_t word(const Pack<T>& pack, int i) {
  const uint4& quad = pack.quads[i / 4];
  return i % 4 == 0 ? quad.x : i % 4 == 1 ? quad.y : i % 4 == 2 ? quad.z : quad.w;
}

template <typename T>
__device__ inline void set_word(Pack<T>& pack, int i, uint32_t value) {
  uint4& quad = pack.quads[i / 4];
  (i % 4 == 0 ? quad.x : i % 4 == 1 ? quad.y : i % 4 == 2 ? quad.z : quad.w) = value;
}

// Element i, a constant once loops are unrolled. Exact.
__device__ inline float element(const Pack<float>& pack, int i) {
  return __uint_as_float(word(pack, i));
}
__device__ inline float element(const Pack<Bf16>& pack, int i) {
  return __uint_as_float(i % 2 == 0 ? word(pack, i / 2) << 16 : word(pack, i / 2) & 0xFFFF0000u);
}
__device__ inline float element(const Pack<Fp16>& pack, int i) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word(pack, i / 2) >> (i % 2 * 16))));
}

// Rounded to nearest, ties to even.
__device__ inline uint32_t two_of(float low, float high, Bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16 | __bfloat16_as_ushort(pair.x);
}
__device__ inline uint32_t two_of(float low, float high, Fp16) {
  const __half2 pair = __floats2half2_rn(low, high);
  return static_cast<uint32_t>(__half_as_ushort(__high2half(pair))) << 16 | __half_as_ushort(__low2half(pair));
}
template <typename T>
__device__ inline Pack<T> pack_of(const float (&values)[kPackSize]) {
  Pack<T> pack;
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < kPackSize; ++i) set_word(pack, i, __float_as_uint(values[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kPackSize / 2; ++i) set_word(pack, i, two_of(values[2 * i], values[2 * i + 1], T()));
  }
  return pack;
}

template <typename T>
__device__ inline Pack<T> zero_pack() {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::kQuads; ++i) pack.quads[i] = make_uint4(0, 0, 0, 0);
  return pack;
}

template <typename T>
__device__ inline Pack<T> pack_filled(float value) {
  const float values[kPackSize] = {value, value, value, value, value, value, value, value};
  return pack_of<T>(values);
}

// What is known of the places of packs: aligned and whole, or anywhere with only the first elements there.
enum class PackPlace { kAligned, kAnywhere };
// Whether the elements are used again soon or not before much else has gone through the cache.
enum class PackUse { kAgain, kOnce };

// The `count` elements from `from`, zeros behind them; all eight if the place is aligned.
template <PackUse kUse = PackUse::kAgain, typename T>
__device__ inline Pack<T> load_pack(const T* from, PackPlace place, int count) {
  Pack<T> pack;
  if (place == PackPlace::kAligned) {
    const uint4* quads = reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int i = 0; i < Pack<T>::kQuads; ++i) pack.quads[i] = kUse == PackUse::kOnce ? __ldcs(quads + i) : quads[i];
    return pack;
  }
  pack = zero_pack<T>();
#pragma unroll
  for (int i = 0; i < kPackSize; ++i) {
    if (i >= count) continue;
    if constexpr (std::is_same_v<T, float>) {
      set_word(pack, i, __float_as_uint(from[i]));
    } else {
      set_word(pack, i / 2, word(pack, i / 2) | static_cast<uint32_t>(from[i].bits) << (i % 2 * 16));
    }
  }
  return pack;
}

template <PackUse kUse = PackUse::kAgain, typename T>
__device__ inline void store_pack(const Pack<T>& pack, T* to, PackPlace place, int count) {
  if (place == PackPlace::kAligned) {
    uint4* quads = reinterpret_cast<uint4*>(to);
#pragma unroll
    for (int i = 0; i < Pack<T>::kQuads; ++i) {
      if constexpr (kUse == PackUse::kOnce) {
        __stcs(quads + i, pack.quads[i]);
      } else {
        quads[i] = pack.quads[i];
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPackSize; ++i) {
    if (i >= count) continue;
    if constexpr (std::is_same_v<T, float>) {
      to[i] = __uint_as_float(word(pack, i));
    } else {
      to[i].bits = static_cast<uint16_t>(word(pack, i / 2) >> (i % 2 * 16));
    }
  }
}

// Constants of the layer, which may be loaded before wait_for_previous. As volatile loads they stay there: the
// compiler moves others behind the wait.
__device__ inline void load_constants(const float* from, PackPlace place, int count, float (&values)[kPackSize]) {
  if (place == PackPlace::kAligned) {
#pragma unroll
    for (int i = 0; i < kPackSize; i += 4) {
      asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(values[i]), "=f"(values[i + 1]), "=f"(values[i + 2]), "=f"(values[i + 3])
                   : "l"(from + i));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPackSize; ++i) values[i] = i < count ? from[i] : 0.0f;
}

// 1 / x for x >= 1; 0 where that is below FP32's normal numbers.
__device__ inline float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ inline float sigmoid(float x) {
  return reciprocal(1.0f + expf(-x));
}
__device__ inline float silu(float x) {
  return x * sigmoid(x);
}
// An element of silu_product.
__device__ inline float silu_product(float gate, float up) {
  return silu(gate) * up;
}
// An element of relu2. A NaN is not below zero, so it stays; fmaxf would drop it.
__device__ inline float relu2(float x) {
  return x < 0.0f ? 0.0f : x * x;
}
// log(1 + e^x), x itself above 20.
__device__ inline float softplus(float x) {
  return x > 20.0f ? x : log1pf(expf(x));
}

}  // namespace replayssm
