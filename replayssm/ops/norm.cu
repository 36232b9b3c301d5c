// The norms as ops of their own on the GPU: one kernel in three forms.
#include "replayssm/ops/norm.cuh"

#include <type_traits>

#include "replayssm/ops/checks.h"
#include "replayssm/ops/launch.cuh"

namespace replayssm {
namespace {

template <typename X, typename Z, typename Out>
struct NormArgs {
  NormVectors<X, Z, Out> vectors;
  int warps;  // a vector
  PackPlace place;
  float inverse_size;
};

// x and the parts of its vector, one after the other; kept in the place of the sums.
template <typename Z, typename Out>
__device__ Pack<float> add_parts(const NormVectors<float, Z, Out>& args, int64_t token, int first, const Pack<float>& x,
                                 PackPlace place, int count) {
  float values[kPackSize];
#pragma unroll
  for (int i = 0; i < kPackSize; ++i) values[i] = element(x, i);
#pragma unroll 2
  for (int part = 0; part < args.part_count; ++part) {
    const Pack<float> added = load_pack(args.parts + (part * args.tokens + token) * args.size + first, place, count);
#pragma unroll
    for (int i = 0; i < kPackSize; ++i) values[i] = values[i] + element(added, i);
  }
  const Pack<float> sum = pack_of<float>(values);
  store_pack(sum, args.sums + token * args.x_stride + first, place, count);
  return sum;
}

// Grid: one dimension over vectors. Blocks of `warps` warps that share a vector, or of kTileThreads threads of which
// kLanes neighbours share one. A thread owns a pack.
template <NormForm kForm, int kLanes, typename X, typename Z, typename Out>
__global__ __launch_bounds__(kLanes == 32 ? 1024 : kTileThreads) void rms_norm_kernel(
    const __grid_constant__ NormArgs<X, Z, Out> launched) {
  __shared__ float partial[32];
  const NormVectors<X, Z, Out>& args = launched.vectors;
  const PackPlace place = launched.place;
  const int lanes = kLanes * launched.warps;
  const uint32_t vector = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
  const int first = static_cast<int>(threadIdx.x % lanes) * kPackSize, count = args.size - first;
  const uint32_t token = vector / args.heads;
  const int head = static_cast<int>(vector % args.heads);
  const bool is_there = token < args.tokens && count > 0;
  float weight[kPackSize];
  if (is_there)
    load_constants(args.weight + static_cast<int64_t>(head) * args.weight_head_stride + first, place, count, weight);
  wait_for_previous();
  let_next_start();

  Pack<X> x = zero_pack<X>();
  Pack<Z> z = zero_pack<Z>();
  bool is_padding = false;
  if (is_there) {
    x = load_pack(args.x + token * args.x_stride + head * args.x_head_stride + first, place, count);
    if constexpr (kForm != NormForm::kPlain)
      z = load_pack(args.z + token * args.z_stride + static_cast<int64_t>(head) * args.size + first, place, count);
    is_padding = args.slot != nullptr && args.slot[token / args.tokens_per_row] == kPaddingSlot;
    if constexpr (kForm == NormForm::kPlain && std::is_same_v<X, float>)
      if (args.part_count > 0) x = add_parts(args, token, first, x, place, count);
  }
  float values[kPackSize];
#pragma unroll
  for (int i = 0; i < kPackSize; ++i) {
    values[i] = element(x, i);
    if constexpr (kForm == NormForm::kGateFirst) values[i] = values[i] * silu(element(z, i));
  }
  float squares = sum_of_squares(values);
  squares = kLanes == 32 ? sum_block(squares, launched.warps, partial) : sum_lanes<kLanes>(squares);
  if (!is_there) return;
  const float factor = inverse_rms(squares, launched.inverse_size, args.eps);
#pragma unroll
  for (int i = 0; i < kPackSize; ++i) {
    if constexpr (kForm == NormForm::kPlain) {
      values[i] = plain_norm(values[i], factor, weight[i], args.weight_offset);
    } else if constexpr (kForm == NormForm::kGateLast) {
      values[i] = gated_norm(values[i], factor, weight[i], element(z, i), args.has_sigmoid_gate);
    } else {
      values[i] = values[i] * factor * weight[i];
    }
  }
  store_pack(is_padding ? zero_pack<Out>() : pack_of<Out>(values),
             args.y + token * args.y_stride + head * args.y_head_stride + first, place, count);
}

template <typename X, typename Z, typename Out>
PackPlace place_of(const NormVectors<X, Z, Out>& args) {
  uintptr_t places = 0;
  for (const void* pointer :
       std::initializer_list<const void*>{args.x, args.z, args.weight, args.y, args.parts, args.sums})
    places |= reinterpret_cast<uintptr_t>(pointer);
  places |= static_cast<uintptr_t>(args.x_stride | args.x_head_stride) * sizeof(X);
  places |= static_cast<uintptr_t>(args.z_stride) * sizeof(Z);
  places |= static_cast<uintptr_t>(args.y_stride | args.y_head_stride) * sizeof(Out);
  return args.size % kPackSize == 0 && places % 16 == 0 ? PackPlace::kAligned : PackPlace::kAnywhere;
}

template <typename X, typename Z, typename Out>
void check_on_gpu(const char* op, const NormVectors<X, Z, Out>& args) {
  require(args.tokens * args.heads < int64_t{1} << 31, "{}: expected fewer than 2^31 vectors, got {} tokens of {}", op,
          args.tokens, args.heads);
  check_alignment(op, sizeof(X), {{"x", args.x}});
  check_alignment(op, sizeof(Z), {{"z", args.z}});
  check_alignment(op, sizeof(float), {{"weight", args.weight}});
  check_alignment(op, sizeof(Out), {{"y", args.y}});
}

void check_size_on_gpu(const char* op, int64_t size) {
  require(size <= kLargestNorm, "{}: expected a size of 1 to {} on a GPU, got {}", op, kLargestNorm, size);
}

}  // namespace

template <NormForm kForm, typename X, typename Z, typename Out>
void launch_norm(const char* op, const NormVectors<X, Z, Out>& args, CudaDevice& device) {
  const NormTiles tiles = norm_tiles(args.size);
  const auto blocks = static_cast<unsigned>(ceiling_quotient(args.tokens * args.heads, tiles.vectors_a_block));
  const auto kernel = tiles.lanes == 16 ? rms_norm_kernel<kForm, 16, X, Z, Out> : rms_norm_kernel<kForm, 32, X, Z, Out>;
  const NormArgs<X, Z, Out> launched = {args, tiles.warps, place_of(args), 1.0f / static_cast<float>(args.size)};
  launch(op, kernel, dim3(blocks), tiles.threads, 0, launched, device, Launch::kOverlapping);
}

template <typename X, typename Out>
void rms_norm(const BasicRmsNorm<X, Out>& args, CudaDevice& device) {
  check_norm_sizes("rms_norm", args, "heads", args.heads);
  check_size_on_gpu("rms_norm", args.size);
  if (args.tokens == 0 || args.heads == 0) return;
  require(!has_null({args.x, args.weight, args.y}), "rms_norm: x, weight and y must not be null");
  require(args.part_count == 0 || (args.part_count > 0 && args.heads == 1 && std::is_same_v<X, float>),
          "rms_norm: expected parts of FP32 vectors, one a token, or none, got {} of {} a token", args.part_count,
          args.heads);
  require(args.part_count == 0 || !has_null({args.parts, args.sums}), "rms_norm: parts and sums must not be null");
  check_alignment("rms_norm", sizeof(float), {{"parts", args.parts}, {"sums", args.sums}});
  check_on_gpu("rms_norm", vectors_of(args));
  launch_norm<NormForm::kPlain>("rms_norm", vectors_of(args), device);
}

template <typename X, typename Z, typename Out>
void gated_rms_norm(const BasicGatedRmsNorm<X, Z, Out>& args, CudaDevice& device) {
  check_norm_sizes("gated_rms_norm", args, "heads", args.heads);
  check_size_on_gpu("gated_rms_norm", args.size);
  if (args.tokens == 0 || args.heads == 0) return;
  require(!has_null({args.x, args.z, args.weight, args.y}), "gated_rms_norm: x, z, weight and y must not be null");
  check_on_gpu("gated_rms_norm", vectors_of(args));
  launch_norm<NormForm::kGateLast>("gated_rms_norm", vectors_of(args), device);
}

template <typename X, typename Z, typename Out>
void gate_first_rms_norm(const BasicGateFirstRmsNorm<X, Z, Out>& args, CudaDevice& device) {
  check_norm_sizes("gate_first_rms_norm", args, "groups", args.groups);
  check_size_on_gpu("gate_first_rms_norm", args.size);
  if (args.tokens == 0 || args.groups == 0) return;
  require(!has_null({args.x, args.z, args.weight, args.y}), "gate_first_rms_norm: x, z, weight and y must not be null");
  check_on_gpu("gate_first_rms_norm", vectors_of(args));
  launch_norm<NormForm::kGateFirst>("gate_first_rms_norm", vectors_of(args), device);
}

template void rms_norm(const BasicRmsNorm<float, float>&, CudaDevice&);
template void rms_norm(const BasicRmsNorm<Bf16, Bf16>&, CudaDevice&);
template void rms_norm(const BasicRmsNorm<Bf16, float>&, CudaDevice&);
template void rms_norm(const BasicRmsNorm<float, Bf16>&, CudaDevice&);
template void rms_norm(const BasicRmsNorm<Fp16, Fp16>&, CudaDevice&);
template void rms_norm(const BasicRmsNorm<Fp16, float>&, CudaDevice&);
template void rms_norm(const BasicRmsNorm<float, Fp16>&, CudaDevice&);

#define REPLAYSSM_GATED_NORMS(X, Z, Out)                                          \
  template void gated_rms_norm(const BasicGatedRmsNorm<X, Z, Out>&, CudaDevice&); \
  template void gate_first_rms_norm(const BasicGateFirstRmsNorm<X, Z, Out>&, CudaDevice&);
REPLAYSSM_GATED_NORMS(float, float, float)
REPLAYSSM_GATED_NORMS(Bf16, Bf16, Bf16)
REPLAYSSM_GATED_NORMS(Bf16, Bf16, float)
REPLAYSSM_GATED_NORMS(float, Bf16, Bf16)
REPLAYSSM_GATED_NORMS(Fp16, Fp16, Fp16)
REPLAYSSM_GATED_NORMS(Fp16, Fp16, float)
REPLAYSSM_GATED_NORMS(float, Fp16, Fp16)
#undef REPLAYSSM_GATED_NORMS

#define REPLAYSSM_LAUNCH_NORMS(T)                                                                            \
  template void launch_norm<NormForm::kGateLast>(const char*, const NormVectors<float, T, T>&, CudaDevice&); \
  template void launch_norm<NormForm::kGateFirst>(const char*, const NormVectors<float, T, T>&, CudaDevice&);
REPLAYSSM_LAUNCH_NORMS(float)
REPLAYSSM_LAUNCH_NORMS(Bf16)
REPLAYSSM_LAUNCH_NORMS(Fp16)
#undef REPLAYSSM_LAUNCH_NORMS

}  // namespace replayssm
