// The cases of the short convolution, for any path: any split into windows and prefills, rollback, batches, padding,
// extreme inputs, refusals.
#pragma once

#include <gtest/gtest.h>

#include "replayssm/core/error.h"
#include "replayssm/ops/conv1d.h"
#include "tests/paths.h"
#include "tests/ref/conv1d.h"

namespace replayssm::test {

// How a call says which tokens a row holds.
enum class ConvCall { kTokenBegin, kTokensPerRow };

// A convolution's weights and windows, a position a slot.
template <typename Path>
struct ConvRig {
  using T = typename Path::T;
  using Out = typename Path::Out;

  ConvRig(int channels, int width, int slots, int max_tokens, std::mt19937_64& random, Path& on, bool has_bias = true)
      : path(on),
        weight(random_normal(random, size_t(width) * channels)),
        bias(has_bias ? random_normal(random, channels) : std::vector<float>()),
        weights(path.template elements<float>(weight)),
        biases(path.template elements<float>(bias)),
        window(path.template elements<T>(poisoned(size_t(slots) * (width - 1 + max_tokens) * channels))),
        positions(slots, 0),
        state{channels, width, slots, width - 1 + max_tokens, window.data()} {}

  // Inputs that a T holds.
  std::vector<float> inputs(std::mt19937_64& random, size_t tokens, float scale = 1.0f) const {
    return Path::template rounded<T>(random_normal(random, tokens * state.channels, scale));
  }

  std::vector<float> run(const std::vector<int32_t>& slots, const std::vector<int32_t>& begin,
                         const std::vector<float>& x, ConvCall call = ConvCall::kTokenBegin) {
    const size_t tokens = begin.back();
    std::vector<int64_t> base;
    std::vector<int32_t> history;
    for (int32_t slot : slots) {
      // Split the position in two: only the sum may matter.
      // Slots that do not exist are for the op to refuse.
      const int64_t position = slot >= 0 && slot < int32_t(positions.size()) ? positions[slot] : 0;
      history.push_back(int32_t(std::min<int64_t>(position / 3, 1000)));
      base.push_back(position - history.back());
    }
    const auto slot_array = path.template array<int32_t>(slots), history_array = path.template array<int32_t>(history);
    const auto begin_array = path.template array<int32_t>(begin);
    const auto base_array = path.template array<int64_t>(base);
    const auto x_array = path.template elements<T>(x);
    auto out = path.template elements<Out>(poisoned(tokens * state.channels));
    conv1d(BasicConv1d<T, Out>{.state = state,
                               .rows = {int(slots.size()), slot_array.data(), base_array.data(), history_array.data(),
                                        slot_array.data(), slot_array.data()},
                               .token_begin = call == ConvCall::kTokenBegin ? begin_array.data() : nullptr,
                               .x = x_array.data(),
                               .x_stride = state.channels,
                               .weight = weights.data(),
                               .bias = bias.empty() ? nullptr : biases.data(),
                               .out = out.data(),
                               .tokens_per_row = slots.empty() ? 1 : int(tokens / slots.size()),
                               .tokens = int64_t(tokens)},
           path.device);
    return path.template read<Out>(out);
  }

