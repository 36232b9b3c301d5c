// Mixture of experts on the GPU: a warp routes a token, one block sorts the choices, a thread sums a pack of channels.
#include "replayssm/ops/experts.h"

#include "replayssm/ops/checks.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/pack.cuh"
#include "replayssm/ops/scan.cuh"

namespace replayssm {
namespace {

// `top_k` is 1 or more.
void check_choices(const char* op, int64_t tokens, int top_k) {
  require(tokens <= kMaxCudaChoices / top_k, "{}: on a GPU expected at most {} choices, got {} tokens of {}", op,
          kMaxCudaChoices, tokens, top_k);
}

__device__ inline int lane_of_thread() {
  return static_cast<int>(threadIdx.x % 32);
}

__device__ inline double excluded() {
  return -static_cast<double>(INFINITY);
}

// A larger number, none of them NaN or -0, has a larger key.
__device__ inline uint64_t order_key(double number) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(number));
  const uint64_t sign = uint64_t{1} << 63;
  return (bits & sign) != 0 ? ~bits : bits | sign;
}

// Numbers in shared memory that a warp takes by falling size; a lane looks after every 32nd.
class FallingNumbers {
 public:
  __device__ FallingNumbers(double* numbers, int count) : numbers_(numbers), count_(count) { look(); }

  // The place of the largest, of equals the first, which is excluded afterwards. Of those that are not excluded, of
  // which there must be one. The warp together.
  __device__ int take() {
    const uint64_t key = order_key(largest_);
    const auto high = static_cast<uint32_t>(key >> 32), low = static_cast<uint32_t>(key);
    const uint32_t top_high = __reduce_max_sync(kAllLanes, high);
    const uint32_t top_low = __reduce_max_sync(kAllLanes, high == top_high ? low : 0u);
    const bool is_top = high == top_high && low == top_low;
    const auto place =
        static_cast<int>(__reduce_min_sync(kAllLanes, is_top ? static_cast<uint32_t>(place_) : ~uint32_t{0}));
    if (is_top && place == place_) {
      numbers_[place] = excluded();
      look();
    }
    return place;
  }

 private:
  __device__ void look() {
    largest_ = excluded();
#pragma unroll 4
    for (int i = lane_of_thread(); i < count_; i += 32) {
      const double number = numbers_[i];
      if (number > largest_) {
        largest_ = number;
        place_ = i;
      }
    }
  }

  double* numbers_;
  int count_;
  double largest_;
  int place_ = 0;
};

