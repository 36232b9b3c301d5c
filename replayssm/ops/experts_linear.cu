// The experts' own matrices on the GPU: a block multiplies a tile of one expert's outputs with a tile of its choices.
// Both stream through shared memory, several steps of the sum in flight, so that a weight is read once for all choices
// of a tile: with few choices an expert, reading the weights is what the op costs.
#include <algorithm>
#include <type_traits>

#include "replayssm/ops/checks.h"
#include "replayssm/ops/copies.cuh"
#include "replayssm/ops/experts.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/pack.cuh"
#include "replayssm/ops/scan.cuh"
#include "replayssm/ops/tensor_cores.cuh"

namespace replayssm {
namespace {

constexpr int kRowBytes = 128;  // of a row of weights or of x in a step of the sum
constexpr int kRowChunks = kRowBytes / 16;

// The shape of a block: a warp owns 32 outputs and kWarpChoices choices. A sum's bits do not depend on it.
template <int kChoiceWarps_, int kWarpChoices_, int kStages_>
struct LinearShape {
  static constexpr int kOutputWarps = 4, kWarpOutputs = 32, kOutputs = kOutputWarps * kWarpOutputs;
  static constexpr int kWarpChoices = kWarpChoices_, kChoices = kChoiceWarps_ * kWarpChoices;
  static constexpr int kThreads = 32 * kOutputWarps * kChoiceWarps_;
  static constexpr int kBlocks = 2;         // that a multiprocessor is to have room for
  static constexpr int kStages = kStages_;  // steps of the sum on their way at once, and the one that is looked at
  static constexpr int kRowsAtOnce = kThreads / kRowChunks;  // that the threads load, a chunk each
  static constexpr int kStageBytes = (kOutputs + kChoices) * kRowBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kOutputs % kRowsAtOnce == 0 && kChoices % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
};
using FewChoices = LinearShape<1, 32, 4>;
using ManyChoices = LinearShape<2, 64, 3>;

// Where chunk `chunk` of a row lies in a stage: eight rows of one chunk fill the banks.
__device__ inline int chunk_offset(int row, int chunk) {
  return row * kRowBytes + (chunk ^ row % 8) * 16;
}

template <typename T>
struct ExpertsLinearArgs {
  ExpertsLinear<T> linear;
  PackPlace from, to;  // of the chunks of weights and x; of the packs of y
};

// Choices first .. first + count - 1, of one expert.
struct ChoiceTile {
  int expert, first, count;
};

// Number `index` of the tiles of at most kChoices choices, all experts' in order; without choices past the last. The
// warp together.
template <int kChoices>
__device__ ChoiceTile find_tile(const int32_t* begin, int experts, int index) {
  const auto tiles_of = [&](int e) { return (begin[e + 1] - begin[e] + kChoices - 1) / kChoices; };
  const int lane = static_cast<int>(threadIdx.x % 32), experts_a_lane = (experts + 31) / 32;
  int tiles = 0;
#pragma unroll 4
  for (int i = 0; i < experts_a_lane; ++i)
    if (lane * experts_a_lane + i < experts) tiles += tiles_of(lane * experts_a_lane + i);
  const int up_to = sum_up_to_lane(tiles);
  const unsigned past = __ballot_sync(kAllLanes, up_to > index);
  if (past == 0) return {0, 0, 0};
  const int owner = __ffs(static_cast<int>(past)) - 1;
  index -= __shfl_sync(kAllLanes, up_to - tiles, owner);
  // Of the owner's experts a lane counts every 32nd.
  const int last = min(experts, (owner + 1) * experts_a_lane);
  for (int first = owner * experts_a_lane;; first += 32) {
    const int own = first + lane < last ? tiles_of(first + lane) : 0;
    const int own_up_to = sum_up_to_lane(own);
    const unsigned own_past = __ballot_sync(kAllLanes, own_up_to > index);
    if (own_past != 0) {
      const int found = __ffs(static_cast<int>(own_past)) - 1, expert = first + found;
      index -= __shfl_sync(kAllLanes, own_up_to - own, found);
      const int choice = begin[expert] + index * kChoices;
      return {expert, choice, min(kChoices, begin[expert + 1] - choice)};
    }
    index -= __shfl_sync(kAllLanes, own_up_to, 31);
  }
}

// 16 bytes.
template <typename T>
struct alignas(16) Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  T elements[kSize];
};

// What a thread brings to every stage: a chunk of some rows of the weights and of x, zeros where there are none.
template <typename T, typename Shape>
class StageLoader {
 public:
  __device__ StageLoader(const ExpertsLinearArgs<T>& launched, const ChoiceTile& tile, int first_output, char* stages)
      : inputs_(static_cast<int>(launched.linear.inputs)), place_(launched.from), stages_(stages) {
    const ExpertsLinear<T>& args = launched.linear;
    const int thread = static_cast<int>(threadIdx.x), row = thread / kRowChunks;
    chunk_ = thread % kRowChunks;
    offset_ = chunk_offset(row, chunk_);
    outputs_ = static_cast<int>(min(args.outputs - first_output, int64_t{Shape::kOutputs})) - row;
    weight_ = args.weight + (tile.expert * args.outputs + first_output + row) * args.inputs;
    safe_ = args.weight;
    // Warps look at sixteen choices at once.
    choices_ = (tile.count + 15) / 16 * 16 - row;
#pragma unroll
    for (int i = 0; i < kXRows; ++i) {
      const int choice = row + i * Shape::kRowsAtOnce;
      x_[i] = nullptr;
      if (choice >= tile.count) continue;
      const int64_t at = args.token == nullptr ? tile.first + choice : args.token[tile.first + choice];
      x_[i] = args.x + at * args.x_stride;
    }
  }

