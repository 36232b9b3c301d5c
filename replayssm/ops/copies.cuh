// Internal to the CUDA kernels of states and caches: copies from memory to shared memory that run beside a warp's work:
// those that each lane makes and awaits, and those of an Arrival. These the copy engine makes on Hopper and later, a
// piece an instruction; before, the lanes of a warp do, 16 bytes each.
#pragma once

#include <cstdint>

namespace replayssm {

#if __CUDA_ARCH__ >= 900
inline constexpr bool kHasCopyEngine = true;
#else
inline constexpr bool kHasCopyEngine = false;
#endif

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ inline void copy_word_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// 4, 8 or 16 bytes.
template <int kBytes>
__device__ inline void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global), "n"(kBytes)
               : "memory");
}
// 16 bytes, or zeros.
__device__ inline void copy_chunk_async(uint32_t shared, const void* global, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ inline void copy_chunk_async(void* shared, const void* global, bool is_there) {
  copy_chunk_async(shared_address(shared), global, is_there);
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// All but the last kGroups groups of copies that this thread has committed.
template <int kGroups>
__device__ inline void wait_for_all_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Makes shared memory as it is now known to the copy engine, which may write there next.
__device__ inline void let_engine_see() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Until a barrier's phase `phase`, the one that is going on or the last that ended, has ended.
__device__ inline void wait_for_phase(uint32_t barrier, int phase) {
  uint32_t is_there = 0;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_there)
                 : "r"(barrier), "r"(phase & 1)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_there)
                 : "r"(barrier), "r"(phase & 1)
                 : "memory");
#endif
  } while (is_there == 0);
}

// A barrier in shared memory at which some threads arrive and others wait; a phase ends when all have arrived.
class PhaseBarrier {
 public:
  __device__ void initialise(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier_)), "r"(arrivals) : "memory");
  }
  __device__ void arrive() {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier_))
                 : "memory");
  }
  // When the copies that this thread has made until now are there.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier_)) : "memory");
  }
  __device__ void wait(int phase) const { wait_for_phase(shared_address(&barrier_), phase); }

 private:
  uint64_t barrier_;
};

// Where a warp's copies are awaited, round by round; lives in shared memory. In a round the warp calls begin with the
// bytes that copy will be given in all, then copy and, if kHasWords, copy_word_async any number of times, then end.
template <bool kHasWords>
class Arrival {
  static constexpr bool kLanesArrive = kHasWords || !kHasCopyEngine;

 public:
  __device__ void initialise() {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier_)),
                 "r"((kHasCopyEngine ? 1 : 0) + (kLanesArrive ? 32 : 0)));
  }

  // The warp together.
  __device__ void begin(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier_)), "r"(bytes)
                   : "memory");
#endif
  }

  // Any lanes, each a piece of its own: a multiple of 16 bytes, aligned to 16.
  __device__ void copy(void* shared, const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(&barrier_))
                 : "memory");
#else
    for (uint32_t at = 0; at < bytes; at += 16)
      copy_chunk_async(static_cast<char*>(shared) + at, static_cast<const char*>(global) + at, true);
#endif
  }

  // The warp together.
  __device__ void end() {
    if constexpr (kLanesArrive)
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier_)) : "memory");
  }

  // Any threads: until round `round`, the last that has begun, is there.
  __device__ void wait(int round) const {
    wait_for_phase(shared_address(&barrier_), round);
  }

 private:
  uint64_t barrier_;
};

}  // namespace replayssm
