// The delta rule's prefill on the CPU: chunks of tokens as matrix products (docs/math.md, "Prefill in chunks").
#include "replayssm/ops/delta.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/delta_prefill.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cstring>

#include "replayssm/core/error.h"
#include "replayssm/ops/delta-inl.h"
#include "replayssm/ops/delta_rows.h"
#include "replayssm/ops/products-inl.h"

#ifndef REPLAYSSM_OPS_DELTA_PREFILL_CHUNK_
#define REPLAYSSM_OPS_DELTA_PREFILL_CHUNK_
namespace replayssm {

// Tokens of a chunk. Half the work inside a chunk grows with it, the work per token with the state does not.
inline constexpr int kChunk = 32;

}  // namespace replayssm
#endif

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// What a thread needs for one key head of one row.
struct PrefillScratch {
  int value_columns;      // V rounded up to whole vectors
  ptrdiff_t value_pitch;  // row pitch of arrays over value channels
  float* state;           // [H/G, K, V] transposed states
  float* rows;            // [4, K] of a state that is kept as planes
  float* x;               // [2 chunk, K] normalised keys, then queries
  float* keys;            // [K, chunk] keys transposed
  float* products;        // [2 chunk, chunk] keys x keys, then queries x keys
  float* read;            // [2 chunk, V] S k, then S q; overwritten by the corrections and the outputs
  float* solve;           // [chunk, chunk] -beta_i k_i.k_j e^{s_i - s_j}
  float* mix;             // [chunk, chunk] q_i.k_j e^{s_i - s_j}
  float* decays;          // [chunk] e^{s_i}; with a gate a channel ones, the decays being in the arrays below
  float* sums;            // [chunk] s_i rounded; with one gate a head, like the next two
  float* rests;           // [chunk] what rounding took
  float* remaining;       // [chunk] e^{s_last - s_i}
  float* decayed;         // [2 chunk, K] e^{s_i} k_i, then e^{s_i} q_i; with a gate a channel, like the next two
  float* carried;         // [chunk, K] e^{s_last - s_j} k_j
  float* prefix;          // [K] e^{s_last}
  float* channel_decays;  // [K] e^{g_i}
};

PrefillScratch take_prefill_scratch(Carver& memory, const DeltaShape& shape) {
  PrefillScratch scratch;
  scratch.value_columns = (shape.value_size + 15) / 16 * 16;
  scratch.value_pitch = scratch.value_columns + kPitchPadding;
  const size_t K = shape.key_size, ratio = shape.heads / shape.key_heads;
  scratch.state = memory.take<float>(ratio * K * scratch.value_pitch);
  scratch.rows = memory.take<float>(4 * K);
  scratch.x = memory.take<float>(2 * kChunk * K);
  scratch.keys = memory.take<float>(K * (kChunk + kPitchPadding));
  scratch.products = memory.take<float>(2 * kChunk * kChunk);
  scratch.read = memory.take<float>(2 * kChunk * scratch.value_pitch);
  scratch.solve = memory.take<float>(kChunk * kChunk);
  scratch.mix = memory.take<float>(kChunk * kChunk);
  const bool is_per_channel = shape.gate_size > 1;
  for (float** sums : {&scratch.sums, &scratch.rests, &scratch.decays, &scratch.remaining})
    *sums = memory.take<float>(kChunk + kExpPadding);
  scratch.decayed = memory.take<float>(is_per_channel ? 2 * kChunk * K : 0);
  scratch.carried = memory.take<float>(is_per_channel ? kChunk * K : 0);
  scratch.prefix = memory.take<float>(is_per_channel ? K : 0);
  scratch.channel_decays = memory.take<float>(is_per_channel ? K : 0);
  return scratch;
}

size_t prefill_scratch_bytes(const DeltaShape& shape) {
  Carver sizes(nullptr);
  take_prefill_scratch(sizes, shape);
  return sizes.bytes();
}

// The keys and queries of a chunk, normalised, and with one gate a head their products with the keys: what all value
// heads of a key head share. `window` covers the chunk.
HWY_INLINE void prepare_chunk(const DeltaWindow& window, const PrefillScratch& scratch) {
  const int K = window.shape->key_size, count = window.tokens;
  const int padded = (count + 3) / 4 * 4;
  for (int t = 0; t < count; ++t) {
    const float* k = window.k(t);
    const float* q = window.q(t);
    scale_vector(k, inverse_norm(k, K), K, scratch.x + static_cast<ptrdiff_t>(t) * K);
    scale_vector(q, inverse_norm(q, K) / std::sqrt(static_cast<float>(K)), K,
                 scratch.x + static_cast<ptrdiff_t>(count + t) * K);
  }
  if (window.shape->gate_size > 1) return;
  // The transposition takes rows by four: the surplus rows are queries, whose columns no product below reads.
  if (2 * count < padded)
    std::fill_n(scratch.x + static_cast<ptrdiff_t>(2 * count) * K, (padded - 2 * count) * K, 0.0f);
  const int pitch = kChunk + kPitchPadding;
  transpose(scratch.x, K, padded, K, scratch.keys, pitch);
  const Product products = {scratch.x, K, 1, scratch.keys, pitch, scratch.products, kChunk, nullptr, 0};
  // Columns past `count` hold what the transposition left there; the products with them are never used.
  multiply(products, 0, 2 * count, kChunk, K);
}

