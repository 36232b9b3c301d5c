// Internal to the delta rule's direct readouts on GPUs: the pass over the checkpoints. Another kernel has made of the
// records, for every token, a query of each head and the records' share of the outputs; what is left is
//
//   out[t, row] = share[t, row] + S0[row] . query[t]
//
// for the rows of the batch that do not flush.
#pragma once

#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/slices.cuh"

namespace replayssm {

template <typename T>
struct StreamArgs {
  StateRows rows;
  int64_t slots, checkpoints;
  const float* checkpoint;  // [checkpoints, heads, values, key_size]
  CheckpointForm form;
  int heads, values, key_size, window, capacity, tokens;
  const float* queries = nullptr;  // [B * tokens, heads, K padded]
  const float* shares = nullptr;   // [B * tokens, heads, values]
  void* out = nullptr;             // [B * tokens, heads, values]
  bool has_float_out = false;
  int slices = 1;  // of a block
};

// `shares` are the slice's, [tokens][16], in shared memory.
template <int K, int kCount, typename T>
__device__ void stream_tokens(const StreamArgs<T>& args, const uint4* slice, const float* queries, const float* shares,
                              int first, int t) {
  float products[kCount];
  Slice<K>::template multiply_shared<kCount>(products, slice, queries + t * K, args.form);
  const int row = first + output_row(threadIdx.x % 32);
  if (!has_output(threadIdx.x % 32) || row >= args.values) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t token = static_cast<int64_t>(blockIdx.z) * args.tokens + t + i;
    const int64_t at = (token * args.heads + blockIdx.y) * args.values + row;
    const float y = __fadd_rn(products[i], shares[(t + i) * args.slices * kSliceRows + output_row(threadIdx.x % 32)]);
    if (args.has_float_out)
      static_cast<float*>(args.out)[at] = y;
    else
      store_number(static_cast<T*>(args.out) + at, y);
  }
}

// Grid (blocks of a head, heads, B), block of a warp: it reads its slices of 16 rows all at once.
template <int K, typename T>
__global__ void __launch_bounds__(32, 24) stream_kernel(const __grid_constant__ StreamArgs<T> args) {
  extern __shared__ uint4 memory[];
  const Row row = row_of(args.rows, blockIdx.z, args.slots, args.checkpoints, args.window, args.capacity);
  if (row.is_padding || row.is_outside || row.history + args.tokens > args.window) return;
  const int bytes = args.form == CheckpointForm::kWords ? kSliceBytes<K> : kSliceBytes<K> / 2;
  auto* queries = reinterpret_cast<float*>(memory + args.slices * (bytes / 16));
  const int first = blockIdx.x * args.slices * kSliceRows;
  for (int i = 0; i < args.slices; ++i)
    if (first + i * kSliceRows < args.values)
      Slice<K>::begin_read(
          memory + i * (bytes / 16),
          HeadPlace(row.checkpoint_in, args.heads, blockIdx.y, args.values, first + i * kSliceRows, args.key_size),
          args.checkpoint, min(kSliceRows, args.values - first - i * kSliceRows), args.key_size, args.form,
          /*hi_alone=*/true);
  wait_for_previous();
  for (int i = threadIdx.x; i < args.tokens * K / 4; i += 32) {
    const int64_t token = static_cast<int64_t>(blockIdx.z) * args.tokens + i / (K / 4);
    copy_chunk_async(queries + 4 * i, args.queries + (token * args.heads + blockIdx.y) * K + 4 * (i % (K / 4)), true);
  }
  float* shares = queries + args.tokens * K;
  const int rows = args.slices * kSliceRows;
  for (int i = threadIdx.x; i < args.tokens * rows / 4; i += 32) {
    const int64_t token = static_cast<int64_t>(blockIdx.z) * args.tokens + i / (rows / 4);
    const int row_of_block = i % (rows / 4) * 4;
    const bool is_there = first + row_of_block < args.values;
    copy_chunk_async(
        shares + 4 * i,
        args.shares + (token * args.heads + blockIdx.y) * args.values + (is_there ? first + row_of_block : 0),
        is_there);
  }
  wait_for_copies();
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < args.slices && first + i * kSliceRows < args.values; ++i) {
    const uint4* slice = memory + i * (bytes / 16);
    int t = 0;
#pragma unroll 1
    for (; t + 4 <= args.tokens; t += 4)
      stream_tokens<K, 4>(args, slice, queries, shares + i * kSliceRows, first + i * kSliceRows, t);
    if (t + 2 <= args.tokens) {
      stream_tokens<K, 2>(args, slice, queries, shares + i * kSliceRows, first + i * kSliceRows, t);
      t += 2;
    }
    if (t < args.tokens) stream_tokens<K, 1>(args, slice, queries, shares + i * kSliceRows, first + i * kSliceRows, t);
  }
}

// Queues the pass behind the kernel that makes the queries, which must let_next_start.
template <int K, typename T>
void launch_stream(const char* op, const StreamArgs<T>& args, CudaDevice& device) {
  const int slices = (args.values + kSliceRows - 1) / kSliceRows;
  const dim3 grid((slices + args.slices - 1) / args.slices, args.heads, args.rows.count);
  const size_t slice_bytes = args.form == CheckpointForm::kWords ? kSliceBytes<K> : kSliceBytes<K> / 2;
  launch(op, stream_kernel<K, T>, grid, 32,
         args.slices * slice_bytes + sizeof(float) * args.tokens * (K + args.slices * kSliceRows), args, device,
         Launch::kOverlapping);
}

}  // namespace replayssm
