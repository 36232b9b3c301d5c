// Vector code that the readouts of all recurrences share: products and sums over records, decays, one pass over a
// state. Compiled once per SIMD target.
#if defined(REPLAYSSM_OPS_RECORDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_RECORDS_INL_H_
#undef REPLAYSSM_OPS_RECORDS_INL_H_
#else
#define REPLAYSSM_OPS_RECORDS_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>

#include "replayssm/ops/ring.h"
#include "replayssm/ops/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// How far ahead of its use the state's memory is asked for: a block's arithmetic is long, and the hardware's own
// fetching pauses at each page. (63% of the in-place roof without, 89% with; multiples of 4 KiB give 80 to 83%; Xeon
// with AVX-512.)
inline constexpr int kPrefetchFloats = 1280;

// The words at element `i` of a head that is kept as planes.
HWY_INLINE Floats join(const HeadState& planes, ptrdiff_t i) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> words;
  const auto lo = hn::PromoteTo(words, hn::LoadU(hn::Rebind<int16_t, FloatTag>(), planes.lo() + i));
  return hn::BitCast(d, hn::Add(hn::BitCast(words, widen(planes.hi() + i)), lo));
}

// The other way. A NaN becomes 0x7FC00000; what is missing to the word are its own lower bits.
HWY_INLINE void split(Floats value, const HeadState& planes, ptrdiff_t i) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> words;
  const hn::Rebind<uint16_t, FloatTag> halves;
  const auto word =
      hn::BitCast(words, hn::IfThenElse(hn::IsNaN(value), hn::BitCast(d, hn::Set(words, 0x7FC00000u)), value));
  const auto hi = hn::ShiftRight<16>(hn::Add(word, hn::Set(words, 0x8000u)));
  hn::StoreU(hn::TruncateTo(halves, hi), halves, reinterpret_cast<uint16_t*>(planes.hi() + i));
  hn::StoreU(hn::TruncateTo(halves, word), halves, reinterpret_cast<uint16_t*>(planes.lo() + i));
}

// `count` elements from `begin` on, a multiple of 16, whose memory is asked for as far ahead as that of words.
HWY_INLINE void join_rows(HeadState planes, ptrdiff_t begin, int count, float* to) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int line = 0; line < count; line += 16) {
    if (line % 32 == 0) {
      hwy::Prefetch(planes.hi() + begin + line + kPrefetchFloats);
      hwy::Prefetch(planes.lo() + begin + line + kPrefetchFloats);
    }
    for (int i = line; i < line + 16; i += lanes) hn::StoreU(join(planes, begin + i), d, to + i);
  }
}
HWY_INLINE void split_rows(const float* from, HeadState planes, ptrdiff_t begin, int count) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < count; i += lanes) split(hn::LoadU(d, from + i), planes, begin + i);
}

// values <- e^values, each value's bits depending on it alone. The array has room up to a multiple of kExpPadding.
inline constexpr int kExpPadding = 16;
HWY_INLINE void exp_in_place(float* values, int count) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < count; i += lanes) hn::StoreU(exponential(hn::LoadU(d, values + i)), d, values + i);
}

// out[c] <- sum_j weights[j] rows[j][c] (+ start[c]), j ascending. `size` is a multiple of 4.
template <class D, int kVectors>
HWY_INLINE void weighted_sum_columns(D d, const float* start, const float* const* rows, const float* weights, int count,
                                     int column, float* out) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  hn::Vec<D> sums[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i)
    sums[i] = start == nullptr ? hn::Zero(d) : hn::LoadU(d, start + column + i * lanes);
  for (int j = 0; j < count; ++j) {
    const hn::Vec<D> weight = hn::Set(d, weights[j]);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i)
      sums[i] = hn::MulAdd(weight, hn::LoadU(d, rows[j] + column + i * lanes), sums[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) hn::StoreU(sums[i], d, out + column + i * lanes);
}

HWY_INLINE void weighted_sum(const float* start, const float* const* rows, const float* weights, int count, int size,
                             float* out) {
  const FloatTag d;
  const hn::CappedTag<float, 4> narrow;
  const int lanes = static_cast<int>(hn::Lanes(d));
  int column = 0;
  for (; column + 8 * lanes <= size; column += 8 * lanes)
    weighted_sum_columns<FloatTag, 8>(d, start, rows, weights, count, column, out);
  for (; column + lanes <= size; column += lanes)
    weighted_sum_columns<FloatTag, 1>(d, start, rows, weights, count, column, out);
  for (; column < size; column += static_cast<int>(hn::Lanes(narrow)))
    weighted_sum_columns<hn::CappedTag<float, 4>, 1>(narrow, start, rows, weights, count, column, out);
}

// products_a[j] <- rows[j] . a and products_b[j] <- rows[j] . b. Both have room up to a multiple of 4: `count` and
// kProductPadding.
inline constexpr int kProductPadding = 3;
HWY_INLINE void products_with_2(const float* const* rows, int count, const float* a, const float* b, int size,
                                float* products_a, float* products_b) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int j = 0; j < count; j += 4) {
    const float* x[4];
    Floats sums_a[4], sums_b[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[i] = rows[std::min(j + i, count - 1)];
      sums_a[i] = sums_b[i] = hn::Zero(d);
    }
    for (int c = 0; c < size; c += lanes) {
      const Floats in_a = hn::LoadU(d, a + c);
      const Floats in_b = hn::LoadU(d, b + c);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Floats value = hn::LoadU(d, x[i] + c);
        sums_a[i] = hn::MulAdd(value, in_a, sums_a[i]);
        sums_b[i] = hn::MulAdd(value, in_b, sums_b[i]);
      }
    }
    sum_lanes_of_4(sums_a[0], sums_a[1], sums_a[2], sums_a[3], products_a + j);
    sum_lanes_of_4(sums_b[0], sums_b[1], sums_b[2], sums_b[3], products_b + j);
  }
}

