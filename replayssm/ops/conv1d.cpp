// The short convolution on the CPU.
#include "replayssm/ops/conv1d.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/conv1d.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "replayssm/core/error.h"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// out[c] for channels begin .. end-1 of one token; inputs[i] is the input W-1-i tokens ago, null before the first
// token.
HWY_INLINE void conv1d_token(const Conv1d& args, const float* const* inputs, int begin, int end, float* out) {
  for_each_vector(end - begin, [&](const auto& load, const auto& store) HWY_ATTR {
    Floats sum = args.bias == nullptr ? hn::Zero(FloatTag()) : load(args.bias + begin);
    for (int i = 0; i < args.state.width; ++i)
      if (inputs[i] != nullptr)
        sum = hn::MulAdd(load(args.weight + static_cast<ptrdiff_t>(i) * args.state.channels + begin),
                         load(inputs[i] + begin), sum);
    store(args.use_silu ? silu(sum) : sum, out + begin);
  });
}

// Channels begin .. end-1 of one row. Outputs of the whole row come first: they read the old window.
void conv1d_kernel(const Conv1d& args, int row, int begin, int end) {
  const Conv1dState& state = args.state;
  const ptrdiff_t channels = state.channels;
  const int first = args.token_begin == nullptr ? row * args.tokens_per_row : args.token_begin[row];
  const int count = args.token_begin == nullptr ? args.tokens_per_row : args.token_begin[row + 1] - first;
  const int32_t slot = args.rows.slot[row];
  float* out = args.out + first * channels;
  if (slot == kPaddingSlot) {
    for (int t = 0; t < count; ++t) std::fill(out + t * channels + begin, out + t * channels + end, 0.0f);
    return;
  }
  const int64_t position = args.rows.base[row] + args.rows.history[row];
  float* window = state.window + slot * (state.capacity * channels);
  for (int t = 0; t < count; ++t) {
    const float* inputs[8];
    for (int i = 0; i < state.width; ++i) {
      const int64_t source = t - (state.width - 1) + i;  // relative to the row's first token
      inputs[i] = source >= 0              ? args.x + (first + source) * args.x_stride
                  : position + source >= 0 ? window + (position + source) % state.capacity * channels
                                           : nullptr;
    }
    conv1d_token(args, inputs, begin, end, out + t * channels);
  }
  for (int t = std::max(0, count - state.capacity); t < count; ++t)
    std::memcpy(window + (position + t) % state.capacity * channels + begin,
                args.x + (first + t) * args.x_stride + begin, sizeof(float) * (end - begin));
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(conv1d_kernel);

void conv1d_cpu(const Conv1d& args, Device& device) {
  constexpr int kBlock = 512;  // channels of a unit: a row's units are independent of each other
  const auto kernel = HWY_DYNAMIC_DISPATCH(conv1d_kernel);
  const int blocks = (args.state.channels + kBlock - 1) / kBlock;
  device.threads().parallel_for(
      static_cast<int64_t>(args.rows.count) * blocks, 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t unit = begin; unit < end; ++unit) {
          const int channel = static_cast<int>(unit % blocks) * kBlock;
          kernel(args, static_cast<int>(unit / blocks), channel, std::min(channel + kBlock, args.state.channels));
        }
      });
}

void conv1d(const Conv1d& args, Device& device) {
  check_conv1d(args);
  if (args.rows.count == 0 || (args.token_begin != nullptr && args.token_begin[args.rows.count] == 0)) return;
  check_conv1d_arrays(args);
  const int64_t slots = args.state.slots;
  for (int b = 0; b < args.rows.count; ++b)
    require(args.rows.slot[b] == kPaddingSlot || (args.rows.slot[b] >= 0 && args.rows.slot[b] < slots),
            "conv1d: row {}: expected a slot of 0 to {}, got {}", b, slots - 1, args.rows.slot[b]);
  conv1d_cpu(args, device);
}

}  // namespace replayssm
#endif  // HWY_ONCE