// Writes the scores of a lane's experts.
__device__ void score_experts(const RouteExperts& args, const float* logits, double* scores) {
  const int lane = lane_of_thread();
  if (args.router.scores == RouterScores::kSigmoid) {
#pragma unroll 4
    for (int e = lane; e < args.experts; e += 32) scores[e] = 1.0 / (1.0 + exp(-static_cast<double>(logits[e])));
    return;
  }
  float largest = -INFINITY;
#pragma unroll 4
  for (int e = lane; e < args.experts; e += 32) largest = fmaxf(largest, logits[e]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  double total = 0.0;
#pragma unroll 4
  for (int e = lane; e < args.experts; e += 32) {
    const double score = exp(static_cast<double>(logits[e]) - static_cast<double>(largest));
    scores[e] = score;
    total = total + score;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total = total + __shfl_xor_sync(kAllLanes, total, step);
#pragma unroll 4
  for (int e = lane; e < args.experts; e += 32) scores[e] = scores[e] / total;
}

// Excludes the experts of all groups but the top_groups best; a lane scores every 32nd group. The warp together.
__device__ void keep_best_groups(const RouteExperts& args, double* choice, double* group_scores) {
  const int lane = lane_of_thread(), groups = args.router.groups, size = args.experts / groups;
  for (int g = lane; g < groups; g += 32) {
    double best = excluded(), second = excluded();
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = fmax(second, fmin(best, choice[e]));
      best = fmax(best, choice[e]);
    }
    group_scores[g] = best + second;
  }
  FallingNumbers falling(group_scores, groups);
  for (int i = 0; i < args.router.top_groups; ++i) falling.take();
  __syncwarp();
  // Those that were taken are the best.
  for (int e = lane; e < args.experts; e += 32)
    if (group_scores[e / size] != excluded()) choice[e] = excluded();
}

// Dynamic shared memory of a token's routing.
struct RouteMemory {
  double* scores;        // [E]
  double* choice;        // [E]
  double* group_scores;  // [groups]
  int32_t* chosen;       // [top_k]

  static size_t bytes(const RouteExperts& args) {
    return (2 * args.experts + args.router.groups) * sizeof(double) + args.top_k * sizeof(int32_t);
  }
  __device__ RouteMemory(double* shared, const RouteExperts& args)
      : scores(shared),
        choice(scores + args.experts),
        group_scores(choice + args.experts),
        chosen(reinterpret_cast<int32_t*>(group_scores + args.router.groups)) {}
};

// Grid: a block of one warp a token. A lane owns every 32nd expert.
__global__ __launch_bounds__(32) void route_experts_kernel(const __grid_constant__ RouteExperts args) {
  extern __shared__ double route_shared[];
  const RouteMemory memory(route_shared, args);
  const RouterConfig& router = args.router;
  const int lane = lane_of_thread();
  const auto token = static_cast<int64_t>(blockIdx.x);
  const float* const logits = args.logits + token * args.logits_stride;
  int32_t* const expert = args.expert + token * args.top_k;
  float* const weight = args.weight + token * args.top_k;
  wait_for_previous();
  let_next_start();
  score_experts(args, logits, memory.scores);
  bool is_finite = true;
#pragma unroll 4
  for (int e = lane; e < args.experts; e += 32) {
    const double score = memory.scores[e];
    const double choice = router.has_correction ? score + static_cast<double>(args.correction[e]) : score;
    memory.choice[e] = choice;
    is_finite = is_finite && isfinite(choice) && isfinite(logits[e]);
  }
  if (!__all_sync(kAllLanes, is_finite)) {
    for (int i = lane; i < args.top_k; i += 32) {
      expert[i] = i;
      weight[i] = NAN;
    }
    return;
  }
  __syncwarp();
  if (router.groups > 1) keep_best_groups(args, memory.choice, memory.group_scores);
  FallingNumbers falling(memory.choice, args.experts);
  double sum = 0.0;
  for (int i = 0; i < args.top_k; ++i) {
    const int e = falling.take();
    sum = sum + memory.scores[e];
    if (lane == 0) memory.chosen[i] = e;
  }
  __syncwarp();
  const double divisor = router.is_normalised ? sum + 1e-20 : 1.0;
  for (int i = lane; i < args.top_k; i += 32) {
    const int e = memory.chosen[i];
    expert[i] = e;
    weight[i] = static_cast<float>(router.scale * memory.scores[e] / divisor);
  }
}

constexpr int kPlaceWarps = 16;
constexpr int kPlaceThreads = 32 * kPlaceWarps;
constexpr int kThreadExperts = kMaxCudaExperts / kPlaceThreads;
constexpr int kLaneChoices = 8;  // that a lane asks memory for at once

// Calls visit(i, expert) for the choices first .. last-1, 32 neighbours at a time in rising order, with expert -1 past
// the last. The warp together.
template <typename Visit>
__device__ void for_each_choice(const int32_t* expert, int64_t first, int64_t last, const Visit& visit) {
  for (int64_t begin = first; begin < last; begin += 32 * kLaneChoices) {
    const int64_t own = begin + lane_of_thread();
    int32_t experts[kLaneChoices];
#pragma unroll
    for (int i = 0; i < kLaneChoices; ++i) experts[i] = own + 32 * i < last ? expert[own + 32 * i] : -1;
#pragma unroll
    for (int i = 0; i < kLaneChoices; ++i)
      if (begin + 32 * i < last) visit(own + 32 * i, experts[i]);
  }
}

// Grid: one block. A warp owns a run of the choices, a thread neighbouring experts.
__global__ __launch_bounds__(kPlaceThreads) void place_choices_kernel(const __grid_constant__ PlaceChoices args) {
  // [kPlaceWarps, E]: how many choices of a warp are an expert's, then the place of the warp's next one.
  extern __shared__ int32_t place_shared[];
  __shared__ int32_t warp_sums[kPlaceWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = lane_of_thread(), warp = thread / 32;
  const int experts = args.experts;
  const int64_t choices = args.tokens * args.top_k;
  const int64_t run = (choices + kPlaceThreads - 1) / kPlaceThreads * 32;
  const int64_t first = min(choices, warp * run), last = min(choices, first + run);
  int32_t* const own = place_shared + warp * experts;
  for (int i = thread; i < kPlaceWarps * experts; i += kPlaceThreads) place_shared[i] = 0;
  wait_for_previous();
  let_next_start();
  __syncthreads();
  for_each_choice(args.expert, first, last, [&](int64_t, int32_t expert) {
    if (expert >= 0) atomicAdd(own + expert, 1);
  });
  __syncthreads();
  int32_t sum = 0;
  for (int e = thread * kThreadExperts; e < min(experts, (thread + 1) * kThreadExperts); ++e)
#pragma unroll
    for (int w = 0; w < kPlaceWarps; ++w) sum += place_shared[w * experts + e];
  const int32_t up_to = sum_up_to_lane(sum);
  if (lane == 31) warp_sums[warp] = up_to;
  __syncthreads();
  int32_t place = up_to - sum;
  for (int w = 0; w < warp; ++w) place += warp_sums[w];
  for (int e = thread * kThreadExperts; e < min(experts, (thread + 1) * kThreadExperts); ++e) {
    args.begin[e] = place;
#pragma unroll
    for (int w = 0; w < kPlaceWarps; ++w) {
      const int32_t count = place_shared[w * experts + e];
      place_shared[w * experts + e] = place;
      place += count;
    }
  }
  if (thread == 0) args.begin[experts] = static_cast<int32_t>(choices);
  __syncthreads();
  for_each_choice(args.expert, first, last, [&](int64_t i, int32_t expert) {
    const unsigned others = __match_any_sync(kAllLanes, expert);
    const int before = __popc(others & ((1u << lane) - 1));
    if (expert >= 0) {
      const int32_t at = own[expert] + before;
      args.place[i] = at;
      args.token[at] = static_cast<int32_t>(static_cast<uint32_t>(i) / static_cast<uint32_t>(args.top_k));
    }
    __syncwarp();
    if (expert >= 0 && before == 0) own[expert] += __popc(others);
    __syncwarp();
  });
}

constexpr int kRowsAtOnce = 8;  // of x, that a thread asks memory for at once

template <typename T, typename Out>
struct AddExpertsArgs {
  AddExperts<T, Out> add;
  PackPlace place;
  int tiles;  // of kTileChannels, a token
};

// Grid: one dimension over tokens and, faster, tiles of channels. A thread owns a pack.
template <typename T, typename Out>
__global__ __launch_bounds__(kTileThreads) void add_experts_kernel(
    const __grid_constant__ AddExpertsArgs<T, Out> launched) {
  extern __shared__ int32_t add_shared[];
  const AddExperts<T, Out>& args = launched.add;
  // By ascending expert.
  int32_t* const rows = add_shared;                                    // [top_k]
  float* const weights = reinterpret_cast<float*>(rows + args.top_k);  // [top_k]
  const int thread = static_cast<int>(threadIdx.x);
  const auto token = static_cast<int64_t>(blockIdx.x / static_cast<unsigned>(launched.tiles));
  const int tile = static_cast<int>(blockIdx.x % static_cast<unsigned>(launched.tiles));
  const int64_t first = int64_t{tile} * kTileChannels + thread * kPackSize;
  const int count = static_cast<int>(min(args.size - first, int64_t{kPackSize}));
  wait_for_previous();
  let_next_start();
  const int64_t choices = token * args.top_k;
  for (int i = thread; i < args.top_k; i += kTileThreads) {
    int before = 0;
    if (args.place != nullptr) {
      const int32_t expert = args.expert[choices + i];
      for (int j = 0; j < args.top_k; ++j) before += args.expert[choices + j] < expert ? 1 : 0;
    }
    rows[before] = args.place == nullptr ? static_cast<int32_t>(token) : args.place[choices + i];
    weights[before] = args.weight == nullptr ? 1.0f : args.weight[choices + i];
  }
  __syncthreads();
  if (count <= 0) return;
  float sums[kPackSize] = {};
  for (int begin = 0; begin < args.top_k; begin += kRowsAtOnce) {
    Pack<T> x[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
      if (begin + i < args.top_k)
        x[i] = load_pack(args.x + rows[begin + i] * args.x_stride + first, launched.place, count);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (begin + i >= args.top_k) continue;
      const float weight = weights[begin + i];
#pragma unroll
      for (int c = 0; c < kPackSize; ++c) sums[c] = __fmaf_rn(weight, element(x[i], c), sums[c]);
    }
  }
  const float factor = args.gate == nullptr ? 1.0f : sigmoid(to_number(args.gate[token * args.gate_stride]));
  Out* const to = args.y + token * args.y_stride + first;
  if (args.is_added) {
    const Pack<Out> y = load_pack(to, launched.place, count);
#pragma unroll
    for (int c = 0; c < kPackSize; ++c) sums[c] = __fmaf_rn(factor, sums[c], element(y, c));
  } else {
#pragma unroll
    for (int c = 0; c < kPackSize; ++c) sums[c] = factor * sums[c];
  }
  store_pack(pack_of<Out>(sums), to, launched.place, count);
}

template <typename T, typename Out>
PackPlace place_of(const AddExperts<T, Out>& args) {
  const auto places = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.y) |
                      static_cast<uintptr_t>(args.x_stride) * sizeof(T) |
                      static_cast<uintptr_t>(args.y_stride) * sizeof(Out);
  return args.size % kPackSize == 0 && places % 16 == 0 ? PackPlace::kAligned : PackPlace::kAnywhere;
}

}  // namespace

