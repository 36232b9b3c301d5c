// Attention of prompts on tensor cores: eight warps, each with 16 queries of its own, against keys and values that
// stream through shared memory, several tiles in flight, each read once for all query heads of a key/value head.
#include "replayssm/ops/attention_units.cuh"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/copies.cuh"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/tensor_cores.cuh"

namespace replayssm {
namespace {

constexpr int kStages = 3;  // tiles on their way at once, and the one that is looked at
constexpr int kThreads = kPromptTileQueries * 2;

// Heads are padded with zeros to kSize. A query's bits depend on kTile.
template <int kSize_>
struct PromptShape {
  static constexpr int kSize = kSize_;
  static constexpr int kTile = kSize <= 128 ? 64 : 32;
  static constexpr int kChunks = kSize / 8;  // of 16 bytes
  static constexpr int kRowBytes = 2 * kSize;
  static constexpr int kPlaneBytes = kTile * kRowBytes;
  static constexpr bool kHoldsQueries = kSize <= 128;  // in registers; else in shared memory
  static constexpr int kPlaces = 4;                    // tiles whose places in the cache are known
  static constexpr int kQueryBytes = kHoldsQueries ? 0 : kPromptTileQueries * kRowBytes;
  static constexpr int kSharedBytes = kStages * 2 * kPlaneBytes + kQueryBytes + kPlaces * kTile * 4 + kSize;
  static_assert(kStages <= kPlaces && kTile <= kThreads && kThreads % kChunks == 0);
};

// Dynamic shared memory.
template <typename Shape>
struct PromptMemory {
  char* stages;   // of keys and values
  char* queries;  // unless in registers
  int* places;    // [kPlaces, kTile]
  uint8_t* bad;   // [kSize]: see settle_bad_values

  __device__ explicit PromptMemory(void* shared) {
    stages = static_cast<char*>(shared);
    queries = stages + kStages * 2 * Shape::kPlaneBytes;
    places = reinterpret_cast<int*>(queries + Shape::kQueryBytes);
    bad = reinterpret_cast<uint8_t*>(places + Shape::kPlaces * Shape::kTile);
  }
  __device__ char* keys(int tile) const { return stages + tile % kStages * 2 * Shape::kPlaneBytes; }
  __device__ char* values(int tile) const { return keys(tile) + Shape::kPlaneBytes; }
};

// Of a unit, for all threads of the block to look up: the sums leave few registers.
struct PromptBoard {
  AttentionUnit unit;
  int is_outside;  // a page is
  int has_bad;     // some channel of the values
};

// A unit as its block sees it.
template <typename T, typename Shape>
struct PromptWork {
  const AttentionArgs<T>& args;
  const PromptMemory<Shape> memory;
  PromptBoard& board;

  // The place of key number `key` of the unit, or -1 where there is none.
  __device__ int place_of(int key) const {
    if (key >= board.unit.end) return -1;
    const int place = cache_place(args, board.unit.b, board.unit.head, key);
    if (place < 0) board.is_outside = 1;
    return place;
  }

  // Lets tile `tile` of the keys and values come, zeros where there are none.
  __device__ void load(int tile) const {
    constexpr int kRows = kThreads / Shape::kChunks;
    const int chunk = static_cast<int>(threadIdx.x) % Shape::kChunks;
    const int first = static_cast<int>(threadIdx.x) / Shape::kChunks;
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
      const int at = plane_offset<Shape::kRowBytes>(row, chunk);
      copy_chunk_async(to + at, keys + from, is_there);
      copy_chunk_async(to + Shape::kPlaneBytes + at, values + from, is_there);
    }
  }

