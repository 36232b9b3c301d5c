// Attention on tensor cores: a warp's 16 queries against keys and values that stream through shared memory, several
// tiles in flight, each read once for all query heads of a key/value head. A block stays and takes units of work, tiles
// of a row's queries with a split of its context, until none is left; which they are it counts from the rows' cursors,
// so that a launch knows nothing of them.
#pragma once

#include "replayssm/ops/attention.cuh"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/copies.cuh"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/pack.cuh"
#include "replayssm/ops/scan.cuh"
#include "replayssm/ops/tensor_cores.cuh"

namespace replayssm {

// The shape of a block: warps share out the queries, and for each 16 of them the keys of a tile; more warps may load
// for them. Heads are padded with zeros to kSize. A query's bits depend on kTile and kKeyWarps, not on the others.
template <int kSize_, int kQueryWarps_, int kKeyWarps_, int kLoadWarps_, int kStages_, int kBlocks_>
struct TileShape {
  static constexpr int kSize = kSize_, kQueryWarps = kQueryWarps_, kKeyWarps = kKeyWarps_;
  static constexpr int kStages = kStages_;  // tiles on their way at once, and the one that is looked at
  static constexpr int kWorkers = 32 * kQueryWarps * kKeyWarps;
  static constexpr int kThreads = kWorkers + 32 * kLoadWarps_;
  static constexpr int kFirstLoader = kLoadWarps_ > 0 ? kWorkers : 0;  // without warps for it all threads load
  static constexpr int kLoaders = kThreads - kFirstLoader;
  static constexpr int kQueries = 16 * kQueryWarps;
  static constexpr int kBlocks = kBlocks_;  // that a multiprocessor is to have room for
  static constexpr int kTile = kSize <= 128 ? 64 : 32;
  static constexpr int kWarpKeys = kTile / kKeyWarps;
  static constexpr int kChunks = kSize / 8;  // of 16 bytes
  static constexpr int kRowBytes = 2 * kSize;
  static constexpr int kPlaneBytes = kTile * kRowBytes;
  static constexpr bool kHoldsQueries = kSize <= 128;  // in registers; else in shared memory
  static constexpr int kPlaces = 4;                    // tiles whose places in the cache are known
  static constexpr int kQueryBytes = kHoldsQueries ? 0 : kQueries * kRowBytes;
  static constexpr int kSharedBytes = kStages * 2 * kPlaneBytes + kQueryBytes + kPlaces * kTile * 4 + kSize;
  static_assert(kQueries <= 128 && kStages <= kPlaces && kTile <= kLoaders && kLoaders % kChunks == 0 &&
                kWarpKeys % 16 == 0);
  // What the warps of the second half of the keys hand to those of the first fits into the stages.
  static_assert(kKeyWarps == 1 ||
                kKeyWarps == 2 && kQueryWarps * 32 * (kSize / 2 + 4) * 4 <= kStages * 2 * kPlaneBytes);
};

// Dynamic shared memory. Chunk c of a row of a plane lies at chunk c ^ (row % 8), so that eight rows of one chunk fill
// the banks.
template <typename Shape>
struct TileMemory {
  char* stages;   // of keys and values
  char* queries;  // unless in registers
  int* places;    // [kPlaces, kTile]
  uint8_t* bad;   // [kSize]: see settle_bad_values

