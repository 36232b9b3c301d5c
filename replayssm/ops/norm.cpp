// Root-mean-square norms: a thread owns whole tokens.
#include "replayssm/ops/norm.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/norm.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cmath>

#include "replayssm/core/error.h"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {
namespace {

// 1 / sqrt(mean(x^2) + eps)
HWY_INLINE Floats inverse_rms(const float* x, int64_t size, float eps) {
  Floats squares = hn::Zero(FloatTag());
  for_each_vector(size, [&](const auto& load, const auto&) HWY_ATTR {
    const Floats value = load(x);
    squares = hn::MulAdd(value, value, squares);
  });
  const float mean = hn::GetLane(hn::SumOfLanes(FloatTag(), squares)) / static_cast<float>(size);
  return hn::Set(FloatTag(), 1.0f / std::sqrt(mean + eps));
}

}  // namespace

// One call owns the tokens begin .. end-1.
void rms_norm_kernel(const RmsNorm& args, int64_t begin, int64_t end) {
  const Floats offset = hn::Set(FloatTag(), args.is_zero_centred ? 1.0f : 0.0f);
  for (int64_t n = begin; n < end; ++n) {
    for (int h = 0; h < args.heads; ++h) {
      const float* x = args.x + n * args.x_stride + h * args.x_head_stride;
      float* y = args.y + n * args.y_stride + h * args.y_head_stride;
      const Floats factor = inverse_rms(x, args.size, args.eps);
      for_each_vector(args.size, [&](const auto& load, const auto& store) HWY_ATTR {
        store(hn::Mul(hn::Mul(load(x), factor), hn::Add(offset, load(args.weight))), y);
      });
    }
  }
}

// One call owns the tokens begin .. end-1.
void gated_rms_norm_kernel(const GatedRmsNorm& args, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    for (int h = 0; h < args.heads; ++h) {
      const float* x = args.x + n * args.x_stride + h * args.size;
      const float* z = args.z + n * args.z_stride + h * args.size;
      float* y = args.y + n * args.y_stride + h * args.size;
      const Floats factor = inverse_rms(x, args.size, args.eps);
      for_each_vector(args.size, [&](const auto& load, const auto& store) HWY_ATTR {
        const Floats normal = hn::Mul(hn::Mul(load(x), factor), load(args.weight));
        const Floats gate = load(z);
        store(hn::Mul(normal, args.has_sigmoid_gate ? sigmoid(gate) : silu(gate)), y);
      });
    }
  }
}

// One call owns the tokens begin .. end-1. The gated vector lies in y until its norm is known.
void gate_first_rms_norm_kernel(const GateFirstRmsNorm& args, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    for (int g = 0; g < args.groups; ++g) {
      const float* x = args.x + n * args.x_stride + g * args.size;
      const float* z = args.z + n * args.z_stride + g * args.size;
      const float* weight = args.weight + g * args.size;
      float* y = args.y + n * args.y_stride + g * args.size;
      for_each_vector(args.size,
                      [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Mul(load(x), silu(load(z))), y); });
      const Floats factor = inverse_rms(y, args.size, args.eps);
      for_each_vector(args.size, [&](const auto& load, const auto& store)
                                     HWY_ATTR { store(hn::Mul(hn::Mul(load(y), factor), load(weight)), y); });
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(rms_norm_kernel);
HWY_EXPORT(gated_rms_norm_kernel);
HWY_EXPORT(gate_first_rms_norm_kernel);

namespace {

// Tokens of a range: at least some microseconds of work.
int64_t norm_grain(int64_t token_elements) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, token_elements));
}

}  // namespace

void rms_norm(const RmsNorm& args, Device& device) {
  check_norm_sizes("rms_norm", args, "heads", args.heads);
  if (args.tokens == 0 || args.heads == 0) return;
  require(!has_null({args.x, args.weight, args.y}), "rms_norm: x, weight and y must not be null");
  const auto kernel = HWY_DYNAMIC_DISPATCH(rms_norm_kernel);
  device.threads().parallel_for(args.tokens, norm_grain(args.heads * args.size),
                                [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

void gated_rms_norm(const GatedRmsNorm& args, Device& device) {
  check_norm_sizes("gated_rms_norm", args, "heads", args.heads);
  if (args.tokens == 0 || args.heads == 0) return;
  require(!has_null({args.x, args.z, args.weight, args.y}), "gated_rms_norm: x, z, weight and y must not be null");
  const auto kernel = HWY_DYNAMIC_DISPATCH(gated_rms_norm_kernel);
  device.threads().parallel_for(args.tokens, norm_grain(args.heads * args.size),
                                [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

void gate_first_rms_norm(const GateFirstRmsNorm& args, Device& device) {
  check_norm_sizes("gate_first_rms_norm", args, "groups", args.groups);
  if (args.tokens == 0 || args.groups == 0) return;
  require(!has_null({args.x, args.z, args.weight, args.y}), "gate_first_rms_norm: x, z, weight and y must not be null");
  const auto kernel = HWY_DYNAMIC_DISPATCH(gate_first_rms_norm_kernel);
  device.threads().parallel_for(args.tokens, norm_grain(args.groups * args.size),
                                [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

}  // namespace replayssm
#endif  // HWY_ONCE
