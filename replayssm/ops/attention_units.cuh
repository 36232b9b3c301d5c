// Internal to attention on tensor cores: the units of work, and what the kernels of decoding steps and of prompts
// share. A unit is a tile of a row's queries of one key/value head with a split of its context. A launch knows nothing
// of the rows' cursors: which unit is whose a warp counts from them.
#pragma once

#include "replayssm/ops/attention.cuh"
#include "replayssm/ops/pack.cuh"
#include "replayssm/ops/scan.cuh"

namespace replayssm {

struct AttentionUnit {
  int b, head;
  AttentionRow row;
  int split, splits;  // the first of the row's splits that it has; how many there are
  bool is_partial;    // it has one of several
  int split_tokens;
  int first_query, queries;        // of the row's tokens * group
  int first_position, begin, end;  // of the first query; of the keys

  // Of `size` keys each.
  __device__ int tiles(int size) const { return max(0, (end - begin + size - 1) / size); }
};

template <typename T>
__device__ inline int row_splits(const AttentionArgs<T>& args, const AttentionRow& row) {
  if (args.max_splits == 1) return 1;
  const int tokens = split_tokens(row.end(), args.attention.cache.head_size);
  return (row.end() + tokens - 1) / tokens;
}
template <typename T>
__device__ inline int row_tiles(const AttentionArgs<T>& args, const AttentionRow& row) {
  return (row.tokens * args.group + args.tile_queries - 1) / args.tile_queries;
}

// Which unit is whose, as a warp knows it: each lane has counted the units of some rows, in order. A row's splits are
// units of their own only where what is left from the row on would not keep all blocks busy for as long as the row
// takes one; so the last units are short. The outputs' bits are the same.
struct AttentionUnits {
  int rows, heads, rows_a_lane;
  int64_t keys;  // of a head, of the rows up to and with this lane's; of all rows
  int64_t all_keys;
  int end;  // units of a head of those

  template <typename T>
  __device__ explicit AttentionUnits(const AttentionArgs<T>& args)
      : rows(args.attention.rows.count), heads(args.attention.cache.kv_heads), rows_a_lane((rows + 31) / 32) {
    const int first = static_cast<int>(threadIdx.x % 32) * rows_a_lane, last = min(rows, first + rows_a_lane);
    keys = 0;
#pragma unroll 4
    for (int b = first; b < last; ++b) keys += keys_of(attention_row(args, b));
    const int64_t own = keys;
    keys = sum_up_to_lane(keys);
    all_keys = __shfl_sync(kAllLanes, keys, 31);
    int64_t before = keys - own;
    int sum = 0;
    for (int b = first; b < last; ++b) {
      const AttentionRow row = attention_row(args, b);
      sum += units_of(args, row, before);
      before += keys_of(row);
    }
    end = sum_up_to_lane(sum);
  }

  __device__ unsigned count() const {
    return static_cast<unsigned>(__shfl_sync(kAllLanes, end, 31)) * static_cast<unsigned>(heads);
  }