  Path& path;
  std::vector<float> weight, bias;
  typename Path::template Array<float> weights, biases;
  typename Path::template Array<T> window;
  std::vector<int64_t> positions;
  BasicConv1dState<T> state;
};

inline const int kConvChannels[] = {1, 5, 64, 1030, 1032};

template <typename Path>
void every_split_matches_the_oracle() {
  Path path;
  for (int channels : kConvChannels)
    for (int width : {2, 4, 8}) {
      std::mt19937_64 random(channels + width);
      ConvRig<Path> rig(channels, width, 2, 4, random, path, width != 4);
      const std::vector<float> x = rig.inputs(random, 60);
      const std::vector<double> expected = ref::conv1d(x, channels, width, rig.weight, rig.bias, true);
      std::vector<float> out;
      for (int t = 0; t < 60;) {
        const int count = std::min(60 - t, t == 0 ? 1 : std::uniform_int_distribution<int>(0, 20)(random));
        const std::vector<float> part(&x[t * channels], &x[t * channels] + count * channels);
        const bool is_window = count >= 1 && count <= 4 && t % 2 == 0;
        const std::vector<float> y =
            rig.run({1}, {0, count}, part, is_window ? ConvCall::kTokensPerRow : ConvCall::kTokenBegin);
        out.insert(out.end(), y.begin(), y.end());
        rig.positions[1] += count;
        t += count;
      }
      EXPECT_LE(relative_error(out, expected), Path::kBound) << channels << " channels, width " << width;
    }
}

// Any number of a window's tokens may be rejected; the next window then sees the accepted inputs alone.
template <typename Path>
void conv1d_rolls_back(int channels) {
  Path path;
  std::mt19937_64 random(1);
  constexpr int kMaxTokens = 6;
  ConvRig<Path> rig(channels, 4, 1, kMaxTokens, random, path);
  std::vector<float> accepted_inputs;
  for (int step = 0; step < 120; ++step) {
    const int T = std::uniform_int_distribution<int>(1, kMaxTokens)(random);
    const int accepted = std::uniform_int_distribution<int>(0, T)(random);
    const std::vector<float> x = rig.inputs(random, T);
    std::vector<float> sequence = accepted_inputs;
    sequence.insert(sequence.end(), x.begin(), x.end());
    const std::vector<double> all = ref::conv1d(sequence, channels, 4, rig.weight, rig.bias, true);
    const std::vector<double> expected(all.end() - T * channels, all.end());
    const auto call = step % 3 == 0 ? ConvCall::kTokenBegin : ConvCall::kTokensPerRow;
    ASSERT_LE(relative_error(rig.run({0}, {0, T}, x, call), expected), Path::kBound) << step;
    accepted_inputs.insert(accepted_inputs.end(), x.begin(), x.begin() + accepted * channels);
    rig.positions[0] += accepted;
  }
}

// Rows of a prefill, one of them padding and one empty: a row's bits are those that it has alone.
template <typename Path>
void conv1d_batch_and_padding_are_nothing(int channels) {
  std::vector<std::vector<float>> outs;
  for (int variant = 0; variant < Path::kVariants; ++variant) {
    Path path(variant);
    std::mt19937_64 random(2);
    ConvRig<Path> batch(channels, 4, 3, 2, random, path);
    std::mt19937_64 again(2);
    ConvRig<Path> alone(channels, 4, 3, 2, again, path);
    const std::vector<float> x = batch.inputs(random, 90);
    const std::vector<float> out = batch.run({2, kPaddingSlot, 0, 1}, {0, 40, 60, 60, 90}, x);
    outs.push_back(out);
    const std::vector<float> first(x.begin(), x.begin() + 40 * channels), last(x.begin() + 60 * channels, x.end());
    EXPECT_TRUE(same_bits(alone.run({2}, {0, 40}, first), std::span(out).first(40 * channels)));
    EXPECT_TRUE(same_bits(alone.run({1}, {0, 30}, last), std::span(out).last(30 * channels)));
    for (int i = 40 * channels; i < 60 * channels; ++i) ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), 0u);
    EXPECT_TRUE(same_bits(path.template read<typename Path::T>(batch.window),
                          path.template read<typename Path::T>(alone.window)));
  }
  for (const std::vector<float>& out : outs) EXPECT_TRUE(same_bits(outs[0], out));
}

