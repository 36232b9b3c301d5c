// What several ops do with a vector of floats: the last elements of an array, sigmoid and silu. Included once a target.
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

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using Floats = hn::Vec<FloatTag>;
inline constexpr int64_t kFloatLanes = hn::MaxLanes(FloatTag());

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

// body(load, store, i) over `size` elements: `load(p)` reads and `store(value, p)` writes the lanes of p[i], p[i + 1],
// ... that exist.
template <typename Body>
HWY_INLINE void for_each_vector(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kFloatLanes <= size; i += kFloatLanes)
    body([&](const float* p) HWY_ATTR { return hn::LoadU(FloatTag(), p + i); },
         [&](Floats value, float* p) HWY_ATTR { hn::StoreU(value, FloatTag(), p + i); });
  if (i < size)
    body([&](const float* p) HWY_ATTR { return load_rest(p + i, size - i); },
         [&](Floats value, float* p) HWY_ATTR { store_rest(value, p + i, size - i); });
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
