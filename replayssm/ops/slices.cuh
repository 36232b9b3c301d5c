// Internal to the CUDA state kernels: a slice is 16 rows of a checkpoint, the share of one warp.
//
// It comes from memory through shared memory, 16 bytes a lane and whole rows together. Then lane 4 r + c has rows r and
// r + 8, of each the quads c, c + 4, c + 8, ... (a quad is four channels): a product with a vector costs two shuffles a
// row, an update none, and a vector's quad serves two rows. The order of arithmetic is that of the channels and lanes,
// whatever the launch.
#pragma once

#include <cstdint>

#include "replayssm/ops/copies.cuh"
#include "replayssm/ops/rows.cuh"
#include "replayssm/ops/tiles.h"

namespace replayssm {

inline constexpr unsigned kWarp = 0xFFFFFFFFu;

// The bytes of shared memory of a slice of K channels (padded): words, or both halves.
template <int K>
inline constexpr int kSliceBytes = kSliceRows* K * 4;

// Four numbers of a vector in shared memory. Volatile: a compiler that sees one vector read twice keeps it in registers
// between, which with a slice there already means memory.
__device__ inline float4 read_quad(uint32_t address) {
  float4 x;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
  return x;
}
__device__ inline float4 read_quad(const float* vector, int quad) {
  return read_quad(shared_address(vector + 4 * quad));
}

__device__ inline float4 scaled(float4 x, float scale) {
  return make_float4(__fmul_rn(x.x, scale), __fmul_rn(x.y, scale), __fmul_rn(x.z, scale), __fmul_rn(x.w, scale));
}
__device__ inline float4 multiplied(float4 x, float4 y) {
  return make_float4(__fmul_rn(x.x, y.x), __fmul_rn(x.y, y.y), __fmul_rn(x.z, y.z), __fmul_rn(x.w, y.w));
}
// x * factor + sum
__device__ inline float4 multiply_added(float4 x, float factor, float4 sum) {
  return make_float4(__fmaf_rn(x.x, factor, sum.x), __fmaf_rn(x.y, factor, sum.y), __fmaf_rn(x.z, factor, sum.z),
                     __fmaf_rn(x.w, factor, sum.w));
}
__device__ inline float4 exponentials(float4 x) {
  return make_float4(expf(x.x), expf(x.y), expf(x.z), expf(x.w));
}

// The sum over kLanes neighbouring lanes, in each of them.
template <int kLanes>
__device__ inline float sum_of_lanes(float value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value = __fadd_rn(value, __shfl_xor_sync(kWarp, value, mask));
  return value;
}

// Products of a row with a vector added up: a lane's even quads and its odd ones, so that neighbours may be exchanged;
// the sum over four lanes ends the product.
struct RowSums {
  float of[2] = {};