// Windows of every batch and length: the bits of one token after the other, and windows of other slots stay.
template <typename Path>
void conv1d_windows_equal_tokens(int channels, const std::vector<int>& tokens_per_row,
                                 const std::vector<int>& batches) {
  Path path;
  for (const int T : tokens_per_row)
    for (const int rows : batches) {
      SCOPED_TRACE(testing::Message() << rows << " rows of " << T);
      std::mt19937_64 random(7);
      ConvRig<Path> window(channels, 4, rows + 2, 16, random, path);
      std::mt19937_64 again(7);
      ConvRig<Path> single(channels, 4, rows + 2, 16, again, path);
      std::vector<int32_t> slots, begin = {0}, begin_one = {0};
      for (int b = 0; b < rows; ++b) {
        slots.push_back(b == 1 ? kPaddingSlot : rows - b);
        begin.push_back((b + 1) * T);
        begin_one.push_back(b + 1);
      }
      for (int step = 0; step < 3; ++step) {
        const std::vector<float> x = window.inputs(random, size_t(rows) * T);
        const std::vector<float> out = window.run(slots, begin, x, ConvCall::kTokensPerRow);
        std::vector<float> expected(out.size());
        for (int t = 0; t < T; ++t) {
          std::vector<float> one;
          for (int b = 0; b < rows; ++b)
            one.insert(one.end(), &x[(b * T + t) * channels], &x[(b * T + t) * channels] + channels);
          const std::vector<float> y = single.run(slots, begin_one, one, ConvCall::kTokensPerRow);
          for (int b = 0; b < rows; ++b) std::copy_n(&y[b * channels], channels, &expected[(b * T + t) * channels]);
          for (int64_t& position : single.positions) ++position;
        }
        for (int64_t& position : window.positions) position += T;
        EXPECT_TRUE(same_bits(out, expected));
        EXPECT_TRUE(same_bits(path.template read<typename Path::T>(window.window),
                              path.template read<typename Path::T>(single.window)));
      }
    }
}

template <typename Path>
void extreme_conv1d_inputs_are_finite() {
  Path path;
  std::mt19937_64 random(3);
  ConvRig<Path> rig(16, 4, 1, 1, random, path);
  const std::vector<float> x = rig.inputs(random, 1, std::is_same_v<typename Path::T, float> ? 1e6f : 1e3f);
  const std::vector<double> expected = ref::conv1d(x, 16, 4, rig.weight, rig.bias, true);
  EXPECT_LE(relative_error(rig.run({0}, {0, 1}, x), expected), Path::kBound);
}

// Positions past 2^32, and slots whose offsets are.
template <typename Path>
void far_positions_are_places_in_the_ring() {
  Path path;
  std::mt19937_64 random(8);
  ConvRig<Path> near(16, 4, 1, 3, random, path);
  std::mt19937_64 again(8);
  ConvRig<Path> far(16, 4, 1, 3, again, path);
  near.positions[0] = near.state.capacity;
  far.positions[0] = (int64_t{1} << 33) / far.state.capacity * far.state.capacity;
  for (int step = 0; step < 9; ++step) {
    const std::vector<float> x = near.inputs(random, 2);
    const auto call = step % 2 == 0 ? ConvCall::kTokenBegin : ConvCall::kTokensPerRow;
    EXPECT_TRUE(same_bits(near.run({0}, {0, 2}, x, call), far.run({0}, {0, 2}, x, call)));
    near.positions[0] += 2;
    far.positions[0] += 2;
  }
}

template <typename Path>
void a_corrupted_conv1d_window_is_seen() {
  Path path;
  std::mt19937_64 random(4);
  ConvRig<Path> rig(16, 4, 1, 1, random, path);
  const std::vector<float> x = rig.inputs(random, 9);
  const std::vector<double> all = ref::conv1d(x, 16, 4, rig.weight, rig.bias, true);
  rig.run({0}, {0, 8}, std::vector<float>(x.begin(), x.begin() + 8 * 16));
  rig.positions[0] = 8;
  std::vector<float> window = path.template read<typename Path::T>(rig.window);
  window[6 % rig.state.capacity * 16 + 3] += 5.0f;
  rig.window = path.template elements<typename Path::T>(window);
  rig.state.window = rig.window.data();
  EXPECT_GT(relative_error(rig.run({0}, {0, 1}, std::vector<float>(x.end() - 16, x.end())),
                           std::vector<double>(all.end() - 16, all.end())),
            kFaultBound);
}

template <typename Path>
void conv1d_refuses_sizes() {
  Path path;
  std::mt19937_64 random(5);
  ConvRig<Path> rig(16, 4, 1, 1, random, path);
  const std::vector<float> x(32);
  EXPECT_THROW(rig.run({0}, {0, 2}, x, ConvCall::kTokensPerRow), Error);  // more than the window has room for
  rig.state.width = 9;
  EXPECT_THROW(rig.run({0}, {0, 1}, x), Error);
  rig.state.width = 4;
  rig.state.capacity = 3;
  EXPECT_THROW(rig.run({0}, {0, 1}, x), Error);
}

}  // namespace replayssm::test
