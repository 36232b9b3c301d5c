// Copies and clears of many pieces on a GPU, against the CPU's.
#include "replayssm/ops/moves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/cuda_memory.h"

namespace replayssm::test {
namespace {

class CudaMoves : public CudaTest {};

TEST_F(CudaMoves, AreTheHosts) {
  CudaDevice device;
  std::mt19937_64 random(51);
  const auto pick = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  constexpr int64_t kRegion = 1 << 16;  // of a move, in either memory
  for (const int count : {0, 1, 2, 63, 64, 65, 200}) {
    std::vector<std::byte> from(std::max(count, 1) * kRegion), to(from.size());
    for (auto* bytes : {&from, &to})
      for (std::byte& byte : *bytes) byte = static_cast<std::byte>(random());
    const DeviceBuffer<std::byte> from_there(from, device), to_there(to, device);
    std::vector<PieceMove> moves, moves_there;
    for (int i = 0; i < count; ++i) {
      constexpr int64_t kUnits[] = {1, 2, 4, 16};
      const int64_t unit = kUnits[pick(0, 3)];
      const int64_t stride = pick(1, 40) * unit * (pick(0, 3) == 0 ? 10 : 1), bytes = pick(0, stride / unit) * unit;
      const int64_t most = (kRegion - 12 * unit) / stride;  // of a move: no other touches its region
      const int64_t pieces = pick(0, std::min<int64_t>(30, most)), begin = i * kRegion + pick(0, 5) * unit;
      const bool is_clear = pick(0, 3) == 0;
      moves.push_back({&to[begin], is_clear ? nullptr : &from[begin + 7 * unit], bytes, pieces, stride});
      moves_there.push_back(
          {to_there.data() + begin, is_clear ? nullptr : from_there.data() + begin + 7 * unit, bytes, pieces, stride});
    }
    move_pieces(moves);
    move_pieces(moves_there, device);
    EXPECT_EQ(to_there.download(device), to) << count;
    EXPECT_EQ(from_there.download(device), from) << count;
  }
}

// More units than a launch has threads for a move.
TEST_F(CudaMoves, LargePieces) {
  CudaDevice device;
  const size_t bytes = (size_t{5} << 20) + 4;
  std::vector<std::byte> from(bytes);
  std::mt19937_64 random(52);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  const DeviceBuffer<std::byte> source(from, device), target(bytes, device);
  const PieceMove copy = {target.data(), source.data(), static_cast<int64_t>(bytes)};
  move_pieces({&copy, 1}, device);
  EXPECT_EQ(target.download(device), from);
  const PieceMove clear = {.to = target.data(), .bytes = static_cast<int64_t>(bytes)};
  move_pieces({&clear, 1}, device);
  EXPECT_EQ(target.download(device), std::vector<std::byte>(bytes));
}

}  // namespace
}  // namespace replayssm::test
