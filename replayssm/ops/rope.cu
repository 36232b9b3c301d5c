// Rotary position embedding on the GPU: the angles of a step, and heads normed and rotated in place.
#include "replayssm/ops/rope.h"

#include "replayssm/ops/checks.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/norm.cuh"

namespace replayssm {
namespace {

constexpr int kTileWarps = kTileThreads / 32;
constexpr int kWarpElements = 32 * kPackSize;
constexpr int kLargestHead = 4 * kWarpElements;

// A token's position; 0 if its row is padding or no row holds it.
__device__ int64_t position_of(const RowRopeAngles& args, int64_t token) {
  int b = 0;
  int64_t place = 0;  // in the row
  if (args.token_begin != nullptr) {
    b = row_of_token(args.token_begin, args.rows.count, token);
    if (token >= args.token_begin[b + 1]) return 0;
    place = token - args.token_begin[b];
  } else {
    b = static_cast<int>(token / args.tokens_per_row);
    place = token % args.tokens_per_row;
  }
  if (args.rows.slot[b] == kPaddingSlot) return 0;
  return args.rows.base[b] + args.rows.history[b] + place;
}

// Grid: one dimension over tokens x R/2. A thread owns an angle.
__global__ __launch_bounds__(kTileThreads) void rope_angles_kernel(const __grid_constant__ RowRopeAngles args) {
  const int half = args.rotary_size / 2;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kTileThreads + threadIdx.x;
  const int64_t token = index / half;
  if (token >= args.tokens) return;
  const double frequency = pow(args.theta, -2.0 * static_cast<double>(index % half) / args.rotary_size);
  wait_for_previous();
  let_next_start();
  const double angle = static_cast<double>(position_of(args, token)) * frequency;
  double sine = 0.0, cosine = 0.0;
  sincos(angle, &sine, &cosine);
  args.cosine[index] = static_cast<float>(cosine);
  args.sine[index] = static_cast<float>(sine);
}

template <typename T>
struct PlaceHeadsArgs {
  PlaceHeads<T> heads;
  PackPlace place;          // of heads and norms
  PackPlace rotated_place;  // of angles, and of what the rotation takes from elsewhere in heads and norms
  float weight_offset;
  float inverse_size;
};

// The element that the rotation pairs with a rotated one, and the angle that both turn by.
__device__ int partner_of(int element, int half) {
  return element < half ? element + half : element - half;
}
__device__ int angle_of(int element, int half) {
  return element < half ? element : element - half;
}

// values[i] <- from[where(e, half)] of the rotated ones among the elements e = first + i of a pack. Of an aligned place
// those lie together.
template <typename T>
__device__ void load_rotated(const T* from, PackPlace place, int (*where)(int, int), int first, int half,
                             float (&values)[kPackSize]) {
  if (first >= 2 * half) return;
  if (place == PackPlace::kAligned) {
    const Pack<T> pack = load_pack(from + where(first, half), place, kPackSize);
#pragma unroll
    for (int i = 0; i < kPackSize; ++i) values[i] = element(pack, i);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPackSize; ++i)
    if (first + i < 2 * half) values[i] = to_number(from[where(first + i, half)]);
}

// Grid: one dimension over tokens x heads, queries first; a warp each. A lane owns kPacks packs, which lie a warp's
// share apart, and loads what the rotation pairs with them beside them.
template <int kPacks, typename T>
__global__ __launch_bounds__(kTileThreads) void place_heads_kernel(const __grid_constant__ PlaceHeadsArgs<T> launched) {
  const PlaceHeads<T>& args = launched.heads;
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * kTileWarps + threadIdx.x / 32;
  const int64_t heads = static_cast<int64_t>(args.query_heads) + args.key_heads, token = vector / heads;
  if (token >= args.tokens) return;
  const int64_t head = vector % heads;
  const int size = args.head_size, half = args.rotary_size / 2;
  const int lane_first = static_cast<int>(threadIdx.x % 32) * kPackSize;
  const bool is_query = head < args.query_heads;
  T* const x = is_query ? args.q + token * args.q_stride + head * size
                        : args.k + token * args.k_stride + (head - args.query_heads) * size;
  const float* const norm = is_query ? args.q_norm : args.k_norm;

  float weight[kPacks][kPackSize] = {}, partner_weight[kPacks][kPackSize] = {};
  if (norm != nullptr) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int first = lane_first + p * kWarpElements;
      if (first < size) load_constants(norm + first, launched.place, size - first, weight[p]);
      load_rotated(norm, launched.rotated_place, partner_of, first, half, partner_weight[p]);
    }
  }
  wait_for_previous();
  let_next_start();

  float values[kPacks][kPackSize], partner[kPacks][kPackSize] = {};
  float cosine[kPacks][kPackSize] = {}, sine[kPacks][kPackSize] = {};
  float squares = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int first = lane_first + p * kWarpElements;
    // Those of T last: turning them into numbers waits for what is on its way.
    load_rotated(args.cosine + token * half, launched.rotated_place, angle_of, first, half, cosine[p]);
    load_rotated(args.sine + token * half, launched.rotated_place, angle_of, first, half, sine[p]);
    const Pack<T> pack = first < size ? load_pack(x + first, launched.place, size - first) : zero_pack<T>();
    load_rotated(x, launched.rotated_place, partner_of, first, half, partner[p]);
#pragma unroll
    for (int i = 0; i < kPackSize; ++i) values[p][i] = element(pack, i);
    squares = squares + sum_of_squares(values[p]);
  }
  float factor = 1.0f;
  if (norm != nullptr) factor = inverse_rms(sum_lanes<32>(squares), launched.inverse_size, args.eps);
  // A lane writes what others have loaded as partners.
  __syncwarp();

