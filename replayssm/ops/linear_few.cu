// Products of a few tokens: blocks stream rows of weights past the tokens' inputs, which stay in the first-level cache
// or, where each block has made them by a norm, in its shared memory.
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
constexpr int kNormPacks = 4;                // that a lane makes of a token's inputs, at most
constexpr int kNormWarps = kWarps * kNormPacks;
static_assert(kNormWarps * kStepInputs == kLargestFewNorm);

// What becomes of a product's sums.
enum class FewEnd { kPlain, kAdded, kSwiGlu, kRelu2 };

template <typename Out>
struct FewArgs {
  BasicLinear<Bf16, Out> linear;
  NormVectors<float, float, Bf16> norm;  // without one of size 0
  float inverse_size;
  FewEnd end;
  int64_t results;  // of a token
  // That a group of rows gives: one a row or, of a gate's rows and those it multiplies, one of two.
  int group_results;
  int64_t second_rows;  // from a group's first two rows to its other two
  int groups;           // that a block has
  int part_inputs;      // that a warp has of a row, a multiple of kStepInputs
};

// Of a block; behind it lie the inputs that it has made by a norm, [kTokens, inputs].
template <int kTokens>
struct FewShared {
  uint4 stages[kWarps][kStages][kRows * 32];
  float partial[kWarps][kTokens * kRows];
  float squares[kTokens][kNormWarps];
};

// The packs of weights that come to a warp, one after the other: of the block's groups of rows, and within one from the
// first of the warp's inputs on. A lane copies what it reads itself.
struct WeightStream {
  const Bf16* row;       // the next group's first
  int64_t results_left;  // from there on, of a token
  int group_results;
  int groups_left;     // of the block's
  int64_t inputs;      // of a row
  int64_t second;      // from a group's first two rows to its other two
  int first, at, end;  // of this lane's packs: a group's first, the next, past the last

  __device__ void load(uint4* to, const Bf16* anywhere) const {
    const bool is_there = groups_left > 0 && at < end;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int result = r < kRows / 2 ? r : r + group_results - kRows;
      const bool has_row = is_there && result < results_left;
      const Bf16* const from = row + r % (kRows / 2) * inputs + r / (kRows / 2) * second;
      copy_chunk_async(to + r * 32, has_row ? from + at : anywhere, has_row);
    }
    commit_copies();
  }
  __device__ void advance(bool is_group_done) {
    at += kStepInputs;
    if (!is_group_done) return;
    at = first;
    row += group_results * inputs;
    results_left -= group_results;
    --groups_left;
  }
};

// The inputs that a lane makes by rms_norm, the very packs that it then multiplies. A step of a warp takes what a warp
// of rms_norm_kernel has, lane by lane, so squares are added in that kernel's order. (Where it has sixteen lanes, the
// others here add zeros.)
template <int kTokens>
struct FewNorm {
  const NormVectors<float, float, Bf16>& args;
  int begin, end;  // of the warp's inputs
  float weight[kNormPacks][kPackSize];

  __device__ int pack(int p) const { return begin + p * kStepInputs + static_cast<int>(threadIdx.x % 32) * kPackSize; }

  // The weights, which wait for nothing.
  __device__ void load_weights() {
#pragma unroll
    for (int p = 0; p < kNormPacks; ++p)
      if (pack(p) < end) load_constants(args.weight + pack(p), PackPlace::kAligned, kPackSize, weight[p]);
  }

  // Every thread of the block takes part; a lane may read in `to` what it has made itself.
  __device__ void make(float inverse_size, float (&squares)[kTokens][kNormWarps], Bf16* to) const {
    Pack<float> x[kTokens][kNormPacks];
#pragma unroll
    for (int n = 0; n < kTokens; ++n)
#pragma unroll
      for (int p = 0; p < kNormPacks; ++p) {
        x[n][p] = zero_pack<float>();
        if (pack(p) < end) x[n][p] = load_pack(args.x + n * args.x_stride + pack(p), PackPlace::kAligned, kPackSize);
      }
#pragma unroll
    for (int n = 0; n < kTokens; ++n)
#pragma unroll
      for (int p = 0; p < kNormPacks; ++p) {
        float values[kPackSize];
#pragma unroll
        for (int i = 0; i < kPackSize; ++i) values[i] = element(x[n][p], i);
        const float sum = sum_lanes<32>(sum_of_squares(values));
        const int first = begin + p * kStepInputs;
        if (first < end && threadIdx.x % 32 == 0) squares[n][first / kStepInputs] = sum;
      }
    __syncthreads();
    const int warps = (args.size + kStepInputs - 1) / kStepInputs;
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      const float factor = inverse_rms(sum_warps(squares[n], warps), inverse_size, args.eps);
#pragma unroll
      for (int p = 0; p < kNormPacks; ++p) {
        float values[kPackSize];
#pragma unroll
        for (int i = 0; i < kPackSize; ++i)
          values[i] = plain_norm(element(x[n][p], i), factor, weight[p][i], args.weight_offset);
        if (pack(p) < end)
          store_pack(pack_of<Bf16>(values), to + n * args.size + pack(p), PackPlace::kAligned, kPackSize);
      }
    }
  }
};