  // The warp together; `item` is below count().
  template <typename T>
  __device__ AttentionUnit find(const AttentionArgs<T>& args, unsigned item) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int head = static_cast<int>(item % static_cast<unsigned>(heads));
    int index = static_cast<int>(item / static_cast<unsigned>(heads));
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, end > index))) - 1;
    const int units_before = __shfl_sync(kAllLanes, end, max(0, owner - 1));
    int64_t keys_before = __shfl_sync(kAllLanes, keys, max(0, owner - 1));
    if (owner > 0)
      index -= units_before;
    else
      keys_before = 0;
    const int last = min(rows, (owner + 1) * rows_a_lane);
    for (int first = owner * rows_a_lane;; first += 32) {
      AttentionRow row{};
      if (first + lane < last) row = attention_row(args, first + lane);
      const int64_t keys_up_to = keys_before + sum_up_to_lane(keys_of(row));
      const int count = units_of(args, row, keys_up_to - keys_of(row));
      const int up_to = sum_up_to_lane(count);
      const unsigned past = __ballot_sync(kAllLanes, up_to > index);
      if (past != 0) {
        const int at = __ffs(static_cast<int>(past)) - 1;
        const bool is_whole = __shfl_sync(kAllLanes, is_row_whole(args, row, keys_up_to - keys_of(row)) ? 1 : 0, at);
        return unit_of(args, first + at, head, index - __shfl_sync(kAllLanes, up_to - count, at), is_whole);
      }
      index -= __shfl_sync(kAllLanes, up_to, 31);
      keys_before = __shfl_sync(kAllLanes, keys_up_to, 31);
    }
  }

 private:
  __device__ static int64_t keys_of(const AttentionRow& row) {
    return row.kind == AttentionKind::kLive ? row.end() : 0;
  }

  // `before`: the keys of the rows before it.
  template <typename T>
  __device__ bool is_row_whole(const AttentionArgs<T>& args, const AttentionRow& row, int64_t before) const {
    return args.max_splits == 1 ||
           (args.is_folding && (all_keys - before) * heads >= static_cast<int64_t>(row.end()) * gridDim.x);
  }

  // Of one key/value head.
  template <typename T>
  __device__ int units_of(const AttentionArgs<T>& args, const AttentionRow& row, int64_t before) const {
    if (row.kind != AttentionKind::kLive) return row.kind == AttentionKind::kEmpty ? 0 : 1;
    return row_tiles(args, row) * (is_row_whole(args, row, before) ? 1 : row_splits(args, row));
  }

  // Later queries first: in a prompt they see more keys.
  template <typename T>
  __device__ static AttentionUnit unit_of(const AttentionArgs<T>& args, int b, int head, int index, bool is_whole) {
    AttentionUnit unit{};
    unit.b = b;
    unit.head = head;
    unit.row = attention_row(args, b);
    if (unit.row.kind != AttentionKind::kLive) return unit;
    unit.splits = row_splits(args, unit.row);
    unit.is_partial = !is_whole && unit.splits > 1;
    unit.split_tokens =
        unit.splits == 1 ? unit.row.end() : split_tokens(unit.row.end(), args.attention.cache.head_size);
    const int units = unit.is_partial ? unit.splits : 1;
    unit.split = index % units;
    unit.first_query = (row_tiles(args, unit.row) - 1 - index / units) * args.tile_queries;
    unit.queries = min(args.tile_queries, unit.row.tokens * args.group - unit.first_query);
    unit.first_position = unit.row.start + unit.first_query / args.group;
    unit.begin = unit.split * unit.split_tokens;
    unit.end = unit.row.start + (unit.first_query + unit.queries - 1) / args.group + 1;
    if (unit.is_partial) unit.end = min(unit.end, unit.begin + unit.split_tokens);
    return unit;
  }
};

// What two runs of keys have summed, put together: of the maxima, the totals and the sums of the run before and the run
// after. Exact where either run is empty (but for a zero's sign).
struct Folding {
  float maximum, before, after;

  __device__ Folding(float maximum_before, float maximum_after) : maximum(fmaxf(maximum_before, maximum_after)) {
    before = exponential_of_2(maximum_before - pivot_of(maximum));
    after = exponential_of_2(maximum_after - pivot_of(maximum));
  }
  __device__ float operator()(float sum_before, float sum_after) const {
    return __fmaf_rn(sum_after, after, __fmul_rn(sum_before, before));
  }
};

// Query `query` of a unit in memory.
template <typename T>
__device__ inline const T* query_at(const AttentionArgs<T>& args, const AttentionUnit& unit, int query) {
  const int token = (unit.first_query + query) / args.group, in_group = (unit.first_query + query) % args.group;
  return args.attention.q + (unit.row.first + token) * args.attention.q_stride +
         static_cast<int64_t>(unit.head * args.group + in_group) * args.attention.cache.head_size;
}