  // The lane's quad i of each.
  __device__ void add(int i, float4 x, float4 y) {
    float& sum = of[i % 2];
    sum = __fmaf_rn(x.x, y.x, sum);
    sum = __fmaf_rn(x.y, y.y, sum);
    sum = __fmaf_rn(x.z, y.z, sum);
    sum = __fmaf_rn(x.w, y.w, sum);
  }
  __device__ float total() const { return sum_of_lanes<4>(__fadd_rn(of[0], of[1])); }
};

// The row of a slice that a lane's output is: lanes c = 0 have row r, lanes c = 1 row r + 8.
__device__ inline int output_row(int lane) {
  return lane / 4 + lane % 4 * 8;
}
__device__ inline bool has_output(int lane) {
  return lane % 4 < 2;
}

// A quad of words of its halves, and the halves of a quad (rows.h); a pair of halves in a word.
__device__ inline float4 joined(uint2 hi, uint2 lo) {
  const auto word = [](uint32_t hi, uint32_t lo) {  // lo: of which the upper half counts
    return __uint_as_float(hi + static_cast<uint32_t>(static_cast<int32_t>(lo) >> 16));
  };
  return make_float4(word(hi.x << 16, lo.x << 16), word(hi.x & 0xFFFF0000u, lo.x), word(hi.y << 16, lo.y << 16),
                     word(hi.y & 0xFFFF0000u, lo.y));
}
__device__ inline void split(float4 quad, uint2& hi, uint2& lo) {
  const auto split_pair = [](float even, float odd, uint32_t& hi, uint32_t& lo) {
    const auto word_of = [](float value) { return isnan(value) ? 0x7FC00000u : __float_as_uint(value); };
    const uint32_t a = word_of(even), b = word_of(odd);
    const uint32_t a_hi = (a + 0x8000u) >> 16, b_hi = (b + 0x8000u) >> 16;
    hi = a_hi | b_hi << 16;
    lo = ((a - (a_hi << 16)) & 0xFFFFu) | (b - (b_hi << 16)) << 16;
  };
  split_pair(quad.x, quad.y, hi.x, lo.x);
  split_pair(quad.z, quad.w, hi.y, lo.y);
}

// Where the rows of a head lie in the checkpoints, from row `first` on, in elements from their beginning: row r's words
// at word(r), or its halves at hi(r) and lo(r).
struct HeadPlace {
  int64_t head_values;  // rows before this head's, over checkpoints and heads
  int values, first, key_size;

  __device__ HeadPlace(int64_t rows_before, int of_head, int first_row, int keys)
      : head_values(rows_before), values(of_head), first(first_row), key_size(keys) {}
  __device__ HeadPlace(int checkpoint, int heads, int head, int of_head, int first_row, int keys)
      : HeadPlace((static_cast<int64_t>(checkpoint) * heads + head) * of_head, of_head, first_row, keys) {}
  __device__ int64_t word(int r) const { return (head_values + first + r) * key_size; }
  __device__ int64_t hi(int r) const { return (2 * head_values + first + r) * key_size; }
  __device__ int64_t lo(int r) const { return (2 * head_values + values + first + r) * key_size; }
};

// A lane's quads of a vector in shared memory.
class VectorOfSlice {
 public:
  __device__ explicit VectorOfSlice(const float* vector) : vector_(vector) {}
  __device__ float4 operator[](int i) const { return read_quad(vector_, threadIdx.x % 4 + 4 * i); }

 private:
  const float* vector_;
};

// A slice of K channels (padded) between memory, shared memory and registers. Its rows follow one another.
template <int K>
struct Slice {
  static constexpr int kQuads = K / 16;  // of a row in a lane
  static constexpr int kWordChunks = K / 4;
  static constexpr int kHalfChunks = K / 8;

  float4 rows[2][kQuads];

  // Begins to read `rows` rows.
  __device__ static void begin_read(uint4* shared, const HeadPlace& place, const float* checkpoint, int rows,
                                    int key_size, CheckpointForm form) {
    const bool is_whole = rows == kSliceRows && key_size == K;
    if (form == CheckpointForm::kWords) {
      copy_rows<kWordChunks, 2>(shared, is_whole, rows, key_size / 4,
                                [&](int row) { return reinterpret_cast<const uint4*>(checkpoint + place.word(row)); });
    } else {
      const auto* halves = reinterpret_cast<const uint16_t*>(checkpoint);
      copy_rows<kHalfChunks, 4>(shared, is_whole, rows, key_size / 8,
                                [&](int row) { return reinterpret_cast<const uint4*>(halves + place.hi(row)); });
      copy_rows<kHalfChunks, 4>(shared + kSliceRows * kHalfChunks, is_whole, rows, key_size / 8,
                                [&](int row) { return reinterpret_cast<const uint4*>(halves + place.lo(row)); });
    }
    commit_copies();
  }