  __device__ static char* stage(char* stages, int step) {
    return stages + step % Shape::kStages * Shape::kStageBytes;
  }

  __device__ void load(int step) const {
    const int at = step * kDepth + chunk_ * Chunk<T>::kSize, count = inputs_ - at;
    char* const to = stage(stages_, step) + offset_;
#pragma unroll
    for (int i = 0; i < kWeightRows; ++i) {
      const int row = i * Shape::kRowsAtOnce;
      load_chunk(to + row * kRowBytes, weight_ + static_cast<int64_t>(row) * inputs_ + at, row < outputs_ ? count : 0);
    }
#pragma unroll
    for (int i = 0; i < kXRows; ++i) {
      const int row = i * Shape::kRowsAtOnce;
      if (row < choices_)
        load_chunk(to + (Shape::kOutputs + row) * kRowBytes, x_[i] + at, x_[i] != nullptr ? count : 0);
    }
  }

  static constexpr int kDepth = kRowBytes / sizeof(T);

 private:
  static constexpr int kWeightRows = Shape::kOutputs / Shape::kRowsAtOnce;
  static constexpr int kXRows = Shape::kChoices / Shape::kRowsAtOnce;

  // The first `count` elements.
  __device__ void load_chunk(char* to, const T* from, int count) const {
    if (place_ == PackPlace::kAligned) {
      copy_chunk_async(to, count > 0 ? from : safe_, count > 0);
      return;
    }
    Chunk<T> chunk{};
#pragma unroll
    for (int i = 0; i < Chunk<T>::kSize; ++i)
      if (i < count) chunk.elements[i] = from[i];
    *reinterpret_cast<Chunk<T>*>(to) = chunk;
  }

