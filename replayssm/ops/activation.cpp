// Elementwise products with an activation: a thread owns whole vectors.
#include "replayssm/ops/activation.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/activation.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>

#include "replayssm/ops/checks.h"
#include "replayssm/ops/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// One call owns the tokens begin .. end-1.
void silu_product_kernel(const SiluProduct& args, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const float* gate = args.gate + n * args.gate_stride;
    const float* up = args.up + n * args.up_stride;
    float* y = args.y + n * args.y_stride;
    for_each_vector(args.size, [&](const auto& load, const auto& store)
                                   HWY_ATTR { store(hn::Mul(silu(load(gate)), load(up)), y); });
  }
}

// One call owns the tokens begin .. end-1.
void relu2_kernel(const Relu2& args, int64_t begin, int64_t end) {
  const Floats zero = hn::Zero(FloatTag());
  for (int64_t n = begin; n < end; ++n) {
    const float* x = args.x + n * args.x_stride;
    float* y = args.y + n * args.y_stride;
    for_each_vector(args.size, [&](const auto& load, const auto& store) HWY_ATTR {
      // A NaN is not below zero, so it stays; the maximum would depend on the order of its operands.
      const Floats value = load(x);
      store(hn::IfThenZeroElse(hn::Lt(value, zero), hn::Mul(value, value)), y);
    });
  }
}

// One call owns the tokens begin .. end-1.
void sigmoid_gate_kernel(const SigmoidGate& args, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    for (int h = 0; h < args.heads; ++h) {
      const float* gate = args.gate + n * args.gate_stride + h * args.gate_head_stride;
      float* x = args.x + n * args.x_stride + h * args.size;
      for_each_vector(args.size, [&](const auto& load, const auto& store)
                                     HWY_ATTR { store(hn::Mul(load(x), sigmoid(load(gate))), x); });
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(silu_product_kernel);
HWY_EXPORT(relu2_kernel);
HWY_EXPORT(sigmoid_gate_kernel);

void silu_product(const SiluProduct& args, Device& device) {
  check_silu_product(args);
  if (args.tokens == 0 || args.size == 0) return;
  const auto kernel = HWY_DYNAMIC_DISPATCH(silu_product_kernel);
  device.threads().parallel_for(args.tokens, std::max<int64_t>(1, 4096 / args.size),
                                [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

void relu2(const Relu2& args, Device& device) {
  check_relu2(args);
  if (args.tokens == 0 || args.size == 0) return;
  const auto kernel = HWY_DYNAMIC_DISPATCH(relu2_kernel);
  device.threads().parallel_for(args.tokens, std::max<int64_t>(1, 4096 / args.size),
                                [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

void sigmoid_gate(const SigmoidGate& args, Device& device) {
  check_sigmoid_gate(args);
  if (args.tokens == 0 || args.heads == 0 || args.size == 0) return;
  const auto kernel = HWY_DYNAMIC_DISPATCH(sigmoid_gate_kernel);
  device.threads().parallel_for(args.tokens, std::max<int64_t>(1, 4096 / (args.heads * args.size)),
                                [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

}  // namespace replayssm
#endif  // HWY_ONCE