  // Takes the slice from shared memory, where it has arrived.
  __device__ void take(const uint4* shared, CheckpointForm form) {
    const uint4* lo = shared + kSliceRows * kHalfChunks;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        if (form == CheckpointForm::kWords) {
          rows[half][i] = word_quad(shared, half, i);
        } else {
          rows[half][i] = joined(half_quad(shared, half, i), half_quad(lo, half, i));
        }
      }
  }

  // Writes the slice to a checkpoint.
  __device__ void write(const HeadPlace& place, float* checkpoint, int count, int key_size, CheckpointForm form) const {
    const int r = (threadIdx.x % 32) / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = r + 8 * half;
      if (row >= count) continue;
      if (form == CheckpointForm::kWords) {
        auto* to = reinterpret_cast<float4*>(checkpoint + place.word(row));
#pragma unroll
        for (int i = 0; i < kQuads; ++i)
          if (4 * (c + 4 * i) < key_size) __stcs(to + c + 4 * i, rows[half][i]);
      } else {
        auto* halves = reinterpret_cast<uint16_t*>(checkpoint);
        auto *hi = reinterpret_cast<uint2*>(halves + place.hi(row)),
             *lo = reinterpret_cast<uint2*>(halves + place.lo(row));
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          if (4 * (c + 4 * i) >= key_size) continue;
          uint2 his, los;
          split(rows[half][i], his, los);
          __stcs(hi + c + 4 * i, his);
          __stcs(lo + c + 4 * i, los);
        }
      }
    }
  }

  // The slice's products with a vector of K in shared memory: of row r and of row r + 8.
  __device__ void multiply(const float* vector, float& first, float& second) const {
    multiply_with(VectorOfSlice(vector), first, second);
  }
  // The same with a vector whose i-th quad of a lane is vector[i].
  template <typename Vector>
  __device__ void multiply_with(const Vector& vector, float& first, float& second) const {
    RowSums sums[2];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 y = vector[i];
      sums[0].add(i, rows[0][i], y);
      sums[1].add(i, rows[1][i], y);
    }
    first = sums[0].total();
    second = sums[1].total();
  }

 private:
  // Chunks of a row are exchanged so that neither a row's copy nor the lanes' reads meet in a bank.
  template <int kChunks, int kPeriod>
  __device__ static int place_of(int row, int chunk) {
    return row * kChunks + (chunk ^ ((row & (kPeriod - 1)) * (8 / kPeriod) & (kChunks - 1)));
  }

  template <int kChunks, int kPeriod, typename RowAddress>
  __device__ static void copy_rows(uint4* shared, bool is_whole, int rows, int chunks, const RowAddress& row_address) {
    constexpr int kRounds = kSliceRows * kChunks / 32;
    const int lane = threadIdx.x % 32;
    if (is_whole) {
      const uint4* from = row_address(0) + lane;
#pragma unroll
      for (int i = 0; i < kRounds; ++i)
        copy_chunk_async(shared + place_of<kChunks, kPeriod>((i * 32 + lane) / kChunks, lane % kChunks), from + i * 32,
                         true);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
      const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
      const bool is_there = row < rows && chunk < chunks;
      const uint4* from = row_address(is_there ? row : 0);
      copy_chunk_async(shared + place_of<kChunks, kPeriod>(row, chunk), from + (is_there ? chunk : 0), is_there);
    }
  }

  __device__ static float4 word_quad(const uint4* shared, int half, int i) {
    const int r = (threadIdx.x % 32) / 4 + 8 * half, c = threadIdx.x % 4;
    return reinterpret_cast<const float4*>(shared)[place_of<kWordChunks, 2>(r, c + 4 * i)];
  }
  __device__ static uint2 half_quad(const uint4* shared, int half, int i) {
    const int r = (threadIdx.x % 32) / 4 + 8 * half, c = threadIdx.x % 4;
    return reinterpret_cast<const uint2*>(shared + place_of<kHalfChunks, 4>(r, c / 2 + 2 * i))[c % 2];
  }
};

}  // namespace replayssm
