// Causal attention over a paged cache: online softmax over blocks of positions that start at multiples of 64, so that
// a token's sums run in one order however the prompt was split.
#include "replayssm/ops/attention.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/attention.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <limits>

#include "replayssm/core/buffer.h"
#include "replayssm/core/error.h"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/vectors-inl.h"

#ifndef REPLAYSSM_OPS_ATTENTION_TILE
#define REPLAYSSM_OPS_ATTENTION_TILE
namespace replayssm {

constexpr int kAttentionBlock = 64;          // positions of a softmax block
constexpr int kAttentionTileQueries = 16;    // queries that share a pass over the keys, unless a group is larger
constexpr int64_t kAttentionPadFloats = 16;  // keeps the arrays of the workspace aligned

// Tokens first .. first+tokens-1 of row `row`: what one thread does for one key/value head.
struct AttentionTile {
  int row;
  int64_t first;
  int tokens;
};

inline int attention_tile_tokens(int group) {
  return std::max(1, kAttentionTileQueries / group);
}

// Floats of one thread's scratch: for each query of a tile its sums [E], E <= D, its scores [block], its maximum and
// its total.
inline int64_t attention_scratch_floats(int group, int64_t head_size) {
  const int64_t queries = static_cast<int64_t>(attention_tile_tokens(group)) * group;
  const int64_t padded = (head_size + kAttentionPadFloats - 1) / kAttentionPadFloats * kAttentionPadFloats;
  const int64_t query_floats = (queries + kAttentionPadFloats - 1) / kAttentionPadFloats * kAttentionPadFloats;
  return queries * (padded + kAttentionBlock) + 2 * query_floats;
}

}  // namespace replayssm
#endif

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {
namespace {

constexpr FloatTag kTag;

// The scores of `Queries` queries, 1 or 4, with `Keys` keys, 1 or 4.
template <int Queries, int Keys>
HWY_INLINE void score(const float* const* q, const float* const* keys, int64_t size, float scale, float* const* scores,
                      int64_t at) {
  Floats sums[Queries * Keys];
  unrolled<Queries * Keys>([&](auto i) REPLAYSSM_INLINE { sums[i] = hn::Zero(kTag); });
  for_each_vector(size, [&](const auto& load, const auto&) REPLAYSSM_INLINE {
    Floats key[Keys];
    unrolled<Keys>([&](auto j) REPLAYSSM_INLINE { key[j] = load(keys[j]); });
    unrolled<Queries>([&](auto i) REPLAYSSM_INLINE {
      const Floats query = load(q[i]);
      unrolled<Keys>([&](auto j)
                         REPLAYSSM_INLINE { sums[i * Keys + j] = hn::MulAdd(query, key[j], sums[i * Keys + j]); });
    });
  });
  // One order of lanes in every form, so that a score does not depend on its neighbours.
  HWY_ALIGN float totals[16];
  constexpr int kLast = Queries * Keys - 1;
  unrolled<(Queries * Keys + 3) / 4>([&](auto i) REPLAYSSM_INLINE {
    sum_lanes_of_4(sums[4 * i], sums[std::min(4 * i + 1, kLast)], sums[std::min(4 * i + 2, kLast)],
                   sums[std::min(4 * i + 3, kLast)], totals + 4 * i);
  });
  for (int i = 0; i < Queries; ++i)
    for (int j = 0; j < Keys; ++j) scores[i][at + j] = scale * totals[i * Keys + j];
}

template <int Queries>
HWY_INLINE void score_block(const float* const* q, const float* const* keys, int count, int64_t size, float scale,
                            float* const* scores) {
  int j = 0;
  for (; j + 4 <= count; j += 4) score<Queries, 4>(q, keys + j, size, scale, scores, j);
  for (; j < count; ++j) score<Queries, 1>(q, keys + j, size, scale, scores, j);
}

// Turns a query's first `count` scores into weights relative to the new maximum; the factor of what was summed before.
HWY_INLINE float soften(float* scores, int count, float& maximum, float& total) {
  float largest = maximum;
  for (int j = 0; j < count; ++j) largest = scores[j] > largest ? scores[j] : largest;
  const Floats peak = hn::Set(kTag, largest);
  const float factor = hn::GetLane(exponential(hn::Sub(hn::Set(kTag, maximum), peak)));
  Floats sums = hn::Zero(kTag);
  int64_t j = 0;
  for (; j + kFloatLanes <= count; j += kFloatLanes) {
    const Floats weights = exponential(hn::Sub(hn::LoadU(kTag, scores + j), peak));
    hn::StoreU(weights, kTag, scores + j);
    sums = hn::Add(sums, weights);
  }
  if (j < count) {
    const Floats weights = exponential(hn::Sub(load_rest(scores + j, count - j), peak));
    store_rest(weights, scores + j, count - j);
    sums = hn::Add(sums, load_rest(scores + j, count - j));
  }
  total = total * factor + hn::GetLane(hn::SumOfLanes(kTag, sums));
  maximum = largest;
  return factor;
}

// sums[i] <- sums[i] * factor[i] + sum_j weight[i][j] value[j], j in order; `Vectors` vectors from element `at` on.
template <int Queries, int Vectors>
HWY_INLINE void add_values(const float* const* values, int count, const float* const* weights, const float* factors,
                           float* const* sums, int64_t at) {
  Floats out[Queries * Vectors];
  unrolled<Queries * Vectors>([&](auto i) REPLAYSSM_INLINE {
    out[i] = hn::Mul(hn::Set(kTag, factors[i / Vectors]),
                     hn::Load(kTag, sums[i / Vectors] + at + i % Vectors * kFloatLanes));
  });
  for (int j = 0; j < count; ++j) {
    Floats value[Vectors];
    unrolled<Vectors>([&](auto d) REPLAYSSM_INLINE { value[d] = hn::LoadU(kTag, values[j] + at + d * kFloatLanes); });
    unrolled<Queries>([&](auto i) REPLAYSSM_INLINE {
      const Floats weight = hn::Set(kTag, weights[i][j]);
      unrolled<Vectors>(
          [&](auto d) REPLAYSSM_INLINE { out[i * Vectors + d] = hn::MulAdd(weight, value[d], out[i * Vectors + d]); });
    });
  }
  unrolled<Queries * Vectors>(
      [&](auto i) REPLAYSSM_INLINE { hn::Store(out[i], kTag, sums[i / Vectors] + at + i % Vectors * kFloatLanes); });
}

// The last elements of a head whose size is no multiple of a vector.
HWY_INLINE void add_values_rest(const float* const* values, int count, const float* weights, float factor, float* sums,
                                int64_t at, int64_t rest) {
  Floats out = hn::Mul(hn::Set(kTag, factor), hn::Load(kTag, sums + at));
  for (int j = 0; j < count; ++j) out = hn::MulAdd(hn::Set(kTag, weights[j]), load_rest(values[j] + at, rest), out);
  hn::Store(out, kTag, sums + at);
}

template <int Queries>
HWY_INLINE void add_value_block(const float* const* values, int count, int64_t size, const float* const* weights,
                                const float* factors, float* const* sums) {
  int64_t d = 0;
  for (; d + 4 * kFloatLanes <= size; d += 4 * kFloatLanes)
    add_values<Queries, 4>(values, count, weights, factors, sums, d);
  for (; d + kFloatLanes <= size; d += kFloatLanes) add_values<Queries, 1>(values, count, weights, factors, sums, d);
  if (d < size)
    for (int i = 0; i < Queries; ++i) add_values_rest(values, count, weights[i], factors[i], sums[i], d, size - d);
}

// One query or four with the same `count` positions of a block.
template <int Queries>
HWY_INLINE void attend_block(const float* const* q, const float* const* keys, const float* const* values, int count,
                             int64_t size, int64_t value_size, float scale, float* const* scores, float* maxima,
                             float* totals, float* const* sums) {
  score_block<Queries>(q, keys, count, size, scale, scores);
  float factors[Queries];
  for (int i = 0; i < Queries; ++i) factors[i] = soften(scores[i], count, maxima[i], totals[i]);
  add_value_block<Queries>(values, count, value_size, scores, factors, sums);
}

}  // namespace

// One call owns the query heads of key/value head `kv_head` for the tokens of one tile; `scratch` is its thread's.
void attention_kernel(const Attention& args, const AttentionTile& tile, int kv_head, float* scratch) {
  const int64_t size = args.cache.head_size, value_size = args.cache.value_size();
  const int group = args.query_heads / args.cache.kv_heads;
  const int queries = tile.tokens * group;
  const int64_t padded = (value_size + kAttentionPadFloats - 1) / kAttentionPadFloats * kAttentionPadFloats;
  float* sums = scratch;
  float* scores = sums + queries * padded;
  float* maxima = scores + static_cast<int64_t>(queries) * kAttentionBlock;
  float* totals = maxima + (queries + kAttentionPadFloats - 1) / kAttentionPadFloats * kAttentionPadFloats;
  std::fill_n(sums, queries * padded, 0.0f);
  std::fill_n(maxima, queries, -std::numeric_limits<float>::infinity());
  std::fill_n(totals, queries, 0.0f);

  const int64_t position =
      args.rows.base[tile.row] + args.rows.history[tile.row] + tile.first - args.token_begin[tile.row];
  const int32_t* pages = args.pages.page_table + static_cast<int64_t>(tile.row) * args.pages.table_stride;
  const int64_t end = position + tile.tokens;
  for (int64_t block = 0; block < end; block += kAttentionBlock) {
    const float* keys[kAttentionBlock];
    const float* values[kAttentionBlock];
    const int block_count = static_cast<int>(std::min<int64_t>(kAttentionBlock, end - block));
    for (int j = 0; j < block_count; ++j) {
      const int64_t page = pages[(block + j) / args.cache.page_tokens];
      const int64_t at =
          ((page * args.cache.kv_heads + kv_head) * args.cache.page_tokens + (block + j) % args.cache.page_tokens) *
          size;
      keys[j] = args.cache.k + at;
      values[j] = (args.cache.latent_size > 0 ? args.cache.k : args.cache.v) + at;
    }
    const auto count_of = [&](int query) {
      return static_cast<int>(std::clamp<int64_t>(position + query / group + 1 - block, 0, block_count));
    };
    for (int i = 0; i < queries;) {
      const float* q[4];
      float* query_scores[4];
      float* query_sums[4];
      const int count = count_of(i);
      const int together = i + 4 <= queries && count_of(i + 3) == count ? 4 : 1;
      for (int a = 0; a < together; ++a) {
        q[a] = args.q + (tile.first + (i + a) / group) * args.q_stride +
               (static_cast<int64_t>(kv_head) * group + (i + a) % group) * size;
        query_scores[a] = scores + static_cast<int64_t>(i + a) * kAttentionBlock;
        query_sums[a] = sums + (i + a) * padded;
      }
      if (count > 0 && together == 4)
        attend_block<4>(q, keys, values, count, size, value_size, args.scale, query_scores, maxima + i, totals + i,
                        query_sums);
      else if (count > 0)
        attend_block<1>(q, keys, values, count, size, value_size, args.scale, query_scores, maxima + i, totals + i,
                        query_sums);
      i += together;
    }
  }

  for (int i = 0; i < queries; ++i) {
    float* out = args.out + (tile.first + i / group) * args.query_heads * value_size +
                 (static_cast<int64_t>(kv_head) * group + i % group) * value_size;
    const Floats total = hn::Set(kTag, totals[i]);
    for_each_vector(value_size, [&](const auto& load, const auto& store)
                                    HWY_ATTR { store(hn::Div(load(sums + i * padded), total), out); });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(attention_kernel);

namespace {

void check(const Attention& args, Device& device, std::span<std::byte> workspace) {
  const KvCache& cache = args.cache;
  const bool has_values = cache.latent_size == 0;
  check_attention(args);
  const size_t needed = attention_workspace_bytes(args.query_heads, cache.kv_heads, cache.head_size, device);
  require(workspace.size() >= needed, "attention: expected a workspace of {} bytes, got {}", needed, workspace.size());
  require(reinterpret_cast<uintptr_t>(workspace.data()) % kAlignmentBytes == 0,
          "attention: expected a workspace aligned to {} bytes", kAlignmentBytes);
  require(args.token_begin[0] == 0, "attention: expected token_begin to start at 0, got {}", args.token_begin[0]);
  for (int b = 0; b < args.rows.count; ++b) {
    const int64_t tokens = args.token_begin[b + 1] - static_cast<int64_t>(args.token_begin[b]);
    require(tokens >= 0, "attention: token_begin falls at row {}", b);
    if (tokens == 0 || args.rows.slot[b] == kPaddingSlot) continue;
    require(args.rows.base[b] >= 0 && args.rows.history[b] >= 0,
            "attention: expected positions >= 0, got base {} and history {} in row {}", args.rows.base[b],
            args.rows.history[b], b);
    const int64_t end = args.rows.base[b] + args.rows.history[b] + tokens;
    const int64_t used = (end + cache.page_tokens - 1) / cache.page_tokens;
    require(used <= args.pages.table_stride, "attention: row {} needs {} pages, its table has {}", b, used,
            args.pages.table_stride);
    for (int64_t i = 0; i < used; ++i) {
      const int32_t page = args.pages.page_table[static_cast<int64_t>(b) * args.pages.table_stride + i];
      require(page >= 0 && page < cache.pages, "attention: expected pages of 0 .. {}, got {} in row {}",
              cache.pages - 1, page, b);
    }
  }
  require(args.token_begin[args.rows.count] == 0 ||
              (args.q != nullptr && args.k != nullptr && (args.v != nullptr || !has_values) && args.out != nullptr),
          "attention: q, k, v and out must not be null");
}

// Writes the step's keys and values to their pages.
void append(const Attention& args, Device& device) {
  const KvCache& cache = args.cache;
  const int64_t size = cache.head_size;
  device.threads().parallel_for(args.token_begin[args.rows.count], 16, [&](int64_t begin, int64_t end, int) {
    int row = 0;
    for (int64_t n = begin; n < end; ++n) {
      while (args.token_begin[row + 1] <= n) ++row;
      if (args.rows.slot[row] == kPaddingSlot) continue;
      const int64_t position = args.rows.base[row] + args.rows.history[row] + n - args.token_begin[row];
      const int64_t page =
          args.pages.page_table[static_cast<int64_t>(row) * args.pages.table_stride + position / cache.page_tokens];
      for (int m = 0; m < cache.kv_heads; ++m) {
        const int64_t at = ((page * cache.kv_heads + m) * cache.page_tokens + position % cache.page_tokens) * size;
        std::copy_n(args.k + n * args.k_stride + m * size, size, cache.k + at);
        if (cache.latent_size == 0) std::copy_n(args.v + n * args.v_stride + m * size, size, cache.v + at);
      }
    }
  });
}

}  // namespace

void attention(const Attention& args, Device& device, std::span<std::byte> workspace) {
  check(args, device, workspace);
  if (args.token_begin[args.rows.count] == 0) return;
  append(args, device);

  const int group = args.query_heads / args.cache.kv_heads;
  const int tile_tokens = attention_tile_tokens(group);
  const auto tiles_of = [&](int row) {
    return (args.token_begin[row + 1] - static_cast<int64_t>(args.token_begin[row]) + tile_tokens - 1) / tile_tokens;
  };
  int64_t tiles = 0;
  for (int b = 0; b < args.rows.count; ++b) tiles += tiles_of(b);
  const int64_t scratch_floats = attention_scratch_floats(group, args.cache.head_size);
  const int64_t token_floats = static_cast<int64_t>(args.query_heads) * args.cache.value_size();
  const auto kernel = HWY_DYNAMIC_DISPATCH(attention_kernel);
  device.threads().parallel_for(tiles * args.cache.kv_heads, 1, [&](int64_t begin, int64_t, int thread) {
    const int kv_head = static_cast<int>(begin % args.cache.kv_heads);
    int64_t index = begin / args.cache.kv_heads;
    int row = 0;
    for (; index >= tiles_of(row); ++row) index -= tiles_of(row);
    const int64_t first = args.token_begin[row] + index * tile_tokens;
    const int tokens = static_cast<int>(std::min<int64_t>(tile_tokens, args.token_begin[row + 1] - first));
    if (args.rows.slot[row] == kPaddingSlot) {
      if (kv_head == 0) std::fill_n(args.out + first * token_floats, tokens * token_floats, 0.0f);
      return;
    }
    kernel(args, {row, first, tokens}, kv_head, reinterpret_cast<float*>(workspace.data()) + thread * scratch_floats);
  });
}

size_t attention_workspace_bytes(int query_heads, int kv_heads, int head_size, Device& device) {
  const int group = std::max(1, query_heads / std::max(1, kv_heads));
  return sizeof(float) * static_cast<size_t>(attention_scratch_floats(group, head_size)) *
         static_cast<size_t>(device.threads().size());
}

}  // namespace replayssm
#endif  // HWY_ONCE
