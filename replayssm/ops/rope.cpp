// Rotary position embedding: a thread owns whole tokens.
#include "replayssm/ops/rope.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/rope.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cmath>

#include "replayssm/ops/checks.h"
#include "replayssm/ops/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// One call owns the tokens begin .. end-1.
void rope_kernel(const Rope& args, int64_t begin, int64_t end) {
  const int64_t half = args.rotary_size / 2;
  for (int64_t n = begin; n < end; ++n) {
    for (int h = 0; h < args.heads; ++h) {
      float* low = args.x + n * args.x_stride + h * args.x_head_stride;
      float* high = low + half;
      for_each_vector(half, [&](const auto& load, const auto& store) HWY_ATTR {
        const Floats cosine = load(args.cosine + n * half), sine = load(args.sine + n * half);
        const Floats a = load(low), b = load(high);
        store(hn::NegMulAdd(b, sine, hn::Mul(a, cosine)), low);
        store(hn::MulAdd(a, sine, hn::Mul(b, cosine)), high);
      });
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(rope_kernel);

void rope_angles(const RopeAngles& args, Device& device) {
  check_rope_angles_sizes(args);
  if (args.tokens == 0 || args.rotary_size == 0) return;
  require(args.position != nullptr && args.cosine != nullptr && args.sine != nullptr,
          "rope_angles: position, cosine and sine must not be null");
  for (int64_t n = 0; n < args.tokens; ++n)
    require(args.position[n] >= 0, "rope_angles: expected positions >= 0, got {} for token {}", args.position[n], n);
  const int64_t half = args.rotary_size / 2;
  device.threads().parallel_for(half, std::max<int64_t>(1, 64 / args.tokens), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const double frequency = std::pow(args.theta, -2.0 * static_cast<double>(i) / args.rotary_size);
      for (int64_t n = 0; n < args.tokens; ++n) {
        const double angle = static_cast<double>(args.position[n]) * frequency;
        args.cosine[n * half + i] = static_cast<float>(std::cos(angle));
        args.sine[n * half + i] = static_cast<float>(std::sin(angle));
      }
    }
  });
}

void rope(const Rope& args, Device& device) {
  require(args.tokens >= 0 && args.heads >= 0, "rope: expected tokens and heads >= 0, got {} and {}", args.tokens,
          args.heads);
  require(args.rotary_size >= 0 && args.rotary_size % 2 == 0 && args.rotary_size <= args.head_size,
          "rope: expected an even rotary_size of 0 .. {}, got {}", args.head_size, args.rotary_size);
  if (args.tokens == 0 || args.heads == 0 || args.rotary_size == 0) return;
  require(args.x != nullptr && args.cosine != nullptr && args.sine != nullptr,
          "rope: x, cosine and sine must not be null");
  const auto kernel = HWY_DYNAMIC_DISPATCH(rope_kernel);
  const int64_t grain = std::max<int64_t>(1, 16384 / (static_cast<int64_t>(args.heads) * args.rotary_size));
  device.threads().parallel_for(args.tokens, grain, [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

}  // namespace replayssm
#endif  // HWY_ONCE