  int inputs_;
  PackPlace place_;
  char* stages_;
  int chunk_, offset_;
  int outputs_, choices_;  // rows that are there or looked at, from this thread's first on
  const T* weight_;
  const T* safe_;  // an address that may be named where nothing is read
  const T* x_[kXRows];
};

// A block's outputs of a choice in shared memory lie side by side; a gap between choices keeps the warps' stores apart.
template <typename T, typename Shape>
constexpr int kOutputRow = Shape::kOutputs + 16 / sizeof(T);

// A warp's sums on tensor cores. In a product's layout a lane has two of its rows (outputs), lane / 4 and 8 more, and
// of each 8 columns (choices) two from lane % 4 * 2 on.
template <typename T, typename Shape>
class TensorSums {
 public:
  __device__ explicit TensorSums(int count)
      : blocks_(min(kBlocks, (count - choice_warp_ * Shape::kWarpChoices + 15) / 16)) {
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[m][n][i] = 0.0f;
  }

  __device__ void add(const char* stage) {
    const uint32_t weights = shared_address(stage) + (output_warp_ * Shape::kWarpOutputs + lane_ % 16) * kRowBytes;
    const uint32_t x = shared_address(stage) +
                       (Shape::kOutputs + choice_warp_ * Shape::kWarpChoices + lane_ % 8 + lane_ / 16 * 8) * kRowBytes;
    const int weight_chunk = lane_ / 16 ^ lane_ % 8, x_chunk = lane_ / 8 % 2 ^ lane_ % 8;
#pragma unroll
    for (int k = 0; k < kRowChunks / 2; k += kDepths) {
      uint32_t a[kDepths][kRows][4];
#pragma unroll
      for (int d = 0; d < kDepths; ++d)
#pragma unroll
        for (int m = 0; m < kRows; ++m)
          load_matrices(a[d][m], weights + m * 16 * kRowBytes + (weight_chunk ^ 2 * (k + d)) * 16);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        if (n >= blocks_) continue;
#pragma unroll
        for (int d = 0; d < kDepths; ++d) {
          uint32_t b[4];
          load_matrices(b, x + n * 16 * kRowBytes + (x_chunk ^ 2 * (k + d)) * 16);
#pragma unroll
          for (int m = 0; m < kRows; ++m) {
            multiply_add(sums_[m][2 * n], a[d][m], b[0], b[1], T());
            multiply_add(sums_[m][2 * n + 1], a[d][m], b[2], b[3], T());
          }
        }
      }
    }
  }

  __device__ void store(T* outputs) const {
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n) {
      if (n >= 2 * blocks_) continue;
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int choice = choice_warp_ * Shape::kWarpChoices + n * 8 + lane_ % 4 * 2 + i % 2;
          const int output = output_warp_ * Shape::kWarpOutputs + m * 16 + lane_ / 4 + i / 2 * 8;
          store_number(outputs + choice * kOutputRow<T, Shape> + output, sums_[m][n][i]);
        }
    }
  }

 private:
  static constexpr int kRows = Shape::kWarpOutputs / 16;
  static constexpr int kBlocks = Shape::kWarpChoices / 16;
  static constexpr int kDepths = 2;  // sixteens of inputs whose weights are in registers

  const int lane_ = static_cast<int>(threadIdx.x % 32);
  const int output_warp_ = static_cast<int>(threadIdx.x / 32) % Shape::kOutputWarps;
  const int choice_warp_ = static_cast<int>(threadIdx.x / 32) / Shape::kOutputWarps;
  const int blocks_;  // sixteens of the warp's choices that are there
  float sums_[kRows][2 * kBlocks][4];
};

