// The delta rule's vector code, compiled once per SIMD target: sums, norms, decays, and the one update that the step,
// the fold and the exact readout share.
#if defined(REPLAYSSM_OPS_DELTA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPLAYSSM_OPS_DELTA_INL_H_
#undef REPLAYSSM_OPS_DELTA_INL_H_
#else
#define REPLAYSSM_OPS_DELTA_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "replayssm/ops/delta_rows.h"
#include "replayssm/ops/records-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// Rows that one pass over the state keeps sums for: two sums a row must fit the registers.
inline constexpr int kRowBlock = HWY_TARGET == HWY_AVX3 ? 8 : 4;

// 1 / sqrt(|x|^2 + 1e-6)
HWY_INLINE float inverse_norm(const float* x, int size) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  Floats squares = hn::Zero(d);
  for (int c = 0; c < size; c += lanes) {
    const Floats value = hn::LoadU(d, x + c);
    squares = hn::MulAdd(value, value, squares);
  }
  float sums[4];
  sum_lanes_of_4(squares, squares, squares, squares, sums);
  return 1.0f / std::sqrt(sums[0] + 1e-6f);
}

// out <- scale x
HWY_INLINE void scale_vector(const float* x, float scale, int size, float* HWY_RESTRICT out) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int c = 0; c < size; c += lanes) hn::StoreU(hn::Mul(hn::Set(d, scale), hn::LoadU(d, x + c)), d, out + c);
}

// decays[c] <- e^{g[c]} for all K channels, which one gate serves if gate_size is 1.
HWY_INLINE void channel_decays(const float* g, int gate_size, int key_size, float* HWY_RESTRICT decays) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  if (gate_size == 1) {
    const Floats decay = exponential(hn::Set(d, g[0]));
    for (int c = 0; c < key_size; c += lanes) hn::StoreU(decay, d, decays + c);
  } else {
    for (int c = 0; c < key_size; c += lanes) hn::StoreU(exponential(hn::LoadU(d, g + c)), d, decays + c);
  }
}

// out <- a b, channel by channel; out may be a or b
HWY_INLINE void multiply_channels(const float* a, const float* b, int size, float* out) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int c = 0; c < size; c += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, a + c), hn::LoadU(d, b + c)), d, out + c);
}

// q . k, in the order of sums of pull_back_query.
HWY_INLINE float product_with_key(const float* q, const float* k, int size) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  Floats sums[2] = {hn::Zero(d), hn::Zero(d)};
  int c = 0;
  for (; c + 2 * lanes <= size; c += 2 * lanes) {
    sums[0] = hn::MulAdd(hn::LoadU(d, q + c), hn::LoadU(d, k + c), sums[0]);
    sums[1] = hn::MulAdd(hn::LoadU(d, q + c + lanes), hn::LoadU(d, k + c + lanes), sums[1]);
  }
  if (c < size) sums[0] = hn::MulAdd(hn::LoadU(d, q + c), hn::LoadU(d, k + c), sums[0]);
  const Floats sum = hn::Add(sums[0], sums[1]);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Carries a query back through one record: q <- decays (q + factor k), channel by channel; returns q . older_k, what
// the record before needs.
HWY_INLINE float pull_back_query(const float* k, float factor, const float* decays, const float* older_k, int size,
                                 float* HWY_RESTRICT q) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const Floats factors = hn::Set(d, factor);
  Floats sums[2] = {hn::Zero(d), hn::Zero(d)};
  const auto channels = [&](int c, Floats& sum) HWY_ATTR {
    const Floats pulled =
        hn::Mul(hn::LoadU(d, decays + c), hn::MulAdd(factors, hn::LoadU(d, k + c), hn::LoadU(d, q + c)));
    hn::StoreU(pulled, d, q + c);
    sum = hn::MulAdd(pulled, hn::LoadU(d, older_k + c), sum);
  };
  int c = 0;
  for (; c + 2 * lanes <= size; c += 2 * lanes) {
    channels(c, sums[0]);
    channels(c + lanes, sums[1]);
  }
  if (c < size) channels(c, sums[0]);
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sums[0], sums[1])));
}

// One token as one value head sees it. The product of the decayed state with k is taken over the state as it lies
// there, as read_scale (S read_k): with one gate a head read_k is k and read_scale e^g, with a gate a channel read_k is
// e^g k and read_scale 1. `out` and `state_out` may be null.
struct DeltaRecord {
  const float* k;       // [K] normalised
  const float* read_k;  // [K]
  const float* decays;  // [K] e^g
  const float* v;       // [V]
  const float* q;       // [K] normalised and scaled; read only with `out`
  float read_scale;
  float beta;
  float* out;                  // [V] receives S q after this record
  const HeadState* state_out;  // [V, K] receives S after this record
};

// S <- S Diag(decays) + d k^T for rows `from` -> `to` (not stored if kStores is false), with d in `corrections`; and
// the sums over channels of S q and of S next_k that the readout and the next record need.
template <int kRows, bool kStores, bool kReads, bool kContinues>
HWY_INLINE void update_pass(const DeltaRecord& record, const float* next_k, const float* corrections, int key_size,
                            const float* from, float* to, float* HWY_RESTRICT readouts, float* HWY_RESTRICT products) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const float* record_k = record.k;  // in registers: the stores below could alias the record
  const float* record_q = record.q;
  const float* record_decays = record.decays;
  Floats read[kRows], next[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) read[r] = next[r] = hn::Zero(d);
  for (int c = 0; c < key_size; c += lanes) {
    const Floats k = hn::LoadU(d, record_k + c);
    const Floats decay = hn::LoadU(d, record_decays + c);
    const Floats q = kReads ? hn::LoadU(d, record_q + c) : k;
    const Floats other_k = kContinues ? hn::LoadU(d, next_k + c) : k;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Floats decayed = hn::Mul(decay, hn::LoadU(d, from + r * key_size + c));
      const Floats state = hn::MulAdd(k, hn::Set(d, corrections[r]), decayed);
      if (kStores) hn::StoreU(state, d, to + r * key_size + c);
      if (kReads) read[r] = hn::MulAdd(state, q, read[r]);
      if (kContinues) next[r] = hn::MulAdd(state, other_k, next[r]);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; r += 4) {
    if (kReads) sum_lanes_of_4(read[r], read[r + 1], read[r + 2], read[r + 3], readouts + r);
    if (kContinues) sum_lanes_of_4(next[r], next[r + 1], next[r + 2], next[r + 3], products + r);
  }
}

