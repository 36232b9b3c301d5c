// What the command's subcommands share around the library: Ctrl-C, standard output, progress lines.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace replayssm {

// From here on the first Ctrl-C makes is_interrupted() true and the second ends the process.
void catch_interrupts();
bool is_interrupted();

// Writes to standard output at once. Returns false if nobody reads it any more; throws Error if it fails otherwise.
bool write_out(std::string_view text);

// A line on standard error, "<verb> <name> ... 40%", that appears only on a terminal and only after a second, and goes
// with the object.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();

  // How far the work is; not called: the line counts seconds.
  void update(int64_t done, int64_t total);

 private:
  void show();

  std::string what_;
  std::atomic<int64_t> done_{0}, total_{0};
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_ended_ = false;
  std::thread watcher_;
};

}  // namespace replayssm
