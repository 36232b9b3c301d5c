// Products of a few tokens: blocks stream rows of weights past the tokens' inputs, which stay in the first-level cache.
#include "replayssm/ops/linear_few.cuh"

#include <algorithm>

#include "replayssm/ops/checks.h"
#include "replayssm/ops/copies.cuh"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/norm.cuh"
#include "replayssm/ops/pack.cuh"

namespace replayssm {
namespace {

// The warps of a block share out a row's inputs: with warps that had rows of their own a matrix of 2560 rows gave a
// multiprocessor too few of them (an H200 read 2.5 TB/s of 2560 x 9216, so 3.7). Four rows together and four packs of
// each on their way are as fast as, or faster than, one or two rows and six to sixteen packs.
constexpr int kWarps = 4;
constexpr int kRows = 4;
constexpr int kStages = 4;
constexpr int kStepInputs = 32 * kPackSize;  // that a warp takes at once

template <typename Out>
struct FewArgs {
  BasicLinear<Bf16, Out> linear;
  int groups;       // of kRows rows, that a block has
  int part_inputs;  // that a warp has of a row, a multiple of kStepInputs
};

// The packs of weights that come to a warp, one after the other: of the block's groups of rows, and within one from the
// first of the warp's inputs on. A lane copies what it reads itself.
struct WeightStream {
  const Bf16* row;     // the next group's first
  int64_t rows_left;   // from there on, of the matrix
  int groups_left;     // of the block's
  int64_t inputs;      // of a row
  int first, at, end;  // of this lane's packs: a group's first, the next, past the last

  __device__ void load(uint4* to, const Bf16* anywhere) const {
    const bool is_there = groups_left > 0 && at < end;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool has_row = is_there && r < rows_left;
      copy_chunk_async(to + r * 32, has_row ? row + r * inputs + at : anywhere, has_row);
    }
    commit_copies();
  }
  __device__ void advance(bool is_group_done) {
    at += kStepInputs;
    if (!is_group_done) return;
    at = first;
    row += kRows * inputs;
    rows_left -= kRows;
    --groups_left;
  }
};

// Grid: as many blocks as give each `groups` groups of rows; blocks of kWarps warps, which own a part of the inputs
// each.
template <int kTokens, typename Out>
__global__ __launch_bounds__(32 * kWarps) void linear_few_kernel(const __grid_constant__ FewArgs<Out> args) {
  __shared__ uint4 stages[kWarps][kStages][kRows * 32];
  __shared__ float partial[kWarps][kTokens * kRows];
  const BasicLinear<Bf16, Out>& linear = args.linear;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t first_row = int64_t{blockIdx.x} * args.groups * kRows;
  const int begin = warp * args.part_inputs, end = min(begin + args.part_inputs, static_cast<int>(linear.inputs));
  const int steps = max(1, (end - begin + kStepInputs - 1) / kStepInputs);
  WeightStream stream{.row = linear.weight + first_row * linear.inputs,
                      .rows_left = linear.outputs - first_row,
                      .groups_left = args.groups,
                      .inputs = linear.inputs,
                      .first = begin + lane * kPackSize,
                      .at = begin + lane * kPackSize,
                      .end = end};
  int loaded = 0;  // steps of the group that is being loaded
  const auto load = [&](int stage) {
    stream.load(stages[warp][stage] + lane, linear.weight);
    loaded = loaded + 1 == steps ? 0 : loaded + 1;
    stream.advance(loaded == 0);
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(stage);
  wait_for_previous();
  let_next_start();

  int stage = 0;
  for (int group = 0; group < args.groups; ++group) {
    float sums[kTokens][kRows] = {};
    for (int step = 0, at = begin + lane * kPackSize; step < steps; ++step, at += kStepInputs) {
      load((stage + kStages - 1) % kStages);
      Pack<Bf16> x[kTokens];
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        x[n] = zero_pack<Bf16>();
        if (at < end) x[n].quads[0] = *reinterpret_cast<const uint4*>(linear.x + n * linear.x_stride + at);
      }
      wait_for_all_copies_but<kStages - 1>();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Pack<Bf16> w;
        w.quads[0] = stages[warp][stage][r * 32 + lane];
#pragma unroll
        for (int i = 0; i < kPackSize; ++i)
#pragma unroll
          for (int n = 0; n < kTokens; ++n) sums[n][r] = __fmaf_rn(element(w, i), element(x[n], i), sums[n][r]);
      }
      stage = (stage + 1) % kStages;
    }
#pragma unroll
    for (int n = 0; n < kTokens; ++n)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float sum = sum_lanes<32>(sums[n][r]);
        if (lane == 0) partial[warp][n * kRows + r] = sum;
      }
    __syncthreads();
    const int n = lane / kRows;
    const int64_t row = first_row + group * kRows + lane % kRows;
    if (warp == 0 && n < kTokens && row < linear.outputs) {
      float sum = partial[0][lane];
      for (int other = 1; other < kWarps; ++other) sum = sum + partial[other][lane];
      Out* const y = linear.y + n * linear.y_stride + row;
      store_number(y, linear.is_added ? to_number(*y) + sum : sum);
    }
    __syncthreads();
  }
}

template <int kTokens, typename Out>
void launch_few(const BasicLinear<Bf16, Out>& linear, CudaDevice& device) {
  const auto kernel = linear_few_kernel<kTokens, Out>;
  const int64_t room = int64_t{resident_blocks("linear", kernel, 32 * kWarps, 0)} * device.properties().multiprocessors;
  // All blocks at once: a group more for some costs less than a second wave.
  const int64_t groups = ceiling_quotient(linear.outputs, int64_t{kRows});
  const int64_t of_a_block = std::max<int64_t>(1, ceiling_quotient(groups, room));
  const int64_t part = ceiling_quotient(linear.inputs, int64_t{kStepInputs} * kWarps) * kStepInputs;
  launch("linear", kernel, dim3(check_blocks("linear", ceiling_quotient(groups, of_a_block))), 32 * kWarps, 0,
         FewArgs<Out>{linear, static_cast<int>(of_a_block), static_cast<int>(part)}, device, Launch::kOverlapping);
}

}  // namespace

template <typename Out>
void linear_few(const BasicLinear<Bf16, Out>& args, CudaDevice& device) {
  if (args.tokens == 1)
    launch_few<1>(args, device);
  else
    launch_few<2>(args, device);
}

template void linear_few(const BasicLinear<Bf16, Bf16>&, CudaDevice&);
template void linear_few(const BasicLinear<Bf16, float>&, CudaDevice&);

}  // namespace replayssm