// products[r] <- S[r] . read_k for kRows rows: what the first record of a run needs.
template <int kRows, bool kIsFromMemory>
HWY_INLINE void first_products(const float* read_k, int key_size, const float* from, float* HWY_RESTRICT products) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  Floats sums[kRows];
  // Row after row: the hardware recognises one ascending stream, not eight at once.
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] = hn::Zero(d);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < key_size; c += lanes) {
      if (kIsFromMemory) hwy::Prefetch(from + r * key_size + c + kPrefetchFloats);
      sums[r] = hn::MulAdd(hn::LoadU(d, from + r * key_size + c), hn::LoadU(d, read_k + c), sums[r]);
    }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; r += 4) sum_lanes_of_4(sums[r], sums[r + 1], sums[r + 2], sums[r + 3], products + r);
}

// One record for kRows rows that start at `row`: d = beta (v - read_scale (S read_k));  S <- S Diag(decays) + d k^T;
// o = S q. Reads S and `products` = S read_k of this record, leaves those of the next record.
template <int kRows>
HWY_INLINE void update_record(const DeltaRecord& record, const float* next_k, int row, int key_size, const float* from,
                              float* to, float* HWY_RESTRICT products) {
  float corrections[kRows], readouts[kRows] = {};
  for (int r = 0; r < kRows; ++r) corrections[r] = record.beta * (record.v[row + r] - record.read_scale * products[r]);
  if (next_k != nullptr) {
    if (record.out != nullptr)
      update_pass<kRows, true, true, true>(record, next_k, corrections, key_size, from, to, readouts, products);
    else
      update_pass<kRows, true, false, true>(record, next_k, corrections, key_size, from, to, readouts, products);
  } else if (record.state_out == nullptr) {
    if (record.out != nullptr)
      update_pass<kRows, false, true, false>(record, nullptr, corrections, key_size, from, to, readouts, products);
  } else if (record.out != nullptr) {
    update_pass<kRows, true, true, false>(record, nullptr, corrections, key_size, from, to, readouts, products);
  } else {
    update_pass<kRows, true, false, false>(record, nullptr, corrections, key_size, from, to, readouts, products);
  }
  if (record.out != nullptr)
    for (int r = 0; r < kRows; ++r) record.out[row + r] = readouts[r];
}

// The conventional recurrence over `count` >= 1 records for kBlocks blocks of kRows rows of one head's state, from
// `row` on. This is the only place where a state is advanced, so every caller gets the same bits. Planes are joined in
// the scratch, and split from there where they are stored.
template <int kRows, int kBlocks>
HWY_INLINE void update_rows(const DeltaRecord* records, int count, int row, int key_size, const HeadState& state,
                            float* scratch) {
  const int block_size = kRows * key_size;
  const ptrdiff_t offset = static_cast<ptrdiff_t>(row) * key_size;
  const float* from[kBlocks];
  float products[kBlocks][kRows];
  for (int b = 0; b < kBlocks; ++b) {
    if (state.is_words()) {
      from[b] = state.words() + offset + b * block_size;
      first_products<kRows, true>(records[0].read_k, key_size, from[b], products[b]);
    } else {
      from[b] = scratch + b * block_size;
      join_rows(state, offset + b * block_size, block_size, scratch + b * block_size);
      first_products<kRows, false>(records[0].read_k, key_size, from[b], products[b]);
    }
  }
  for (int j = 0; j < count; ++j) {
    const DeltaRecord& record = records[j];
    const float* next_k = j + 1 < count ? records[j + 1].read_k : nullptr;
    if (next_k != nullptr) hwy::Prefetch(records[j + 1].v + row);
    const bool is_stored = record.state_out != nullptr;
    for (int b = 0; b < kBlocks; ++b) {
      float* to = (is_stored && state.is_words() ? record.state_out->words() + offset : scratch) + b * block_size;
      update_record<kRows>(record, next_k, row + b * kRows, key_size, from[b], to, products[b]);
      if (is_stored && !state.is_words()) split_rows(to, *record.state_out, offset + b * block_size, block_size);
      from[b] = to;
    }
  }
}

// update_rows for all rows of a head. `scratch` holds 2 kRowBlock * K floats. Two blocks take turns through a run of
// records, so that one's sums of lanes hide behind the other's arithmetic; a single record is bound by memory, which
// prefers one stream.
HWY_INLINE void update_head(const DeltaRecord* records, int count, int key_size, int value_size, const HeadState& state,
                            float* scratch) {
  int row = 0;
  if (count > 1)
    for (; row + 2 * kRowBlock <= value_size; row += 2 * kRowBlock)
      update_rows<kRowBlock, 2>(records, count, row, key_size, state, scratch);
  for (; row + kRowBlock <= value_size; row += kRowBlock)
    update_rows<kRowBlock, 1>(records, count, row, key_size, state, scratch);
  for (; row < value_size; row += 4) update_rows<4, 1>(records, count, row, key_size, state, scratch);
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();
#endif  // REPLAYSSM_OPS_DELTA_INL_H_
