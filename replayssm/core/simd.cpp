#include "replayssm/core/simd.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/core/simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include "replayssm/core/error.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {
int64_t target() {
  return HWY_TARGET;
}
}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(target);

namespace {

std::vector<std::string> target_names(int64_t targets) {
  std::vector<std::string> names;
  for (; targets != 0; targets &= targets - 1) names.emplace_back(hwy::TargetName(targets & -targets));
  return names;
}

// The processor's targets, before any was disabled by use_simd_target.
int64_t processor_targets() {
  static const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  return targets;
}

}  // namespace

std::vector<std::string> simd_targets() {
  return target_names(processor_targets());
}

std::vector<std::string> unsupported_simd_targets() {
  return target_names(HWY_TARGETS & ~processor_targets());
}

std::string simd_target() {
  return hwy::TargetName(HWY_DYNAMIC_DISPATCH(target)());
}

void use_simd_target(std::string_view name) {
  for (int64_t rest = processor_targets(); rest != 0; rest &= rest - 1) {
    const int64_t one = rest & -rest;
    if (name != hwy::TargetName(one)) continue;
    hwy::SetSupportedTargetsForTest(one);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return;
  }
  fail("simd target: expected one of {}, got '{}'", fmt::join(simd_targets(), " "), name);
}

}  // namespace replayssm
#endif  // HWY_ONCE
