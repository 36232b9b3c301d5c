// A limit on what a stretch of code may allocate with operator new, for tests of hostile input.
#pragma once

#include <cstddef>

namespace replayssm::test {

// While it lives, this thread may allocate `limit_bytes` in all (memory given back counts too); the allocation that
// passes the limit throws std::bad_alloc. One at a time a thread.
class AllocationLimit {
 public:
  explicit AllocationLimit(size_t limit_bytes);
  ~AllocationLimit();
  AllocationLimit(const AllocationLimit&) = delete;
  AllocationLimit& operator=(const AllocationLimit&) = delete;

  size_t used_bytes() const;

 private:
  size_t limit_bytes_;
};

}  // namespace replayssm::test
