// Internal to the CUDA paths: the lanes of a warp, and running sums over them.
#pragma once

namespace replayssm {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Of the values of the lanes up to and with this one. The warp together.
template <typename T>
__device__ inline T sum_up_to_lane(T value) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

}  // namespace replayssm
