// Internal to the CUDA paths: the checks at their doors, of what the host can see.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "replayssm/core/error.h"

namespace replayssm {

// The sizes that the state kernels are built for.
inline constexpr int kMaxCudaKeySize = 128;
inline constexpr int kMaxCudaRecords = 64;  // L + T
inline constexpr int kMaxCudaTokens = 16;   // T
inline constexpr int kMaxCudaRows = 65535;
inline constexpr int kMaxCudaExperts = 1024;
inline constexpr int64_t kMaxCudaChoices = int64_t{1} << 30;  // of experts, by all tokens

inline void check_cuda_sizes(const char* op, const char* name, int key_size, int rows) {
  require(key_size <= kMaxCudaKeySize, "{}: on a GPU expected a {} that is a multiple of 16, 16 to {}, got {}", op,
          name, kMaxCudaKeySize, key_size);
  require(rows >= 0 && rows <= kMaxCudaRows, "{}: on a GPU expected 0 to {} rows, got {}", op, kMaxCudaRows, rows);
}

inline void check_cuda_size(const char* op, const char* name, int64_t size, int64_t least, int64_t most) {
  require(size >= least && size <= most, "{}: on a GPU expected {} of {} to {}, got {}", op, name, least, most, size);
}

inline void check_cuda_window(const char* op, int window, int tokens_per_row) {
  require(tokens_per_row <= kMaxCudaTokens, "{}: on a GPU expected 1 to {} tokens a row, got {}", op, kMaxCudaTokens,
          tokens_per_row);
  require(window + tokens_per_row <= kMaxCudaRecords,
          "{}: on a GPU expected a window and a row's tokens of at most {} records together, got {} and {}", op,
          kMaxCudaRecords, window, tokens_per_row);
}

inline void check_not_null(const char* op, const char* name, const void* pointer) {
  require(pointer != nullptr, "{}: {} is null", op, name);
}

struct NamedPointer {
  const char* name;
  const void* pointer;
};
// Throws Error unless the arguments `arrays` of `op` are multiples of `alignment` bytes.
inline void check_alignment(const char* op, size_t alignment, std::initializer_list<NamedPointer> arrays) {
  for (const NamedPointer& array : arrays) {
    const auto address = reinterpret_cast<uintptr_t>(array.pointer);
    require(address % alignment == 0, "{}: expected {} aligned to {} bytes, got the address {:#x}", op, array.name,
            alignment, address);
  }
}

// Of arrays that are read 16 bytes at a time.
inline void check_pointers(const char* op, std::initializer_list<NamedPointer> pointers) {
  for (const NamedPointer& p : pointers) check_not_null(op, p.name, p.pointer);
  check_alignment(op, 16, pointers);
}

struct NamedStride {
  const char* name;
  int64_t stride;
  int64_t least;
};
inline void check_strides(const char* op, int64_t element_bytes, std::initializer_list<NamedStride> strides) {
  for (const NamedStride& s : strides)
    require(s.stride >= s.least && s.stride * element_bytes % 16 == 0,
            "{}: expected a {} of at least {} elements and a multiple of {} (16 bytes), got {}", op, s.name, s.least,
            16 / element_bytes, s.stride);
}

}  // namespace replayssm
