// Attention on a GPU: the door, the kernel that writes keys and values, the one that puts splits together, and a plain
// one for what the tensor cores do not take: FP32, latent caches, odd sizes.
#include "replayssm/ops/attention.cuh"

#include "replayssm/core/buffer.h"
#include "replayssm/ops/attention_units.cuh"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/norm.cuh"
#include "replayssm/ops/ring.h"

namespace replayssm {
namespace {

constexpr int kThreads = 128;
constexpr const char* kOutside = "a position past its page table, a page past the pool, or more tokens than expected";

template <typename T>
struct AppendArgs {
  AttentionArgs<T> args;
  PackPlace place;
  int packs;  // of a head
};

// Grid: tokens x heads x packs, kThreads a block. A thread writes a pack of a key and of a value.
template <typename T>
__global__ __launch_bounds__(kThreads) void attention_append_kernel(const __grid_constant__ AppendArgs<T> launched) {
  const AttentionArgs<T>& args = launched.args;
  const BasicAttention<T>& attention = args.attention;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int at = static_cast<int>(index % launched.packs) * kPackSize;
  const int64_t vector = index / launched.packs;
  const int head = static_cast<int>(vector % attention.cache.kv_heads);
  const int64_t token = vector / attention.cache.kv_heads;
  wait_for_previous();
  let_next_start();
  if (token >= attention.tokens) return;
  const int b = row_of_token(attention.token_begin, attention.rows.count, token);
  const AttentionRow row = attention_row(args, b);
  if (row.kind != AttentionKind::kLive || token >= row.first + row.tokens) return;
  const int place = cache_place(args, b, head, row.start + static_cast<int>(token - row.first));
  if (place < 0) return;
  const int size = attention.cache.head_size, count = size - at;
  const int64_t to = static_cast<int64_t>(place) * size + at, from = static_cast<int64_t>(head) * size + at;
  store_pack(load_pack(attention.k + token * attention.k_stride + from, launched.place, count), attention.cache.k + to,
             launched.place, count);
  if (attention.v == nullptr) return;
  store_pack(load_pack(attention.v + token * attention.v_stride + from, launched.place, count), attention.cache.v + to,
             launched.place, count);
}

constexpr int kCombinedChannels = 128;

// Grid: rows x max_tokens_per_row x query heads x kCombinedChannels of a head, a warp each. Folds the splits of the
// queries of rows that were cut, in their order.
template <typename T>
__global__ __launch_bounds__(kThreads) void attention_combine_kernel(const __grid_constant__ AttentionArgs<T> args) {
  const BasicAttention<T>& attention = args.attention;
  const int size = args.value_size, parts = (size + kCombinedChannels - 1) / kCombinedChannels;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int channel = static_cast<int>(index % parts) * kCombinedChannels + static_cast<int>(threadIdx.x % 32) * 4;
  const int64_t row_queries = int64_t{attention.max_tokens_per_row} * attention.query_heads;
  const int64_t query = index / parts % row_queries, b = index / parts / row_queries;
  // Heads are multiples of 8.
  const bool is_there = b < attention.rows.count && channel < size;
  // The kernel before waited for those that may have written the rows.
  AttentionRow row{};
  if (is_there) row = attention_row(args, static_cast<int>(b));
  wait_for_previous();
  let_next_start();
  if (row.kind != AttentionKind::kLive || query >= int64_t{row.tokens} * attention.query_heads) return;
  const int tokens = split_tokens(row.end(), args.attention.cache.head_size),
            splits = (row.end() + tokens - 1) / tokens;
  if (splits == 1 || args.is_cut[b] == 0) return;

  const int64_t first = args.split_place(static_cast<int>(b), 0) + query;
  float2 totals = args.totals[first];
  float4 sums = *reinterpret_cast<const float4*>(args.sums + first * size + channel);
#pragma unroll 8
  for (int split = 1; split < splits; ++split) {
    const int64_t place = first + split * row_queries;
    const float2 others = args.totals[place];
    const float4 part = *reinterpret_cast<const float4*>(args.sums + place * size + channel);
    const Folding fold(totals.x, others.x);
    totals = make_float2(fold.maximum, fold(totals.y, others.y));
    sums = make_float4(fold(sums.x, part.x), fold(sums.y, part.y), fold(sums.z, part.z), fold(sums.w, part.w));
  }
  const float factor = __fdiv_rn(1.0f, totals.y);
  T* const out = attention.out + (row.first * static_cast<int64_t>(attention.query_heads) + query) * size + channel;
  *reinterpret_cast<uint2*>(out) =
      make_uint2(two_of(sums.x * factor, sums.y * factor, T()), two_of(sums.z * factor, sums.w * factor, T()));
}

// Floats of shared memory of the plain kernel: a query, sums of values.
int64_t plain_floats(int head_size, int value_size) {
  return int64_t{head_size} + value_size;
}

__device__ float block_max(float value, float* partial) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) value = fmaxf(value, partial[warp]);
  return value;
}