// A warp's sums in FP32. A lane has each fourth output from lane / 8 on, and each eighth choice from lane % 8 on. The
// products of a stage are summed for themselves first: a long sum of few terms at a time loses less.
template <typename Shape>
class FloatSums {
 public:
  __device__ explicit FloatSums(int count)
      : blocks_(min(kBlocks, (count - choice_warp_ * Shape::kWarpChoices + 7) / 8)) {
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) totals_[m][n] = 0.0f;
  }

  __device__ void add(const char* stage) {
    float sums[kRows][kBlocks] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < kRowChunks; ++chunk) {
      float4 x[kBlocks];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        if (n < blocks_) x[n] = numbers_at(stage, Shape::kOutputs + choice(n), chunk);
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        const float4 weight = numbers_at(stage, output(m), chunk);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          if (n >= blocks_) continue;
          float sum = sums[m][n];
          sum = __fmaf_rn(weight.x, x[n].x, sum);
          sum = __fmaf_rn(weight.y, x[n].y, sum);
          sum = __fmaf_rn(weight.z, x[n].z, sum);
          sums[m][n] = __fmaf_rn(weight.w, x[n].w, sum);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) totals_[m][n] = totals_[m][n] + sums[m][n];
  }

  __device__ void store(float* outputs) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int m = 0; m < kRows; ++m) outputs[choice(n) * kOutputRow<float, Shape> + output(m)] = totals_[m][n];
  }

 private:
  static constexpr int kRows = Shape::kWarpOutputs / 4;
  static constexpr int kBlocks = Shape::kWarpChoices / 8;

  __device__ int output(int m) const {
    return output_warp_ * Shape::kWarpOutputs + lane_ / 8 + 4 * m;
  }
  __device__ int choice(int n) const {
    return choice_warp_ * Shape::kWarpChoices + lane_ % 8 + 8 * n;
  }
  __device__ static float4 numbers_at(const char* stage, int row, int chunk) {
    return *reinterpret_cast<const float4*>(stage + chunk_offset(row, chunk));
  }

  const int lane_ = static_cast<int>(threadIdx.x % 32);
  const int output_warp_ = static_cast<int>(threadIdx.x / 32) % Shape::kOutputWarps;
  const int choice_warp_ = static_cast<int>(threadIdx.x / 32) / Shape::kOutputWarps;
  const int blocks_;  // eights of the warp's choices that are there
  float totals_[kRows][kBlocks];
};

// Grid: tiles of choices (neighbours share an expert's weights in the cache), then tiles of outputs. A thread loads its
// chunks of every stage; a warp owns its share of the sums.
template <typename T, typename Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void experts_linear_kernel(
    const __grid_constant__ ExpertsLinearArgs<T> launched) {
  extern __shared__ uint4 linear_shared[];
  using Sums = std::conditional_t<std::is_same_v<T, float>, FloatSums<Shape>, TensorSums<T, Shape>>;
  using Loader = StageLoader<T, Shape>;
  static_assert(Shape::kChoices * kOutputRow<T, Shape> * sizeof(T) <= Shape::kSharedBytes);
  const ExpertsLinear<T>& args = launched.linear;
  wait_for_previous();
  let_next_start();
  const ChoiceTile tile = find_tile<Shape::kChoices>(args.begin, args.experts, static_cast<int>(blockIdx.x));
  if (tile.count <= 0) return;
  const int first_output = static_cast<int>(blockIdx.y) * Shape::kOutputs;
  char* const stages = reinterpret_cast<char*>(linear_shared);
  const Loader loader(launched, tile, first_output, stages);
  const int steps = static_cast<int>((args.inputs + Loader::kDepth - 1) / Loader::kDepth);
#pragma unroll
  for (int step = 0; step < Shape::kStages - 1; ++step) {
    if (step < steps) loader.load(step);
    commit_copies();
  }
  Sums sums(tile.count);
  for (int step = 0; step < steps; ++step) {
    wait_for_all_copies_but<Shape::kStages - 2>();
    __syncthreads();
    const int next = step + Shape::kStages - 1;
    if (next < steps) loader.load(next);
    commit_copies();
    sums.add(Loader::stage(stages, step));
  }
  __syncthreads();  // the stages have been looked at
  T* const outputs = reinterpret_cast<T*>(stages);
  sums.store(outputs);
  __syncthreads();
  constexpr int kRowPacks = Shape::kOutputs / kPackSize;
  for (int i = static_cast<int>(threadIdx.x); i < tile.count * kRowPacks; i += Shape::kThreads) {
    const int choice = i / kRowPacks, at = i % kRowPacks * kPackSize;
    const int64_t output = first_output + at;
    if (output >= args.outputs) continue;
    const auto pack = *reinterpret_cast<const Pack<T>*>(outputs + choice * kOutputRow<T, Shape> + at);
    store_pack(pack, args.y + (tile.first + choice) * args.y_stride + output, launched.to,
               static_cast<int>(min(args.outputs - output, int64_t{kPackSize})));
  }
}

