// Attention of decoding steps on tensor cores. One warp of a block finds out where the keys of the next tiles lie, two
// let tiles of keys and values stream into a ring of planes in shared memory, from one unit of work to the next without
// a pause, and the others look at them. For each 16 queries these are four: of a tile each scores a quarter of the
// keys, they show each other the scores, and each sums a quarter of the values' channels, so that at a unit's end
// nothing is left to be put together but the splits that it has. Latent caches, whose values are their keys' first
// channels, have one plane a tile.
#include "replayssm/ops/attention_units.cuh"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/copies.cuh"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/norm.cuh"
#include "replayssm/ops/tensor_cores.cuh"

namespace replayssm {
namespace {

constexpr int kSlices = 4;  // of a tile's keys, and of the values' channels
constexpr int kLoaders = 64;
constexpr int kScouts = 32;
constexpr int kPlacedTiles = 8;  // that the scout may be ahead of the loaders
constexpr int kMaxPlanes = 12;
constexpr int kLeastPlanes = 2;  // a tile's keys and values

// The shape of a block. Keys are padded with zeros to kSize, values to kValues. A query's bits depend on these and on
// kTile, not on the others.
template <int kSize_, int kValues_, bool kIsLatent_, int kQueryWarps_, int kBlocks_>
struct StreamShape {
  static constexpr int kSize = kSize_, kValues = kValues_;
  static constexpr bool kIsLatent = kIsLatent_;
  static constexpr int kQueryWarps = kQueryWarps_;
  static constexpr int kBlocks = kBlocks_;  // that a multiprocessor is to have room for
  static constexpr int kQueries = 16 * kQueryWarps;
  static constexpr int kUnits = kIsLatent ? 2 : 3;  // that the scout, the loaders and the workers may be at
  static constexpr int kWorkers = 32 * kSlices * kQueryWarps;
  static constexpr int kThreads = kWorkers + kLoaders + kScouts;
  static constexpr int kTile = kSize <= 128 ? 64 : 32;
  static constexpr int kKeys = kTile / kSlices;        // that a warp scores
  static constexpr int kChannels = kValues / kSlices;  // that a warp sums
  static constexpr int kChunks = kSize / 8;            // of 16 bytes, of a row
  static constexpr int kRowBytes = 2 * kSize;
  static constexpr int kPlaneBytes = kTile * kRowBytes;
  static constexpr int kQueryBytes = kQueries * kRowBytes;
  static constexpr int kScoreStride = kTile + 8;  // eight rows of two lanes' pairs fill the banks
  static constexpr int kScores = kQueries * kScoreStride;
  static constexpr int kFixedBytes = kUnits * kQueryBytes + 2 * kScores * 4 + kValues;
  static_assert((kKeys == 8 || kKeys == 16) && kSize % 64 == 0 && kChannels % 16 == 0 && kTile % 32 == 0);
};

// A unit on its way from the scout to the workers.
struct StreamUnit {
  AttentionUnit unit;
  int is_last;     // there is no unit, and none comes
  int is_outside;  // a page is
  int has_bad;     // some channel of the values
};

// Where a tile's keys lie, on its way from the scout to the loaders.
template <typename Shape>
struct StreamTile {
  int places[Shape::kTile];  // -1: there is none
  int is_last;               // there is no tile, and none comes
};

template <typename Shape>
struct StreamBoard {
  StreamUnit units[Shape::kUnits];
  StreamTile<Shape> tiles[kPlacedTiles];
  // Of units: their queries are there; nothing of them is needed any more. Of tiles: their places are known; the
  // loaders have read them. Of planes: their keys or values are there; they have been looked at.
  PhaseBarrier ready[Shape::kUnits], done[Shape::kUnits];
  PhaseBarrier placed[kPlacedTiles], read[kPlacedTiles];
  PhaseBarrier full[kMaxPlanes], empty[kMaxPlanes];
};

template <typename Shape>
struct StreamMemory {
  char* first;
  uint32_t planes, queries;  // addresses; [kUnits] of queries
  float* scores;             // [2, kQueries, kScoreStride]
  uint8_t* bad;              // [kValues]: see settle_bad_values

