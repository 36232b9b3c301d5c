// The short convolution as an op of its own on the GPU. Blocks of 128 threads; a block owns a tile of 1024 channels of
// its rows or tokens, a thread eight of them.
#include "replayssm/ops/conv1d.cuh"

#include "replayssm/core/cuda_launch.cuh"
#include "replayssm/ops/checks.h"

namespace replayssm {
namespace {

constexpr int kWindowTokens = 4;  // loaded together
constexpr int kChunkTokens = 32;  // of a prefill, a block's
constexpr const char* kOp = "conv1d";

// The first channel of this thread, blocks of a row's tiles lying together.
__device__ int first_channel(int tiles) {
  return (static_cast<int>(blockIdx.x % tiles) * kTileThreads + static_cast<int>(threadIdx.x)) * kPackSize;
}

// Grid: groups of kRows rows x tiles. One token a row.
template <int kRows, typename T, typename Out>
__global__ __launch_bounds__(kTileThreads) void conv1d_rows_kernel(const __grid_constant__ BasicConv1d<T, Out> args,
                                                                   int tiles, const char* op, CudaFault* fault) {
  const int channel = first_channel(tiles);
  if (channel >= args.state.channels) return;
  const ConvChannels<ConvForm::kFast> channels(args, channel);
  wait_for_earlier_work();
  let_later_work_start();
  convolve_rows<kRows>(args, channels, static_cast<int>(blockIdx.x / tiles) * kRows, -1, op, fault);
}

// Grid: rows x tiles. A window of tokens a row.
template <ConvForm kForm, typename T, typename Out>
__global__ __launch_bounds__(kTileThreads) void conv1d_windows_kernel(const __grid_constant__ BasicConv1d<T, Out> args,
                                                                      int tiles, const char* op, CudaFault* fault) {
  const int channel = first_channel(tiles);
  if (channel >= args.state.channels) return;
  const ConvChannels<kForm> channels(args, channel);
  wait_for_earlier_work();
  let_later_work_start();
  const int b = static_cast<int>(blockIdx.x / tiles);
  const ConvRow row(args.rows, b, -1);
  const RowKind kind = row.kind(args.state.slots, -1, channel == 0, op, b, fault);
  const int64_t begin = static_cast<int64_t>(b) * args.tokens_per_row;
  convolve_tokens<kForm == ConvForm::kFast ? kWindowTokens : 1, ConvAppend::kYes>(args, channels, row, kind, begin,
                                                                                  begin, begin + args.tokens_per_row);
}

// The row that holds `token`, of those that hold any.
__device__ int row_of(const int32_t* token_begin, int rows, int64_t token) {
  int low = 0, high = rows;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (token_begin[middle] <= token ? low : high) = middle;
  }
  return low;
}

// Grid: chunks of kChunkTokens tokens x tiles. The outputs of a prefill; its windows are still the old ones.
template <ConvForm kForm, typename T, typename Out>
__global__ __launch_bounds__(kTileThreads) void conv1d_prefill_kernel(const __grid_constant__ BasicConv1d<T, Out> args,
                                                                      int tiles, const char* op, CudaFault* fault) {
  const int channel = first_channel(tiles);
  if (channel >= args.state.channels) return;
  const ConvChannels<kForm> channels(args, channel);
  wait_for_earlier_work();
  let_later_work_start();
  int64_t token = static_cast<int64_t>(blockIdx.x / tiles) * kChunkTokens;
  const int64_t last = min(token + kChunkTokens, args.tokens);
  int b = row_of(args.token_begin, args.rows.count, token);
  while (token < last) {
    while (b < args.rows.count && args.token_begin[b + 1] <= token) ++b;
    if (b == args.rows.count) return;
    const int64_t end = min(static_cast<int64_t>(args.token_begin[b + 1]), last);
    const ConvRow row(args.rows, b, -1);
    const RowKind kind = row.kind(args.state.slots, -1, channel == 0, op, b, fault);
    convolve_tokens<kForm == ConvForm::kFast ? kWindowTokens : 1, ConvAppend::kNo>(args, channels, row, kind,
                                                                                   args.token_begin[b], token, end);
    token = end;
  }
}

// Grid: rows x tiles. The last inputs of a prefill's rows, to their windows.
template <ConvForm kForm, typename T, typename Out>
__global__ __launch_bounds__(kTileThreads) void conv1d_append_kernel(const __grid_constant__ BasicConv1d<T, Out> args,
                                                                     int tiles) {
  const int channel = first_channel(tiles), count = args.state.channels - channel;
  if (count <= 0) return;
  wait_for_earlier_work();
  let_later_work_start();
  const int b = static_cast<int>(blockIdx.x / tiles);
  const ConvRow row(args.rows, b, -1);
  if (row.slot < 0 || row.slot >= args.state.slots) return;
  const int64_t begin = args.token_begin[b], end = args.token_begin[b + 1];
  const ConvWindow<T> window(args, row, channel);
  int64_t token = max(begin, end - args.state.capacity);
  int place = static_cast<int>((window.next + (token - begin)) % args.state.capacity);
  for (; token < end; ++token) {
    store_pack(load_pack(args.x + token * args.x_stride + channel, kPlaceOf<kForm>, count),
               window.inputs + static_cast<int64_t>(place) * args.state.channels, kPlaceOf<kForm>, count);
    if (++place == args.state.capacity) place = 0;
  }
}

template <typename T, typename Out>
bool is_fast(const BasicConv1d<T, Out>& args) {
  uintptr_t places = static_cast<uintptr_t>(args.x_stride) * sizeof(T);
  for (const void* pointer :
       std::initializer_list<const void*>{args.x, args.weight, args.bias, args.out, args.state.window})
    places |= reinterpret_cast<uintptr_t>(pointer);
  return args.state.width == kTapsOf<ConvForm::kFast> && args.state.channels % kPackSize == 0 && places % 16 == 0;
}

template <ConvForm kForm, typename T, typename Out>
void launch_prefill(const BasicConv1d<T, Out>& args, int tiles, CudaDevice& device) {
  const int64_t chunks = ceiling_quotient(args.tokens, kChunkTokens);
  launch_overlapped(kOp, conv1d_prefill_kernel<kForm, T, Out>, chunks * tiles, kTileThreads, device, args, tiles, kOp,
                    device.fault());
  launch_overlapped(kOp, conv1d_append_kernel<kForm, T, Out>, int64_t{args.rows.count} * tiles, kTileThreads, device,
                    args, tiles);
}

template <typename T, typename Out>
void launch_windows(const BasicConv1d<T, Out>& args, int tiles, CudaDevice& device) {
  const int64_t rows = args.rows.count;
  if (!is_fast(args)) {
    launch_overlapped(kOp, conv1d_windows_kernel<ConvForm::kAny, T, Out>, rows * tiles, kTileThreads, device, args,
                      tiles, kOp, device.fault());
  } else if (args.tokens_per_row > 1) {
    launch_overlapped(kOp, conv1d_windows_kernel<ConvForm::kFast, T, Out>, rows * tiles, kTileThreads, device, args,
                      tiles, kOp, device.fault());
  } else {
    const int each = conv_rows_a_thread(args.rows.count, args.state.channels, device.properties().multiprocessors);
    launch_overlapped(kOp, each == 2 ? conv1d_rows_kernel<2, T, Out> : conv1d_rows_kernel<1, T, Out>,
                      ceiling_quotient(rows, each) * tiles, kTileThreads, device, args, tiles, kOp, device.fault());
  }
}

}  // namespace