  __device__ explicit TileMemory(void* shared) {
    stages = static_cast<char*>(shared);
    queries = stages + Shape::kStages * 2 * Shape::kPlaneBytes;
    places = reinterpret_cast<int*>(queries + Shape::kQueryBytes);
    bad = reinterpret_cast<uint8_t*>(places + Shape::kPlaces * Shape::kTile);
  }
  __device__ char* keys(int tile) const { return stages + tile % Shape::kStages * 2 * Shape::kPlaneBytes; }
  __device__ char* values(int tile) const { return keys(tile) + Shape::kPlaneBytes; }
  __device__ static int offset(int row, int chunk) { return row * Shape::kRowBytes + (chunk ^ row % 8) * 16; }
};

// A block's next piece of work for one key/value head: queries from tile * kQueries on, keys of one split.
struct TileUnit {
  int b;
  AttentionRow row;
  int tile, split, splits;
  int split_tokens;
};

// Of a unit, for all threads of the block to look up: the sums leave few registers.
struct TileBoard {
  TileUnit unit;
  int is_outside;  // a page is
  int has_bad;     // some channel of the values
};

template <typename T>
__device__ inline int row_splits(const AttentionArgs<T>& args, const AttentionRow& row) {
  if (args.max_splits == 1) return 1;
  const int tokens = split_tokens(row.end(), args.group);
  return (row.end() + tokens - 1) / tokens;
}
template <typename T>
__device__ inline int row_units(const AttentionArgs<T>& args, const AttentionRow& row) {
  if (row.kind != AttentionKind::kLive) return row.kind == AttentionKind::kEmpty ? 0 : 1;
  return (row.tokens * args.group + args.tile_queries - 1) / args.tile_queries * row_splits(args, row);
}

// Which unit is whose, as a warp knows it: each lane has counted the units of some rows, in order.
struct TileUnits {
  int rows, rows_a_lane;
  int end;  // units of the rows up to and with this lane's

  template <typename T>
  __device__ explicit TileUnits(const AttentionArgs<T>& args)
      : rows(args.attention.rows.count), rows_a_lane((rows + 31) / 32) {
    const int first = static_cast<int>(threadIdx.x % 32) * rows_a_lane, last = min(rows, first + rows_a_lane);
    int sum = 0;
#pragma unroll 4
    for (int b = first; b < last; ++b) sum += row_units(args, attention_row(args, b));
    end = sum_up_to_lane(sum);
  }

  __device__ int count() const {
    return __shfl_sync(0xFFFFFFFFu, end, 31);
  }

  // The warp together; `index` is below count().
  template <typename T>
  __device__ TileUnit find(const AttentionArgs<T>& args, int index) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int owner = __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFu, end > index))) - 1;
    const int before = __shfl_sync(0xFFFFFFFFu, end, max(0, owner - 1));
    if (owner > 0) index -= before;
    const int last = min(rows, (owner + 1) * rows_a_lane);
    for (int first = owner * rows_a_lane;; first += 32) {
      const int count = first + lane < last ? row_units(args, attention_row(args, first + lane)) : 0;
      const int up_to = sum_up_to_lane(count);
      const unsigned past = __ballot_sync(0xFFFFFFFFu, up_to > index);
      if (past != 0) {
        const int row = __ffs(static_cast<int>(past)) - 1;
        return unit_of(args, first + row, index - __shfl_sync(0xFFFFFFFFu, up_to - count, row));
      }
      index -= __shfl_sync(0xFFFFFFFFu, up_to, 31);
    }
  }

  // Later queries first: in a prompt they see more keys.
  template <typename T>
  static __device__ TileUnit unit_of(const AttentionArgs<T>& args, int b, int index) {
    TileUnit unit{b, attention_row(args, b), 0, 0, 1, 0};
    if (unit.row.kind != AttentionKind::kLive) return unit;
    unit.splits = row_splits(args, unit.row);
    unit.split_tokens = unit.splits == 1 ? unit.row.end() : split_tokens(unit.row.end(), args.group);
    const int tiles = (unit.row.tokens * args.group + args.tile_queries - 1) / args.tile_queries;
    unit.tile = tiles - 1 - index / unit.splits;
    unit.split = index % unit.splits;
    return unit;
  }
};

// Over the four lanes that share a row of a product.
__device__ inline float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}
__device__ inline float quad_sum(float value) {
  value = value + __shfl_xor_sync(0xFFFFFFFFu, value, 1);
  return value + __shfl_xor_sync(0xFFFFFFFFu, value, 2);
}

// Whether one of a word's two numbers is not finite.
__device__ inline bool has_bad_number(uint32_t word, Bf16) {
  return (word & 0x7F80u) == 0x7F80u || (word & 0x7F800000u) == 0x7F800000u;
}
__device__ inline bool has_bad_number(uint32_t word, Fp16) {
  return (word & 0x7C00u) == 0x7C00u || (word & 0x7C000000u) == 0x7C000000u;
}