  __device__ StreamMemory(void* shared, int plane_count) {
    first = static_cast<char*>(shared);
    planes = shared_address(shared);
    queries = planes + plane_count * Shape::kPlaneBytes;
    scores = reinterpret_cast<float*>(first + plane_count * Shape::kPlaneBytes + Shape::kUnits * Shape::kQueryBytes);
    bad = reinterpret_cast<uint8_t*>(scores + 2 * Shape::kScores);
  }
};

template <typename T>
struct StreamArgs {
  AttentionArgs<T> attention;
  int planes;
};

// Where a role is in a ring, and for which time.
struct RingPlace {
  int at = 0, round = 0;

  __device__ void advance(int size) {
    if (++at < size) return;
    at = 0;
    ++round;
  }
};

// Barriers of some warps of the block.
constexpr int kWorkerBarrier = 1, kQueryBarrier = 2;
__device__ inline void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// When the whole warp has come here.
__device__ inline void arrive_together(PhaseBarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// A row of a plane is copied 8 chunks at a time, one a lane; `from` is the lane's first.
template <typename Shape>
__device__ inline void load_row(uint32_t plane, int row, int chunk, int chunks, const char* from, bool is_there) {
  const uint32_t to = plane + plane_offset<Shape::kRowBytes>(row, chunk);
#pragma unroll
  for (int group = 0; group < Shape::kChunks; group += 8)
    copy_chunk_async(to + group * 16, from + group * 16, is_there && group + chunk < chunks);
}

// The warp that is ahead of all others: whatever waits for an answer from memory before anything can be copied waits
// here.
template <typename T, typename Shape>
struct StreamScout {
  static constexpr int kHalves = Shape::kTile / 32;
  static constexpr int kTogether = 4;  // tiles whose places are looked up at once

  const AttentionArgs<T>& args;
  const StreamMemory<Shape> memory;
  StreamBoard<Shape>& board;
  const int lane = static_cast<int>(threadIdx.x % 32);
  RingPlace tiles{};

  __device__ void run() {
    const AttentionUnits units(args);
    const unsigned count = units.count();
    RingPlace place;
    for (unsigned item = blockIdx.x;; place.advance(Shape::kUnits)) {
      StreamUnit& on_board = board.units[place.at];
      if (place.round > 0) board.done[place.at].wait(place.round - 1);
      if (item >= count) {
        if (lane == 0) on_board.is_last = 1;
        arrive(board.ready[place.at]);
        break;
      }
      // Who is done takes the next: units differ in length. After each item one question is asked, whose answer is not
      // needed until the item has been dealt with.
      unsigned answer = 0;
      if (lane == 0) answer = atomicAdd(args.asked, 1u);
      const AttentionUnit unit = units.find(args, item);
      if (lane == 0) {
        on_board = StreamUnit{unit, 0, 0, 0};
        if (args.max_splits > 1) args.is_cut[unit.b] = unit.is_partial ? 1 : 0;
      }
      const bool is_live = unit.row.kind == AttentionKind::kLive;
      if (is_live) {
        if (args.is_appending) append(unit);
        load_queries(unit, memory.queries + place.at * Shape::kQueryBytes);
      }
      arrive(board.ready[place.at]);
      if (is_live) place_tiles(unit, on_board);
      if (lane == 0 && answer == count - 1) *args.asked = 0;  // the last question: the next call begins anew
      item = gridDim.x + __shfl_sync(kAllLanes, answer, 0);
    }
    StreamTile<Shape>& last = next_tile();
    if (lane == 0) last.is_last = 1;
    arrive_together(board.placed[tiles.at]);
    wait_for_copies();
  }

  // When the copies are there, and what the warp wrote before.
  __device__ void arrive(PhaseBarrier& barrier) const {
    barrier.arrive_after_copies();
    arrive_together(barrier);
  }

  // Writes the keys and values of those of the row's tokens that lie in the split. No other block reads or writes them.
  __device__ void append(const AttentionUnit& unit) const {
    const BasicAttention<T>& attention = args.attention;
    const int size = attention.cache.head_size, chunks = size / 8;
    const int first = max(unit.row.start, unit.begin);
    for (int i = lane; i < (unit.end - first) * chunks; i += 32) {
      const int position = first + i / chunks, at = i % chunks * 8;
      const int place = cache_place(args, unit.b, unit.head, position);
      if (place < 0) continue;
      const int64_t token = unit.row.first + (position - unit.row.start), to = static_cast<int64_t>(place) * size + at;
      const int64_t from = static_cast<int64_t>(unit.head) * size + at;
      const auto move = [&](const T* source, int64_t stride, T* cache) {
        store_pack(load_pack(source + token * stride + from, PackPlace::kAligned, 8), cache + to, PackPlace::kAligned,
                   8);
      };
      move(attention.k, attention.k_stride, attention.cache.k);
      if constexpr (!Shape::kIsLatent) move(attention.v, attention.v_stride, attention.cache.v);
    }
  }

  __device__ void load_queries(const AttentionUnit& unit, uint32_t queries) const {
    const int chunk = lane % 8;
#pragma unroll 4
    for (int query = lane / 8; query < Shape::kQueries; query += 4) {
      const bool is_there = query < unit.queries;
      const T* const from = query_at(args, unit, is_there ? query : 0) + chunk * 8;
      load_row<Shape>(queries, query, chunk, args.attention.cache.head_size / 8, reinterpret_cast<const char*>(from),
                      is_there);
    }
  }

  // The next tile's place on the board, once it is free. The warp together.
  __device__ StreamTile<Shape>& next_tile() const {
    if (tiles.round > 0) board.read[tiles.at].wait(tiles.round - 1);
    return board.tiles[tiles.at];
  }

  __device__ void place_tiles(const AttentionUnit& unit, StreamUnit& on_board) {
    for (int begin = unit.begin; begin < unit.end; begin += kTogether * Shape::kTile) {
      int places[kTogether * kHalves];
#pragma unroll
      for (int i = 0; i < kTogether * kHalves; ++i) {
        const int position = begin + i * 32 + lane;
        places[i] = position < unit.end ? cache_place(args, unit.b, unit.head, position) : -1;
      }
#pragma unroll
      for (int tile = 0; tile < kTogether; ++tile) {
        if (begin + tile * Shape::kTile >= unit.end) break;
        StreamTile<Shape>& on_way = next_tile();
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const int i = tile * kHalves + half;
          if (places[i] < 0 && begin + i * 32 + lane < unit.end) on_board.is_outside = 1;
          on_way.places[half * 32 + lane] = places[i];
        }
        if (lane == 0) on_way.is_last = 0;
        arrive_together(board.placed[tiles.at]);
        tiles.advance(kPlacedTiles);
      }
    }
  }
};

// One of the two warps that load.
template <typename T, typename Shape>
struct StreamLoader {
  static constexpr int kRowStep = kLoaders / 8;