template <typename T, typename Out>
void conv1d(const BasicConv1d<T, Out>& args, CudaDevice& device) {
  check_conv1d(args);
  require(args.token_begin == nullptr || args.tokens >= 0,
          "conv1d: expected the number of tokens beside token_begin, got {}", args.tokens);
  if (args.rows.count == 0 || (args.token_begin != nullptr && args.tokens == 0)) return;
  check_conv1d_arrays(args);
  require(!has_null({args.state.window, args.rows.slot, args.rows.base, args.rows.history}),
          "conv1d: expected a window and the rows' slots, bases and histories, got a null pointer");
  check_alignment(kOp, sizeof(T), {{"x", args.x}, {"the window", args.state.window}});
  check_alignment(kOp, sizeof(float), {{"weight", args.weight}, {"bias", args.bias}});
  check_alignment(kOp, sizeof(Out), {{"out", args.out}});
  const int tiles = conv_tiles(args.state.channels);
  if (args.token_begin == nullptr) {
    launch_windows(args, tiles, device);
  } else if (is_fast(args)) {
    launch_prefill<ConvForm::kFast>(args, tiles, device);
  } else {
    launch_prefill<ConvForm::kAny>(args, tiles, device);
  }
}

template void conv1d(const BasicConv1d<float, float>&, CudaDevice&);
template void conv1d(const BasicConv1d<Bf16, Bf16>&, CudaDevice&);
template void conv1d(const BasicConv1d<Bf16, float>&, CudaDevice&);
template void conv1d(const BasicConv1d<Fp16, Fp16>&, CudaDevice&);
template void conv1d(const BasicConv1d<Fp16, float>&, CudaDevice&);

}  // namespace replayssm