// Grid: tokens x query heads. A block owns a query; of each kThreads keys a thread scores one, and then owns channels.
template <typename T>
__global__ __launch_bounds__(kThreads) void attention_plain_kernel(const __grid_constant__ AppendArgs<T> launched) {
  extern __shared__ float plain_shared[];
  __shared__ float weights[kThreads], maxima[kThreads / 32], partial[kThreads / 32];
  __shared__ int places[kThreads];
  const AttentionArgs<T>& args = launched.args;
  const BasicAttention<T>& attention = args.attention;
  const BasicKvCache<T>& cache = attention.cache;
  const int thread = static_cast<int>(threadIdx.x), size = cache.head_size, value_size = args.value_size;
  const int64_t token = blockIdx.x / attention.query_heads;
  const int head = static_cast<int>(blockIdx.x % attention.query_heads);
  float* const query = plain_shared;
  float* const sums = plain_shared + size;
  wait_for_previous();
  let_next_start();
  const int b = row_of_token(attention.token_begin, attention.rows.count, token);
  const AttentionRow row = attention_row(args, b);
  if (row.kind == AttentionKind::kEmpty || token < row.first || token >= row.first + row.tokens) return;
  T* const out = attention.out + (token * attention.query_heads + head) * value_size;
  if (row.kind != AttentionKind::kLive) {
    const bool is_outside = row.kind == AttentionKind::kOutside;
    for (int e = thread; e < value_size; e += kThreads) store_number(out + e, is_outside ? NAN : 0.0f);
    if (is_outside && head == 0 && token == row.first && thread == 0) report_outside(args, b, row.slot);
    return;
  }
  const T* const q = attention.q + token * attention.q_stride + static_cast<int64_t>(head) * size;
  for (int d = thread; d < size; d += kThreads) query[d] = to_number(q[d]);
  for (int e = thread; e < value_size; e += kThreads) sums[e] = 0.0f;
  const T* const values = cache.latent_size > 0 ? cache.k : cache.v;
  const int end = row.start + static_cast<int>(token - row.first) + 1;
  float maximum = -INFINITY, total = 0.0f;
  bool is_outside = false;
  for (int begin = 0; begin < end; begin += kThreads) {
    const int count = min(kThreads, end - begin);
    const int place = thread < count ? cache_place(args, b, head / args.group, begin + thread) : -1;
    // Also: the block before is done with its weights, and the query is there.
    is_outside = __syncthreads_or(thread < count && place < 0) != 0;
    if (is_outside) break;
    float score = -INFINITY;
    if (thread < count) {
      const T* const key = cache.k + static_cast<int64_t>(place) * size;
      float products[2] = {};
      for (int d = 0; d < size; d += kPackSize) {
        const Pack<T> pack = load_pack(key + d, launched.place, size - d);
#pragma unroll
        for (int i = 0; i < kPackSize; ++i)
          if (d + i < size) products[i % 2] = __fmaf_rn(query[d + i], element(pack, i), products[i % 2]);
      }
      score = (products[0] + products[1]) * attention.scale;
    }
    const float largest = fmaxf(maximum, block_max(score, maxima));
    const float factor = expf(maximum - pivot_of(largest));
    const float weight = thread < count ? expf(score - pivot_of(largest)) : 0.0f;
    maximum = largest;
    weights[thread] = weight;
    places[thread] = place;
    total = __fmaf_rn(total, factor, sum_block(weight, kThreads / 32, partial));
    for (int e = thread; e < value_size; e += kThreads) {
      float sum = 0.0f;
      for (int key = 0; key < count; ++key)
        sum = __fmaf_rn(weights[key], to_number(values[static_cast<int64_t>(places[key]) * size + e]), sum);
      sums[e] = __fmaf_rn(sums[e], factor, sum);
    }
  }
  for (int e = thread; e < value_size; e += kThreads)
    store_number(out + e, is_outside ? NAN : __fdiv_rn(sums[e], total));
  if (is_outside && thread == 0) report_outside(args, b, row.slot);
}

