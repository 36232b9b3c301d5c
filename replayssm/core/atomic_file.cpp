#include "replayssm/core/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

// A name nobody else uses; the number tells this process's files apart, O_EXCL everyone else's.
std::string temporary_name(const std::string& path) {
  static std::atomic<unsigned> next{0};
  return fmt::format("{}.{}.{}.tmp", path, getpid(), next.fetch_add(1));
}

void sync_directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int descriptor = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  fsync(descriptor);
  close(descriptor);
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  require(!path.empty() && path.find('\0') == std::string::npos, "file name: expected one to write to, got '{}'",
          path.c_str());
  do {
    temporary_path_ = temporary_name(path);
    descriptor_ = open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  require(descriptor_ >= 0, "{}: cannot be written: {}", path, std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_path_.empty()) unlink(temporary_path_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  require(descriptor_ >= 0, "{}: expected no write after commit", path_);
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    require(written > 0, "{}: cannot be written: {}", path_, std::strerror(errno));
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::commit() {
  require(descriptor_ >= 0, "{}: expected one commit, got another", path_);
  require(fsync(descriptor_) == 0, "{}: cannot be written: {}", path_, std::strerror(errno));
  const int closed = close(descriptor_);
  descriptor_ = -1;
  require(closed == 0, "{}: cannot be written: {}", path_, std::strerror(errno));
  require(std::rename(temporary_path_.c_str(), path_.c_str()) == 0, "{}: cannot be put in place: {}", path_,
          std::strerror(errno));
  temporary_path_.clear();
  sync_directory_of(path_);
}

}  // namespace replayssm
