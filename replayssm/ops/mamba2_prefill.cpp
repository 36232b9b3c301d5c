// Mamba-2's prefill on the CPU: chunks of tokens as matrix products (docs/math.md, "Prefill in chunks").
#include "replayssm/ops/mamba2.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/mamba2_prefill.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cstring>

#include "replayssm/core/error.h"
#include "replayssm/ops/mamba2-inl.h"
#include "replayssm/ops/mamba2_rows.h"
#include "replayssm/ops/products-inl.h"

#ifndef REPLAYSSM_OPS_MAMBA2_PREFILL_CHUNK_
#define REPLAYSSM_OPS_MAMBA2_PREFILL_CHUNK_
namespace replayssm {

// Tokens of a chunk, a multiple of 16.
inline constexpr int kMamba2Chunk = 64;

}  // namespace replayssm
#endif

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// What a thread needs for one unit of one row. Pitches are no multiples of 512 bytes, or few cache sets serve a column.
struct PrefillScratch {
  ptrdiff_t state_pitch;  // of arrays over state channels
  ptrdiff_t token_pitch;  // of arrays over tokens
  ptrdiff_t head_pitch;   // of arrays over a head's channels, a multiple of 16
  float* state;           // [P, N] of a head whose state is kept as planes
  float* b;               // [chunk, N]
  float* c;               // [chunk, N]
  float* queries;         // [N, chunk] c transposed
  float* products;        // [chunk, chunk] products[t][j] = C_t . B_j
  float* turned;          // [max(chunk, P), chunk] results before their transposition
  float* x;               // [chunk, P] dt' x, then that times `remaining`
  float* y;               // [chunk, P]
  float* mix;             // [chunk, chunk] C_t . B_j e^{s_t - s_j}
  float* sums;            // [chunk] s_t rounded
  float* rests;           // [chunk] what rounding took
  float* decays;          // [chunk] e^{s_t}
  float* remaining;       // [chunk] e^{s_last - s_t}
};

PrefillScratch take_prefill_scratch(Carver& memory, const Mamba2Shape& shape) {
  constexpr size_t kChunk = kMamba2Chunk;
  PrefillScratch scratch;
  scratch.state_pitch = shape.state_size + kPitchPadding;
  scratch.token_pitch = kMamba2Chunk + kPitchPadding;
  scratch.head_pitch = (shape.head_size + 15) / 16 * 16 + kPitchPadding;
  const size_t turned_rows = std::max<size_t>(kChunk, scratch.head_pitch);
  scratch.state = memory.take<float>(static_cast<size_t>(shape.head_size) * shape.state_size);
  scratch.b = memory.take<float>(kChunk * scratch.state_pitch);
  scratch.c = memory.take<float>(kChunk * scratch.state_pitch);
  scratch.queries = memory.take<float>(shape.state_size * scratch.token_pitch);
  scratch.products = memory.take<float>(kChunk * scratch.token_pitch);
  scratch.turned = memory.take<float>(turned_rows * scratch.token_pitch);
  scratch.x = memory.take<float>(kChunk * scratch.head_pitch);
  scratch.y = memory.take<float>(kChunk * scratch.head_pitch);
  scratch.mix = memory.take<float>(kChunk * scratch.token_pitch);
  for (float** sums : {&scratch.sums, &scratch.rests, &scratch.decays, &scratch.remaining})
    *sums = memory.take<float>(kChunk + kExpPadding);
  return scratch;
}

size_t prefill_scratch_bytes(const Mamba2Shape& shape) {
  Carver sizes(nullptr);
  take_prefill_scratch(sizes, shape);
  return sizes.bytes();
}

// `count` rounded up to whole vectors of any target.
HWY_INLINE int padded_tokens(int count) {
  return (count + 15) / 16 * 16;
}

