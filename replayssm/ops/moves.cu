// Many copies a launch: the list travels as the kernel's arguments.
#include "replayssm/ops/moves.h"

#include <algorithm>

#include "replayssm/ops/launch.cuh"

namespace replayssm {
namespace {

constexpr int kThreads = 256;
constexpr size_t kLaunchMoves = 64;
constexpr int64_t kMaxBlocks = 1024;  // of a move

struct MoveArgs {
  PieceMove moves[kLaunchMoves];
};

template <typename Unit>
__device__ void move_units(const PieceMove& move) {
  const int64_t units = move.bytes / sizeof(Unit), stride = move.stride / sizeof(Unit);
  auto* to = reinterpret_cast<Unit*>(move.to);
  const auto* from = reinterpret_cast<const Unit*>(move.from);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < move.count * units; i += step) {
    const int64_t at = i / units * stride + i % units;
    to[at] = from == nullptr ? Unit{} : from[at];
  }
}

// Grid: blocks of a move x moves. A thread owns every step-th unit of its move.
__global__ __launch_bounds__(kThreads) void move_pieces_kernel(const __grid_constant__ MoveArgs args) {
  const PieceMove& move = args.moves[blockIdx.y];
  const uint64_t places = reinterpret_cast<uintptr_t>(move.to) | reinterpret_cast<uintptr_t>(move.from) |
                          static_cast<uint64_t>(move.bytes) | static_cast<uint64_t>(move.stride);
  if (places % 16 == 0)
    move_units<uint4>(move);
  else if (places % 4 == 0)
    move_units<uint32_t>(move);
  else
    move_units<uint8_t>(move);
}

}  // namespace

void move_pieces(std::span<const PieceMove> moves, CudaDevice& device) {
  while (!moves.empty()) {
    const std::span<const PieceMove> some = moves.first(std::min(moves.size(), kLaunchMoves));
    moves = moves.subspan(some.size());
    MoveArgs args;
    std::ranges::copy(some, args.moves);
    int64_t bytes = 0;
    for (const PieceMove& move : some) bytes = std::max(bytes, move.count * move.bytes);
    const int64_t blocks = std::clamp<int64_t>(bytes / (16 * kThreads), 1, kMaxBlocks);
    launch("move_pieces", move_pieces_kernel, dim3(static_cast<uint32_t>(blocks), static_cast<uint32_t>(some.size())),
           kThreads, 0, args, device);
  }
}

}  // namespace replayssm
