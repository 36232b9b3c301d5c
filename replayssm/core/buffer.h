// Owned, aligned memory for arrays of plain numbers.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace replayssm {

inline constexpr size_t kAlignmentBytes = 64;

// Memory of `bytes` bytes, aligned to kAlignmentBytes and, from 2 MiB on, to 2 MiB and offered to the kernel for huge
// pages. Not initialised (fresh pages of the kernel read as zero). Throws Error when it cannot be had.
void* allocate_bytes(size_t bytes);
void free_bytes(void* memory);

// `count` elements of a trivially copyable type; not initialised.
template <typename T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  explicit Buffer(size_t count) : data_(static_cast<T*>(allocate_bytes(count * sizeof(T)))), count_(count) {}

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return count_; }
  T& operator[](size_t index) { return data_[index]; }
  const T& operator[](size_t index) const { return data_[index]; }
  T* begin() { return data(); }
  T* end() { return data() + count_; }

 private:
  struct Free {
    void operator()(T* memory) const { free_bytes(memory); }
  };
  std::unique_ptr<T[], Free> data_;
  size_t count_ = 0;
};

}  // namespace replayssm
