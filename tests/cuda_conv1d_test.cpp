// The short convolution on a GPU.
#include <gtest/gtest.h>

#include "tests/bad_input.h"
#include "tests/conv1d_cases.h"
#include "tests/cuda_path.h"

namespace replayssm::test {
namespace {

class CudaConv1d : public CudaTest {};

template <typename Run>
void for_all_types(const Run& run) {
  run(CudaPath<float>());
  run(CudaPath<Bf16>());
  run(CudaPath<Bf16, float>());
  run(CudaPath<Fp16>());
  run(CudaPath<Fp16, float>());
}

TEST_F(CudaConv1d, EverySplitMatchesOracle) {
  for_all_types([]<typename Path>(const Path&) { every_split_matches_the_oracle<Path>(); });
}

TEST_F(CudaConv1d, RollsBack) {
  for (const int channels : {37, 64}) {
    conv1d_rolls_back<CudaPath<float>>(channels);
    conv1d_rolls_back<CudaPath<Bf16, float>>(channels);
    conv1d_rolls_back<CudaPath<Fp16>>(channels);
  }
}

TEST_F(CudaConv1d, BatchAndPaddingAreNothing) {
  for (const int channels : {600, 1033, 2048}) {
    conv1d_batch_and_padding_are_nothing<CudaPath<float>>(channels);
    conv1d_batch_and_padding_are_nothing<CudaPath<Bf16>>(channels);
  }
}

TEST_F(CudaConv1d, WindowsEqualTokens) {
  for (const int channels : {37, 40, 1032}) {
    conv1d_windows_equal_tokens<CudaPath<float>>(channels, {1, 2, 4, 5, 16}, {1, 2, 3, 40});
    conv1d_windows_equal_tokens<CudaPath<Bf16>>(channels, {1, 2, 4, 5, 16}, {1, 2, 3, 40});
  }
  // Enough rows for two a thread, the last thread of which has one.
  conv1d_windows_equal_tokens<CudaPath<float>>(40, {1}, {1601});
  conv1d_windows_equal_tokens<CudaPath<Bf16>>(40, {1}, {1601});
  conv1d_windows_equal_tokens<CudaPath<Fp16, float>>(40, {1}, {1602});
}

TEST_F(CudaConv1d, ExtremeInputsAreFinite) {
  extreme_conv1d_inputs_are_finite<CudaPath<float>>();
  extreme_conv1d_inputs_are_finite<CudaPath<Bf16, float>>();
}

TEST_F(CudaConv1d, FarPositionsArePlacesInTheRing) {
  far_positions_are_places_in_the_ring<CudaPath<float>>();
  far_positions_are_places_in_the_ring<CudaPath<Bf16>>();
}

TEST_F(CudaConv1d, ACorruptedWindowIsSeen) {
  a_corrupted_conv1d_window_is_seen<CudaPath<float>>();
  a_corrupted_conv1d_window_is_seen<CudaPath<Bf16>>();
}

// The elements before the last slot's are more than 2^31.
TEST_F(CudaConv1d, OffsetsPast2To31) {
  using Path = CudaPath<Bf16>;
  Path path;
  constexpr int kChannels = 8192, kSlots = 40000;
  std::mt19937_64 random(9);
  ConvRig<Path> near(kChannels, 4, 1, 4, random, path);
  std::mt19937_64 again(9);
  ConvRig<Path> far(kChannels, 4, 1, 4, again, path);
  far.window = DeviceBuffer<Bf16>(size_t{kSlots} * far.state.capacity * kChannels, path.device);
  far.state.window = far.window.data();
  far.state.slots = kSlots;
  far.positions.resize(kSlots);
  for (int step = 0; step < 4; ++step) {
    const std::vector<float> x = near.inputs(random, 3);
    const auto call = step % 2 == 0 ? ConvCall::kTokenBegin : ConvCall::kTokensPerRow;
    EXPECT_TRUE(same_bits(near.run({0}, {0, 3}, x, call), far.run({kSlots - 1}, {0, 3}, x, call)));
    near.positions[0] += 3;
    far.positions[kSlots - 1] += 3;
  }
}

// A row outside the pool gives no numbers, writes nothing and is named; its neighbours keep their bits.
TEST_F(CudaConv1d, NamesARowOutsideThePool) {
  using Path = CudaPath<Bf16>;
  for (const int channels : {37, 40})
    for (const int T : {1, 2})
      for (const auto call : {ConvCall::kTokenBegin, ConvCall::kTokensPerRow})
        for (const int32_t outside : {3, -2}) {
          Path path;
          std::mt19937_64 random(10);
          ConvRig<Path> rig(channels, 4, 3, 2, random, path);
          std::mt19937_64 again(10);
          ConvRig<Path> good(channels, 4, 3, 2, again, path);
          const std::vector<float> x = rig.inputs(random, 3 * T);
          const std::vector<float> expected = good.run({0, kPaddingSlot, 2}, {0, T, 2 * T, 3 * T}, x, call);
          path.throws_faults = false;
          const std::vector<float> out = rig.run({0, outside, 2}, {0, T, 2 * T, 3 * T}, x, call);
          expect_refusal([&] { path.device.synchronize(); }, "conv1d", "row 1", "slot " + std::to_string(outside));
          EXPECT_NO_THROW(path.device.synchronize());
          const size_t part = size_t(T) * channels;
          EXPECT_TRUE(same_bits(std::span(out).first(part), std::span(expected).first(part)));
          EXPECT_TRUE(same_bits(std::span(out).last(part), std::span(expected).last(part)));
          for (float value : std::span(out).subspan(part, part)) EXPECT_TRUE(std::isnan(value));
          EXPECT_TRUE(same_bits(path.read(rig.window), path.read(good.window)));
        }
}

TEST_F(CudaConv1d, RefusesWhatTheContractForbids) {
  conv1d_refuses_sizes<CudaPath<float>>();
  using Path = CudaPath<Bf16>;
  Path path;
  std::mt19937_64 random(5);
  ConvRig<Path> rig(16, 4, 1, 1, random, path);
  const auto x = path.elements<Bf16>(poisoned(16));
  auto out = path.elements<Bf16>(poisoned(16));
  const auto numbers = path.array<int32_t>(std::vector<int32_t>{0, 1});
  const auto base = path.array<int64_t>(std::vector<int64_t>{0});
  const BasicConv1d<Bf16, Bf16> good = {
      .state = rig.state,
      .rows = {1, numbers.data(), base.data(), numbers.data(), numbers.data(), numbers.data()},
      .x = x.data(),
      .x_stride = 16,
      .weight = rig.weights.data(),
      .out = out.data()};
  const auto refuse = [&](auto change, const std::string& part) {
    BasicConv1d<Bf16, Bf16> bad = good;
    change(bad);
    expect_refusal([&] { conv1d(bad, path.device); }, "conv1d", part);
  };
  const auto odd = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + 1);
  };
  refuse([&](auto& args) { args.x = odd(args.x); }, "x aligned to 2 bytes");
  refuse([&](auto& args) { args.out = odd(args.out); }, "out aligned to 2 bytes");
  refuse([&](auto& args) { args.state.window = odd(args.state.window); }, "window aligned to 2 bytes");
  refuse([&](auto& args) { args.weight = odd(args.weight); }, "weight aligned to 4 bytes");
  refuse([&](auto& args) { args.state.window = nullptr; }, "null");
  refuse([&](auto& args) { args.rows.base = nullptr; }, "null");
  refuse([&](auto& args) { args.token_begin = numbers.data(); }, "number of tokens");
  refuse([&](auto& args) { args.state.width = 1; }, "width of 2 to 8");
  refuse([&](auto& args) { args.tokens_per_row = 2; }, "1 tokens a row");
  EXPECT_NO_THROW(conv1d(good, path.device));
  path.device.synchronize();
}

}  // namespace
}  // namespace replayssm::test
