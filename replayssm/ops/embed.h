// Rows of an embedding table, widened to FP32:  y[n, i] = table[token[n], i].
#pragma once

#include <cstdint>

#include "replayssm/core/bf16.h"
#include "replayssm/core/cuda_device.h"
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

// The same on a GPU, queued on its stream, from a table of float, Bf16 or Fp16. Every pointer is of device memory; the
// table may be read before the work queued earlier is done. A token outside 0 .. vocabulary-1 gives a row of NaN.
template <typename T>
struct CudaEmbed {
  int64_t tokens = 0;  // N
  int64_t vocabulary = 0;
  int64_t size = 0;
  const int32_t* token = nullptr;  // [N]
  const T* table = nullptr;        // [vocabulary, size]
  float* y = nullptr;              // [N, size]
};
template <typename T>
void embed(const CudaEmbed<T>& args, CudaDevice& device);

}  // namespace replayssm
