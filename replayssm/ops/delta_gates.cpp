// The gates of the delta rule on the CPU.
#include "replayssm/ops/delta.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/delta_gates.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>

#include "replayssm/ops/checks.h"
#include "replayssm/ops/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// log(1 + e^x), x itself above 20; a NaN stays one.
HWY_INLINE Floats softplus(Floats x) {
  const FloatTag tag;
  const Floats limit = hn::Set(tag, 20.0f);
  const Floats logarithm = hn::Log1p(tag, hn::Exp(tag, hn::Min(x, limit)));
  return hn::IfThenElse(hn::Le(x, limit), logarithm, x);
}

// g of one vector of gates.
HWY_INLINE Floats gate(Floats a, Floats bias, Floats rate, float lower_bound) {
  const FloatTag tag;
  const Floats x = hn::Add(a, bias);
  if (lower_bound == 0) return hn::Neg(hn::Mul(rate, softplus(x)));
  return hn::Mul(hn::Set(tag, lower_bound), sigmoid(hn::Mul(rate, x)));
}

// The gates of tokens begin .. end-1 that share a vector of rates with head `head`: that head's own, or with one gate a
// head those of as many heads as a vector has lanes.
void delta_gates_kernel(const DeltaGates& args, int64_t begin, int64_t end, int head) {
  const FloatTag tag;
  const bool is_per_head = args.gate_size == 1;
  const int64_t first = static_cast<int64_t>(head) * args.gate_size,
                row = static_cast<int64_t>(args.heads) * args.gate_size;
  const int64_t count = is_per_head ? std::min<int64_t>(kFloatLanes, args.heads - head) : args.gate_size;
  const auto load = [&](const float* p, int64_t c) HWY_ATTR {
    return c + kFloatLanes <= count ? hn::LoadU(tag, p + c) : load_rest(p + c, count - c);
  };
  const auto store = [&](Floats value, float* p, int64_t c) HWY_ATTR {
    c + kFloatLanes <= count ? hn::StoreU(value, tag, p + c) : store_rest(value, p + c, count - c);
  };
  const Floats rate = exponential(is_per_head ? load(args.a_log + head, 0) : hn::Set(tag, args.a_log[head]));
  for (int64_t token = begin; token < end; ++token) {
    const float* a = args.a + token * args.a_stride + first;
    float* g = args.g + token * row + first;
    for (int64_t c = 0; c < count; c += kFloatLanes)
      store(gate(load(a, c), load(args.dt_bias + first, c), rate, args.lower_bound), g, c);
  }
}

// beta for the tokens begin .. end-1.
void delta_beta_kernel(const DeltaGates& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const float* b = args.b + token * args.b_stride;
    float* beta = args.beta + token * args.heads;
    for_each_vector(args.heads, [&](const auto& load, const auto& store) HWY_ATTR { store(sigmoid(load(b)), beta); });
  }
}

int gate_lanes() {
  return static_cast<int>(kFloatLanes);
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(delta_gates_kernel);
HWY_EXPORT(delta_beta_kernel);
HWY_EXPORT(gate_lanes);

void delta_gates_cpu(const DeltaGates& args, Device& device) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(delta_gates_kernel);
  const auto beta_kernel = HWY_DYNAMIC_DISPATCH(delta_beta_kernel);
  const int heads = args.gate_size == 1 ? HWY_DYNAMIC_DISPATCH(gate_lanes)() : 1;  // of a unit
  const int64_t groups = (args.heads + heads - 1) / heads;
  constexpr int64_t kTokens = 16;  // of a unit: the rates are computed once for all of them
  const int64_t blocks = (args.tokens + kTokens - 1) / kTokens;
  const int64_t grain = std::max<int64_t>(1, 512 / (heads * args.gate_size));
  device.threads().parallel_for(blocks * groups, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit / groups * kTokens, last = std::min(first + kTokens, args.tokens);
      kernel(args, first, last, static_cast<int>(unit % groups) * heads);
      if (unit % groups == 0) beta_kernel(args, first, last);
    }
  });
}

void delta_gates(const DeltaGates& args, Device& device) {
  check_delta_gates(args);
  delta_gates_cpu(args, device);
}

}  // namespace replayssm
#endif  // HWY_ONCE