// A unit as its block sees it.
template <typename T, typename Shape>
struct TileWork {
  const AttentionArgs<T>& args;
  const TileUnit& unit;  // on the board
  const int head;
  const TileMemory<Shape> memory;
  TileBoard& board;
  int first_query, queries;           // of the row's tokens * group
  int first_position, begin, end;     // of the first query; of the keys
  static constexpr int kNoBad = 255;  // past the tokens of any unit

  __device__ TileWork(const AttentionArgs<T>& args_, int head_, TileMemory<Shape> memory_, TileBoard& board_)
      : args(args_), unit(board_.unit), head(head_), memory(memory_), board(board_) {
    const AttentionRow& row = unit.row;
    first_query = unit.tile * Shape::kQueries;
    queries = min(Shape::kQueries, row.tokens * args.group - first_query);
    first_position = row.start + first_query / args.group;
    begin = unit.split * unit.split_tokens;
    end = min(row.start + (first_query + queries - 1) / args.group + 1, begin + unit.split_tokens);
  }

  __device__ int tiles() const { return max(0, (end - begin + Shape::kTile - 1) / Shape::kTile); }

  // The place of a key, or -1 where there is none.
  __device__ int place_of(int position) const {
    if (position >= end) return -1;
    const int place = cache_place(args, unit.b, head, position);
    if (place < 0) board.is_outside = 1;
    return place;
  }

  // Query `query` of the unit in memory.
  __device__ const T* query_at(int query) const {
    const int token = (first_query + query) / args.group, in_group = (first_query + query) % args.group;
    return args.attention.q + (unit.row.first + token) * args.attention.q_stride +
           static_cast<int64_t>(head * args.group + in_group) * args.attention.cache.head_size;
  }

  // Writes the keys and values of those of the row's tokens that lie in the split. No other block reads or writes them.
  __device__ void append() const {
    const BasicAttention<T>& attention = args.attention;
    const int size = attention.cache.head_size, chunks = size / 8;
    const int first = max(unit.row.start, begin), last = min(unit.row.end(), begin + unit.split_tokens);
    for (int i = static_cast<int>(threadIdx.x); i < (last - first) * chunks; i += Shape::kThreads) {
      const int position = first + i / chunks, at = i % chunks * 8;
      const int place = cache_place(args, unit.b, head, position);
      if (place < 0) continue;
      const int64_t token = unit.row.first + (position - unit.row.start), to = static_cast<int64_t>(place) * size + at;
      const Pack<T> key = load_pack(attention.k + token * attention.k_stride + static_cast<int64_t>(head) * size + at,
                                    PackPlace::kAligned, 8);
      const Pack<T> value = load_pack(attention.v + token * attention.v_stride + static_cast<int64_t>(head) * size + at,
                                      PackPlace::kAligned, 8);
      store_pack(key, attention.cache.k + to, PackPlace::kAligned, 8);
      store_pack(value, attention.cache.v + to, PackPlace::kAligned, 8);
    }
  }

  // Lets tile `tile` of the keys and values come, zeros where there are none. The loaders together.
  __device__ void load(int tile) const {
    constexpr int kRows = Shape::kLoaders / Shape::kChunks;
    const int loader = static_cast<int>(threadIdx.x) - Shape::kFirstLoader;
    const int chunk = loader % Shape::kChunks, first = loader / Shape::kChunks;
    const int row_bytes = 2 * args.attention.cache.head_size;
    const bool is_inside = chunk * 16 < row_bytes;
    const int* places = memory.places + tile % Shape::kPlaces * Shape::kTile;
    const char* keys = reinterpret_cast<const char*>(args.attention.cache.k) + chunk * 16;
    const char* values = reinterpret_cast<const char*>(args.attention.cache.v) + chunk * 16;
    char* to = memory.keys(tile);
#pragma unroll 4
    for (int row = first; row < Shape::kTile; row += kRows) {
      const int place = places[row];
      const bool is_there = is_inside && place >= 0;
      const int64_t from = is_there ? static_cast<int64_t>(place) * row_bytes : -chunk * 16;
      const int at = TileMemory<Shape>::offset(row, chunk);
      copy_chunk_async(to + at, keys + from, is_there);
      copy_chunk_async(to + Shape::kPlaneBytes + at, values + from, is_there);
    }
  }

