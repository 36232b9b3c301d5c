#include "apps/terminal.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <system_error>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

volatile std::sig_atomic_t interrupts = 0;

void on_interrupt(int) {
  interrupts = 1;
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, nullptr);
}

bool is_interrupted() {
  return interrupts != 0;
}

bool write_out(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EPIPE) {
      return false;
    } else if (errno != EINTR) {
      fail("standard output: {}", std::generic_category().message(errno));
    }
  }
  return true;
}

Progress::Progress(std::string what) : what_(std::move(what)) {
  if (isatty(STDERR_FILENO)) watcher_ = std::thread([this] { show(); });
}

Progress::~Progress() {
  if (!watcher_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    is_ended_ = true;
  }
  ended_.notify_all();
  watcher_.join();
}

void Progress::update(int64_t done, int64_t total) {
  total_ = total;
  done_ = done;
}

void Progress::show() {
  std::unique_lock lock(mutex_);
  for (int seconds = 1;; ++seconds) {
    if (ended_.wait_for(lock, std::chrono::seconds(1), [this] { return is_ended_; })) {
      if (seconds > 1) std::fputs("\r\033[K", stderr);
      return;
    }
    if (total_ > 0)
      fmt::print(stderr, "\r\033[K{} ... {}%", what_, 100 * done_ / total_);
    else
      fmt::print(stderr, "\r\033[K{} ... {} s", what_, seconds);
    std::fflush(stderr);
  }
}

}  // namespace replayssm
