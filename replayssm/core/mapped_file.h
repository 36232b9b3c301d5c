// A file's bytes, mapped read-only.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace replayssm {

// Maps a whole file until the object goes. Movable; the bytes stay where they are. A file must not be shortened while
// it is mapped: reading past its new end is a fault of the process.
class MappedFile {
 public:
  // Throws Error, naming `path`, unless it is a readable, non-empty regular file (or a link to one).
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept
      : path_(std::move(other.path_)),
        data_(std::exchange(other.data_, nullptr)),
        size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_bytes_}; }
  std::string_view text() const { return {static_cast<const char*>(data_), size_bytes_}; }

 private:
  std::string path_;
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace replayssm