  const AttentionArgs<T>& args;
  const int planes;
  const StreamMemory<Shape> memory;
  StreamBoard<Shape>& board;
  const int thread = static_cast<int>(threadIdx.x) - Shape::kWorkers;
  RingPlace ring{};

  __device__ void run() {
    for (RingPlace tiles;; tiles.advance(kPlacedTiles)) {
      board.placed[tiles.at].wait(tiles.round);
      const StreamTile<Shape>& tile = board.tiles[tiles.at];
      if (tile.is_last != 0) break;
      int places[Shape::kTile / kRowStep];
#pragma unroll
      for (int i = 0; i < Shape::kTile / kRowStep; ++i) places[i] = tile.places[thread / 8 + i * kRowStep];
      arrive_together(board.read[tiles.at]);
      load_plane(args.attention.cache.k, places);
      if constexpr (!Shape::kIsLatent) load_plane(args.attention.cache.v, places);
    }
    wait_for_copies();
  }

  // Lets the next plane come, zeros where there is nothing.
  __device__ void load_plane(const T* cache, const int (&places)[Shape::kTile / kRowStep]) {
    if (ring.round > 0) board.empty[ring.at].wait(ring.round - 1);
    const int chunk = thread % 8, chunks = args.attention.cache.head_size / 8;
    const auto row_bytes = static_cast<uint32_t>(args.attention.cache.head_size) * 2u;
    const char* const first = reinterpret_cast<const char*>(cache) + chunk * 16;
#pragma unroll
    for (int i = 0; i < Shape::kTile / kRowStep; ++i) {
      const char* const from = first + static_cast<uint64_t>(static_cast<uint32_t>(max(places[i], 0))) * row_bytes;
      load_row<Shape>(memory.planes + ring.at * Shape::kPlaneBytes, thread / 8 + i * kRowStep, chunk, chunks, from,
                      places[i] >= 0);
    }
    board.full[ring.at].arrive_after_copies();
    arrive_together(board.full[ring.at]);
    ring.advance(planes);
  }
};

// What has been summed of a run of keys, by a lane for two queries.
template <int kSums>
struct Run {
  float sums[kSums][4];
  float maximum[2], total[2];  // total: of this lane's keys, or of all

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      maximum[i] = -INFINITY;
      total[i] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kSums; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
  }

