// Internal to the CUDA replay kernel: a slice (slices.cuh) that comes through shared memory by Arrival.
//
// In shared memory its rows follow one another as in memory. So that the lanes' reads meet in no bank, a lane of an odd
// row has neighbouring quads exchanged: its i-th is quad c + 4 (i ^ 1). RowSums makes nothing of the order of the two.
#pragma once

#include "replayssm/ops/slices.cuh"

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

// A lane's quads of a vector of numbers in shared memory.
class VectorQuads {
 public:
  __device__ VectorQuads(const float* vector, int lane) : quads_(vector, lane) {}
  __device__ float4 operator[](int i) const { return read_quad(reinterpret_cast<const float*>(quads_.at(i)), 0); }

 private:
  LaneQuads<16> quads_;
};

// A slice of K channels (padded) between memory, shared memory and registers. The rows of
// a slice follow one another. In shared memory rows of K words or of K first halves, and behind those of K second
// ones, follow one another; what lies past a row's channels there is zero.
template <int K, CheckpointForm kForm>
struct StagedSlice {
  static constexpr bool kIsWords = kForm == CheckpointForm::kWords;
  static constexpr int kQuads = K / 16;  // of a row in a lane
  static constexpr int kWordRow = 4 * K, kHalfRow = 2 * K;

  float4 rows[2][kQuads];

  // The bytes of `rows` rows that `read` copies.
  __device__ static uint32_t read_bytes(int rows, int key_size, bool hi_alone) {
    return rows * key_size * (!kIsWords && hi_alone ? 2 : 4);
  }

  // Begins to read `rows` rows; with hi_alone (planes only) one half of them. The warp together.
  __device__ static void read(Arrival<false>& arrival, char* shared, const HeadPlace& place, const float* checkpoint,
                              int rows, int key_size, bool hi_alone) {
    constexpr int kRow = kIsWords ? kWordRow : kHalfRow;
    const auto* bytes = reinterpret_cast<const char*>(checkpoint);
    const int row_bytes = key_size * (kRow / K);
    const bool is_whole = kHasCopyEngine && key_size == K;
    const int pieces = is_whole ? 1 : rows, piece_bytes = is_whole ? rows * row_bytes : row_bytes;
    const int lane = fresh_thread() % 32;
    if (lane >= pieces) return;
    arrival.copy(shared + lane * kRow, bytes + (kIsWords ? 4 * place.word(lane) : 2 * place.hi(lane)), piece_bytes);
    if (!kIsWords && !hi_alone)
      arrival.copy(shared + (kSliceRows + lane) * kRow, bytes + 2 * place.lo(lane), piece_bytes);
  }

  // Takes the slice from shared memory, where it has arrived.
  __device__ void take(const char* shared) {
    const int lane = fresh_thread() % 32, r = lane / 4;
    if constexpr (kIsWords) {
      const LaneQuads<16> words(shared + r * kWordRow, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < kQuads; ++i)
          rows[half][i] = *reinterpret_cast<const float4*>(words.at(i, half * 8 * kWordRow));
    } else {
      const LaneQuads<8> hi(shared + r * kHalfRow, lane), lo(shared + (kSliceRows + r) * kHalfRow, lane);
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

  // The slice's products with a vector of K in shared memory: of row r and of row r + 8.
  __device__ void multiply(const float* vector, float& first, float& second) const {
    const VectorQuads quads(vector, fresh_thread() % 32);
    RowSums sums[2];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 y = quads[i];
      sums[0].add(i, rows[0][i], y);
      sums[1].add(i, rows[1][i], y);
    }
    first = sums[0].total();
    second = sums[1].total();
  }

  // Adds to sums the products of rows r and r + 8 of a slice in shared memory, words or hi halves, with kCount vectors
  // [kCount][K].
  template <int kCount>
  __device__ static void add_shared(RowSums (&sums)[kCount][2], const char* shared, const float* vectors) {
    const int lane = fresh_thread() % 32, r = lane / 4;
    const LaneQuads<16> of_vectors(vectors, lane);
    const auto add = [&](const auto& quads, int row_bytes, const auto& number_of) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        float4 x[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) x[half] = number_of(quads.at(i, half * 8 * row_bytes));
#pragma unroll
        for (int t = 0; t < kCount; ++t) {
          const float4 y = *reinterpret_cast<const float4*>(of_vectors.at(i, t * kWordRow));
#pragma unroll
          for (int half = 0; half < 2; ++half) sums[t][half].add(i, x[half], y);
        }
      }
    };
    if constexpr (kIsWords)
      add(LaneQuads<16>(shared + r * kWordRow, lane), kWordRow,
          [](const char* at) { return *reinterpret_cast<const float4*>(at); });
    else
      add(LaneQuads<8>(shared + r * kHalfRow, lane), kHalfRow,
          [](const char* at) { return to_numbers(Quad<Bf16>{*reinterpret_cast<const uint2*>(at)}); });
  }

 private:
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