#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int first = lane_first + p * kWarpElements;
    if (first >= size) continue;
#pragma unroll
    for (int i = 0; i < kPackSize; ++i) {
      if (norm != nullptr) {
        values[p][i] = plain_norm(values[p][i], factor, weight[p][i], launched.weight_offset);
        partner[p][i] = plain_norm(partner[p][i], factor, partner_weight[p][i], launched.weight_offset);
      }
      if (first + i < 2 * half) {
        const float other = first + i < half ? -partner[p][i] : partner[p][i];
        values[p][i] = __fmaf_rn(other, sine[p][i], values[p][i] * cosine[p][i]);
      }
    }
    store_pack(pack_of<T>(values[p]), x + first, launched.place, size - first);
  }
}

template <typename T>
void check_place_heads(const PlaceHeads<T>& args) {
  require(args.tokens >= 0 && args.query_heads >= 0 && args.key_heads >= 0,
          "place_heads: expected tokens, query_heads and key_heads >= 0, got {}, {} and {}", args.tokens,
          args.query_heads, args.key_heads);
  require(args.head_size >= 2 && args.head_size <= kLargestHead && args.head_size % 2 == 0,
          "place_heads: expected an even head_size of 2 .. {}, got {}", kLargestHead, args.head_size);
  require(args.rotary_size >= 0 && args.rotary_size % 2 == 0 && args.rotary_size <= args.head_size,
          "place_heads: expected an even rotary_size of 0 .. {}, got {}", args.head_size, args.rotary_size);
  require(args.eps >= 0, "place_heads: expected eps >= 0, got {}", args.eps);
}

template <typename T>
PlaceHeadsArgs<T> with_places(const PlaceHeads<T>& args) {
  uintptr_t places = static_cast<uintptr_t>(args.q_stride | args.k_stride) * sizeof(T);
  for (const void* pointer : std::initializer_list<const void*>{args.q, args.k, args.q_norm, args.k_norm})
    places |= reinterpret_cast<uintptr_t>(pointer);
  const bool is_aligned = args.head_size % kPackSize == 0 && places % 16 == 0;
  places |= reinterpret_cast<uintptr_t>(args.cosine) | reinterpret_cast<uintptr_t>(args.sine);
  const bool is_rotated_aligned = is_aligned && args.rotary_size / 2 % kPackSize == 0 && places % 16 == 0;
  const auto place_if = [](bool aligned) { return aligned ? PackPlace::kAligned : PackPlace::kAnywhere; };
  return {args, place_if(is_aligned), place_if(is_rotated_aligned), args.is_zero_centred ? 1.0f : 0.0f,
          1.0f / static_cast<float>(args.head_size)};
}

}  // namespace

void rope_angles(const RowRopeAngles& args, CudaDevice& device) {
  check_rope_angles_sizes(args);
  if (args.tokens == 0 || args.rotary_size == 0) return;
  const StateRows& rows = args.rows;
  require(args.token_begin != nullptr
              ? rows.count >= 1
              : args.tokens_per_row >= 1 && args.tokens <= static_cast<int64_t>(rows.count) * args.tokens_per_row,
          "rope_angles: expected token_begin and rows, or {} tokens in rows of tokens_per_row, got {} rows of {}",
          args.tokens, rows.count, args.tokens_per_row);
  require(!has_null({rows.slot, rows.base, rows.history, args.cosine, args.sine}),
          "rope_angles: slot, base, history, cosine and sine must not be null");
  check_alignment("rope_angles", 8, {{"base", rows.base}});
  check_alignment("rope_angles", 4,
                  {{"slot", rows.slot},
                   {"history", rows.history},
                   {"token_begin", args.token_begin},
                   {"cosine", args.cosine},
                   {"sine", args.sine}});
  const int64_t angles = args.tokens * (args.rotary_size / 2);
  const unsigned blocks = check_blocks("rope_angles", ceiling_quotient(angles, kTileThreads));
  launch("rope_angles", rope_angles_kernel, dim3(blocks), kTileThreads, 0, args, device, Launch::kOverlapping);
}

template <typename T>
void place_heads(const PlaceHeads<T>& args, CudaDevice& device) {
  check_place_heads(args);
  const int64_t heads = static_cast<int64_t>(args.query_heads) + args.key_heads;
  if (args.tokens == 0 || heads == 0) return;
  require((args.query_heads == 0 || args.q != nullptr) && (args.key_heads == 0 || args.k != nullptr),
          "place_heads: q and k must not be null");
  require(args.rotary_size == 0 || !has_null({args.cosine, args.sine}),
          "place_heads: cosine and sine must not be null");
  check_alignment("place_heads", sizeof(T), {{"q", args.q}, {"k", args.k}});
  check_alignment("place_heads", 4,
                  {{"q_norm", args.q_norm}, {"k_norm", args.k_norm}, {"cosine", args.cosine}, {"sine", args.sine}});
  const unsigned blocks = check_blocks("place_heads", ceiling_quotient(args.tokens * heads, kTileWarps));
  const auto kernel = args.head_size <= kWarpElements       ? place_heads_kernel<1, T>
                      : args.head_size <= 2 * kWarpElements ? place_heads_kernel<2, T>
                                                            : place_heads_kernel<4, T>;
  launch("place_heads", kernel, dim3(blocks), kTileThreads, 0, with_places(args), device, Launch::kOverlapping);
}

template void place_heads(const PlaceHeads<float>&, CudaDevice&);
template void place_heads(const PlaceHeads<Bf16>&, CudaDevice&);
template void place_heads(const PlaceHeads<Fp16>&, CudaDevice&);

}  // namespace replayssm
