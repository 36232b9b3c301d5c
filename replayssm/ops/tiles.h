// Internal to the ops on a GPU: how their launches cut the work. Host arithmetic, for the launches and for plans that
// name them.
#pragma once

#include <cstdint>

namespace replayssm {

inline constexpr int kSliceRows = 16;        // of a checkpoint, the share of one warp (slices.cuh)
inline constexpr int kReservedBytes = 1024;  // of shared memory, that a block takes beside its own
inline constexpr int kPackSize = 8;          // elements that a thread loads and stores together
inline constexpr int kTileThreads = 128;     // of a block
inline constexpr int kTileChannels = kTileThreads * kPackSize;

constexpr int64_t ceiling_quotient(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Tiles of a convolution's channels.
constexpr int conv_tiles(int channels) {
  return static_cast<int>(ceiling_quotient(channels, kTileChannels));
}

// Rows of which a thread convolves its channels, at one token a row. Two halve the reads of the weights; with fewer
// than four blocks a multiprocessor the rows are better spread.
constexpr int conv_rows_a_thread(int rows, int channels, int multiprocessors) {
  return ceiling_quotient(rows, 2) * conv_tiles(channels) >= int64_t{4} * multiprocessors ? 2 : 1;
}

// The threads that a token's gates of the delta rule need: one for each pack of a head's gates, or with one gate a head
// for each gate; and one for each beta.
constexpr int64_t delta_gate_packs(int heads, int gate_size) {
  return heads * (gate_size == 1 ? 1 : ceiling_quotient(gate_size, kPackSize));
}
constexpr int64_t delta_gate_threads(int heads, int gate_size) {
  return delta_gate_packs(heads, gate_size) + heads;
}

// How vectors are spread over threads, a pack a thread: sixteen lanes, a warp, or a block of whole warps a vector. It
// depends on the vector's size alone, and so does the order in which its squares are added.
struct NormTiles {
  int lanes = 0;    // of a warp
  int warps = 0;    // a vector
  int threads = 0;  // a block
  int vectors_a_block = 0;
};
inline constexpr int64_t kLargestNorm = 1024 * kPackSize;
constexpr NormTiles norm_tiles(int64_t size) {
  const int packs = static_cast<int>(ceiling_quotient(size, kPackSize));
  if (packs <= 16) return {16, 1, kTileThreads, kTileThreads / 16};
  if (packs <= 32) return {32, 1, kTileThreads, kTileThreads / 32};
  const int warps = static_cast<int>(ceiling_quotient(packs, 32));
  return {32, warps, 32 * warps, 1};
}

}  // namespace replayssm