  __device__ void load_queries() const {
    for (int i = static_cast<int>(threadIdx.x) - Shape::kFirstLoader; i < Shape::kQueries * Shape::kChunks;
         i += Shape::kLoaders) {
      const int query = i / Shape::kChunks, chunk = i % Shape::kChunks;
      const bool is_there = query < queries && chunk * 8 < args.attention.cache.head_size;
      copy_chunk_async(memory.queries + TileMemory<Shape>::offset(query, chunk),
                       is_there ? query_at(query) + chunk * 8 : args.attention.q, is_there);
    }
  }

  // A weight of zero times a number that is not finite is none: values at positions that some query of the unit does
  // not see may not reach its sums. Where one of a tile's is not finite the tile gets a zero, and bad[channel] the
  // first such token, from which on the channel's outputs become NaN. Threads have columns of their own.
  __device__ void settle_bad_values(int tile) const {
    const int tile_begin = begin + tile * Shape::kTile;
    const int first = max(0, first_position + 1 - tile_begin), last = min(Shape::kTile, end - tile_begin);
    for (int chunk = static_cast<int>(threadIdx.x); chunk < Shape::kChunks; chunk += Shape::kThreads)
      for (int row = first; row < last; ++row) {
        auto* words = reinterpret_cast<uint32_t*>(memory.values(tile) + TileMemory<Shape>::offset(row, chunk));
        for (int i = 0; i < 4; ++i) {
          if (!has_bad_number(words[i], T())) continue;
          board.has_bad = 1;
          const auto token = static_cast<uint8_t>(tile_begin + row - first_position);
          for (int half = 0; half < 2; ++half) {
            if (!has_bad_number(words[i] >> 16 * half & 0xFFFFu, T())) continue;
            uint8_t& bad = memory.bad[chunk * 8 + 2 * i + half];
            bad = min(bad, token);
            words[i] &= half == 0 ? 0xFFFF0000u : 0xFFFFu;
          }
        }
      }
  }
};

// What a warp holds: 16 queries and what has been summed for them. In a product's layout a lane has two of its rows,
// lane / 4 and 8 more, and of each 8 columns two from lane % 4 * 2 on.
template <typename T, typename Shape>
struct TileWarp {
  using Work = TileWork<T, Shape>;
  static constexpr int kSums = Shape::kSize / 8;
  static constexpr int kScores = Shape::kWarpKeys / 8;

  const int lane = static_cast<int>(threadIdx.x % 32);
  const int query_warp = static_cast<int>(threadIdx.x / 32) % Shape::kQueryWarps;
  const int key_warp = static_cast<int>(threadIdx.x / 32) / Shape::kQueryWarps;  // of a warp that loads: past the last
  int position[2];                                                               // the last that it sees
  uint32_t held[Shape::kHoldsQueries ? Shape::kSize / 16 : 1][4];
  float sums[kSums][4];
  float maximum[2], total[2];

