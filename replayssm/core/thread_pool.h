// The CPU's worker threads: one parallel loop at a time, without allocation.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace replayssm {

// `threads` threads share each loop; the calling thread is one of them. One loop runs at a time, started by the thread
// that owns the pool. Which thread runs which part of a loop is not defined, so a loop's parts must write disjoint
// results whose bits do not depend on the split.
class ThreadPool {
 public:
  // threads >= 1, or 0 for one per core that this process may use. With `pin`, thread i stays on the i-th such core,
  // the calling thread too. Throws Error when the threads cannot be had.
  explicit ThreadPool(int threads = 0, bool pin = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end, thread) for ranges that cover 0 .. count-1 once, each at most `grain` long; `thread` is in
  // 0 .. size()-1 and no two ranges run at once under one `thread`. grain >= 1; `body` starts no loop of this pool.
  // What a call of `body` throws is thrown here, once all calls that had begun have ended; the remaining ranges are
  // left out, and the pool stays usable.
  template <typename Body>
  void parallel_for(int64_t count, int64_t grain, Body&& body) {
    if (count <= 0) return;
    if (workers_.empty() || count <= grain) {
      for (int64_t begin = 0; begin < count; begin += grain)
        body(begin, begin + grain < count ? begin + grain : count, 0);
      return;
    }
    run({count, grain,
         [](void* context, int64_t begin, int64_t end, int thread) {
           (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end, thread);
         },
         const_cast<void*>(static_cast<const void*>(&body))});
  }

 private:
  struct Loop {
    int64_t count;
    int64_t grain;
    void (*body)(void* context, int64_t begin, int64_t end, int thread);
    void* context;
  };

  void run(const Loop& loop);
  void work(int thread);
  void claim_ranges(int thread);
  void stop();

  // Written by run() alone, between two rounds: a round ends when every worker has left it.
  Loop loop_{};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> busy_{0};
  std::atomic<bool> has_thrown_{false};
  std::exception_ptr thrown_;  // the first of this round; written by whoever set has_thrown_
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace replayssm