  __device__ void load_queries() const {
    for (int i = static_cast<int>(threadIdx.x); i < kPromptTileQueries * Shape::kChunks; i += kThreads) {
      const int query = i / Shape::kChunks, chunk = i % Shape::kChunks;
      const bool is_there = query < board.unit.queries && chunk * 8 < args.attention.cache.head_size;
      copy_chunk_async(memory.queries + plane_offset<Shape::kRowBytes>(query, chunk),
                       is_there ? query_at(args, board.unit, query) + chunk * 8 : args.attention.q, is_there);
    }
  }
};

// What a warp holds: 16 queries and what has been summed for them. In a product's layout a lane has two of its rows,
// lane / 4 and 8 more, and of each 8 columns two from lane % 4 * 2 on.
template <typename T, typename Shape>
struct PromptWarp {
  using Work = PromptWork<T, Shape>;
  static constexpr int kSums = Shape::kSize / 8;
  static constexpr int kScores = Shape::kTile / 8;

  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  int position[2];  // the last that it sees
  uint32_t held[Shape::kHoldsQueries ? Shape::kSize / 16 : 1][4];
  float sums[kSums][4];
  float maximum[2], total[2];

  __device__ explicit PromptWarp(const Work& work) {
    const AttentionUnit& unit = work.board.unit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int there = min(query(i), unit.queries - 1);
      position[i] = unit.row.start + (unit.first_query + there) / work.args.group;
      maximum[i] = -INFINITY;
      total[i] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kSums; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
    if constexpr (Shape::kHoldsQueries) {
      const int size = work.args.attention.cache.head_size;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_there = query(i) < unit.queries;
        const T* from = query_at(work.args, unit, is_there ? query(i) : 0);
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
    return warp * 16 + lane / 4 + 8 * i;
  }

  __device__ void score(const Work& work, int tile, float (&scores)[kScores][4]) const {
#pragma unroll
    for (int n = 0; n < kScores; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    const int key = lane % 8 + lane / 16 * 8;
    const uint32_t keys = shared_address(work.memory.keys(tile)) + key * Shape::kRowBytes;
    const int key_chunk = lane / 8 % 2 ^ lane % 8;
    const uint32_t queries = shared_address(work.memory.queries) + (warp * 16 + lane % 16) * Shape::kRowBytes;
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
    const int tile_begin = tile * Shape::kTile;
    const bool is_masked = tile_begin + Shape::kTile > work.board.unit.first_position + 1;
    const int key = tile_begin + lane % 4 * 2;
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
    if (!__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kSums; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = sums[n][i] * factor[i / 2];
  }

  __device__ void add_values(const Work& work, int tile, const float (&weights)[kScores][4]) {
    const uint32_t values = shared_address(work.memory.values(tile)) + lane % 16 * Shape::kRowBytes;
    const int chunk = lane / 16 ^ lane % 8;
#pragma unroll
    for (int k = 0; k < Shape::kTile / 16; ++k) {
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

  __device__ void store(const Work& work) {
    const AttentionUnit& unit = work.board.unit;
    const int size = work.args.attention.cache.head_size;
    const bool is_outside = work.board.is_outside != 0, has_bad = work.board.has_bad != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] = quad_sum(total[i]);
      if (query(i) >= unit.queries) continue;
      T* const out =
          work.args.attention.out + (row_place(work.args, unit.row) + query_place(work.args, unit, query(i))) * size;
      const float factor = __fdiv_rn(1.0f, total[i]);
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        const int channel = n * 8 + lane % 4 * 2;
        if (channel >= size) continue;
        float2 value = make_float2(sums[n][2 * i] * factor, sums[n][2 * i + 1] * factor);
        const int seen = position[i] - unit.first_position;
        if (is_outside || (has_bad && work.memory.bad[channel] <= seen)) value.x = NAN;
        if (is_outside || (has_bad && work.memory.bad[channel + 1] <= seen)) value.y = NAN;
        *reinterpret_cast<uint32_t*>(out + channel) = two_of(value.x, value.y, T());
      }
    }
  }
};

// The block together.
template <typename T, typename Shape>
__device__ void attend_unit(const AttentionArgs<T>& args, const AttentionUnit& unit, PromptMemory<Shape> memory,
                            PromptBoard& board) {
  const int thread = static_cast<int>(threadIdx.x);
  const bool is_placing = thread < Shape::kTile;
  __syncthreads();  // the unit before is done with shared memory
  if (thread == 0) board = PromptBoard{unit, 0, 0};
  for (int channel = thread; channel < Shape::kSize; channel += kThreads) memory.bad[channel] = kNoBad;
  __syncthreads();
  const PromptWork<T, Shape> work{args, memory, board};
  const int tiles = unit.tiles(Shape::kTile);
  if (is_placing) {
#pragma unroll
    for (int tile = 0; tile < kStages; ++tile)
      memory.places[tile * Shape::kTile + thread] = work.place_of(tile * Shape::kTile + thread);
  }
  __syncthreads();
  if constexpr (!Shape::kHoldsQueries) work.load_queries();
#pragma unroll
  for (int tile = 0; tile < kStages - 1; ++tile) {
    if (tile < tiles) work.load(tile);
    commit_copies();
  }
  PromptWarp<T, Shape> warp(work);
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_all_copies_but<kStages - 2>();
    __syncthreads();
    const int next = tile + kStages;
    if (next - 1 < tiles) work.load(next - 1);
    commit_copies();
    // A load whose latency the products hide; it is stored when they are done.
    int place = 0;
    if (is_placing) place = work.place_of(next * Shape::kTile + thread);
    const int begin = tile * Shape::kTile;
    if (min(board.unit.end, begin + Shape::kTile) > board.unit.first_position + 1) {
      if (settle_bad_values<Shape::kRowBytes, T>(board.unit, memory.values(tile), begin, Shape::kTile, Shape::kChunks,
                                                 memory.bad, thread, kThreads))
        board.has_bad = 1;
      __syncthreads();
    }
    warp.look_at(work, tile);
    if (is_placing) memory.places[next % Shape::kPlaces * Shape::kTile + thread] = place;
  }
  warp.store(work);
  if (thread == 0 && board.is_outside != 0) report_outside(args, board.unit.b, board.unit.row.slot);
}

// Grid: as many blocks as there is room for, or fewer.
template <typename T, typename Shape>
__global__ __launch_bounds__(kThreads, 1) void attention_prompt_kernel(const __grid_constant__ AttentionArgs<T> args) {
  extern __shared__ uint4 attention_shared[];
  __shared__ PromptBoard board;
  __shared__ unsigned next_item;
  wait_for_previous();
  let_next_start();
  const AttentionUnits units(args);
  const unsigned items = units.count();
  for (unsigned item = blockIdx.x; item < items;) {
    // Who is done takes the next: units differ in length. After each item one question is asked, whose answer is not
    // needed until the item is done.
    unsigned answer = 0;
    if (threadIdx.x == 0) answer = atomicAdd(args.asked, 1u);
    const AttentionUnit unit = units.find(args, item);
    if (unit.row.kind == AttentionKind::kLive)
      attend_unit<T, Shape>(args, unit, PromptMemory<Shape>(attention_shared), board);
    else
      fill_outputs(args, unit, static_cast<int>(threadIdx.x), kThreads);
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
void launch_shape(const AttentionArgs<T>& args, CudaDevice& device) {
  static_assert(Shape::kSharedBytes <= prompt_shared_bytes(Shape::kSize));
  const auto kernel = attention_prompt_kernel<T, Shape>;
  const int64_t room =
      int64_t{resident_blocks(args.op, kernel, kThreads, Shape::kSharedBytes)} * device.properties().multiprocessors;
  launch(args.op, kernel, dim3(static_cast<unsigned>(std::min(most_units(args), room))), kThreads, Shape::kSharedBytes,
         args, device, Launch::kOverlapping);
}

}  // namespace

template <typename T>
void launch_prompt(const AttentionArgs<T>& args, CudaDevice& device) {
  const int size = args.attention.cache.head_size;
  if (size <= 64)
    launch_shape<PromptShape<64>>(args, device);
  else if (size <= 128)
    launch_shape<PromptShape<128>>(args, device);
  else
    launch_shape<PromptShape<256>>(args, device);
}

template void launch_prompt(const AttentionArgs<Bf16>&, CudaDevice&);
template void launch_prompt(const AttentionArgs<Fp16>&, CudaDevice&);

}  // namespace replayssm