  // This run, and then the next.
  __device__ void fold(const Run& next) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Folding fold(maximum[i], next.maximum[i]);
      maximum[i] = fold.maximum;
      total[i] = fold(total[i], next.total[i]);
#pragma unroll
      for (int n = 0; n < kSums; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          sums[n][2 * i + half] = fold(sums[n][2 * i + half], next.sums[n][2 * i + half]);
    }
  }
};

// What a warp that works holds: of 16 queries the sums of its share of the channels. In a product's layout a lane has
// two of its rows, lane / 4 and 8 more, and of each 8 columns two from lane % 4 * 2 on.
template <typename T, typename Shape>
struct StreamWorker {
  static constexpr int kSums = Shape::kChannels / 8;
  static constexpr int kWeights = Shape::kTile / 8;

  const AttentionArgs<T>& args;
  const int planes;
  const StreamMemory<Shape> memory;
  StreamBoard<Shape>& board;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int slice = static_cast<int>(threadIdx.x / 32) % kSlices;
  const int query_warp = static_cast<int>(threadIdx.x / 32) / kSlices;
  RingPlace ring{};
  int step = 0;     // of which scores have two places
  int position[2];  // the last that a query sees
  // Of the split that is looked at, and of the unit's splits before it.
  Run<kSums> current, before;

  __device__ void run() {
    for (RingPlace place;; place.advance(Shape::kUnits)) {
      board.ready[place.at].wait(place.round);
      StreamUnit& on_board = board.units[place.at];
      if (on_board.is_last != 0) return;
      if (on_board.unit.row.kind == AttentionKind::kLive)
        attend(on_board, memory.queries + place.at * Shape::kQueryBytes);
      else
        fill_outputs(args, on_board.unit, static_cast<int>(threadIdx.x), Shape::kWorkers);
      arrive_together(board.done[place.at]);
    }
  }

  // Of the unit, the one of row i of this lane.
  __device__ int query(int i) const { return query_warp * 16 + lane / 4 + 8 * i; }

  __device__ void attend(StreamUnit& on_board, uint32_t queries) {
    const AttentionUnit& unit = on_board.unit;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      position[i] = unit.row.start + (unit.first_query + min(query(i), unit.queries - 1)) / args.group;
    current.clear();
    const int end = unit.end, first_position = unit.first_position;
    const int split_tokens = unit.split_tokens;
    int split_end = unit.begin + split_tokens;
    bool is_first_settled = true;
    for (int begin = unit.begin; begin < end; begin += Shape::kTile) {
      const int key_plane = ring.at;
      board.full[ring.at].wait(ring.round);
      float* const scores = memory.scores + step % 2 * Shape::kScores + query_warp * 16 * Shape::kScoreStride;
      const bool is_masked = begin + Shape::kTile > first_position + 1;
      score(queries, memory.planes + key_plane * Shape::kPlaneBytes, begin, is_masked, scores);
      if constexpr (!Shape::kIsLatent) {
        arrive_together(board.empty[ring.at]);
        ring.advance(planes);
      }
      meet(kQueryBarrier + query_warp, 32 * kSlices);
      float weights[kWeights][4];
      soften(scores, weights);
      if constexpr (!Shape::kIsLatent) board.full[ring.at].wait(ring.round);
      const int values = ring.at * Shape::kPlaneBytes;
      if (min(end, begin + Shape::kTile) > first_position + 1) {
        settle(on_board, memory.first + values, begin, is_first_settled);
        is_first_settled = false;
      }
      add_values(memory.planes + values, weights);
      arrive_together(board.empty[ring.at]);
      ring.advance(planes);
      ++step;
      if constexpr (!Shape::kIsLatent) {
        if (begin + Shape::kTile >= split_end && begin + Shape::kTile < end) {
          end_split(split_end == unit.begin + split_tokens);
          current.clear();
          split_end += split_tokens;
        }
      }
    }
    if constexpr (Shape::kIsLatent)
      end_split(true);
    else
      end_split(split_end == unit.begin + split_tokens);
    store(on_board);
  }

