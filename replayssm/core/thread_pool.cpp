#include "replayssm/core/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <system_error>
#include <utility>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

// A waiting thread polls for about 50 us before it sleeps: a decode step starts hundreds of loops a few microseconds
// apart, and waking a sleeper costs more than such a loop.
constexpr int kPolls = 2000;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::vector<int> usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(set), &set) == 0)
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &set)) cores.push_back(core);
  if (cores.empty()) cores.push_back(0);
  return cores;
}

void pin_to(pthread_t thread, int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(thread, sizeof(set), &set);
}

}  // namespace

ThreadPool::ThreadPool(int threads, bool pin) {
  require(threads >= 0 && threads <= 4096, "threads: expected 0 (one per core) to 4096, got {}", threads);
  const std::vector<int> cores = usable_cores();
  const int count = threads == 0 ? static_cast<int>(cores.size()) : threads;
  workers_.reserve(count - 1);
  try {
    for (int thread = 1; thread < count; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (const std::system_error& error) {
    stop();
    fail("threads: cannot start {} threads: {}", count, error.what());
  }
  if (!pin) return;
  pin_to(pthread_self(), cores[0]);
  for (int thread = 1; thread < count; ++thread)
    pin_to(workers_[thread - 1].native_handle(), cores[thread % cores.size()]);
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::stop() {
  stopping_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(const Loop& loop) {
  loop_ = loop;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_seq_cst);
  round_.notify_all();
  claim_ranges(0);
  for (int polls = 0;; ++polls) {
    const int busy = busy_.load(std::memory_order_acquire);
    if (busy == 0) break;
    if (polls < kPolls)
      pause_briefly();
    else
      busy_.wait(busy, std::memory_order_acquire);
  }
  if (has_thrown_.exchange(false)) std::rethrow_exception(std::exchange(thrown_, nullptr));
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    uint32_t round = round_.load(std::memory_order_acquire);
    for (int polls = 0; round == seen && polls < kPolls; ++polls) {
      pause_briefly();
      round = round_.load(std::memory_order_acquire);
    }
    if (round == seen) {
      round_.wait(seen, std::memory_order_acquire);
      continue;
    }
    seen = round;
    if (stopping_.load()) return;
    claim_ranges(thread);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

void ThreadPool::claim_ranges(int thread) {
  const Loop loop = loop_;
  for (;;) {
    const int64_t begin = next_.fetch_add(loop.grain, std::memory_order_relaxed);
    if (begin >= loop.count) return;
    const int64_t end = begin + loop.grain < loop.count ? begin + loop.grain : loop.count;
    try {
      loop.body(loop.context, begin, end, thread);
    } catch (...) {
      if (!has_thrown_.exchange(true)) thrown_ = std::current_exception();
      next_.store(loop.count, std::memory_order_relaxed);
    }
  }
}

}  // namespace replayssm