  __device__ TileWarp(const Work& work, bool is_worker) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int there = min(query(i), work.queries - 1);
      position[i] = work.unit.row.start + (work.first_query + there) / work.args.group;
      maximum[i] = -INFINITY;
      total[i] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kSums; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
    if constexpr (Shape::kHoldsQueries) {
      if (!is_worker) return;
      const int size = work.args.attention.cache.head_size;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_there = query(i) < work.queries;
        const T* from = work.query_at(is_there ? query(i) : 0);
#pragma unroll
        for (int k = 0; k < Shape::kSize / 16; ++k)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = k * 16 + half * 8 + lane % 4 * 2;
            held[k][half * 2 + i] = is_there && at < size ? *reinterpret_cast<const uint32_t*>(from + at) : 0u;
          }
      }
    }
  }

  // Of the unit, the one of row i of this lane.
  __device__ int query(int i) const {
    return query_warp * 16 + lane / 4 + 8 * i;
  }

  __device__ void score(const Work& work, int tile, float (&scores)[kScores][4]) const {
#pragma unroll
    for (int n = 0; n < kScores; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    const int key = key_warp * Shape::kWarpKeys + lane % 8 + lane / 16 * 8;
    const uint32_t keys = shared_address(work.memory.keys(tile)) + key * Shape::kRowBytes;
    const int key_chunk = lane / 8 % 2 ^ lane % 8;
    const uint32_t queries = shared_address(work.memory.queries) + (query_warp * 16 + lane % 16) * Shape::kRowBytes;
    const int query_chunk = lane / 16 ^ lane % 8;
#pragma unroll(Shape::kHoldsQueries ? Shape::kSize / 16 : 2)
    for (int k = 0; k < Shape::kSize / 16; ++k) {
      uint32_t a[4];
      if constexpr (Shape::kHoldsQueries) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = held[k][i];
      } else {
        load_matrices(a, queries + (query_chunk ^ 2 * k) * 16);
      }
#pragma unroll
      for (int n = 0; n < kScores; n += 2) {
        uint32_t b[4];
        load_matrices(b, keys + n * 8 * Shape::kRowBytes + (key_chunk ^ 2 * k) * 16);
        multiply_add(scores[n], a, b[0], b[1], T());
        multiply_add(scores[n + 1], a, b[2], b[3], T());
      }
    }
  }

  // Scores become weights relative to the new maximum, and what was summed is made so too.
  __device__ void soften(const Work& work, int tile, float (&scores)[kScores][4]) {
    const int tile_begin = work.begin + tile * Shape::kTile;
    const bool is_masked = tile_begin + Shape::kTile > work.first_position + 1;
    const int key = tile_begin + key_warp * Shape::kWarpKeys + lane % 4 * 2;
    float largest[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int n = 0; n < kScores; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = scores[n][i] * work.args.scale;
        if (is_masked && key + n * 8 + i % 2 > position[i / 2]) scores[n][i] = -INFINITY;
        largest[i / 2] = fmaxf(largest[i / 2], scores[n][i]);
      }
    float factor[2], pivot[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = quad_max(largest[i]);
      pivot[i] = pivot_of(largest[i]);
      factor[i] = exponential_of_2(maximum[i] - pivot[i]);
      maximum[i] = largest[i];
      total[i] = total[i] * factor[i];
    }
#pragma unroll
    for (int n = 0; n < kScores; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = exponential_of_2(scores[n][i] - pivot[i / 2]);
        total[i / 2] = total[i / 2] + scores[n][i];
      }
    if (!__any_sync(0xFFFFFFFFu, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kSums; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = sums[n][i] * factor[i / 2];
  }

  __device__ void add_values(const Work& work, int tile, const float (&weights)[kScores][4]) {
    const int row = key_warp * Shape::kWarpKeys + lane % 16;
    const uint32_t values = shared_address(work.memory.values(tile)) + row * Shape::kRowBytes;
    const int chunk = lane / 16 ^ lane % 8;
#pragma unroll
    for (int k = 0; k < Shape::kWarpKeys / 16; ++k) {
      const float(&low)[4] = weights[2 * k];
      const float(&high)[4] = weights[2 * k + 1];
      const uint32_t a[4] = {two_of(low[0], low[1], T()), two_of(low[2], low[3], T()), two_of(high[0], high[1], T()),
                             two_of(high[2], high[3], T())};
#pragma unroll
      for (int n = 0; n < kSums; n += 2) {
        uint32_t b[4];
        load_transposed(b, values + k * 16 * Shape::kRowBytes + (chunk ^ n) * 16);
        multiply_add(sums[n], a, b[0], b[1], T());
        multiply_add(sums[n + 1], a, b[2], b[3], T());
      }
    }
  }

  __device__ void look_at(const Work& work, int tile) {
    float scores[kScores][4];
    score(work, tile, scores);
    soften(work, tile, scores);
    add_values(work, tile, scores);
  }

  // The totals of a row's lanes, and into the warps of the first keys what those of the second have. The block
  // together.
  __device__ void gather(const Work& work) {
#pragma unroll
    for (int i = 0; i < 2; ++i) total[i] = quad_sum(total[i]);
    if constexpr (Shape::kKeyWarps == 2) {
      constexpr int kWords = kSums * 4 + 4;
      float* const words = reinterpret_cast<float*>(work.memory.stages) + query_warp * kWords * 32 + lane;
      __syncthreads();
      if (key_warp == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          words[i * 32] = maximum[i];
          words[(2 + i) * 32] = total[i];
        }
#pragma unroll
        for (int n = 0; n < kSums; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) words[(4 + n * 4 + i) * 32] = sums[n][i];
      }
      __syncthreads();
      if (key_warp != 0) return;
      float mine[2], others[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float largest = fmaxf(maximum[i], words[i * 32]);
        mine[i] = exponential_of_2(maximum[i] - pivot_of(largest));
        others[i] = exponential_of_2(words[i * 32] - pivot_of(largest));
        maximum[i] = largest;
        total[i] = __fmaf_rn(total[i], mine[i], words[(2 + i) * 32] * others[i]);
      }
#pragma unroll
      for (int n = 0; n < kSums; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[n][i] = __fmaf_rn(sums[n][i], mine[i / 2], words[(4 + n * 4 + i) * 32] * others[i / 2]);
    }
  }

  // Outputs, or what is left of a split. The warps of the first keys.
  __device__ void store(const Work& work) {
    const AttentionArgs<T>& args = work.args;
    const int size = args.attention.cache.head_size;
    const bool is_outside = work.board.is_outside != 0, has_bad = work.board.has_bad != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (query(i) >= work.queries) continue;
      const int token = (work.first_query + query(i)) / args.group;
      const int query_head = work.head * args.group + (work.first_query + query(i)) % args.group;
      const int64_t place = work.unit.splits > 1 ? args.place(work.unit.b, work.unit.split, token, query_head) : 0;
      const float factor = work.unit.splits > 1 ? 1.0f : __fdiv_rn(1.0f, total[i]);
      const int64_t out_place =
          (work.unit.row.first + token) * static_cast<int64_t>(args.attention.query_heads) + query_head;
      if (work.unit.splits > 1 && lane % 4 == 0) args.totals[place] = make_float2(maximum[i], total[i]);
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        const int channel = n * 8 + lane % 4 * 2;
        if (channel >= size) continue;
        float2 value = make_float2(sums[n][2 * i] * factor, sums[n][2 * i + 1] * factor);
        const int seen = position[i] - work.first_position;
        if (is_outside || (has_bad && work.memory.bad[channel] <= seen)) value.x = NAN;
        if (is_outside || (has_bad && work.memory.bad[channel + 1] <= seen)) value.y = NAN;
        if (work.unit.splits > 1) {
          *reinterpret_cast<float2*>(args.sums + place * size + channel) = value;
        } else {
          *reinterpret_cast<uint32_t*>(args.attention.out + out_place * size + channel) = two_of(value.x, value.y, T());
        }
      }
    }
  }
};

