// Internal to the CUDA replay kernel: a slice (slices.cuh) that comes through shared memory by Arrival.
//
// In shared memory its rows follow one another as in memory. So that the lanes' reads meet in no bank, a lane of an odd
// row has neighbouring quads exchanged: its i-th is quad c + 4 (i ^ 1). RowSums makes nothing of the order of the two.
#pragma once

#include "replayssm/ops/pack.cuh"
#include "replayssm/ops/slices.cuh"
#include "replayssm/ops/tensor_cores.cuh"

namespace replayssm {

// The thread's index, asked for anew: what is made of it is then not carried through a long loop in registers that a
// slice needs (carried in memory, each address of shared memory costs a wait of hundreds of cycles).
__device__ inline int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A lane's quads of a row of K numbers in memory of any kind, a quad of kBytes bytes; `row` is where the row begins.
template <int kBytes>
class LaneQuads {
 public:
  __device__ LaneQuads(const void* row, int lane) {
    const int c = lane % 4, is_odd = lane / 4 & 1;
    const char* first = static_cast<const char*>(row) + c * kBytes;
    even_ = first + is_odd * 4 * kBytes;
    odd_ = first - is_odd * 4 * kBytes;
  }
  // Quad i of the lane; and of the row `distance` bytes on.
  __device__ char* at(int i, int distance = 0) const {
    return const_cast<char*>((i % 2 == 0 ? even_ : odd_) + i * 4 * kBytes + distance);
  }
  // The number of the row's quad that it is.
  __device__ static int number(int i, int lane) { return lane % 4 + 4 * (i ^ (lane / 4 & 1)); }

 private:
  const char *even_, *odd_;
};

// A lane's quads of a vector of numbers in shared memory, which begins at a multiple of 128 bytes: neighbouring quads
// of a lane differ in one bit of their addresses, so that one register is enough for all.
class VectorQuads {
 public:
  __device__ VectorQuads(const float* vector, int lane)
      : first_(shared_address(vector) + lane % 4 * 16 + (lane / 4 & 1) * 64) {}
  __device__ float4 operator[](int i) const { return read_quad((first_ ^ i % 2 * 64) + i / 2 * 128); }
  // Of the vector that begins so many numbers on.
  __device__ VectorQuads operator+(int numbers) const { return VectorQuads(first_ + numbers * 4); }

 private:
  __device__ explicit VectorQuads(uint32_t first) : first_(first) {}

  uint32_t first_;
};

// A slice of K channels (padded) between memory, shared memory and registers. Its rows follow one another; in shared
// memory as rows of K words, or of K halves of one kind, where what lies past a row's channels is zero.
template <int K, CheckpointForm kForm>
struct StagedSlice {
  static constexpr bool kIsWords = kForm == CheckpointForm::kWords;
  static constexpr int kQuads = K / 16;  // of a row in a lane
  static constexpr int kWordRow = 4 * K, kHalfRow = 2 * K;

  float4 rows[2][kQuads];

  // Begins to read `rows` rows, of words or of one half, that lie one after the other from `from` on. The warp
  // together.
  __device__ static void read(Arrival<false>& arrival, char* shared, const char* from, int rows, int row_bytes) {
    constexpr int kRow = kIsWords ? kWordRow : kHalfRow;
    const int lane = fresh_thread() % 32;
    const bool is_whole = kHasCopyEngine && row_bytes == kRow;
    arrival.begin(rows * row_bytes);
    if (lane < (is_whole ? min(rows, 1) : rows))
      arrival.copy(shared + lane * kRow, from + lane * row_bytes, is_whole ? rows * row_bytes : row_bytes);
    arrival.end();
  }

  // Takes the slice from shared memory, where its words have arrived, or its upper halves and its lower ones.
  __device__ void take(const char* shared, const char* lower) {
    const int lane = fresh_thread() % 32, r = lane / 4;
    if constexpr (kIsWords) {
      const LaneQuads<16> words(shared + r * kWordRow, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < kQuads; ++i)
          rows[half][i] = *reinterpret_cast<const float4*>(words.at(i, half * 8 * kWordRow));
    } else {
      const LaneQuads<8> hi(shared + r * kHalfRow, lane), lo(lower + r * kHalfRow, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          const auto half_at = [&](const LaneQuads<8>& plane) {
            return *reinterpret_cast<const uint2*>(plane.at(i, half * 8 * kHalfRow));
          };
          rows[half][i] = joined(half_at(hi), half_at(lo));
        }
    }
  }

  // Writes `count` rows to a checkpoint.
  __device__ void write(const HeadPlace& place, float* checkpoint, int count, int key_size) const {
    const int lane = fresh_thread() % 32, r = lane / 4;
    if constexpr (kIsWords) {
      store_words(LaneQuads<16>(checkpoint + place.word(r), lane), 8 * 4 * key_size, count, key_size, lane);
    } else {
      auto* halves = reinterpret_cast<uint16_t*>(checkpoint);
      store_halves(LaneQuads<8>(halves + place.hi(r), lane), LaneQuads<8>(halves + place.lo(r), lane), 8 * 2 * key_size,
                   count, key_size, lane);
    }
  }

