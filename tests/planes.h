// The planes of a checkpoint for tests, word by word.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace replayssm::test {

// CheckpointForm::kPlanes of heads of `head_size` words each, as rows.h defines it.
inline std::vector<uint16_t> to_planes(std::span<const float> words, size_t head_size) {
  std::vector<uint16_t> halves(2 * words.size());
  for (size_t i = 0; i < words.size(); ++i) {
    const uint32_t word = std::isnan(words[i]) ? 0x7FC00000u : std::bit_cast<uint32_t>(words[i]);
    const uint32_t high = (word + 0x8000u) >> 16;
    uint16_t* half = &halves[i / head_size * 2 * head_size + i % head_size];
    half[0] = static_cast<uint16_t>(high);
    half[head_size] = static_cast<uint16_t>(word - (high << 16));
  }
  return halves;
}

inline void from_planes(std::span<const uint16_t> halves, size_t head_size, std::span<float> words) {
  for (size_t i = 0; i < words.size(); ++i) {
    const uint16_t* half = &halves[i / head_size * 2 * head_size + i % head_size];
    const auto low = static_cast<uint32_t>(static_cast<int16_t>(half[head_size]));
    words[i] = std::bit_cast<float>((static_cast<uint32_t>(half[0]) << 16) + low);
  }
}

}  // namespace replayssm::test