template <typename T>
bool has_tiled_sizes(const BasicAttention<T>& args) {
  const BasicKvCache<T>& cache = args.cache;
  const bool is_latent = cache.latent_size > 0;
  return sizeof(T) == 2 && cache.head_size % kPackSize == 0 && cache.value_size() % kPackSize == 0 &&
         cache.head_size <= (is_latent ? kMaxLatentHead : kMaxTiledHead) && cache.latent_size <= kMaxLatent;
}

template <typename T>
bool is_aligned(const BasicAttention<T>& args) {
  uintptr_t places = static_cast<uintptr_t>(args.q_stride | args.k_stride) * sizeof(T);
  if (args.v != nullptr) places |= static_cast<uintptr_t>(args.v_stride) * sizeof(T);
  for (const void* pointer :
       std::initializer_list<const void*>{args.q, args.k, args.v, args.out, args.cache.k, args.cache.v})
    places |= reinterpret_cast<uintptr_t>(pointer);
  return places % 16 == 0 && args.cache.head_size % kPackSize == 0;
}

// What a decoding step on tensor cores leaves of its splits.
struct Partials {
  int splits = 1;  // of a row, at most
  float* sums = nullptr;
  float2* totals = nullptr;
  int32_t* is_cut = nullptr;
  size_t bytes = 0;
};
template <typename T>
Partials partials_of(const BasicAttention<T>& args, std::byte* memory) {
  Partials partials;
  if (!has_tiled_sizes(args) || args.max_tokens_per_row > kMaxCudaTokens) return partials;
  const int64_t width = int64_t{args.pages.table_stride} * args.cache.page_tokens;
  partials.splits = most_splits(width, args.cache.head_size);
  if (partials.splits == 1) return partials;
  const int64_t queries = int64_t{args.rows.count} * partials.splits * args.max_tokens_per_row * args.query_heads;
  Carver carver(memory);
  partials.sums = carver.take<float>(queries * args.cache.value_size());
  partials.totals = carver.take<float2>(queries);
  partials.is_cut = carver.take<int32_t>(args.rows.count);
  partials.bytes = carver.bytes();
  return partials;
}