  // Puts the current split to those of the unit before it.
  __device__ void end_split(bool is_first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) current.total[i] = quad_sum(current.total[i]);
    if (is_first)
      before = current;
    else
      before.fold(current);
  }

  // Of this warp's keys, in base 2, for all warps of its queries to see.
  __device__ void score(uint32_t queries, uint32_t keys, int begin, bool is_masked, float* scores) const {
    constexpr int kChains = 2;
    float products[kChains][4];
#pragma unroll
    for (int n = 0; n < kChains; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) products[n][i] = 0.0f;
    const uint32_t query_row = queries + (query_warp * 16 + lane % 16) * Shape::kRowBytes;
    const int query_chunk = lane / 16 ^ lane % 8;
    const auto load_query = [&](uint32_t(&a)[4], int k) { load_matrices(a, query_row + (query_chunk ^ 2 * k) * 16); };
    if constexpr (Shape::kKeys == 8) {
      // One chain of products for every other 16 channels.
      const uint32_t key_row = keys + (slice * 8 + lane % 8) * Shape::kRowBytes;
      const int key_chunk = lane / 8 ^ lane % 8;
#pragma unroll(Shape::kSize <= 256 ? 8 : 6)
      for (int k = 0; k < Shape::kSize / 16; k += 2) {
        uint32_t a[4], b[4];
        load_matrices(b, key_row + (key_chunk ^ 2 * k) * 16);
        load_query(a, k);
        multiply_add(products[0], a, b[0], b[1], T());
        load_query(a, k + 1);
        multiply_add(products[1], a, b[2], b[3], T());
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) products[0][i] = products[0][i] + products[1][i];
    } else {
      const uint32_t key_row = keys + (slice * 16 + lane % 8 + lane / 16 * 8) * Shape::kRowBytes;
      const int key_chunk = lane / 8 % 2 ^ lane % 8;
#pragma unroll
      for (int k = 0; k < Shape::kSize / 16; ++k) {
        uint32_t a[4], b[4];
        load_matrices(b, key_row + (key_chunk ^ 2 * k) * 16);
        load_query(a, k);
        multiply_add(products[0], a, b[0], b[1], T());
        multiply_add(products[1], a, b[2], b[3], T());
      }
    }
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n) {
      const int key = slice * Shape::kKeys + n * 8 + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 pair = make_float2(products[n][2 * i] * args.scale, products[n][2 * i + 1] * args.scale);
        if (is_masked && begin + key > position[i]) pair.x = -INFINITY;
        if (is_masked && begin + key + 1 > position[i]) pair.y = -INFINITY;
        *reinterpret_cast<float2*>(scores + (lane / 4 + 8 * i) * Shape::kScoreStride + key) = pair;
      }
    }
  }

  // Scores become weights relative to the new maximum, and what was summed is made so too.
  __device__ void soften(const float* scores, float (&weights)[kWeights][4]) {
    float largest[2] = {current.maximum[0], current.maximum[1]};
#pragma unroll
    for (int n = 0; n < kWeights; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 pair =
            *reinterpret_cast<const float2*>(scores + (lane / 4 + 8 * i) * Shape::kScoreStride + n * 8 + lane % 4 * 2);
        weights[n][2 * i] = pair.x;
        weights[n][2 * i + 1] = pair.y;
        largest[i] = fmaxf(largest[i], fmaxf(pair.x, pair.y));
      }
    float factor[2], pivot[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = quad_max(largest[i]);
      pivot[i] = pivot_of(largest[i]);
      factor[i] = exponential_of_2(current.maximum[i] - pivot[i]);
      current.maximum[i] = largest[i];
      current.total[i] = current.total[i] * factor[i];
    }
#pragma unroll
    for (int n = 0; n < kWeights; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[n][i] = exponential_of_2(weights[n][i] - pivot[i / 2]);
        current.total[i / 2] = current.total[i / 2] + weights[n][i];
      }
    if (!__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kSums; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) current.sums[n][i] = current.sums[n][i] * factor[i / 2];
  }

  // All workers together: in a latent cache other warps may still be scoring the plane that changes.
  __device__ void settle(StreamUnit& on_board, char* values, int begin, bool is_first) const {
    constexpr int kChunks = Shape::kValues / 8;
    const int thread = static_cast<int>(threadIdx.x);
    meet(kWorkerBarrier, Shape::kWorkers);
    if (is_first)
      for (int chunk = thread; chunk < kChunks; chunk += Shape::kWorkers)
        for (int i = 0; i < 8; ++i) memory.bad[chunk * 8 + i] = kNoBad;
    if (settle_bad_values<Shape::kRowBytes, T>(on_board.unit, values, begin, Shape::kTile, kChunks, memory.bad, thread,
                                               Shape::kWorkers))
      on_board.has_bad = 1;
    meet(kWorkerBarrier, Shape::kWorkers);
  }

  __device__ void add_values(uint32_t values, const float (&weights)[kWeights][4]) {
    const uint32_t row = values + lane % 16 * Shape::kRowBytes;
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
        load_transposed(b, row + k * 16 * Shape::kRowBytes + (chunk ^ slice * kSums + n) * 16);
        multiply_add(current.sums[n], a, b[0], b[1], T());
        multiply_add(current.sums[n + 1], a, b[2], b[3], T());
      }
    }
  }

  // Outputs, or what is left of a split.
  __device__ void store(const StreamUnit& on_board) {
    const AttentionUnit& unit = on_board.unit;
    const bool is_outside = on_board.is_outside != 0, has_bad = on_board.has_bad != 0;
    const bool is_partial = unit.is_partial;
    if (is_outside && threadIdx.x == 0) report_outside(args, unit.b, unit.row.slot);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (query(i) >= unit.queries) continue;
      const int64_t place = query_place(args, unit, query(i)) +
                            (is_partial ? args.split_place(unit.b, unit.split) : row_place(args, unit.row));
      const float factor = is_partial ? 1.0f : __fdiv_rn(1.0f, before.total[i]);
      if (is_partial && slice == 0 && lane % 4 == 0)
        args.totals[place] = make_float2(before.maximum[i], before.total[i]);
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        const int channel = slice * Shape::kChannels + n * 8 + lane % 4 * 2;
        if (channel >= args.value_size) continue;
        float2 value = make_float2(before.sums[n][2 * i] * factor, before.sums[n][2 * i + 1] * factor);
        const int seen = position[i] - unit.first_position;
        if (is_outside || (has_bad && memory.bad[channel] <= seen)) value.x = NAN;
        if (is_outside || (has_bad && memory.bad[channel + 1] <= seen)) value.y = NAN;
        if (is_partial)
          *reinterpret_cast<float2*>(args.sums + place * args.value_size + channel) = value;
        else
          *reinterpret_cast<uint32_t*>(args.attention.out + place * args.value_size + channel) =
              two_of(value.x, value.y, T());
      }
    }
  }
};