// The decays of a chunk for one value head and the two triangular matrices that they weigh; one gate a head.
HWY_INLINE void prepare_head(const DeltaWindow& window, int head, const PrefillScratch& scratch) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const int count = window.tokens;
  double sum = 0;  // so that differences of far sums keep a float's precision
  for (int t = 0; t < count; ++t) {
    sum += *window.g(t, head);
    scratch.sums[t] = static_cast<float>(sum);
    scratch.rests[t] = static_cast<float>(sum - scratch.sums[t]);
  }
  for (float* sums : {scratch.sums, scratch.rests})
    std::fill(sums + count, sums + kChunk + kExpPadding, sums[count - 1]);
  for (int t = 0; t < kChunk; ++t) {
    scratch.decays[t] = scratch.sums[t];
    scratch.remaining[t] = (scratch.sums[count - 1] - scratch.sums[t]) + (scratch.rests[count - 1] - scratch.rests[t]);
  }
  exp_in_place(scratch.decays, kChunk);
  exp_in_place(scratch.remaining, kChunk);
  for (int i = 0; i < count; ++i) {
    const Floats own_sum = hn::Set(d, scratch.sums[i]), own_rest = hn::Set(d, scratch.rests[i]);
    const Floats minus_beta = hn::Set(d, -window.beta(i, head));
    float* solve = scratch.solve + static_cast<ptrdiff_t>(i) * kChunk;
    float* mix = scratch.mix + static_cast<ptrdiff_t>(i) * kChunk;
    const float* keys = scratch.products + static_cast<ptrdiff_t>(i) * kChunk;
    const float* queries = scratch.products + static_cast<ptrdiff_t>(count + i) * kChunk;
    for (int j = 0; j <= i; j += lanes) {
      const Floats exponent =
          hn::Add(hn::Sub(own_sum, hn::LoadU(d, scratch.sums + j)), hn::Sub(own_rest, hn::LoadU(d, scratch.rests + j)));
      // Later tokens get no positive exponent; their entries are cleared below.
      const Floats decay = exponential(hn::IfThenElse(hn::Gt(exponent, hn::Zero(d)), hn::Zero(d), exponent));
      hn::StoreU(hn::Mul(hn::Mul(minus_beta, decay), hn::LoadU(d, keys + j)), d, solve + j);
      hn::StoreU(hn::Mul(decay, hn::LoadU(d, queries + j)), d, mix + j);
    }
    std::fill(solve + i, solve + kChunk, 0.0f);
    std::fill(mix + i + 1, mix + kChunk, 0.0f);
  }
}

// rows[j] <- decays rows[j] and the products of the result with a and b, for four rows.
HWY_INLINE void carry_rows(float* rows, const float* decays, const float* a, const float* b, int size,
                           float* products_a, float* products_b) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  Floats sums_a[4], sums_b[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) sums_a[j] = sums_b[j] = hn::Zero(d);
  for (int c = 0; c < size; c += lanes) {
    const Floats decay = hn::LoadU(d, decays + c), in_a = hn::LoadU(d, a + c), in_b = hn::LoadU(d, b + c);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Floats value = hn::Mul(decay, hn::LoadU(d, rows + j * size + c));
      hn::StoreU(value, d, rows + j * size + c);
      sums_a[j] = hn::MulAdd(value, in_a, sums_a[j]);
      sums_b[j] = hn::MulAdd(value, in_b, sums_b[j]);
    }
  }
  sum_lanes_of_4(sums_a[0], sums_a[1], sums_a[2], sums_a[3], products_a);
  sum_lanes_of_4(sums_b[0], sums_b[1], sums_b[2], sums_b[3], products_b);
}