void route_experts(const RouteExperts& args, CudaDevice& device) {
  check_route_experts(args);
  check_cuda_size("route_experts", "experts", args.experts, 1, kMaxCudaExperts);
  if (args.tokens == 0) return;
  check_alignment("route_experts", sizeof(float),
                  {{"logits", args.logits},
                   {"correction", args.router.has_correction ? args.correction : nullptr},
                   {"expert", args.expert},
                   {"weight", args.weight}});
  launch("route_experts", route_experts_kernel, dim3(check_blocks("route_experts", args.tokens)), 32,
         RouteMemory::bytes(args), args, device, Launch::kOverlapping);
}

void place_choices(const PlaceChoices& args, CudaDevice& device) {
  require(args.tokens >= 0 && args.top_k >= 1, "place_choices: expected tokens >= 0 and top_k >= 1, got {} and {}",
          args.tokens, args.top_k);
  check_cuda_size("place_choices", "experts", args.experts, 1, kMaxCudaExperts);
  check_choices("place_choices", args.tokens, args.top_k);
  require(args.begin != nullptr, "place_choices: begin must not be null");
  require(args.tokens == 0 || !has_null({args.expert, args.token, args.place}),
          "place_choices: expert, token and place must not be null");
  check_alignment("place_choices", sizeof(int32_t),
                  {{"expert", args.expert}, {"begin", args.begin}, {"token", args.token}, {"place", args.place}});
  launch("place_choices", place_choices_kernel, dim3(1), kPlaceThreads,
         sizeof(int32_t) * kPlaceWarps * static_cast<size_t>(args.experts), args, device, Launch::kOverlapping);
}

