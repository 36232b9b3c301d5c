// A GPU as the ops use it, and the move of cursors in its memory.
#include "replayssm/core/cuda_device.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "replayssm/ops/rows.h"
#include "tests/bad_input.h"
#include "tests/cuda_memory.h"

namespace replayssm::test {
namespace {

class CudaDeviceTest : public CudaTest {};

TEST_F(CudaDeviceTest, RefusesADeviceThatIsNotThere) {
  expect_refusal([] { CudaDevice device(99); }, "cuda", "0 to", "99");
  expect_refusal([] { CudaDevice device(-1); }, "-1");
}

TEST_F(CudaDeviceTest, RefusesMoreMemoryThanThereIs) {
  CudaDevice device;
  EXPECT_GE(device.properties().compute_major, 8);
  EXPECT_GT(device.properties().multiprocessors, 0);
  expect_refusal([&] { device.allocate_bytes(size_t{1} << 50); }, "1125899906842624 bytes", "free");
  DeviceBuffer<int32_t> after(3, device);
  device.synchronize();
}

TEST_F(CudaDeviceTest, CopiesAndFillsInOrder) {
  CudaDevice device;
  std::vector<int32_t> numbers(100'000);
  std::iota(numbers.begin(), numbers.end(), 7);
  DeviceBuffer<int32_t> a(numbers, device), b(numbers.size(), device);
  device.copy(b.data(), a.data(), numbers.size() * sizeof(int32_t));
  device.fill_words(a.data() + 1, 42, 5);
  EXPECT_EQ(b.download(device), numbers);
  std::fill_n(numbers.begin() + 1, 5, 42);
  EXPECT_EQ(a.download(device), numbers);
  EXPECT_TRUE(DeviceBuffer<int32_t>(0, device).download(device).empty());
}

// More uploads than blocks, each filled while those before it may be under way: rows of any width, packed on the host.
TEST_F(CudaDeviceTest, PinnedUploadsKeepTheirOrder) {
  CudaDevice device;
  constexpr int kUploads = 40, kRows = 50, kStride = 1001;
  DeviceBuffer<int32_t> table(kRows * kStride, device), seen(kUploads * table.size(), device);
  PinnedUploads uploads(table.size() * sizeof(int32_t), device);
  device.fill_words(table.data(), 7, table.size());
  std::vector<int32_t> now(table.size(), 7), expected;
  std::mt19937_64 random(62);
  for (int upload = 0; upload < kUploads; ++upload) {
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    const int rows = upload == 0 ? kRows : draw(1, kRows), columns = upload == 0 ? kStride : draw(1, kStride);
    auto* const block = static_cast<int32_t*>(uploads.next());
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < columns; ++column)
        now[row * kStride + column] = block[row * columns + column] = static_cast<int32_t>(random());
    uploads.upload(table.data(), kStride * sizeof(int32_t), columns * sizeof(int32_t), rows);
    device.copy(seen.data() + upload * table.size(), table.data(), table.size() * sizeof(int32_t));
    expected.insert(expected.end(), now.begin(), now.end());
  }
  EXPECT_EQ(seen.download(device), expected);
  expect_refusal([&] { PinnedUploads(size_t{1} << 60, device); }, "1152921504606846976 bytes of page-locked");
  EXPECT_EQ(table.download(device), now) << "the device is as it was";
}

TEST_F(CudaDeviceTest, AGraphThatCannotBeMadeLeavesTheDeviceUsable) {
  CudaDevice device;
  DeviceBuffer<int32_t> words(4, device);
  device.fill_words(words.data(), 1, 4);
  expect_refusal(
      [&] {
        CudaGraph graph(device, [&] {
          device.fill_words(words.data(), 2, 4);
          fail("the record stops");
        });
      },
      "the record stops");
  EXPECT_EQ(words.download(device), std::vector<int32_t>(4, 1));
  CudaGraph graph(device, [&] { device.fill_words(words.data(), 3, 4); });
  EXPECT_EQ(words.download(device), std::vector<int32_t>(4, 1));
  graph.launch();
  EXPECT_EQ(words.download(device), std::vector<int32_t>(4, 3));
}

// Batches of every size up to some blocks of threads, with padding rows, against the definition.
TEST_F(CudaDeviceTest, CommitRowsMovesCursors) {
  CudaDevice device;
  std::mt19937_64 random(61);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (const int count : {0, 1, 2, 31, 33, 256, 1000}) {
    const int window = draw(1, 40), tokens = draw(1, window);
    for (const bool has_accepted : {true, false}) {
      const bool has_limits = draw(0, 1) == 0;
      std::vector<int32_t> slot, history, in, out, accepted, limit;
      std::vector<int64_t> base;
      for (int b = 0; b < count; ++b) {
        slot.push_back(draw(0, 3) == 0 ? kPaddingSlot : b);
        base.push_back(draw(0, 1) == 0 ? b : int64_t{5'000'000'000} + b);
        history.push_back(draw(0, window));
        in.push_back(2 * b);
        out.push_back(draw(0, 1) + 2 * b);
        accepted.push_back(draw(0, tokens));
        limit.push_back(draw(1, window));
      }
      DeviceBuffer<int32_t> slots(slot, device), histories(history, device), ins(in, device), outs(out, device);
      DeviceBuffer<int32_t> accepts(accepted, device), limits(limit, device);
      DeviceBuffer<int64_t> bases(base, device);
      commit_rows({count, slots.data(), bases.data(), histories.data(), ins.data(), outs.data(), tokens, window,
                   has_accepted ? accepts.data() : nullptr, has_limits ? limits.data() : nullptr},
                  device);
      device.synchronize();
      for (int b = 0; b < count; ++b) {
        if (slot[b] == kPaddingSlot) continue;
        if (history[b] + tokens > window || (has_limits && history[b] >= limit[b])) {
          base[b] += history[b];
          history[b] = 0;
          in[b] = out[b];
          if (has_limits) limit[b] = window;
        }
        history[b] += has_accepted ? accepted[b] : tokens;
      }
      EXPECT_EQ(bases.download(device), base) << count;
      EXPECT_EQ(histories.download(device), history) << count;
      EXPECT_EQ(ins.download(device), in) << count;
      EXPECT_EQ(outs.download(device), out) << count;
      EXPECT_EQ(slots.download(device), slot) << count;
      EXPECT_EQ(limits.download(device), limit) << count;
    }
  }
}

}  // namespace
}  // namespace replayssm::test