// The block together.
template <typename T, typename Shape>
__device__ void attend_unit(const AttentionArgs<T>& args, const TileUnit& unit, int head, TileMemory<Shape> memory,
                            TileBoard& board) {
  const int thread = static_cast<int>(threadIdx.x);
  const int place_slot = thread - Shape::kFirstLoader;
  const bool is_loader = place_slot >= 0, is_worker = thread < Shape::kWorkers;
  const bool is_placing = is_loader && place_slot < Shape::kTile;
  __syncthreads();  // the unit before is done with shared memory
  if (thread == 0) board = TileBoard{unit, 0, 0};
  for (int channel = thread; channel < Shape::kSize; channel += Shape::kThreads)
    memory.bad[channel] = TileWork<T, Shape>::kNoBad;
  __syncthreads();
  const TileWork<T, Shape> work(args, head, memory, board);
  const int tiles = work.tiles();
  if (args.is_appending) work.append();
  if (is_placing) {
#pragma unroll
    for (int tile = 0; tile < Shape::kStages; ++tile)
      memory.places[tile * Shape::kTile + place_slot] = work.place_of(work.begin + tile * Shape::kTile + place_slot);
  }
  __syncthreads();
  if (is_loader) {
    if constexpr (!Shape::kHoldsQueries) {
      if (tiles > 0) work.load_queries();
    }
#pragma unroll
    for (int tile = 0; tile < Shape::kStages - 1; ++tile) {
      if (tile < tiles) work.load(tile);
      commit_copies();
    }
  }
  TileWarp<T, Shape> warp(work, is_worker);
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_all_copies_but<Shape::kStages - 2>();
    __syncthreads();
    const int next = tile + Shape::kStages;
    int place = 0;
    if (is_loader) {
      if (next - 1 < tiles) work.load(next - 1);
      commit_copies();
      // A load whose latency the products hide; it is stored when they are done.
      if (is_placing) place = work.place_of(work.begin + next * Shape::kTile + place_slot);
    }
    if (min(work.end, work.begin + (tile + 1) * Shape::kTile) > work.first_position + 1) {
      work.settle_bad_values(tile);
      __syncthreads();
    }
    if (is_worker) warp.look_at(work, tile);
    if (is_placing) memory.places[next % Shape::kPlaces * Shape::kTile + place_slot] = place;
  }
  warp.gather(work);
  if (warp.key_warp == 0) warp.store(work);
  if (thread == 0 && board.is_outside != 0) report_outside(args, board.unit.b, board.unit.row.slot);
}