template <typename T, typename Out>
void add_experts(const AddExperts<T, Out>& args, CudaDevice& device) {
  require(args.tokens >= 0 && args.size >= 0, "add_experts: expected tokens and size >= 0, got {} and {}", args.tokens,
          args.size);
  const int most = args.place == nullptr ? 1 : kMaxCudaExperts;
  require(args.top_k >= 1 && args.top_k <= most, "add_experts: expected top_k 1 .. {}{}, got {}", most,
          args.place == nullptr ? " without place" : "", args.top_k);
  check_choices("add_experts", args.tokens, args.top_k);
  if (args.tokens == 0 || args.size == 0) return;
  require(!has_null({args.x, args.y}), "add_experts: x and y must not be null");
  require(args.place == nullptr || args.expert != nullptr, "add_experts: with place, expert must not be null");
  require(args.x_stride >= args.size && args.y_stride >= args.size,
          "add_experts: expected x_stride and y_stride >= {}, got {} and {}", args.size, args.x_stride, args.y_stride);
  check_alignment("add_experts", sizeof(float),
                  {{"expert", args.expert}, {"place", args.place}, {"weight", args.weight}});
  check_alignment("add_experts", sizeof(T), {{"gate", args.gate}, {"x", args.x}});
  check_alignment("add_experts", sizeof(Out), {{"y", args.y}});
  const int64_t tiles = ceiling_quotient(args.size, kTileChannels);
  const unsigned blocks = check_blocks("add_experts", args.tokens * tiles);
  const AddExpertsArgs<T, Out> launched = {args, place_of(args), static_cast<int>(tiles)};
  launch("add_experts", add_experts_kernel<T, Out>, dim3(blocks), kTileThreads,
         static_cast<size_t>(args.top_k) * (sizeof(int32_t) + sizeof(float)), launched, device, Launch::kOverlapping);
}

template void add_experts(const AddExperts<float, float>&, CudaDevice&);
template void add_experts(const AddExperts<Bf16, Bf16>&, CudaDevice&);
template void add_experts(const AddExperts<Bf16, float>&, CudaDevice&);
template void add_experts(const AddExperts<Fp16, Fp16>&, CudaDevice&);
template void add_experts(const AddExperts<Fp16, float>&, CudaDevice&);

}  // namespace replayssm
