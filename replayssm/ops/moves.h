// Copies and clears many pieces of memory in one call: what forks and clean slots of a state pool are made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/core/cuda_device.h"

namespace replayssm {

// `count` pieces of `bytes` bytes each; in `to` and in `from` alike a piece begins `stride` bytes after the one before.
struct PieceMove {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;  // null: the pieces become zeros
  int64_t bytes = 0;
  int64_t count = 1;
  int64_t stride = 0;
};

// Makes all moves, in no order: memory that one of them writes is read and written by no other piece or move.
void move_pieces(std::span<const PieceMove> moves);

// The same in a GPU's memory, queued on its stream. The list is read before the call returns. Fast where addresses,
// sizes and strides are multiples of 16 bytes.
void move_pieces(std::span<const PieceMove> moves, CudaDevice& device);

}  // namespace replayssm