// B and C of a chunk and their products: what all heads of a group share. `window` covers the chunk.
HWY_INLINE void prepare_chunk(const Mamba2Window& window, const PrefillScratch& scratch) {
  const int N = window.state->shape.state_size, count = window.tokens, padded = padded_tokens(count);
  for (int t = 0; t < count; ++t) {
    std::memcpy(scratch.b + t * scratch.state_pitch, window.b(t), sizeof(float) * N);
    std::memcpy(scratch.c + t * scratch.state_pitch, window.c(t), sizeof(float) * N);
  }
  for (int t = count; t < padded; ++t) std::fill_n(scratch.c + t * scratch.state_pitch, N, 0.0f);
  transpose(scratch.c, scratch.state_pitch, padded, N, scratch.queries, scratch.token_pitch);
  multiply({scratch.b, scratch.state_pitch, 1, scratch.queries, scratch.token_pitch, scratch.turned,
            scratch.token_pitch, nullptr, 0},
           0, count, padded, N);
  // Rows past `count` hold older numbers: columns of products that no token below reads.
  transpose(scratch.turned, scratch.token_pitch, padded, padded, scratch.products, scratch.token_pitch);
}

// The decays of a chunk for one head and the triangular matrix that they weigh.
HWY_INLINE void prepare_head(const Mamba2Window& window, int head, float rate, const PrefillScratch& scratch) {
  const FloatTag d;
  const int lanes = static_cast<int>(hn::Lanes(d)), count = window.tokens;
  double sum = 0;  // so that differences of far sums keep a float's precision
  for (int t = 0; t < count; ++t) {
    sum += rate * window.dt(t, head);
    scratch.sums[t] = static_cast<float>(sum);
    scratch.rests[t] = static_cast<float>(sum - scratch.sums[t]);
  }
  for (float* sums : {scratch.sums, scratch.rests})
    std::fill(sums + count, sums + kMamba2Chunk + kExpPadding, sums[count - 1]);
  for (int t = 0; t < padded_tokens(count); ++t) {
    scratch.decays[t] = scratch.sums[t];
    scratch.remaining[t] = (scratch.sums[count - 1] - scratch.sums[t]) + (scratch.rests[count - 1] - scratch.rests[t]);
  }
  exp_in_place(scratch.decays, count);
  exp_in_place(scratch.remaining, count);
  for (int t = 0; t < count; ++t) {
    const Floats own_sum = hn::Set(d, scratch.sums[t]), own_rest = hn::Set(d, scratch.rests[t]);
    const float* products = scratch.products + t * scratch.token_pitch;
    float* mix = scratch.mix + t * scratch.token_pitch;
    for (int j = 0; j <= t; j += lanes) {
      const Floats exponent =
          hn::Add(hn::Sub(own_sum, hn::LoadU(d, scratch.sums + j)), hn::Sub(own_rest, hn::LoadU(d, scratch.rests + j)));
      // Of later tokens, which the triangular product leaves out, the exponent would be positive.
      const Floats decay = exponential(hn::IfThenElse(hn::Gt(exponent, hn::Zero(d)), hn::Zero(d), exponent));
      hn::StoreU(hn::Mul(decay, hn::LoadU(d, products + j)), d, mix + j);
    }
  }
}

// A head's inputs and outputs lie far apart from token to token, so the hardware foresees none of them.
HWY_INLINE void prefetch_head(const Mamba2Window& window, int head, const float* out, ptrdiff_t out_stride) {
  for (int t = 0; t < window.tokens; ++t)
    for (int p = 0; p < window.state->shape.head_size; p += kLineFloats) {
      hwy::Prefetch(window.x(t, head) + p);
      hwy::Prefetch(out + t * out_stride + p);
    }
}

// One head's share of a chunk: outputs, and the state [P, N] moved past the chunk.
HWY_INLINE void run_chunk(const Mamba2Window& window, const Mamba2Heads& heads, int head, float* state,
                          const PrefillScratch& scratch, float* out, ptrdiff_t out_stride) {
  const int P = window.state->shape.head_size, N = window.state->shape.state_size, count = window.tokens;
  const int columns = static_cast<int>(scratch.head_pitch) - kPitchPadding;
  prepare_head(window, head, decay_rate(heads, head), scratch);
  if (head + 1 < window.head_end) prefetch_head(window, head + 1, out + P, out_stride);
  for (int t = 0; t < count; ++t)
    scale_input(window.x(t, head), window.dt(t, head), P, scratch.x + t * scratch.head_pitch);
  multiply({state, N, 1, scratch.queries, scratch.token_pitch, scratch.turned, scratch.token_pitch, nullptr, 0}, 0, P,
           padded_tokens(count), N);
  transpose(scratch.turned, scratch.token_pitch, P, (count + 3) / 4 * 4, scratch.y, scratch.head_pitch);
  multiply_triangle({scratch.mix, scratch.token_pitch, 1, scratch.x, scratch.head_pitch, scratch.y, scratch.head_pitch,
                     scratch.decays, 1},
                    count, columns, /*diagonal=*/1);
  for (int t = 0; t < count; ++t)
    finish_output(scratch.y + t * scratch.head_pitch, heads.d == nullptr ? nullptr : heads.d + head, window.x(t, head),
                  window.z(t, head), P, out + t * out_stride);
  for (int t = 0; t < count; ++t)
    scale_input(scratch.x + t * scratch.head_pitch, scratch.remaining[t], P, scratch.x + t * scratch.head_pitch);
  multiply({scratch.x, 1, scratch.head_pitch, scratch.b, scratch.state_pitch, state, N, scratch.decays + count - 1, 0},
           0, P, N, count);
}

