#include "replayssm/ops/moves.h"

#include <cstring>

namespace replayssm {

void move_pieces(std::span<const PieceMove> moves) {
  for (const PieceMove& move : moves) {
    for (int64_t piece = 0; piece < move.count; ++piece) {
      std::byte* to = move.to + piece * move.stride;
      if (move.from == nullptr)
        std::memset(to, 0, move.bytes);
      else
        std::memcpy(to, move.from + piece * move.stride, move.bytes);
    }
  }
}

}  // namespace replayssm
