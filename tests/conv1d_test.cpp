// The short convolution against its oracle: any split into windows and prefills, rollback, batches, padding.
#include "replayssm/ops/conv1d.h"

#include <gtest/gtest.h>

#include "replayssm/core/error.h"
#include "tests/arrays.h"
#include "tests/ref/conv1d.h"
#include "tests/tolerance.h"

namespace replayssm::test {
namespace {

struct ConvRig {
  ConvRig(int channels, int width, int slots, int max_tokens, std::mt19937_64& random, Device& on, bool has_bias = true)
      : device(on),
        weight(random_normal(random, size_t(width) * channels)),
        bias(has_bias ? random_normal(random, channels) : std::vector<float>()),
        window(poisoned(size_t(slots) * (width - 1 + max_tokens) * channels)),
        positions(slots, 0),
        state{channels, width, slots, width - 1 + max_tokens, window.data()} {}

  std::vector<float> run(const std::vector<int32_t>& slots, const std::vector<int32_t>& begin,
                         const std::vector<float>& x) {
    std::vector<float> out = poisoned(size_t(begin.back()) * state.channels);
    std::vector<int64_t> base;
    std::vector<int32_t> history;
    for (int32_t slot : slots) {
      // Split the position in two: only the sum may matter.
      // Slots that do not exist are for the op to refuse.
      const int64_t position = slot >= 0 && slot < int32_t(positions.size()) ? positions[slot] : 0;
      history.push_back(int32_t(position / 3));
      base.push_back(position - position / 3);
    }
    const StateRows rows = {int(slots.size()), slots.data(), base.data(), history.data(), slots.data(), slots.data()};
    conv1d({state, rows, begin.data(), x.data(), state.channels, weight.data(), bias.empty() ? nullptr : bias.data(),
            true, out.data()},
           device);
    return out;
  }

  Device& device;
  std::vector<float> weight, bias, window;
  std::vector<int64_t> positions;
  Conv1dState state;
};

TEST(Conv1d, EverySplitMatchesOracle) {
  Device device(2);
  for (int channels : {1, 5, 64, 1030})
    for (int width : {2, 4, 8}) {
      std::mt19937_64 random(channels + width);
      ConvRig rig(channels, width, 2, 4, random, device, width != 4);
      const std::vector<float> x = random_normal(random, size_t(60) * channels);
      const std::vector<double> expected = ref::conv1d(x, channels, width, rig.weight, rig.bias, true);
      std::vector<float> out;
      for (int t = 0; t < 60;) {
        const int count = std::min(60 - t, t == 0 ? 1 : std::uniform_int_distribution<int>(0, 20)(random));
        const std::vector<float> part(&x[t * channels], &x[t * channels] + count * channels);
        const std::vector<float> y = rig.run({1}, {0, count}, part);
        out.insert(out.end(), y.begin(), y.end());
        rig.positions[1] += count;
        t += count;
      }
      EXPECT_LE(relative_error(out, expected), kFloat32Bound) << channels << " channels, width " << width;
    }
}

// Any number of a window's tokens may be rejected; the next window then sees the accepted inputs alone.
TEST(Conv1d, RollsBack) {
  Device device(2);
  std::mt19937_64 random(1);
  constexpr int kChannels = 37, kMaxTokens = 4;
  ConvRig rig(kChannels, 4, 1, kMaxTokens, random, device);
  std::vector<float> accepted_inputs;
  for (int step = 0; step < 200; ++step) {
    const int T = std::uniform_int_distribution<int>(1, kMaxTokens)(random);
    const int accepted = std::uniform_int_distribution<int>(0, T)(random);
    const std::vector<float> x = random_normal(random, size_t(T) * kChannels);
    std::vector<float> sequence = accepted_inputs;
    sequence.insert(sequence.end(), x.begin(), x.end());
    const std::vector<double> all = ref::conv1d(sequence, kChannels, 4, rig.weight, rig.bias, true);
    const std::vector<double> expected(all.end() - T * kChannels, all.end());
    ASSERT_LE(relative_error(rig.run({0}, {0, T}, x), expected), kFloat32Bound) << step;
    accepted_inputs.insert(accepted_inputs.end(), x.begin(), x.begin() + accepted * kChannels);
    rig.positions[0] += accepted;
  }
}

TEST(Conv1d, BatchThreadsAndPaddingAreNothing) {
  constexpr int kChannels = 600;
  std::vector<std::vector<float>> outs;
  for (int threads : {1, 2, 3}) {
    Device device(threads);
    std::mt19937_64 random(2);
    ConvRig batch(kChannels, 4, 3, 2, random, device);
    std::mt19937_64 again(2);
    ConvRig alone(kChannels, 4, 3, 2, again, device);
    const std::vector<float> x = random_normal(random, size_t(9) * kChannels);
    const std::vector<float> out = batch.run({2, kPaddingSlot, 0, 1}, {0, 4, 6, 6, 9}, x);
    outs.push_back(out);
    const std::vector<float> first(x.begin(), x.begin() + 4 * kChannels), last(x.begin() + 6 * kChannels, x.end());
    EXPECT_TRUE(same_bits(alone.run({2}, {0, 4}, first), std::span(out).first(4 * kChannels)));
    EXPECT_TRUE(same_bits(alone.run({1}, {0, 3}, last), std::span(out).last(3 * kChannels)));
    for (int i = 4 * kChannels; i < 6 * kChannels; ++i) ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), 0u);
  }
  EXPECT_TRUE(same_bits(outs[0], outs[1]));
  EXPECT_TRUE(same_bits(outs[0], outs[2]));
}

TEST(Conv1d, ExtremeInputsAreFinite) {
  Device device(1);
  std::mt19937_64 random(3);
  ConvRig rig(16, 4, 1, 1, random, device);
  std::vector<float> x = random_normal(random, 16, 1e6f);
  const std::vector<double> expected = ref::conv1d(x, 16, 4, rig.weight, rig.bias, true);
  EXPECT_LE(relative_error(rig.run({0}, {0, 1}, x), expected), kFloat32Bound);
}

TEST(Conv1d, ACorruptedWindowIsSeen) {
  Device device(1);
  std::mt19937_64 random(4);
  ConvRig rig(16, 4, 1, 1, random, device);
  const std::vector<float> x = random_normal(random, 16 * 9);
  const std::vector<double> all = ref::conv1d(x, 16, 4, rig.weight, rig.bias, true);
  rig.run({0}, {0, 8}, std::vector<float>(x.begin(), x.begin() + 8 * 16));
  rig.positions[0] = 8;
  rig.window[6 % rig.state.capacity * 16 + 3] += 5.0f;
  EXPECT_GT(relative_error(rig.run({0}, {0, 1}, std::vector<float>(x.end() - 16, x.end())),
                           std::vector<double>(all.end() - 16, all.end())),
            kFaultBound);
}

TEST(Conv1d, RefusesWhatTheContractForbids) {
  Device device(1);
  std::mt19937_64 random(5);
  ConvRig rig(16, 4, 1, 1, random, device);
  const std::vector<float> x(16);
  EXPECT_THROW(rig.run({1}, {0, 1}, x), Error);
  EXPECT_THROW(rig.run({-2}, {0, 1}, x), Error);
  rig.state.width = 9;
  EXPECT_THROW(rig.run({0}, {0, 1}, x), Error);
  rig.state.width = 4;
  rig.state.capacity = 3;
  EXPECT_THROW(rig.run({0}, {0, 1}, x), Error);
}

}  // namespace
}  // namespace replayssm::test