template <typename T>
void check_on_gpu(const BasicAttention<T>& args, std::span<std::byte> workspace) {
  check_attention(args);
  const BasicKvCache<T>& cache = args.cache;
  require(args.rows.count >= 0 && args.rows.count <= kMaxCudaRows, "attention: on a GPU expected 0 to {} rows, got {}",
          kMaxCudaRows, args.rows.count);
  require(
      args.tokens >= 0 && args.tokens < int64_t{1} << 31 && args.max_tokens_per_row >= 1,
      "attention: on a GPU expected the number of tokens, below 2^31, and the most that a row may have, at least 1, "
      "got {} and {}",
      args.tokens, args.max_tokens_per_row);
  require(args.pages.table_stride >= 1 && int64_t{args.pages.table_stride} * cache.page_tokens < int64_t{1} << 31,
          "attention: on a GPU expected page tables of 1 to 2^31 - 1 positions, got {} pages of {}",
          args.pages.table_stride, cache.page_tokens);
  require(cache.pages <= ((int64_t{1} << 31) - 1) / cache.kv_heads / cache.page_tokens,
          "attention: on a GPU expected a cache of fewer than 2^31 keys, got {} pages of {} heads of {}", cache.pages,
          cache.kv_heads, cache.page_tokens);
  const int64_t queries = int64_t{args.query_heads} * cache.head_size, keys = int64_t{cache.kv_heads} * cache.head_size;
  require(args.q_stride >= queries && args.k_stride >= keys && (cache.latent_size > 0 || args.v_stride >= keys),
          "attention: expected strides of at least {} elements for q and {} for k and v, got {}, {} and {}", queries,
          keys, args.q_stride, args.k_stride, args.v_stride);
  const size_t needed = attention_workspace_bytes(args);
  require(workspace.size() >= needed, "attention: expected a workspace of {} bytes, got {}", needed, workspace.size());
  require(reinterpret_cast<uintptr_t>(workspace.data()) % kAlignmentBytes == 0,
          "attention: expected a workspace aligned to {} bytes", kAlignmentBytes);
}

template <typename T>
void check_arrays_on_gpu(const BasicAttention<T>& args) {
  require(!has_null({args.q, args.k, args.out}) && (args.v != nullptr || args.cache.latent_size > 0),
          "attention: q, k, v and out must not be null");
  check_alignment(kAttentionOp, sizeof(T),
                  {{"q", args.q},
                   {"k", args.k},
                   {"v", args.v},
                   {"out", args.out},
                   {"the cache's k", args.cache.k},
                   {"the cache's v", args.cache.v}});
}

template <typename T>
void launch_append(const AttentionArgs<T>& args, CudaDevice& device) {
  const BasicAttention<T>& attention = args.attention;
  const int packs = static_cast<int>(ceiling_quotient(attention.cache.head_size, kPackSize));
  const int64_t blocks = ceiling_quotient(attention.tokens * attention.cache.kv_heads * packs, kThreads);
  const PackPlace place = is_aligned(attention) ? PackPlace::kAligned : PackPlace::kAnywhere;
  launch(kAttentionOp, attention_append_kernel<T>, dim3(check_blocks(kAttentionOp, blocks)), kThreads, 0,
         AppendArgs<T>{args, place, packs}, device, Launch::kOverlapping);
}

template <typename T>
void launch_plain(const AttentionArgs<T>& args, CudaDevice& device) {
  const BasicAttention<T>& attention = args.attention;
  const PackPlace place = is_aligned(attention) ? PackPlace::kAligned : PackPlace::kAnywhere;
  const size_t shared_bytes = plain_floats(attention.cache.head_size, attention.cache.value_size()) * sizeof(float);
  require(shared_bytes <= device.properties().shared_bytes_per_block - 2 * kReservedBytes,
          "attention: on a GPU expected heads that fit into {} bytes, got {}",
          device.properties().shared_bytes_per_block - 2 * kReservedBytes, shared_bytes);
  const unsigned blocks = check_blocks(kAttentionOp, attention.tokens * attention.query_heads);
  launch(kAttentionOp, attention_plain_kernel<T>, dim3(blocks), kThreads, shared_bytes, AppendArgs<T>{args, place, 0},
         device, Launch::kOverlapping);
}

template <typename T>
void launch_combine(const AttentionArgs<T>& args, CudaDevice& device) {
  const BasicAttention<T>& attention = args.attention;
  const int64_t queries = int64_t{attention.rows.count} * attention.max_tokens_per_row * attention.query_heads;
  const int64_t warps = queries * ceiling_quotient(int64_t{args.value_size}, int64_t{kCombinedChannels});
  const unsigned blocks = check_blocks(kAttentionOp, ceiling_quotient(warps, kThreads / 32));
  launch(kAttentionOp, attention_combine_kernel<T>, dim3(blocks), kThreads, 0, args, device, Launch::kOverlapping);
}