// One number for all outputs of a row and a key/value head. The block together.
template <typename T>
__device__ void fill_outputs(const AttentionArgs<T>& args, const AttentionRow& row, int head, float value) {
  const int size = args.value_size, width = args.group * size;
  for (int token = 0; token < row.tokens; ++token) {
    T* const out = args.attention.out +
                   ((row.first + token) * static_cast<int64_t>(args.attention.query_heads) + head * args.group) * size;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x))
      store_number(out + i, value);
  }
}

// Grid: as many blocks as there is room for, or fewer. A warp owns 16 queries and its share of a tile's keys.
template <typename T, typename Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void attention_tiles_kernel(
    const __grid_constant__ AttentionArgs<T> args) {
  extern __shared__ uint4 attention_shared[];
  __shared__ TileBoard board;
  __shared__ unsigned next_item;
  wait_for_previous();
  let_next_start();
  const auto heads = static_cast<unsigned>(args.attention.cache.kv_heads);
  const TileUnits units(args);
  const unsigned items = static_cast<unsigned>(units.count()) * heads;
  for (unsigned item = blockIdx.x; item < items;) {
    // Who is done takes the next: units differ in length, and by a fixed stride some blocks had all the long ones.
    // After each item one question is asked, whose answer is not needed until the item is done.
    unsigned answer = 0;
    if (threadIdx.x == 0) answer = atomicAdd(args.asked, 1u);
    const int head = static_cast<int>(item % heads);
    const TileUnit unit = units.find(args, static_cast<int>(item / heads));
    if (unit.row.kind == AttentionKind::kLive) {
      attend_unit<T, Shape>(args, unit, head, TileMemory<Shape>(attention_shared), board);
    } else {
      const bool is_outside = unit.row.kind == AttentionKind::kOutside;
      fill_outputs(args, unit.row, head, is_outside ? NAN : 0.0f);
      if (is_outside && head == 0 && threadIdx.x == 0) report_outside(args, unit.b, unit.row.slot);
    }
    if (threadIdx.x == 0) {
      next_item = gridDim.x + answer;
      if (answer == items - 1) *args.asked = 0;  // the last question: the next call begins anew
    }
    __syncthreads();
    item = next_item;
    __syncthreads();
  }
}

template <typename Shape, typename T>
void launch_tiles(const AttentionArgs<T>& args, CudaDevice& device) {
  static_assert(Shape::kSharedBytes <= tile_shared_bytes(Shape::kSize));
  const BasicAttention<T>& attention = args.attention;
  const auto kernel = attention_tiles_kernel<T, Shape>;
  // At most: every row has all the tokens it may have, or the tokens are all there are.
  const int64_t row_tiles = ceiling_quotient(int64_t{attention.max_tokens_per_row} * args.group, Shape::kQueries);
  const int64_t tiles =
      std::min(attention.rows.count * row_tiles,
               ceiling_quotient(attention.tokens * args.group, Shape::kQueries) + attention.rows.count);
  const unsigned items = check_blocks(args.op, tiles * args.max_splits * attention.cache.kv_heads);
  const int64_t room = int64_t{resident_blocks(args.op, kernel, Shape::kThreads, Shape::kSharedBytes)} *
                       device.properties().multiprocessors;
  launch(args.op, kernel, dim3(static_cast<unsigned>(std::min<int64_t>(items, room))), Shape::kThreads,
         Shape::kSharedBytes, args, device, Launch::kOverlapping);
}

}  // namespace replayssm