// Grid: as many blocks as there is room for, or fewer.
template <typename T, typename Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void attention_stream_kernel(
    const __grid_constant__ StreamArgs<T> launched) {
  extern __shared__ uint4 attention_shared[];
  __shared__ StreamBoard<Shape> board;
  const StreamMemory<Shape> memory(attention_shared, launched.planes);
  constexpr int kWorkerWarps = Shape::kWorkers / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kUnits; ++i) {
      board.ready[i].initialise(kScouts + 1);
      board.done[i].initialise(kWorkerWarps);
    }
    for (int i = 0; i < kPlacedTiles; ++i) {
      board.placed[i].initialise(1);
      board.read[i].initialise(kLoaders / 32);
    }
    for (int i = 0; i < launched.planes; ++i) {
      board.full[i].initialise(kLoaders + kLoaders / 32);
      board.empty[i].initialise(kWorkerWarps);
    }
  }
  wait_for_previous();
  let_next_start();
  __syncthreads();
  if (threadIdx.x < Shape::kWorkers)
    StreamWorker<T, Shape>{launched.attention, launched.planes, memory, board}.run();
  else if (threadIdx.x < Shape::kWorkers + kLoaders)
    StreamLoader<T, Shape>{launched.attention, launched.planes, memory, board}.run();
  else
    StreamScout<T, Shape>{launched.attention, memory, board}.run();
}

