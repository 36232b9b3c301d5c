// The short convolution as an op of its own on the GPU. Blocks of 128 threads; a block owns a tile of 1024 channels of
// its rows or tokens, a thread eight of them.
#include "replayssm/ops/conv1d.cuh"

#include "replayssm/ops/checks.h"
#include "replayssm/ops/launch.cuh"

namespace replayssm {
namespace {

constexpr int kWindowTokens = 4;  // loaded together
constexpr int kChunkTokens = 32;  // of a prefill, a block's
constexpr const char* kOp = "conv1d";

template <typename T, typename Out>
struct ConvArgs {
  BasicConv1d<T, Out> conv;
  ConvLimits limits;
  int tiles;  // of channels
};

// The first channel of this thread, blocks of a row's tiles lying together.
__device__ int first_channel(int tiles) {
  return (static_cast<int>(blockIdx.x % tiles) * kTileThreads + static_cast<int>(threadIdx.x)) * kPackSize;
}

// Grid: groups of kRows rows x tiles. One token a row.
template <int kRows, typename T, typename Out>
__global__ __launch_bounds__(kTileThreads) void conv1d_rows_kernel(const __grid_constant__ ConvArgs<T, Out> args) {
  const BasicConv1d<T, Out>& conv = args.conv;
  const int channel = first_channel(args.tiles);
  if (channel >= conv.state.channels) return;
  const ConvChannels<ConvForm::kFast> channels(conv, channel);
  wait_for_previous();
  let_next_start();
  convolve_rows<kRows>(conv, channels, static_cast<int>(blockIdx.x / args.tiles) * kRows, args.limits);
}

// Grid: rows x tiles. A window of tokens a row.
template <ConvForm kForm, typename T, typename Out>
__global__ __launch_bounds__(kTileThreads) void conv1d_windows_kernel(const __grid_constant__ ConvArgs<T, Out> args) {
  const BasicConv1d<T, Out>& conv = args.conv;
  const int channel = first_channel(args.tiles);
  if (channel >= conv.state.channels) return;
  const ConvChannels<kForm> channels(conv, channel);
  wait_for_previous();
  let_next_start();
  const int b = static_cast<int>(blockIdx.x / args.tiles);
  const ConvRow row(conv.rows, b, args.limits);
  const RowKind kind = row.kind(args.limits, b, channel == 0);
  const int64_t begin = static_cast<int64_t>(b) * conv.tokens_per_row;
  convolve_tokens<kForm == ConvForm::kFast ? kWindowTokens : 1, ConvAppend::kYes>(conv, channels, row, kind, begin,
                                                                                  begin, begin + conv.tokens_per_row);
}

// Grid: chunks of kChunkTokens tokens x tiles. The outputs of a prefill; its windows are still the old ones.
template <ConvForm kForm, typename T, typename Out>
__global__ __launch_bounds__(kTileThreads) void conv1d_prefill_kernel(const __grid_constant__ ConvArgs<T, Out> args) {
  const BasicConv1d<T, Out>& conv = args.conv;
  const int channel = first_channel(args.tiles);
  if (channel >= conv.state.channels) return;
  const ConvChannels<kForm> channels(conv, channel);
  wait_for_previous();
  let_next_start();
  int64_t token = static_cast<int64_t>(blockIdx.x / args.tiles) * kChunkTokens;
  const int64_t last = min(token + kChunkTokens, conv.tokens);
  int b = row_of_token(conv.token_begin, conv.rows.count, token);
  while (token < last) {
    while (b < conv.rows.count && conv.token_begin[b + 1] <= token) ++b;
    if (b == conv.rows.count) return;
    const int64_t end = min(static_cast<int64_t>(conv.token_begin[b + 1]), last);
    const ConvRow row(conv.rows, b, args.limits);
    const RowKind kind = row.kind(args.limits, b, channel == 0);
    convolve_tokens<kForm == ConvForm::kFast ? kWindowTokens : 1, ConvAppend::kNo>(conv, channels, row, kind,
                                                                                   conv.token_begin[b], token, end);
    token = end;
  }
}

// Grid: rows x tiles. The last inputs of a prefill's rows, to their windows.
template <ConvForm kForm, typename T, typename Out>
__global__ __launch_bounds__(kTileThreads) void conv1d_append_kernel(const __grid_constant__ ConvArgs<T, Out> args) {
  const BasicConv1d<T, Out>& conv = args.conv;
  const int channel = first_channel(args.tiles), count = conv.state.channels - channel;
  if (count <= 0) return;
  wait_for_previous();
  let_next_start();
  const int b = static_cast<int>(blockIdx.x / args.tiles);
  const ConvRow row(conv.rows, b, args.limits);
  if (row.kind(args.limits, b, false) != RowKind::kLive) return;
  const int64_t begin = conv.token_begin[b], end = conv.token_begin[b + 1];
  const ConvWindow<T> window(conv, row, channel);
  int64_t token = max(begin, end - conv.state.capacity);
  int place = static_cast<int>((window.next + (token - begin)) % conv.state.capacity);
  for (; token < end; ++token) {
    store_pack(load_pack(conv.x + token * conv.x_stride + channel, kPlaceOf<kForm>, count),
               window.inputs + static_cast<int64_t>(place) * conv.state.channels, kPlaceOf<kForm>, count);
    if (++place == conv.state.capacity) place = 0;
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

// Queues `units` blocks for each tile.
template <typename T, typename Out>
void launch_tiles(void (*kernel)(ConvArgs<T, Out>), int64_t units, const BasicConv1d<T, Out>& conv,
                  CudaDevice& device) {
  const ConvArgs<T, Out> args = {.conv = conv,
                                 .limits = {.slots = conv.state.slots, .op = kOp, .fault = device.fault()},
                                 .tiles = conv_tiles(conv.state.channels)};
  launch(kOp, kernel, dim3(check_blocks(kOp, units * args.tiles)), kTileThreads, 0, args, device, Launch::kOverlapping);
}

template <ConvForm kForm, typename T, typename Out>
void launch_prefill(const BasicConv1d<T, Out>& args, CudaDevice& device) {
  launch_tiles(conv1d_prefill_kernel<kForm, T, Out>, ceiling_quotient(args.tokens, kChunkTokens), args, device);
  launch_tiles(conv1d_append_kernel<kForm, T, Out>, args.rows.count, args, device);
}

template <typename T, typename Out>
void launch_windows(const BasicConv1d<T, Out>& args, CudaDevice& device) {
  const int rows = args.rows.count;
  if (!is_fast(args)) {
    launch_tiles(conv1d_windows_kernel<ConvForm::kAny, T, Out>, rows, args, device);
  } else if (args.tokens_per_row > 1) {
    launch_tiles(conv1d_windows_kernel<ConvForm::kFast, T, Out>, rows, args, device);
  } else if (conv_rows_a_thread(rows, args.state.channels, device.properties().multiprocessors) == 2) {
    launch_tiles(conv1d_rows_kernel<2, T, Out>, ceiling_quotient(rows, 2), args, device);
  } else {
    launch_tiles(conv1d_rows_kernel<1, T, Out>, rows, args, device);
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
  if (args.token_begin == nullptr) {
    launch_windows(args, device);
  } else if (is_fast(args)) {
    launch_prefill<ConvForm::kFast>(args, device);
  } else {
    launch_prefill<ConvForm::kAny>(args, device);
  }
}

template void conv1d(const BasicConv1d<float, float>&, CudaDevice&);
template void conv1d(const BasicConv1d<Bf16, Bf16>&, CudaDevice&);
template void conv1d(const BasicConv1d<Bf16, float>&, CudaDevice&);
template void conv1d(const BasicConv1d<Fp16, Fp16>&, CudaDevice&);
template void conv1d(const BasicConv1d<Fp16, float>&, CudaDevice&);

}  // namespace replayssm
