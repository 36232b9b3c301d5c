#include "replayssm/core/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

class Descriptor {
 public:
  // Opening a pipe without O_NONBLOCK would wait for a writer.
  explicit Descriptor(const std::string& path) : number_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  require(path.find('\0') == std::string::npos, "file name: expected no zero byte, got one in '{}'", path.c_str());
  const Descriptor descriptor(path);
  require(descriptor.number() >= 0, "{}: cannot be opened: {}", path, std::strerror(errno));
  struct stat status;
  require(fstat(descriptor.number(), &status) == 0, "{}: cannot be examined: {}", path, std::strerror(errno));
  require(!S_ISDIR(status.st_mode), "{}: expected a file, got a directory", path);
  require(S_ISREG(status.st_mode), "{}: expected a regular file, got a device, pipe or socket", path);
  require(status.st_size > 0, "{}: expected a file with contents, got an empty one", path);
  size_bytes_ = static_cast<size_t>(status.st_size);
  void* data = mmap(nullptr, size_bytes_, PROT_READ, MAP_PRIVATE, descriptor.number(), 0);
  require(data != MAP_FAILED, "{}: cannot be mapped ({} bytes): {}", path, size_bytes_, std::strerror(errno));
  data_ = data;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

}  // namespace replayssm