// Grid: as many blocks as give each `groups` groups of rows; blocks of kWarps warps, which own a part of the inputs
// each.
template <int kTokens, bool kHasNorm, typename Out>
__global__ __launch_bounds__(32 * kWarps) void linear_few_kernel(const __grid_constant__ FewArgs<Out> args) {
  extern __shared__ uint4 few_shared[];
  auto& shared = *reinterpret_cast<FewShared<kTokens>*>(few_shared);
  const BasicLinear<Bf16, Out>& linear = args.linear;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t first_result = int64_t{blockIdx.x} * args.groups * args.group_results;
  const int begin = warp * args.part_inputs, end = min(begin + args.part_inputs, static_cast<int>(linear.inputs));
  const int steps = max(1, (end - begin + kStepInputs - 1) / kStepInputs);
  WeightStream stream{.row = linear.weight + first_result * linear.inputs,
                      .results_left = args.results - first_result,
                      .group_results = args.group_results,
                      .groups_left = args.groups,
                      .inputs = linear.inputs,
                      .second = args.second_rows * linear.inputs,
                      .first = begin + lane * kPackSize,
                      .at = begin + lane * kPackSize,
                      .end = end};
  int loaded = 0;  // steps of the group that is being loaded
  const auto load = [&](int stage) {
    stream.load(shared.stages[warp][stage] + lane, linear.weight);
    loaded = loaded + 1 == steps ? 0 : loaded + 1;
    stream.advance(loaded == 0);
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) load(stage);
  const Bf16* inputs = linear.x;
  int64_t inputs_stride = linear.x_stride;
  if constexpr (kHasNorm) {
    Bf16* const made = reinterpret_cast<Bf16*>(&shared + 1);
    FewNorm<kTokens> norm{.args = args.norm, .begin = begin, .end = end};
    norm.load_weights();
    wait_for_previous();
    let_next_start();
    norm.make(args.inverse_size, shared.squares, made);
    inputs = made;
    inputs_stride = args.norm.size;
  } else {
    wait_for_previous();
    let_next_start();
  }

  int stage = 0;
  for (int group = 0; group < args.groups; ++group) {
    float sums[kTokens][kRows] = {};
    for (int step = 0, at = begin + lane * kPackSize; step < steps; ++step, at += kStepInputs) {
      load((stage + kStages - 1) % kStages);
      Pack<Bf16> x[kTokens];
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        x[n] = zero_pack<Bf16>();
        if (at < end) x[n].quads[0] = *reinterpret_cast<const uint4*>(inputs + n * inputs_stride + at);
      }
      wait_for_all_copies_but<kStages - 1>();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Pack<Bf16> w;
        w.quads[0] = shared.stages[warp][stage][r * 32 + lane];
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
        if (lane == 0) shared.partial[warp][n * kRows + r] = sum;
      }
    __syncthreads();
    const int n = lane / kRows, of_group = lane % kRows;
    const int64_t result = first_result + group * args.group_results + of_group;
    if (warp == 0 && n < kTokens && of_group < args.group_results && result < args.results) {
      const auto sum_of = [&](int row) {
        float sum = shared.partial[0][row];
        for (int other = 1; other < kWarps; ++other) sum = sum + shared.partial[other][row];
        return sum;
      };
      Out* const y = linear.y + n * linear.y_stride + result;
      float value = sum_of(lane);
      if (args.end == FewEnd::kAdded) value = to_number(*y) + value;
      if (args.end == FewEnd::kRelu2) value = relu2(as_kept<Out>(value));
      if (args.end == FewEnd::kSwiGlu)
        value = silu_product(as_kept<Out>(value), as_kept<Out>(sum_of(lane + kRows / 2)));
      store_number(y, value);
    }
    __syncthreads();
  }
}

template <int kTokens, bool kHasNorm, typename Out>
void launch_few(const BasicLinear<Bf16, Out>& linear, CudaDevice& device) {
  const auto kernel = linear_few_kernel<kTokens, kHasNorm, Out>;
  const bool is_gated = linear.activation == Activation::kSwiGlu;
  FewArgs<Out> args = {.linear = linear,
                       .end = is_gated            ? FewEnd::kSwiGlu
                              : linear.activation ? FewEnd::kRelu2
                              : linear.is_added   ? FewEnd::kAdded
                                                  : FewEnd::kPlain,
                       .results = is_gated ? linear.outputs / 2 : linear.outputs,
                       .group_results = is_gated ? kRows / 2 : kRows,
                       .second_rows = is_gated ? linear.outputs / 2 : kRows / 2};
  size_t shared_bytes = sizeof(FewShared<kTokens>);
  if constexpr (kHasNorm) {
    args.norm = vectors_of(*linear.norm);
    args.inverse_size = 1.0f / static_cast<float>(linear.inputs);
    shared_bytes += static_cast<size_t>(kTokens * linear.inputs) * sizeof(Bf16);
  }
  // All blocks at once: a group more for some costs less than a second wave.
  const int64_t room =
      int64_t{resident_blocks("linear", kernel, 32 * kWarps, shared_bytes)} * device.properties().multiprocessors;
  const int64_t groups = ceiling_quotient(args.results, int64_t{args.group_results});
  args.groups = static_cast<int>(std::max<int64_t>(1, ceiling_quotient(groups, room)));
  args.part_inputs = static_cast<int>(ceiling_quotient(linear.inputs, int64_t{kStepInputs} * kWarps) * kStepInputs);
  launch("linear", kernel, dim3(check_blocks("linear", ceiling_quotient(groups, int64_t{args.groups}))), 32 * kWarps,
         shared_bytes, args, device, Launch::kOverlapping);
}

template <int kTokens, typename Out>
void launch_few(const BasicLinear<Bf16, Out>& linear, CudaDevice& device) {
  if (linear.norm != nullptr)
    launch_few<kTokens, true>(linear, device);
  else
    launch_few<kTokens, false>(linear, device);
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