// How a step of sizes and alignments that tensor cores take is cut.
template <typename T>
void plan_tiles(AttentionArgs<T>& args, std::byte* workspace, const CudaProperties& gpu) {
  const BasicAttention<T>& attention = args.attention;
  const bool is_latent = attention.cache.latent_size > 0, is_prompt = attention.max_tokens_per_row > kMaxCudaTokens;
  const int64_t row_queries = int64_t{attention.max_tokens_per_row} * args.group;
  args.tile_queries = is_latent   ? kLatentTileQueries
                      : is_prompt ? kPromptTileQueries
                                  : decoding_tile_queries(row_queries);
  // Where many queries leave no room for their keys, fewer share them: a token's bits are the same.
  while (!is_prompt && args.tile_queries > 16 && !has_room_for_stream(args, gpu)) args.tile_queries /= 2;
  args.max_tiles = static_cast<int>(ceiling_quotient(row_queries, int64_t{args.tile_queries}));
  if (is_prompt) return;
  const Partials partials = partials_of(attention, workspace);
  args.max_splits = partials.splits;
  args.sums = partials.sums;
  args.totals = partials.totals;
  args.is_cut = partials.is_cut;
  args.is_folding = !is_latent;
  // Of two units with the same keys one would read what the other writes.
  args.is_appending = args.max_tiles == 1;
}

// Whether tensor cores were given the step.
template <typename T>
bool launch_tiled(AttentionArgs<T> args, std::byte* workspace, CudaDevice& device) {
  if (!has_tiled_sizes(args.attention) || !is_aligned(args.attention)) return false;
  const CudaProperties& gpu = device.properties();
  plan_tiles(args, workspace, gpu);
  const bool is_prompt = args.tile_queries == kPromptTileQueries;
  if (is_prompt ? prompt_shared_bytes(args.attention.cache.head_size) > gpu.shared_bytes_per_block
                : !has_room_for_stream(args, gpu))
    return false;
  if (!args.is_appending) launch_append(args, device);
  if (is_prompt)
    launch_prompt(args, device);
  else
    launch_stream(args, device);
  if (args.max_splits > 1) launch_combine(args, device);
  return true;
}

}  // namespace

template <typename T>
size_t attention_workspace_bytes(const BasicAttention<T>& args) {
  return partials_of(args, nullptr).bytes;
}

template <typename T>
void attention(const BasicAttention<T>& args, CudaDevice& device, std::span<std::byte> workspace) {
  check_on_gpu(args, workspace);
  if (args.rows.count == 0 || args.tokens == 0) return;
  check_arrays_on_gpu(args);
  AttentionArgs<T> launched;
  launched.attention = args;
  launched.group = args.query_heads / args.cache.kv_heads;
  launched.value_size = args.cache.value_size();
  launched.width = int64_t{args.pages.table_stride} * args.cache.page_tokens;
  launched.scale = args.scale * 1.4426950408889634f;  // log2(e)
  launched.outside = kOutside;
  launched.asked = device.counter();
  launched.fault = device.fault();
  if constexpr (!std::is_same_v<T, float>) {
    if (launch_tiled(launched, workspace.data(), device)) return;
  }
  launch_append(launched, device);
  launch_plain(launched, device);
}

template void attention(const BasicAttention<float>&, CudaDevice&, std::span<std::byte>);
template void attention(const BasicAttention<Bf16>&, CudaDevice&, std::span<std::byte>);
template void attention(const BasicAttention<Fp16>&, CudaDevice&, std::span<std::byte>);
template size_t attention_workspace_bytes(const BasicAttention<float>&);
template size_t attention_workspace_bytes(const BasicAttention<Bf16>&);
template size_t attention_workspace_bytes(const BasicAttention<Fp16>&);

}  // namespace replayssm