// The same for a gate a channel. A key is carried forward from token to token, multiplied by each token's decays on the
// way, so there are no exponents but the gates themselves.
HWY_INLINE void prepare_head_channels(const DeltaWindow& window, int head, const PrefillScratch& scratch) {
  const int K = window.shape->key_size, count = window.tokens;
  std::fill_n(scratch.decays, kChunk, 1.0f);
  std::fill_n(scratch.prefix, K, 1.0f);
  std::fill_n(scratch.carried, (count + 3) / 4 * 4 * K, 0.0f);  // the rows not yet reached are carried along by fours
  for (int i = 0; i < count; ++i) {
    const float* k = scratch.x + static_cast<ptrdiff_t>(i) * K;
    const float* q = scratch.x + static_cast<ptrdiff_t>(count + i) * K;
    float* solve = scratch.solve + static_cast<ptrdiff_t>(i) * kChunk;
    float* mix = scratch.mix + static_cast<ptrdiff_t>(i) * kChunk;
    if (i + 1 < count)  // a token's gates lie far from the last one's: 10% of the prefill went into waiting for them
      for (int c = 0; c < K; c += 16) hwy::Prefetch(window.g(i + 1, head) + c);
    channel_decays(window.g(i, head), K, K, scratch.channel_decays);
    for (int j = 0; j < i; j += 4)
      carry_rows(scratch.carried + static_cast<ptrdiff_t>(j) * K, scratch.channel_decays, k, q, K, solve + j, mix + j);
    for (int j = 0; j < i; ++j) solve[j] *= -window.beta(i, head);
    mix[i] = product_with_key(q, k, K);
    std::memcpy(scratch.carried + static_cast<ptrdiff_t>(i) * K, k, sizeof(float) * K);
    multiply_channels(scratch.prefix, scratch.channel_decays, K, scratch.prefix);
    multiply_channels(scratch.prefix, k, K, scratch.decayed + static_cast<ptrdiff_t>(i) * K);
    multiply_channels(scratch.prefix, q, K, scratch.decayed + static_cast<ptrdiff_t>(count + i) * K);
  }
}

// The chunk's corrections, by forward substitution: rows 0 .. count-1 of scratch.read from S k to
// d_i = beta_i (v_i - e^{s_i} S k_i) - sum_{j<i} beta_i k_i.k_j e^{s_i - s_j} d_j.
HWY_INLINE void solve_corrections(const DeltaWindow& window, int head, const PrefillScratch& scratch) {
  const int V = window.shape->value_size, count = window.tokens;
  for (int i = 0; i < count; ++i) {
    float* row = scratch.read + i * scratch.value_pitch;
    const float* v = window.v(i, head);
    const float beta = window.beta(i, head);
    for (int c = 0; c < V; ++c) row[c] = beta * (v[c] - scratch.decays[i] * row[c]);
  }
  const float one = 1.0f;
  multiply_triangle(
      {scratch.solve, kChunk, 1, scratch.read, scratch.value_pitch, scratch.read, scratch.value_pitch, &one, 0}, count,
      scratch.value_columns, /*diagonal=*/0);
}

// One value head's share of a chunk: outputs, and the transposed state `state` [K, V] moved past the chunk.
HWY_INLINE void run_chunk(const DeltaWindow& window, int head, float* state, const PrefillScratch& scratch, float* out,
                          ptrdiff_t out_stride) {
  const int K = window.shape->key_size, V = window.shape->value_size, count = window.tokens;
  const ptrdiff_t pitch = scratch.value_pitch;
  const bool is_per_channel = window.shape->gate_size > 1;
  if (is_per_channel)
    prepare_head_channels(window, head, scratch);
  else
    prepare_head(window, head, scratch);
  const Product read = {
      is_per_channel ? scratch.decayed : scratch.x, K, 1, state, pitch, scratch.read, pitch, nullptr, 0};
  multiply(read, 0, 2 * count, scratch.value_columns, K);
  solve_corrections(window, head, scratch);
  float* outputs = scratch.read + count * pitch;
  multiply_triangle({scratch.mix, kChunk, 1, scratch.read, pitch, outputs, pitch, scratch.decays, 1}, count,
                    scratch.value_columns, /*diagonal=*/1);
  for (int t = 0; t < count; ++t) std::memcpy(out + t * out_stride, outputs + t * pitch, sizeof(float) * V);
  Product advance = {scratch.carried, 1, K, scratch.read, pitch, state, pitch, scratch.prefix, 1};
  if (!is_per_channel) {
    for (int t = 0; t < count; ++t)
      for (int c = 0; c < scratch.value_columns; ++c) scratch.read[t * pitch + c] *= scratch.remaining[t];
    advance = {scratch.x, 1, K, scratch.read, pitch, state, pitch, scratch.decays + count - 1, 0};
  }
  multiply(advance, 0, K, scratch.value_columns, count);
}