// The planes that a block has room for with as many blocks a multiprocessor as the shape asks for, or, where these are
// too few, with fewer blocks; 0 if they always are.
template <typename Shape>
int planes_of(const CudaProperties& gpu) {
  constexpr size_t kFixed =
      Shape::kFixedBytes + sizeof(StreamBoard<Shape>) + 1024;  // of a block the driver keeps 1 KiB
  for (int blocks = Shape::kBlocks; blocks >= 1; --blocks) {
    const size_t room = std::min(gpu.shared_bytes_per_multiprocessor / blocks, gpu.shared_bytes_per_block + 1024);
    const size_t planes = room < kFixed ? 0 : (room - kFixed) / Shape::kPlaneBytes;
    if (planes >= kLeastPlanes) return static_cast<int>(std::min<size_t>(planes, kMaxPlanes));
  }
  return 0;
}

template <typename Shape, typename T>
void launch_shape(const AttentionArgs<T>& args, CudaDevice& device) {
  const BasicAttention<T>& attention = args.attention;
  const auto kernel = attention_stream_kernel<T, Shape>;
  const int planes = planes_of<Shape>(device.properties());
  const size_t shared_bytes = static_cast<size_t>(planes) * Shape::kPlaneBytes + Shape::kFixedBytes;
  const int64_t items = most_units(args);
  const int64_t room =
      int64_t{resident_blocks(args.op, kernel, Shape::kThreads, shared_bytes)} * device.properties().multiprocessors;
  launch(args.op, kernel, dim3(static_cast<unsigned>(std::min(items, room))), Shape::kThreads, shared_bytes,
         StreamArgs<T>{args, planes}, device, Launch::kOverlapping);
}

// Calls `use` with the shape of a block for these heads.
template <typename Use>
auto with_shape(int head_size, bool is_latent, int tile_queries, const Use& use) {
  const auto with_queries = [&]<int kSize>(std::integral_constant<int, kSize>) {
    if (tile_queries == 16) return use(StreamShape<kSize, kSize, false, 1, 2>());
    if (tile_queries == 32) return use(StreamShape<kSize, kSize, false, 2, 1>());
    return use(StreamShape<kSize, kSize, false, 4, 1>());
  };
  if (is_latent) return use(StreamShape<kMaxLatentHead, kMaxLatent, true, 2, 1>());
  if (head_size <= 64) return with_queries(std::integral_constant<int, 64>());
  if (head_size <= 128) return with_queries(std::integral_constant<int, 128>());
  return with_queries(std::integral_constant<int, kMaxTiledHead>());
}

template <typename T, typename Use>
auto with_shape_of(const AttentionArgs<T>& args, const Use& use) {
  const BasicKvCache<T>& cache = args.attention.cache;
  return with_shape(cache.head_size, cache.latent_size > 0, args.tile_queries, use);
}

}  // namespace

template <typename T>
bool has_room_for_stream(const AttentionArgs<T>& args, const CudaProperties& gpu) {
  return with_shape_of(args, [&](auto shape) { return planes_of<decltype(shape)>(gpu) > 0; });
}

template <typename T>
void launch_stream(const AttentionArgs<T>& args, CudaDevice& device) {
  with_shape_of(args, [&](auto shape) { launch_shape<decltype(shape)>(args, device); });
}

template bool has_room_for_stream(const AttentionArgs<Bf16>&, const CudaProperties&);
template bool has_room_for_stream(const AttentionArgs<Fp16>&, const CudaProperties&);
template void launch_stream(const AttentionArgs<Bf16>&, CudaDevice&);
template void launch_stream(const AttentionArgs<Fp16>&, CudaDevice&);

}  // namespace replayssm
