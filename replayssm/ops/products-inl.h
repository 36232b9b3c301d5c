// Matrix products of chunked prefill: general, with a lower triangular factor, and transposition. Compiled once per
// SIMD target.
#if defined(REPLAYSSM_OPS_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_PRODUCTS_INL_H_
#undef REPLAYSSM_OPS_PRODUCTS_INL_H_
#else
#define REPLAYSSM_OPS_PRODUCTS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>

#include "replayssm/ops/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// Row pitch of matrices that are read down their columns: not a multiple of 512 bytes, or few cache sets serve them.
inline constexpr int kPitchPadding = 16;

inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = HWY_TARGET == HWY_AVX3 ? 4 : 2;

// c[r, :] <- start[r] c[r, :] + sum_i a[r, i] b[i, :]; without `start` c is not read. a's rows and columns are a_row
// and a_column elements apart; start's elements start_step apart.
struct Product {
  const float* a;
  ptrdiff_t a_row, a_column;
  const float* b;
  ptrdiff_t b_row;
  float* c;
  ptrdiff_t c_row;
  const float* start;
  ptrdiff_t start_step;
};

template <int kRows, int kVectors>
HWY_INLINE void product_tile(const Product& product, int row, int column, int depth) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const float* a = product.a + row * product.a_row;
  const float* b = product.b + column;
  float* c = product.c + row * product.c_row + column;
  Floats sums[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n)
      sums[r][n] = product.start == nullptr ? hn::Zero(d)
                                            : hn::Mul(hn::Set(d, product.start[(row + r) * product.start_step]),
                                                      hn::LoadU(d, c + r * product.c_row + n * lanes));
  for (int i = 0; i < depth; ++i) {
    Floats values[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) values[n] = hn::LoadU(d, b + i * product.b_row + n * lanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Floats factor = hn::Set(d, a[r * product.a_row + i * product.a_column]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) sums[r][n] = hn::MulAdd(factor, values[n], sums[r][n]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) hn::StoreU(sums[r][n], d, c + r * product.c_row + n * lanes);
}

template <int kVectors>
HWY_INLINE void product_rows(const Product& product, int rows, int row, int column, int depth) {
  switch (rows) {
    case 1:
      return product_tile<1, kVectors>(product, row, column, depth);
    case 2:
      return product_tile<2, kVectors>(product, row, column, depth);
    case 3:
      return product_tile<3, kVectors>(product, row, column, depth);
    case 4:
      return product_tile<4, kVectors>(product, row, column, depth);
    case 5:
      return product_tile<5, kVectors>(product, row, column, depth);
    default:
      return product_tile<6, kVectors>(product, row, column, depth);
  }
}

// Rows `begin` .. `end`-1 of a product over `depth` and columns 0 .. columns-1 (a multiple of the lanes).
HWY_INLINE void multiply(const Product& product, int begin, int end, int columns, int depth) {
  const int lanes = static_cast<int>(hn::Lanes(FloatTag()));
  int column = 0;
  for (; column + kTileVectors * lanes <= columns; column += kTileVectors * lanes)
    for (int row = begin; row < end; row += kTileRows)
      product_rows<kTileVectors>(product, std::min(kTileRows, end - row), row, column, depth);
  for (; column < columns; column += lanes)
    for (int row = begin; row < end; row += kTileRows)
      product_rows<1>(product, std::min(kTileRows, end - row), row, column, depth);
}

// A product with a lower triangular a: row i takes columns 0 .. i-1 of a, with `diagonal` 1 also column i. Rows are
// finished in ascending order, so b and c may be one matrix. Nothing above the triangle is multiplied, not even by
// zero: a later token, finite or not, must not reach an earlier one.
HWY_INLINE void multiply_triangle(const Product& product, int rows, int columns, int diagonal) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int begin = 0; begin < rows; begin += kTileRows) {
    const int end = std::min(begin + kTileRows, rows);
    multiply(product, begin, end, columns, begin);
    for (int i = begin; i < end; ++i)
      for (int c = 0; c < columns; c += lanes) {
        float* target = product.c + i * product.c_row + c;
        Floats sum = hn::LoadU(d, target);
        for (int j = begin; j < i + diagonal; ++j)
          sum = hn::MulAdd(hn::Set(d, product.a[i * product.a_row + j]),
                           hn::LoadU(d, product.b + j * product.b_row + c), sum);
        hn::StoreU(sum, d, target);
      }
  }
}

// to[j, i] <- from[i, j], rows and columns multiples of 4.
HWY_INLINE void transpose(const float* from, ptrdiff_t from_row, int rows, int columns, float* to, ptrdiff_t to_row) {
  const hn::FixedTag<float, 4> d;
  const hn::RepartitionToWide<decltype(d)> pairs;
  for (int i = 0; i < rows; i += 4)
    for (int j = 0; j < columns; j += 4) {
      const float* corner = from + i * from_row + j;
      const auto a = hn::LoadU(d, corner), b = hn::LoadU(d, corner + from_row);
      const auto c = hn::LoadU(d, corner + 2 * from_row), e = hn::LoadU(d, corner + 3 * from_row);
      const auto ab_low = hn::BitCast(pairs, hn::InterleaveLower(d, a, b));
      const auto ab_high = hn::BitCast(pairs, hn::InterleaveUpper(d, a, b));
      const auto ce_low = hn::BitCast(pairs, hn::InterleaveLower(d, c, e));
      const auto ce_high = hn::BitCast(pairs, hn::InterleaveUpper(d, c, e));
      float* target = to + j * to_row + i;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, ab_low, ce_low)), d, target);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, ab_low, ce_low)), d, target + to_row);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, ab_high, ce_high)), d, target + 2 * to_row);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, ab_high, ce_high)), d, target + 3 * to_row);
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();
#endif  // REPLAYSSM_OPS_PRODUCTS_INL_H_