  // Adds to sums the products of rows r and r + 8 with a vector of K in shared memory.
  __device__ void add_products(RowSums (&sums)[2], const float* vector) const {
    const VectorQuads quads(vector, fresh_thread() % 32);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 y = quads[i];
      sums[0].add(i, rows[0][i], y);
      sums[1].add(i, rows[1][i], y);
    }
  }

  // A query as add_shared takes it, in shared memory: K numbers; or, to be multiplied with halves, three vectors of K
  // BF16 numbers, whose sum it is.
  static constexpr int kQueryNumbers = kIsWords ? K : K * 3 / 2;
  // Keeps a lane's quad of it.
  __device__ static void keep_query(float* query, int quad, float4 x) {
    if constexpr (kIsWords) {
      reinterpret_cast<float4*>(query)[quad] = x;
    } else {
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const Quad<Bf16> nearest = {make_uint2(two_of(x.x, x.y, Bf16()), two_of(x.z, x.w, Bf16()))};
        reinterpret_cast<uint2*>(query + part * (K / 2))[quad] = nearest.bits;
        x = multiply_added(to_numbers(nearest), -1.0f, x);
      }
    }
  }

  // Adds to sums the products of rows r and r + 8 of a slice in shared memory, words or upper halves, with kCount
  // queries.
  template <int kCount>
  __device__ static void add_shared(RowSums (&sums)[kCount][2], const char* shared, const float* queries) {
    if constexpr (kIsWords)
      add_words<kCount>(sums, shared, queries);
    else
      add_halves<kCount>(sums, shared, queries);
  }

 private:
  template <int kCount>
  __device__ static void add_words(RowSums (&sums)[kCount][2], const char* shared, const float* queries) {
    const int lane = fresh_thread() % 32;
    const LaneQuads<16> words(shared + lane / 4 * kWordRow, lane), of_queries(queries, lane);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      float4 x[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) x[half] = *reinterpret_cast<const float4*>(words.at(i, half * 8 * kWordRow));
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        const float4 y = *reinterpret_cast<const float4*>(of_queries.at(i, t * kWordRow));
#pragma unroll
        for (int half = 0; half < 2; ++half) sums[t][half].add(i, x[half], y);
      }
    }
  }

  // On tensor cores, which multiply BF16 numbers exactly and add in FP32. A lane's packs of eight channels are operands
  // as they are: products do not ask in which order channels come. So that the lanes' reads meet in no bank, those of
  // odd rows take neighbouring packs exchanged; columns 0 to 2 of the other operand are the query's three parts for
  // even rows, 3 to 5 the same exchanged for odd ones.
  template <int kCount>
  __device__ static void add_halves(RowSums (&sums)[kCount][2], const char* shared, const float* queries) {
    const int lane = fresh_thread() % 32, r = lane / 4, c = lane % 4;
    const bool is_odd = r % 2 != 0, has_exchanged = r >= 3;
    const char* rows = shared + r * kHalfRow + c * 16;
    const char* parts = reinterpret_cast<const char*>(queries) + r % 3 * kHalfRow + c * 16;
    float products[kCount][4] = {};
#pragma unroll
    for (int i = 0; i < K / 32; ++i) {
      const int of_rows = (i ^ is_odd) * 64, of_parts = (i ^ has_exchanged) * 64;
      const uint4 first = *reinterpret_cast<const uint4*>(rows + of_rows);
      const uint4 second = *reinterpret_cast<const uint4*>(rows + of_rows + 8 * kHalfRow);
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        const uint4 part = *reinterpret_cast<const uint4*>(parts + of_parts + t * kQueryNumbers * 4);
        multiply_add(products[t], {first.x, second.x, first.y, second.y}, part.x, part.y, Bf16());
        multiply_add(products[t], {first.z, second.z, first.w, second.w}, part.z, part.w, Bf16());
      }
    }
    // A lane has columns 2 c and 2 c + 1 of rows r and r + 8.
    const bool has_even_column = is_odd ? c == 2 : c < 2, has_odd_column = is_odd ? c == 1 || c == 2 : c == 0;
#pragma unroll
    for (int t = 0; t < kCount; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[t][half].of[0] += has_even_column ? products[t][2 * half] : 0.0f;
        sums[t][half].of[1] += has_odd_column ? products[t][2 * half + 1] : 0.0f;
      }
  }

  __device__ void store_words(const LaneQuads<16>& to, int half_distance, int count, int key_size, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane / 4 + 8 * half >= count) continue;
#pragma unroll
      for (int i = 0; i < kQuads; ++i)
        if (key_size == K || 4 * LaneQuads<16>::number(i, lane) < key_size)
          *reinterpret_cast<float4*>(to.at(i, half * half_distance)) = rows[half][i];
    }
  }
  __device__ void store_halves(const LaneQuads<8>& hi, const LaneQuads<8>& lo, int half_distance, int count,
                               int key_size, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane / 4 + 8 * half >= count) continue;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        if (key_size != K && 4 * LaneQuads<8>::number(i, lane) >= key_size) continue;
        uint2 his, los;
        split(rows[half][i], his, los);
        *reinterpret_cast<uint2*>(hi.at(i, half * half_distance)) = his;
        *reinterpret_cast<uint2*>(lo.at(i, half * half_distance)) = los;
      }
    }
  }
};

}  // namespace replayssm
