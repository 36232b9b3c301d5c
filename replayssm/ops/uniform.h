// Internal to sampling and random fills: their uniform numbers, one arithmetic for CPU and GPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define REPLAYSSM_EITHER_SIDE __host__ __device__
#else
#define REPLAYSSM_EITHER_SIDE
#endif

namespace replayssm {

// The finaliser of splitmix64 (Steele, Lea, Flood, 2014).
REPLAYSSM_EITHER_SIDE constexpr uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// sample_uniform of sample.h.
REPLAYSSM_EITHER_SIDE constexpr double uniform_number(uint64_t seed, uint64_t sequence, int64_t position) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  uint64_t z = mix_bits(seed + kGolden);
  z = mix_bits(z ^ (sequence + kGolden));
  z = mix_bits(z ^ (static_cast<uint64_t>(position) + kGolden));
  return static_cast<double>(z >> 11) * 0x1p-53;
}

// u_i of random_fill.h.
REPLAYSSM_EITHER_SIDE constexpr float fill_number(uint64_t seed, uint64_t i) {
  return static_cast<float>(mix_bits(seed + (i + 1) * 0x9E3779B97F4A7C15u) >> 40) * 0x1p-24f;
}

}  // namespace replayssm

#undef REPLAYSSM_EITHER_SIDE