template <typename T>
ExpertsLinearArgs<T> places_of(const ExpertsLinear<T>& args) {
  const auto place = [](bool is_whole, const void* array, const void* other, int64_t stride) {
    const auto bits = reinterpret_cast<uintptr_t>(array) | reinterpret_cast<uintptr_t>(other) |
                      static_cast<uintptr_t>(stride) * sizeof(T);
    return is_whole && bits % 16 == 0 ? PackPlace::kAligned : PackPlace::kAnywhere;
  };
  return {args, place(args.inputs % Chunk<T>::kSize == 0, args.weight, args.x, args.x_stride),
          place(args.outputs % kPackSize == 0, args.y, nullptr, args.y_stride)};
}

template <typename Shape, typename T>
void launch_experts_linear(const ExpertsLinear<T>& args, CudaDevice& device) {
  // At most: each expert's last tile may have one choice alone, the others are full.
  const int64_t chosen = std::min<int64_t>(args.experts, args.choices);
  const int64_t tiles = chosen + (args.choices - chosen) / Shape::kChoices;
  const dim3 grid(check_blocks("experts_linear", tiles),
                  static_cast<unsigned>(ceiling_quotient(args.outputs, Shape::kOutputs)));
  launch("experts_linear", experts_linear_kernel<T, Shape>, grid, Shape::kThreads, Shape::kSharedBytes, places_of(args),
         device, Launch::kOverlapping);
}

}  // namespace

template <typename T>
void experts_linear(const ExpertsLinear<T>& args, CudaDevice& device) {
  constexpr int64_t kMostInputs = int64_t{1} << 30;
  constexpr int64_t kMostOutputs = int64_t{65535} * FewChoices::kOutputs;  // of a grid
  check_cuda_size("experts_linear", "choices", args.choices, 0, kMaxCudaChoices);
  check_cuda_size("experts_linear", "experts", args.experts, 1, kMaxCudaExperts);
  check_cuda_size("experts_linear", "inputs", args.inputs, 1, kMostInputs);
  check_cuda_size("experts_linear", "outputs", args.outputs, 1, kMostOutputs);
  if (args.choices == 0) return;
  require(!has_null({args.begin, args.weight, args.x, args.y}),
          "experts_linear: begin, weight, x and y must not be null");
  require(args.x_stride >= args.inputs && args.y_stride >= args.outputs,
          "experts_linear: expected x_stride >= {} and y_stride >= {}, got {} and {}", args.inputs, args.outputs,
          args.x_stride, args.y_stride);
  check_alignment("experts_linear", sizeof(int32_t), {{"begin", args.begin}, {"token", args.token}});
  check_alignment("experts_linear", sizeof(T), {{"weight", args.weight}, {"x", args.x}, {"y", args.y}});
  if constexpr (!std::is_same_v<T, float>) {
    // A tile has room for more than twice the mean of an expert's choices: most experts then have one.
    const bool is_many = 2 * args.choices > (FewChoices::kChoices - 8) * int64_t{args.experts};
    if (is_many) return launch_experts_linear<ManyChoices>(args, device);
  }
  launch_experts_linear<FewChoices>(args, device);
}

template void experts_linear(const ExpertsLinear<float>&, CudaDevice&);
template void experts_linear(const ExpertsLinear<Bf16>&, CudaDevice&);
template void experts_linear(const ExpertsLinear<Fp16>&, CudaDevice&);

}  // namespace replayssm
