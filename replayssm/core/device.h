// Where an op runs.
#pragma once

#include "replayssm/core/thread_pool.h"

namespace replayssm {

// The CPU with its threads. Every op takes the device as its last argument and runs there before it returns.
class Device {
 public:
  // As ThreadPool's constructor.
  explicit Device(int threads = 0, bool pin = false) : threads_(threads, pin) {}

  ThreadPool& threads() { return threads_; }

 private:
  ThreadPool threads_;
};

}  // namespace replayssm