// to [K, V] <- a head's state, transposed.
HWY_INLINE void load_transposed(const HeadState& from, const DeltaShape& shape, const PrefillScratch& scratch,
                                float* to) {
  const int K = shape.key_size, V = shape.value_size;
  if (from.is_words()) return transpose(from.words(), K, V, K, to, scratch.value_pitch);
  for (int row = 0; row < V; row += 4) {
    join_rows(from, static_cast<ptrdiff_t>(row) * K, 4 * K, scratch.rows);
    transpose(scratch.rows, K, 4, K, to + row, scratch.value_pitch);
  }
}

HWY_INLINE void store_transposed(const float* from, const DeltaShape& shape, const PrefillScratch& scratch,
                                 const HeadState& to) {
  const int K = shape.key_size, V = shape.value_size;
  if (to.is_words()) return transpose(from, scratch.value_pitch, K, V, to.words(), K);
  for (int row = 0; row < V; row += 4) {
    transpose(from + row, scratch.value_pitch, K, 4, scratch.rows, K);
    split_rows(scratch.rows, to, static_cast<ptrdiff_t>(row) * K, 4 * K);
  }
}

// One key head of one row: its tokens from first_token on, in place on checkpoint_out.
void delta_prefill_kernel(const DeltaPrefill& args, int row, int key_head, std::span<std::byte> workspace, int thread) {
  const DeltaShape& shape = args.state.shape;
  const int K = shape.key_size, V = shape.value_size, ratio = shape.heads / shape.key_heads;
  const int begin = args.token_begin[row], end = args.token_begin[row + 1];
  const ptrdiff_t out_stride = static_cast<ptrdiff_t>(shape.heads) * V;
  if (args.rows.slot[row] == kPaddingSlot) {
    for (int token = begin; token < end; ++token)
      std::fill_n(args.out + token * out_stride + key_head * ratio * V, ratio * V, 0.0f);
    return;
  }
  if (begin == end) return;
  Carver memory(workspace.data() + prefill_scratch_bytes(shape) * thread);
  const PrefillScratch scratch = take_prefill_scratch(memory, shape);
  const ptrdiff_t head_state = K * scratch.value_pitch;
  for (int i = 0; i < ratio; ++i) {
    float* state = scratch.state + i * head_state;
    if (V < scratch.value_columns) std::fill_n(state, head_state, 0.0f);
    load_transposed(checkpoint_of(args.state, args.rows.checkpoint_out[row], key_head * ratio + i), shape, scratch,
                    state);
  }
  for (int64_t token = begin; token < end; token += kChunk) {
    const int count = static_cast<int>(std::min<int64_t>(kChunk, end - token));
    const DeltaWindow window = window_of(args.state, args.rows, args.tokens, row, token, count, key_head);
    prepare_chunk(window, scratch);
    for (int i = 0; i < ratio; ++i) {
      const int head = key_head * ratio + i;
      run_chunk(window, head, scratch.state + i * head_state, scratch, args.out + token * out_stride + head * V,
                out_stride);
    }
  }
  for (int i = 0; i < ratio; ++i)
    store_transposed(scratch.state + i * head_state, shape, scratch,
                     checkpoint_of(args.state, args.rows.checkpoint_out[row], key_head * ratio + i));
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(delta_prefill_kernel);
HWY_EXPORT(prefill_scratch_bytes);

size_t delta_prefill_scratch_bytes(const DeltaShape& shape) {
  return HWY_DYNAMIC_DISPATCH(prefill_scratch_bytes)(shape);
}

void delta_prefill_cpu(const DeltaPrefill& args, Device& device, std::span<std::byte> workspace) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(delta_prefill_kernel);
  const int key_heads = args.state.shape.key_heads;
  device.threads().parallel_for(
      static_cast<int64_t>(args.rows.count) * key_heads, 1, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t unit = begin; unit < end; ++unit)
          kernel(args, static_cast<int>(unit / key_heads), static_cast<int>(unit % key_heads), workspace, thread);
      });
}

void delta_prefill(const DeltaPrefill& args, Device& device, std::span<std::byte> workspace) {
  check_token_begin("delta_prefill", args.rows, args.token_begin);
  const bool has_tokens = args.rows.count > 0 && args.token_begin[args.rows.count] > 0;
  if (has_tokens) check_tokens("delta_prefill", args.state.shape, args.tokens, args.out);
  // Folds the rings, and brings every row to the checkpoint that the kernel advances in place.
  delta_materialise({args.state, args.rows}, device, workspace);
  if (!has_tokens) return;
  delta_prefill_cpu(args, device, workspace);
}

}  // namespace replayssm
#endif  // HWY_ONCE
