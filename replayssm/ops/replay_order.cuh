// Internal to the CUDA replay kernel: the order in which its blocks take the rows of a batch.
//
// A row that flushes takes a block several times as long as another, so that one near the end of a call would leave the
// other blocks nothing to do. The last rows to be taken are direct ones; those that flush are spread over the others,
// or come first if all direct ones are to be last.
#pragma once

#include <cstdint>

#include "replayssm/ops/replay_plan.h"
#include "replayssm/ops/rows.cuh"
#include "replayssm/ops/slices.cuh"

namespace replayssm {

// Of as many rows as there are places; in shared memory.
struct RowOrder {
  uint32_t flushing[kArrangedWords];  // a bit a row: whether it flushes
  uint16_t before[kArrangedWords];    // how many of the rows of the words before do
  int all;                            // how many do
  int mixed;                          // the first so many places have them
  uint32_t each;                      // all / mixed in units of 2^-16, rounded up: at most 1

  // Notes which rows from `first` on flush, and leaves `tail` of 256 rows, if so many are direct, to the end; for a
  // warp.
  __device__ void look_at(const StateRows& rows, int first, int tokens, int window, int tail) {
    const int lane = threadIdx.x % 32, count = rows.count - first;
    int so_far = 0;
#pragma unroll 4
    for (int word = 0; 32 * word < count; ++word) {
      const int row = first + 32 * word + lane;
      const bool flushes =
          row < rows.count && will_flush(rows.flush_limit, row, __ldg(rows.history + row), tokens, window);
      const uint32_t bits = __ballot_sync(kWarp, flushes);
      if (lane == 0) {
        flushing[word] = bits;
        before[word] = so_far;
      }
      so_far += __popc(bits);
    }
    if (lane == 0) {
      all = so_far;
      mixed = max(max(so_far, count - count * tail / 256), 1);
      each = ((static_cast<uint32_t>(so_far) << 16) + mixed - 1) / mixed;
    }
    __syncwarp();
  }

  // The row, of `count`, at a place; for a warp, of which all lanes ask for the same.
  __device__ int row_at(int place, int count) const {
    const auto flushing_before = [&](int p) { return p < mixed ? static_cast<int>(p * each >> 16) : all; };
    const int lane = threadIdx.x % 32, before_it = flushing_before(place);
    const bool flushes = flushing_before(place + 1) > before_it;
    const int wanted = flushes ? before_it : place - before_it;  // of its kind
    uint32_t bits = 0;  // of the lane's word, the rows of that kind; so many are before them
    int first = 0;
    if (32 * lane < count) {
      bits = flushing[lane];
      first = before[lane];
      if (!flushes) {
        bits = ~bits & (count - 32 * lane >= 32 ? ~0u : (1u << (count - 32 * lane)) - 1);
        first = 32 * lane - first;
      }
    }
    const int word = __ffs(__ballot_sync(kWarp, wanted >= first && wanted < first + __popc(bits))) - 1;
    bits = __shfl_sync(kWarp, bits, word);
    const int in_word = wanted - __shfl_sync(kWarp, first, word);
    const bool is_it = (bits >> lane & 1) != 0 && __popc(bits & ((1u << lane) - 1)) == in_word;
    return 32 * word + __ffs(__ballot_sync(kWarp, is_it)) - 1;
  }
};
static_assert(sizeof(RowOrder) <= kRowOrderBytes);

}  // namespace replayssm