// The same query's place among those of the row's tokens.
template <typename T>
__device__ inline int64_t query_place(const AttentionArgs<T>& args, const AttentionUnit& unit, int query) {
  const int token = (unit.first_query + query) / args.group, in_group = (unit.first_query + query) % args.group;
  return token * static_cast<int64_t>(args.attention.query_heads) + unit.head * args.group + in_group;
}
// Of the first of a row's queries among the step's.
template <typename T>
__device__ inline int64_t row_place(const AttentionArgs<T>& args, const AttentionRow& row) {
  return row.first * static_cast<int64_t>(args.attention.query_heads);
}

// One number for all outputs of a row that is not live and a key/value head, by `threads` threads of which this is
// `thread`.
template <typename T>
__device__ inline void fill_outputs(const AttentionArgs<T>& args, const AttentionUnit& unit, int thread, int threads) {
  const bool is_outside = unit.row.kind == AttentionKind::kOutside;
  const int size = args.value_size, width = args.group * size;
  for (int token = 0; token < unit.row.tokens; ++token) {
    T* const out =
        args.attention.out + (row_place(args, unit.row) + token * static_cast<int64_t>(args.attention.query_heads) +
                              unit.head * args.group) *
                                 size;
    for (int i = thread; i < width; i += threads) store_number(out + i, is_outside ? NAN : 0.0f);
  }
  if (is_outside && unit.head == 0 && thread == 0) report_outside(args, unit.b, unit.row.slot);
}

// Over the four lanes that share a row of a product.
__device__ inline float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}
__device__ inline float quad_sum(float value) {
  value = value + __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// Of a plane of keys or values in shared memory, whose rows are kRowBytes long, a multiple of 128. Chunk c of 16 bytes
// of a row lies at chunk c ^ (row % 8), so that eight rows of one chunk fill the banks.
template <int kRowBytes>
__device__ inline int plane_offset(int row, int chunk) {
  return row * kRowBytes + (chunk ^ row % 8) * 16;
}

// Whether one of a word's two numbers is not finite.
__device__ inline bool has_bad_number(uint32_t word, Bf16) {
  return (word & 0x7F80u) == 0x7F80u || (word & 0x7F800000u) == 0x7F800000u;
}
__device__ inline bool has_bad_number(uint32_t word, Fp16) {
  return (word & 0x7C00u) == 0x7C00u || (word & 0x7C000000u) == 0x7C000000u;
}

inline constexpr int kNoBad = 255;  // past the tokens of any unit

// A weight of zero times a number that is not finite is none: values at positions that some query of the unit does not
// see may not reach its sums. Where one of a tile's is not finite the tile gets a zero, and bad[channel] the first such
// token, counted from the unit's first, from which on the channel's outputs become NaN. Returns whether there was one.
// Threads have chunks of their own, `thread`, `thread` + `threads` and so on.
template <int kRowBytes, typename T>
__device__ inline bool settle_bad_values(const AttentionUnit& unit, char* values, int tile_begin, int tile_size,
                                         int chunks, uint8_t* bad, int thread, int threads) {
  bool has_bad = false;
  const int first = max(0, unit.first_position + 1 - tile_begin), last = min(tile_size, unit.end - tile_begin);
  for (int chunk = thread; chunk < chunks; chunk += threads)
    for (int row = first; row < last; ++row) {
      auto* words = reinterpret_cast<uint32_t*>(values + plane_offset<kRowBytes>(row, chunk));
      for (int i = 0; i < 4; ++i) {
        if (!has_bad_number(words[i], T())) continue;
        has_bad = true;
        const auto token = static_cast<uint8_t>(tile_begin + row - unit.first_position);
        for (int half = 0; half < 2; ++half) {
          if (!has_bad_number(words[i] >> 16 * half & 0xFFFFu, T())) continue;
          uint8_t& first_bad = bad[chunk * 8 + 2 * i + half];
          first_bad = min(first_bad, token);
          words[i] &= half == 0 ? 0xFFFF0000u : 0xFFFFu;
        }
      }
    }
  return has_bad;
}

}  // namespace replayssm
