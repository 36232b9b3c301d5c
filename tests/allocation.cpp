// The test binary's operator new: malloc, counted against the limit of the thread, if it has one.
#include "tests/allocation.h"

#include <cstdint>
#include <cstdlib>
#include <new>

namespace replayssm::test {
namespace {

thread_local size_t left_bytes = SIZE_MAX;

void count(size_t bytes) {
  if (left_bytes == SIZE_MAX) return;
  if (bytes > left_bytes) throw std::bad_alloc();
  left_bytes -= bytes;
}

}  // namespace

AllocationLimit::AllocationLimit(size_t limit_bytes) : limit_bytes_(limit_bytes) {
  left_bytes = limit_bytes;
}
AllocationLimit::~AllocationLimit() {
  left_bytes = SIZE_MAX;
}
size_t AllocationLimit::used_bytes() const {
  return limit_bytes_ - left_bytes;
}

void* allocate(size_t bytes) {
  count(bytes);
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void* allocate(size_t bytes, std::align_val_t alignment) {
  count(bytes);
  const size_t step = static_cast<size_t>(alignment);
  void* memory = std::aligned_alloc(step, (bytes + step - 1) / step * step + (bytes == 0 ? step : 0));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void* allocate_or_null(size_t bytes) noexcept {
  try {
    return allocate(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace replayssm::test

using replayssm::test::allocate;
using replayssm::test::allocate_or_null;

void* operator new(size_t bytes) {
  return allocate(bytes);
}
void* operator new[](size_t bytes) {
  return allocate(bytes);
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, alignment);
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, alignment);
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return allocate_or_null(bytes);
}
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return allocate_or_null(bytes);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}
