// BF16, the upper half of an FP32 word.
#pragma once

#include <bit>
#include <cstdint>

namespace replayssm {

struct Bf16 {
  uint16_t bits;
};

// Exact.
inline float to_float(Bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
inline Bf16 to_bf16(float value) {
  const uint32_t word = std::bit_cast<uint32_t>(value);
  if ((word & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>((word >> 16) | 0x40u)};
  return {static_cast<uint16_t>((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16)};
}

}  // namespace replayssm
