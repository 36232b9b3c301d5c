// Mamba-2's vector code, compiled once per SIMD target: the one update that the step, the fold and the exact readout
// share, and what follows a readout.
#if defined(REPLAYSSM_OPS_MAMBA2_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_MAMBA2_INL_H_
#undef REPLAYSSM_OPS_MAMBA2_INL_H_
#else
#define REPLAYSSM_OPS_MAMBA2_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstddef>

#include "replayssm/ops/mamba2_rows.h"
#include "replayssm/ops/records-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

inline constexpr int kLineFloats = 16;  // of a cache line

// A of a head: a token's log-decay is A dt'.
inline float decay_rate(const Mamba2Heads& heads, int head) {
  return -std::exp(heads.a_log[head]);
}

// The records of one head that the recurrence runs over.
struct Mamba2Run {
  int count = 0;
  int first_read = 0;               // records from here on give outputs
  int stored = 0;                   // the state after so many records is kept; first_read, count or 0: none
  const float* decays = nullptr;    // [count] e^{A dt'}
  const float* weights = nullptr;   // [count, P] dt' x
  const float* const* b = nullptr;  // [count] of [N]
  const float* const* c = nullptr;  // [count - first_read] of [N]
  float* const* outs = nullptr;     // [count - first_read] of [P]
  HeadState state = {};             // [P, N]
  HeadState state_out = {};         // [P, N]
};

// Record j for kVectors vectors of one row of the state, in registers:  S <- decay S + (dt' x) B.
template <int kVectors>
HWY_INLINE void update_vectors(const Mamba2Run& run, int j, float weight, int column, Floats (&state)[kVectors]) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const Floats decay = hn::Set(d, run.decays[j]), factor = hn::Set(d, weight);
  const float* b = run.b[j] + column;
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i)
    state[i] = hn::MulAdd(decay, state[i], hn::Mul(factor, hn::LoadU(d, b + i * lanes)));
}

// kVectors vectors of a row, from element `begin` of the head on.
template <int kVectors>
HWY_INLINE void load_vectors(HeadState from, ptrdiff_t begin, Floats (&state)[kVectors]) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  if (from.is_words()) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      if (i * lanes % kLineFloats == 0) hwy::Prefetch(from.words() + begin + i * lanes + kPrefetchFloats);
      state[i] = hn::LoadU(d, from.words() + begin + i * lanes);
    }
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      if (i * lanes % (2 * kLineFloats) == 0) {
        hwy::Prefetch(from.hi() + begin + i * lanes + kPrefetchFloats);
        hwy::Prefetch(from.lo() + begin + i * lanes + kPrefetchFloats);
      }
      state[i] = join(from, begin + i * lanes);
    }
  }
}

template <int kVectors>
HWY_INLINE void store_vectors(const Floats (&state)[kVectors], HeadState to, ptrdiff_t begin) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  if (to.is_words()) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) hn::StoreU(state[i], d, to.words() + begin + i * lanes);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) split(state[i], to, begin + i * lanes);
  }
}

// All records for kVectors vectors of one row, from `column` on; adds this part of S C to `sums`, [outputs, 4] vectors
// of which this row has every fourth.
template <int kVectors>
HWY_INLINE void update_columns(const Mamba2Run& run, int row, int column, const Mamba2Shape& shape,
                               float* HWY_RESTRICT sums) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const ptrdiff_t offset = static_cast<ptrdiff_t>(row) * shape.state_size + column;
  const float* weight = run.weights + row;
  Floats state[kVectors];
  load_vectors<kVectors>(run.state, offset, state);
  int j = 0;
  for (; j < run.first_read; ++j, weight += shape.head_size) update_vectors<kVectors>(run, j, *weight, column, state);
  if (run.stored > 0 && run.stored == run.first_read) store_vectors<kVectors>(state, run.state_out, offset);
  for (; j < run.count; ++j, weight += shape.head_size) {
    update_vectors<kVectors>(run, j, *weight, column, state);
    const float* c = run.c[j - run.first_read] + column;
    float* target = sums + static_cast<ptrdiff_t>(j - run.first_read) * 4 * lanes;
    Floats even = column == 0 ? hn::Zero(d) : hn::Load(d, target), odd = hn::Zero(d);
#pragma GCC unroll 4
    for (int i = 0; i + 1 < kVectors; i += 2) {
      even = hn::MulAdd(state[i], hn::LoadU(d, c + i * lanes), even);
      odd = hn::MulAdd(state[i + 1], hn::LoadU(d, c + (i + 1) * lanes), odd);
    }
    if (kVectors == 1) even = hn::MulAdd(state[0], hn::LoadU(d, c), even);
    hn::Store(hn::Add(even, odd), d, target);
  }
  if (run.stored > run.first_read) store_vectors<kVectors>(state, run.state_out, offset);
}

// The conventional recurrence over a head's records, with outputs S C after each of the last. This is the only place
// where a state is advanced token by token, so every caller gets the same bits. `sums` holds 4 vectors an output.
HWY_INLINE void update_head(const Mamba2Run& run, const Mamba2Shape& shape, float* HWY_RESTRICT sums) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d)), N = shape.state_size;
  for (int row = 0; row < shape.head_size; row += 4) {
    for (int r = 0; r < 4; ++r) {
      float* row_sums = sums + r * lanes;
      int column = 0;
      for (; column + 8 * lanes <= N; column += 8 * lanes) update_columns<8>(run, row + r, column, shape, row_sums);
      for (; column + 2 * lanes <= N; column += 2 * lanes) update_columns<2>(run, row + r, column, shape, row_sums);
      for (; column < N; column += lanes) update_columns<1>(run, row + r, column, shape, row_sums);
    }
    for (int t = 0; t < run.count - run.first_read; ++t) {
      const float* of_token = sums + static_cast<ptrdiff_t>(t) * 4 * lanes;
      sum_lanes_of_4(hn::Load(d, of_token), hn::Load(d, of_token + lanes), hn::Load(d, of_token + 2 * lanes),
                     hn::Load(d, of_token + 3 * lanes), run.outs[t] + row);
    }
  }
}

// out <- scale x, of one head and token. `x` may be `out`.
HWY_INLINE void scale_input(const float* x, float scale, int size, float* out) {
  const Floats factor = hn::Set(FloatTag(), scale);
  for_each_vector(size, [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Mul(factor, load(x)), out); });
}

// out <- (sum + d x) silu(z), of one head and token; d and z may be null: left out. `sum` may be `out`.
HWY_INLINE void finish_output(const float* sum, const float* d, const float* x, const float* z, int size, float* out) {
  if (d != nullptr) {
    const Floats scale = hn::Set(FloatTag(), *d);
    for_each_vector(
        size, [&](const auto& load, const auto& store) HWY_ATTR { store(hn::MulAdd(scale, load(x), load(sum)), out); });
  } else if (sum != out) {
    for_each_vector(size, [&](const auto& load, const auto& store) HWY_ATTR { store(load(sum), out); });
  }
  if (z != nullptr)
    for_each_vector(
        size, [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Mul(load(out), silu(load(z))), out); });
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();
#endif  // REPLAYSSM_OPS_MAMBA2_INL_H_
