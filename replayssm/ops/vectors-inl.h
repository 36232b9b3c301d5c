// What several ops do with vectors of floats: loops in registers, the last elements of an array, sums of lanes, sigmoid
// and silu. Compiled once per SIMD target.
#if defined(REPLAYSSM_OPS_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_VECTORS_INL_H_
#undef REPLAYSSM_OPS_VECTORS_INL_H_
#else
#define REPLAYSSM_OPS_VECTORS_INL_H_
#endif

#include <hwy/highway.h>
// Uses the above.
#include <hwy/contrib/math/math-inl.h>

#include <cstdint>
#include <utility>

#include "replayssm/core/bf16.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using Floats = hn::Vec<FloatTag>;
inline constexpr int64_t kFloatLanes = hn::MaxLanes(FloatTag());

#define REPLAYSSM_INLINE HWY_ATTR __attribute__((always_inline))

// Calls body(0), ..., body(count - 1) with constants: an array indexed by them alone stays in registers.
template <typename Body, int... Index>
HWY_INLINE void unrolled(std::integer_sequence<int, Index...>, const Body& body) {
  (body(std::integral_constant<int, Index>()), ...);
}
template <int Count, typename Body>
HWY_INLINE void unrolled(const Body& body) {
  unrolled(std::make_integer_sequence<int, Count>(), body);
}

// A vector of the numbers at `from`.
HWY_INLINE Floats widen(const float* from) {
  return hn::LoadU(FloatTag(), from);
}
HWY_INLINE Floats widen(const Bf16* from) {
  const hn::Rebind<uint32_t, FloatTag> words;
  const auto halves = hn::LoadU(hn::Rebind<uint16_t, FloatTag>(), reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(words, halves)));
}

// The `count` < kFloatLanes elements at `from`, followed by zeros.
HWY_INLINE Floats load_rest(const float* from, int64_t count) {
  HWY_ALIGN float lanes[kFloatLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
  return hn::Load(FloatTag(), lanes);
}

// Writes the first `count` < kFloatLanes lanes.
HWY_INLINE void store_rest(Floats value, float* to, int64_t count) {
  HWY_ALIGN float lanes[kFloatLanes];
  hn::Store(value, FloatTag(), lanes);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

// sums[0..3] <- the lane sums of four vectors, each in one fixed order.
HWY_INLINE void sum_lanes_of_4(Floats a, Floats b, Floats c, Floats e, float* HWY_RESTRICT sums) {
  const FloatTag d;
  const auto ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const auto ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const hn::RepartitionToWide<FloatTag> pairs;
  const auto ab_pairs = hn::BitCast(pairs, ab);
  const auto ce_pairs = hn::BitCast(pairs, ce);
  const auto blocks = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, ab_pairs, ce_pairs)),
                              hn::BitCast(d, hn::InterleaveUpper(pairs, ab_pairs, ce_pairs)));
#if HWY_TARGET == HWY_AVX3
  const hn::Half<FloatTag> half;
  const hn::Half<hn::Half<FloatTag> > quarter;
  const auto halves = hn::Add(hn::LowerHalf(half, blocks), hn::UpperHalf(half, blocks));
  hn::StoreU(hn::Add(hn::LowerHalf(quarter, halves), hn::UpperHalf(quarter, halves)), quarter, sums);
#elif HWY_TARGET == HWY_AVX2
  const hn::Half<FloatTag> half;
  hn::StoreU(hn::Add(hn::LowerHalf(half, blocks), hn::UpperHalf(half, blocks)), half, sums);
#else
  static_assert(hn::MaxLanes(FloatTag()) == 4, "a target with other vectors needs its own order of summation");
  hn::StoreU(blocks, d, sums);
#endif
}

// body(load, store, i) over `size` elements: `load(p)` reads and `store(value, p)` writes the lanes of p[i], p[i + 1],
// ... that exist.
template <typename Body>
HWY_INLINE void for_each_vector(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kFloatLanes <= size; i += kFloatLanes)
    body([&](const float* p) REPLAYSSM_INLINE { return hn::LoadU(FloatTag(), p + i); },
         [&](Floats value, float* p) REPLAYSSM_INLINE { hn::StoreU(value, FloatTag(), p + i); });
  if (i < size)
    body([&](const float* p) REPLAYSSM_INLINE { return load_rest(p + i, size - i); },
         [&](Floats value, float* p) REPLAYSSM_INLINE { store_rest(value, p + i, size - i); });
}

// e^x for x <= 88; a NaN stays one.
HWY_INLINE Floats exponential(Floats x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(FloatTag(), x));
}

// 1 / (1 + e^-x); a NaN stays one.
HWY_INLINE Floats sigmoid(Floats x) {
  const FloatTag tag;
  const Floats one = hn::Set(tag, 1.0f);
  // Beyond 88 the exponential would overflow; the result is below 1e-38 there.
  const Floats power = hn::Exp(tag, hn::Min(hn::Set(tag, 88.0f), hn::Neg(x)));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Div(one, hn::Add(one, power)));
}

HWY_INLINE Floats silu(Floats x) {
  return hn::Mul(x, sigmoid(x));
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
