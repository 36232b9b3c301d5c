// Rows of an embedding table, widened to FP32:  y[n, i] = table[token[n], i].
#pragma once

#include <cstdint>

#include "replayssm/core/bf16.h"
#include "replayssm/core/device.h"

namespace replayssm {

// Exact. Throws Error if a token lies outside 0 .. vocabulary-1, for negative sizes, null pointers, and unless exactly
// one table is given.
struct Embed {
  int64_t tokens = 0;  // N
  int64_t vocabulary = 0;
  int64_t size = 0;
  const int32_t* token = nullptr;    // [N]
  const Bf16* table = nullptr;       // [vocabulary, size], this or table_f32
  const float* table_f32 = nullptr;  // [vocabulary, size]
  float* y = nullptr;                // [N, size]
};
void embed(const Embed& args, Device& device);

}  // namespace replayssm
