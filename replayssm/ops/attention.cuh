// Internal to attention on a GPU: a step's rows, how a decoding step cuts their contexts, and the kernels' arguments.
#pragma once

#include <algorithm>
#include <type_traits>

#include "replayssm/ops/attention.h"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/rows.cuh"
#include "replayssm/ops/tiles.h"

namespace replayssm {

inline constexpr const char* kAttentionOp = "attention";

// The largest heads that tensor cores take.
inline constexpr int kMaxTiledHead = 256;
inline constexpr int kMaxLatentHead = 576, kMaxLatent = 512;

// A decoding step cuts a row's context into splits of so many tokens, doubled until there are few enough. The cut knows
// nothing of the batch: a row's bits may not. Keys of a split take some 64 KiB; of latent caches, whose many queries
// leave much to put together, more.
inline constexpr int kMaxSplits = 32;
__host__ __device__ constexpr int least_split_tokens(int head_size) {
  return head_size <= 64 ? 512 : head_size <= 128 ? 256 : head_size <= kMaxTiledHead ? 128 : 256;
}
__host__ __device__ constexpr int split_tokens(int64_t end, int head_size) {
  int64_t tokens = least_split_tokens(head_size);
  while (end > kMaxSplits * tokens) tokens *= 2;
  return static_cast<int>(tokens);
}
// Of the longest context that `width` positions hold.
constexpr int most_splits(int64_t width, int head_size) {
  const int64_t splits = (width + least_split_tokens(head_size) - 1) / least_split_tokens(head_size);
  return static_cast<int>(splits < kMaxSplits ? splits : kMaxSplits);
}

template <typename T>
struct AttentionArgs {
  BasicAttention<T> attention;
  int group = 0;              // query heads of a key/value head
  int value_size = 0;         // E
  int64_t width = 0;          // positions of a page table
  int max_splits = 1;         // of a row; 1: rows are not cut
  int tile_queries = 0;       // of a unit of work: so many of a row's tokens * group
  bool is_appending = false;  // units write the keys and values of their tokens before they read
  bool is_folding = false;    // a unit may have all of a row's splits
  // What units of one split leave to be put together, of a query relative to its maximum.
  float* sums = nullptr;      // [B, max_splits, max_tokens_per_row, Q, E]
  float2* totals = nullptr;   // [B, max_splits, max_tokens_per_row, Q]: the maximum, and the weights' total
  int32_t* is_cut = nullptr;  // [B]: whether a row's splits were units of their own
  uint32_t* asked = nullptr;  // counts the units asked for, 0 between calls
  int max_tiles = 0;          // of tile_queries, of a row and a key/value head
  float scale = 0;            // of scores whose exponentials are of base 2
  const char* op = kAttentionOp;
  const char* outside = nullptr;  // a fault's text
  CudaFault* fault = nullptr;

  // Where a row's split leaves what it has, of all queries of the row's tokens.
  __device__ int64_t split_place(int b, int split) const {
    return (static_cast<int64_t>(b) * max_splits + split) * attention.max_tokens_per_row * attention.query_heads;
  }
};

enum class AttentionKind { kEmpty, kLive, kPadding, kOutside };

struct AttentionRow {
  AttentionKind kind;
  int slot;
  int first, tokens;  // of the step's N, cut to them if the row is not live
  int start;          // position of the first token

  __device__ int end() const { return start + tokens; }
};

template <typename T>
__device__ inline AttentionRow attention_row(const AttentionArgs<T>& args, int b) {
  const BasicAttention<T>& attention = args.attention;
  const int64_t begin = __ldg(attention.token_begin + b), end = __ldg(attention.token_begin + b + 1);
  const int64_t base = __ldg(attention.rows.base + b);
  const int32_t history = __ldg(attention.rows.history + b);
  AttentionRow row;
  row.slot = __ldg(attention.rows.slot + b);
  row.first = static_cast<int>(max(begin, int64_t{0}));
  row.tokens = static_cast<int>(min(end, attention.tokens) - row.first);
  row.start = static_cast<int>(base + history);
  const bool is_inside = begin >= 0 && end <= attention.tokens && end - begin <= attention.max_tokens_per_row &&
                         base >= 0 && base <= args.width && history >= 0 &&
                         base + history + (end - begin) <= args.width;
  if (row.tokens <= 0) {
    row.kind = AttentionKind::kEmpty;
    row.tokens = 0;
  } else if (row.slot == kPaddingSlot) {
    row.kind = AttentionKind::kPadding;
  } else {
    row.kind = is_inside ? AttentionKind::kLive : AttentionKind::kOutside;
  }
  return row;
}

template <typename T>
__device__ inline void report_outside(const AttentionArgs<T>& args, int b, int slot) {
  report_fault(args.fault, args.op, b, slot, 0, 0, args.outside);
}

// Position `position` of row b in the cache, counted in heads' keys from its start, or -1 if its page lies outside.
template <typename T>
__device__ inline int cache_place(const AttentionArgs<T>& args, int b, int head, int position) {
  const BasicKvCache<T>& cache = args.attention.cache;
  const auto page_tokens = static_cast<unsigned>(cache.page_tokens), at = static_cast<unsigned>(position);
  const int32_t* pages = args.attention.pages.page_table + static_cast<int64_t>(b) * args.attention.pages.table_stride;
  const int page = pages[at / page_tokens];
  if (page < 0 || page >= cache.pages) return -1;
  return (page * cache.kv_heads + head) * cache.page_tokens + static_cast<int>(at % page_tokens);
}

// 2^x; 0 where that is below FP32's normal numbers.
__device__ inline float exponential_of_2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The number that an exponent is relative to: a maximum of nothing is taken as 0.
__device__ inline float pivot_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// How many queries share a pass over the keys in a decoding step of `queries` a key/value head, at most, and in a
// prompt. The queries of latent caches, whose heads are wide, are as many in both.
inline constexpr int kLatentTileQueries = 32;
constexpr int decoding_tile_queries(int64_t queries) {
  return queries <= 16 ? 16 : queries <= 32 ? 32 : 64;
}
inline constexpr int kPromptTileQueries = 128;
// The shared memory that a prompt's blocks may take, of heads of a size.
constexpr size_t prompt_shared_bytes(int head_size) {
  return static_cast<size_t>(head_size <= 128 ? 98 : 161) * 1024;
}

// The units of a step, at most: every row has all the tokens it may have, or the tokens are all there are.
template <typename T>
int64_t most_units(const AttentionArgs<T>& args) {
  const BasicAttention<T>& attention = args.attention;
  const int64_t tiles =
      std::min(int64_t{attention.rows.count} * args.max_tiles,
               ceiling_quotient(attention.tokens * args.group, args.tile_queries) + attention.rows.count);
  return check_blocks(args.op, tiles * args.max_splits * attention.cache.kv_heads);
}

// On tensor cores, args.tile_queries as said above. The keys and values of the step's tokens are in the cache unless
// args.is_appending. The stream leaves partial results of rows that it cut; it is for decoding steps, and for prompts
// too of latent caches.
template <typename T>
bool has_room_for_stream(const AttentionArgs<T>& args, const CudaProperties& gpu);
template <typename T>
void launch_stream(const AttentionArgs<T>& args, CudaDevice& device);
template <typename T>
void launch_prompt(const AttentionArgs<T>& args, CudaDevice& device);

}  // namespace replayssm
