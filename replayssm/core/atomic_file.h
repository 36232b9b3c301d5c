// A file that appears whole or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace replayssm {

// Bytes go to a temporary file beside `path`; commit() puts it in the place of `path`, which until then keeps what it
// held. An object that goes without commit() removes its temporary file. Every failure throws Error naming `path`.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  // Once, after the last write: the contents are on the medium before the name is.
  void commit();

 private:
  std::string path_;
  std::string temporary_path_;
  int descriptor_ = -1;
};

}  // namespace replayssm