// One unit: its tokens from first_token on, in place on checkpoint_out.
void mamba2_prefill_kernel(const Mamba2Prefill& args, int64_t unit, std::span<std::byte> workspace, int thread) {
  const Mamba2Shape& shape = args.state.shape;
  const Mamba2Units units(shape);
  const int64_t row = unit / units.per_row();
  const int64_t begin = args.token_begin[row], end = args.token_begin[row + 1];
  const ptrdiff_t out_stride = static_cast<ptrdiff_t>(shape.heads) * shape.head_size;
  const StateRows& rows = args.rows;
  if (rows.slot[row] == kPaddingSlot) {
    const Mamba2Window window =
        window_of(args.state, rows, args.tokens, units, unit, begin, static_cast<int>(end - begin));
    return zero_outputs(window, args.out + begin * out_stride);
  }
  Carver memory(workspace.data() + prefill_scratch_bytes(shape) * thread);
  const PrefillScratch scratch = take_prefill_scratch(memory, shape);
  std::fill_n(scratch.x, kMamba2Chunk * scratch.head_pitch, 0.0f);  // the columns past P stay zeros
  for (int64_t token = begin; token < end; token += kMamba2Chunk) {
    const int count = static_cast<int>(std::min<int64_t>(kMamba2Chunk, end - token));
    Mamba2Window window = window_of(args.state, rows, args.tokens, units, unit, token, count);
    window.history = 0;  // already folded
    prepare_chunk(window, scratch);
    for (int head = window.head_begin; head < window.head_end; ++head) {
      const HeadState state = checkpoint_of(args.state, window.checkpoint_out, head);
      float* words = state.is_words() ? state.words() : scratch.state;
      if (!state.is_words()) join_rows(state, 0, static_cast<int>(state.size), words);
      run_chunk(window, args.heads, head, words, scratch,
                args.out + token * out_stride + static_cast<ptrdiff_t>(head) * shape.head_size, out_stride);
      if (!state.is_words()) split_rows(words, state, 0, static_cast<int>(state.size));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(mamba2_prefill_kernel);
HWY_EXPORT(prefill_scratch_bytes);

size_t mamba2_prefill_scratch_bytes(const Mamba2Shape& shape) {
  return HWY_DYNAMIC_DISPATCH(prefill_scratch_bytes)(shape);
}

void mamba2_prefill_cpu(const Mamba2Prefill& args, Device& device, std::span<std::byte> workspace) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(mamba2_prefill_kernel);
  const int64_t units = static_cast<int64_t>(args.rows.count) * Mamba2Units(args.state.shape).per_row();
  device.threads().parallel_for(units, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t unit = begin; unit < end; ++unit) kernel(args, unit, workspace, thread);
  });
}

void mamba2_prefill(const Mamba2Prefill& args, Device& device, std::span<std::byte> workspace) {
  check_token_begin("mamba2_prefill", args.rows, args.token_begin);
  const bool has_tokens = args.rows.count > 0 && args.token_begin[args.rows.count] > 0;
  if (has_tokens) check_tokens("mamba2_prefill", args.state.shape, args.tokens, args.out);
  check_heads("mamba2_prefill", args.heads);
  // Folds the rings, and brings every row to the checkpoint that the kernel advances in place.
  mamba2_materialise({args.state, args.rows}, device, workspace);
  if (!has_tokens) return;
  mamba2_prefill_cpu(args, device, workspace);
}

}  // namespace replayssm
#endif  // HWY_ONCE
