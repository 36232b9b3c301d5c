#include "replayssm/core/buffer.h"

#include <sys/mman.h>

#include <cstdlib>

#include "replayssm/core/error.h"

namespace replayssm {

void* allocate_bytes(size_t bytes) {
  constexpr size_t kHugePageBytes = size_t{2} << 20;
  const size_t alignment = bytes >= kHugePageBytes ? kHugePageBytes : kAlignmentBytes;
  require(bytes <= (size_t{1} << 62), "memory: cannot allocate {} bytes", bytes);
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  require(memory != nullptr, "memory: cannot allocate {} bytes", bytes);
  if (alignment == kHugePageBytes) madvise(memory, rounded, MADV_HUGEPAGE);
  return memory;
}

void free_bytes(void* memory) {
  std::free(memory);
}

}  // namespace replayssm
