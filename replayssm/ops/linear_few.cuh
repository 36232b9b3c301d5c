// Internal to matrix products on a GPU: those of a few tokens, which take as long as their weights take to read.
#pragma once

#include "replayssm/ops/linear.h"

namespace replayssm {

// At most: with four cuBLASLt is faster (18.8 against 22.6 us for 12352 x 2560 on an H200).
inline constexpr int64_t kFewTokens = 2;

// Of BF16 weights and inputs, a single head; inputs, strides and pointers are multiples of 16 bytes. A token's bits do
// not depend on how many tokens there are.
template <typename Out>
void linear_few(const BasicLinear<Bf16, Out>& args, CudaDevice& device);

}  // namespace replayssm
