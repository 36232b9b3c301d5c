// Internal to matrix products on a GPU: those of a few tokens, which take as long as their weights take to read.
#pragma once

#include "replayssm/ops/linear.h"

namespace replayssm {

// The elements of an input's norm, at most.
inline constexpr int64_t kLargestFewNorm = 4096;

// Where can_fuse(args). A token's bits do not depend on how many tokens there are.
template <typename Out>
void linear_few(const BasicLinear<Bf16, Out>& args, CudaDevice& device);

}  // namespace replayssm
