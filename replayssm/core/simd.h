// Which vector instructions the ops use. They are compiled for several and the best that the processor has is taken.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace replayssm {

// The names of the targets compiled into this library that this processor can run, best first ("AVX3", "AVX2", ...).
std::vector<std::string> simd_targets();

// The names of the targets compiled into this library that this processor cannot run.
std::vector<std::string> unsupported_simd_targets();

// The target in use.
std::string simd_target();

// Makes every op use `name`, one of simd_targets(). Not while an op runs. Throws Error for any other name.
void use_simd_target(std::string_view name);

}  // namespace replayssm