// Sums over one row for kQueries queries: sums[t] <- lanes whose sum is row . u[t].
template <int kQueries>
HWY_INLINE void read_row(const float* row, int key_size, const float* const* u, Floats (&sums)[kQueries]) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
#pragma GCC unroll 4
  for (int t = 0; t < kQueries; ++t) sums[t] = hn::Zero(d);
  for (int c = 0; c < key_size; c += lanes) {
    const Floats value = hn::LoadU(d, row + c);
#pragma GCC unroll 4
    for (int t = 0; t < kQueries; ++t) sums[t] = hn::MulAdd(value, hn::LoadU(d, u[t] + c), sums[t]);
  }
}

// The same of the first plane, by pairs of neighbours: one word holds two. The queries lie as order_query leaves them.
// Every other plane is skipped, so this stream is asked for ahead (GDN, KDA: 7 to 10% less time outside of flushes;
// Mamba-2: none less).
template <int kQueries>
HWY_INLINE void read_row(const Bf16* row, int key_size, const float* const* u, Floats (&sums)[kQueries]) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> words;
  const int lanes = static_cast<int>(hn::Lanes(d));
  Floats odd_sums[kQueries];
#pragma GCC unroll 4
  for (int t = 0; t < kQueries; ++t) sums[t] = odd_sums[t] = hn::Zero(d);
  const auto add_pairs = [&](int c) REPLAYSSM_INLINE {
    const auto pairs = hn::LoadU(words, reinterpret_cast<const uint32_t*>(row + c));
    const Floats even = hn::BitCast(d, hn::ShiftLeft<16>(pairs));
    const Floats odd = hn::BitCast(d, hn::And(pairs, hn::Set(words, 0xFFFF0000u)));
#pragma GCC unroll 4
    for (int t = 0; t < kQueries; ++t) {
      sums[t] = hn::MulAdd(even, hn::LoadU(d, u[t] + c), sums[t]);
      odd_sums[t] = hn::MulAdd(odd, hn::LoadU(d, u[t] + c + lanes), odd_sums[t]);
    }
  };
  constexpr int kLine = 32;
  int c = 0;
  for (; c + kLine <= key_size; c += kLine) {
    hwy::Prefetch(row + c + kPrefetchFloats);
    unrolled<kLine / (2 * kFloatLanes)>([&](auto i) REPLAYSSM_INLINE { add_pairs(c + i * 2 * lanes); });
  }
  for (; c + 2 * lanes <= key_size; c += 2 * lanes) add_pairs(c);
#pragma GCC unroll 4
  for (int t = 0; t < kQueries; ++t) {
    if (c < key_size) sums[t] = hn::MulAdd(widen(row + c), hn::LoadU(d, u[t] + c), sums[t]);
    sums[t] = hn::Add(sums[t], odd_sums[t]);
  }
}

// to <- a query as reads of such a state take it: of planes, each two vectors' even elements before the odd ones. `to`
// may be `from`.
HWY_INLINE void order_query(CheckpointForm form, const float* from, int key_size, float* to) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  int c = 0;
  if (form == CheckpointForm::kPlanes)
    for (; c + 2 * lanes <= key_size; c += 2 * lanes) {
      Floats even, odd;
      hn::LoadInterleaved2(d, from + c, even, odd);
      hn::StoreU(even, d, to + c);
      hn::StoreU(odd, d, to + c + lanes);
    }
  if (from != to) std::copy(from + c, from + key_size, to + c);
}

// out[t][row + r] += scales[t] (S u[t])[row + r] for four rows and kQueries queries. Row after row: the hardware
// recognises one ascending stream of memory, not several at once. A stream of words that is only read needs no asking
// ahead (78% of the read roof with, 95% without; EPYC, family 25).
template <int kQueries, typename T>
HWY_INLINE void read_rows(const T* state, int row, int key_size, const float* const* u, const float* scales,
                          float* const* out) {
  Floats sums[4][kQueries];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r)
    read_row<kQueries>(state + static_cast<ptrdiff_t>(row + r) * key_size, key_size, u, sums[r]);
#pragma GCC unroll 4
  for (int t = 0; t < kQueries; ++t) {
    float products[4];
    sum_lanes_of_4(sums[0][t], sums[1][t], sums[2][t], sums[3][t], products);
    for (int r = 0; r < 4; ++r) out[t][row + r] += scales[t] * products[r];
  }
}

template <typename T>
HWY_INLINE void read_all_rows(const T* state, int key_size, int value_size, int queries, const float* const* u,
                              const float* scales, float* const* out) {
  for (int row = 0; row < value_size; row += 4) {
    int t = 0;
    for (; t + 4 <= queries; t += 4) read_rows<4>(state, row, key_size, u + t, scales + t, out + t);
    if (t + 2 <= queries) {
      read_rows<2>(state, row, key_size, u + t, scales + t, out + t);
      t += 2;
    }
    if (t < queries) read_rows<1>(state, row, key_size, u + t, scales + t, out + t);
  }
}

// read_rows for all rows of a head and all queries of a window, which order_query has ordered. Of planes the first
// alone is read.
HWY_INLINE void read_head(const HeadState& state, int key_size, int value_size, int queries, const float* const* u,
                          const float* scales, float* const* out) {
  if (state.is_words())
    read_all_rows(state.words(), key_size, value_size, queries, u, scales, out);
  else
    read_all_rows(state.hi(), key_size, value_size, queries, u, scales, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();
#endif  // REPLAYSSM_OPS_RECORDS_INL_H_
