// The bounds that tests may use: relative L2 errors against a float64 oracle. A test never carries its own number.
#pragma once

namespace replayssm::test {

inline constexpr double kFloat64Bound = 1e-12;  // a float64 path, or two oracles against each other
inline constexpr double kFloat32Bound = 2e-6;   // an FP32 op
inline constexpr double kBf16Bound = 5e-3;      // an op whose output is rounded to BF16
inline constexpr double kModelBound = 1e-4;     // a whole model's FP32 logits against another implementation's

// A whole model whose activations are rounded to BF16 between its ops against FP32: what remains when every op's bound
// holds. It cannot tell a fault of bookkeeping, which tests in FP32 do.
inline constexpr double kBf16ModelBound = 0.1;

// Above every other bound, below what any bookkeeping fault gives: what a teeth test must exceed.
inline constexpr double kFaultBound = 1e-2;

}  // namespace replayssm::test
