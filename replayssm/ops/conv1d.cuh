// The short convolution on the GPU, for kernels: a thread owns the eight channels of a pack, so that nothing is shared
// between threads. A channel's bits do not depend on how its tokens are cut into calls.
#pragma once

#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/pack.cuh"
#include "replayssm/ops/rows.cuh"

namespace replayssm {

// The two forms of the loops: models' width with aligned packs, and all else at up to eight taps.
enum class ConvForm { kFast, kAny };
template <ConvForm kForm>
inline constexpr int kTapsOf = kForm == ConvForm::kFast ? 4 : 8;
template <ConvForm kForm>
inline constexpr PackPlace kPlaceOf = kForm == ConvForm::kFast ? PackPlace::kAligned : PackPlace::kAnywhere;

enum class RowKind { kLive, kPadding, kOutside };

// What a row's numbers must lie within, and where one that does not is reported.
struct ConvLimits {
  int64_t slots = 0;
  int64_t checkpoints = -1;  // below 0: checkpoints are not looked at,
  int window = -1;           // nor whether a history is longer than the state's window
  const char* op = nullptr;
  CudaFault* fault = nullptr;
};

// What a row says, loaded in one go.
struct ConvRow {
  int32_t slot = kPaddingSlot;
  int32_t checkpoint_in = 0, checkpoint_out = 0;
  int32_t history = 0;
  int64_t base = 0;

  __device__ ConvRow() {}
  __device__ ConvRow(const StateRows& rows, int b, const ConvLimits& limits)
      : slot(rows.slot[b]), history(rows.history[b]), base(rows.base[b]) {
    if (limits.checkpoints < 0) return;
    checkpoint_in = rows.checkpoint_in[b];
    checkpoint_out = rows.checkpoint_out[b];
  }

  // Reports the row, number `b`, if it lies outside the pool and this thread is its reporter.
  __device__ RowKind kind(const ConvLimits& limits, int b, bool is_reporter) const {
    if (slot == kPaddingSlot) return RowKind::kPadding;
    bool is_inside = slot >= 0 && slot < limits.slots && base >= 0 && history >= 0;
    if (limits.checkpoints >= 0)
      is_inside = is_inside && history <= limits.window && checkpoint_in >= 0 && checkpoint_in < limits.checkpoints &&
                  checkpoint_out >= 0 && checkpoint_out < limits.checkpoints;
    if (is_inside) return RowKind::kLive;
    if (is_reporter) report_fault(limits.fault, limits.op, b, slot, checkpoint_in, checkpoint_out);
    return RowKind::kOutside;
  }
};

// The eight channels of a thread, and their weights in the order of kTaps taps, the first of which a narrower
// convolution leaves out.
template <ConvForm kForm>
struct ConvChannels {
  static constexpr int kTaps = kTapsOf<kForm>;
  static constexpr PackPlace kPlace = kPlaceOf<kForm>;

  template <typename T, typename Out>
  __device__ ConvChannels(const BasicConv1d<T, Out>& args, int first)
      : channel(first), count(args.state.channels - first), skipped(kTaps - width_of(args.state.width)) {
#pragma unroll
    for (int c = 0; c < kPackSize; ++c) bias[c] = 0.0f;
    if (args.bias != nullptr) load_constants(args.bias + channel, kPlace, count, bias);
#pragma unroll
    for (int i = 0; i < kTaps; ++i)
      if (i >= skipped)
        load_constants(args.weight + static_cast<int64_t>(i - skipped) * args.state.channels + channel, kPlace, count,
                       weight[i]);
  }

  static __device__ int width_of(int width) {
    return kForm == ConvForm::kFast ? kTaps : width;
  }

  int channel, count, skipped;
  float weight[kTaps][kPackSize], bias[kPackSize];
};

// y <- the outputs of one token, whose inputs are inputs[0 .. kTaps-1], its own last.
template <ConvForm kForm, typename T>
__device__ inline void convolve(const ConvChannels<kForm>& channels, const Pack<T>* inputs, bool use_silu,
                                float (&y)[kPackSize]) {
#pragma unroll
  for (int c = 0; c < kPackSize; ++c) y[c] = channels.bias[c];
#pragma unroll
  for (int i = 0; i < kTapsOf<kForm>; ++i) {
    if (i < channels.skipped) continue;
#pragma unroll
    for (int c = 0; c < kPackSize; ++c) y[c] = __fmaf_rn(channels.weight[i][c], element(inputs[i], c), y[c]);
  }
  if (!use_silu) return;
#pragma unroll
  for (int c = 0; c < kPackSize; ++c) y[c] = silu(y[c]);
}

// A row's window as a thread sees it.
template <typename T>
struct ConvWindow {
  T* inputs;         // of the thread's channels, at ring position 0
  int64_t position;  // of the row's first token
  int next;          // that token's ring position

  template <typename Out>
  __device__ ConvWindow(const BasicConv1d<T, Out>& args, const ConvRow& row, int channel)
      : inputs(args.state.window + static_cast<int64_t>(row.slot) * args.state.capacity * args.state.channels +
               channel),
        position(row.base + row.history) {
    // A division of 64-bit words takes the time of all else that a thread does.
    const auto capacity = static_cast<uint32_t>(args.state.capacity);
    next = position < int64_t{1} << 32 ? static_cast<int>(static_cast<uint32_t>(position) % capacity)
                                       : static_cast<int>(position % capacity);
  }
};

template <ConvForm kForm, typename T, typename Out>
__device__ inline Pack<T> load_input(const BasicConv1d<T, Out>& args, const ConvChannels<kForm>& channels,
                                     int64_t token) {
  return load_pack(args.x + token * args.x_stride + channels.channel, kPlaceOf<kForm>, channels.count);
}

// inputs[0 .. kTaps-2] <- the inputs before token `first` of the row that begins with token `begin`; zeros before a
// sequence's first token.
template <ConvForm kForm, typename T, typename Out>
__device__ inline void load_history(const BasicConv1d<T, Out>& args, const ConvChannels<kForm>& channels,
                                    const ConvWindow<T>& window, int64_t begin, int64_t first, Pack<T>* inputs) {
  constexpr int kTaps = kTapsOf<kForm>;
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    const int age = kTaps - 1 - i;
    inputs[i] = zero_pack<T>();
    if (i < channels.skipped) continue;
    if (first - age >= begin) {
      inputs[i] = load_input(args, channels, first - age);
    } else if (window.position + (first - begin) >= age) {
      int place = window.next + static_cast<int>(first - begin) - age;
      if (place < 0) place += args.state.capacity;
      inputs[i] = load_pack<PackUse::kOnce>(window.inputs + static_cast<int64_t>(place) * args.state.channels,
                                            kPlaceOf<kForm>, channels.count);
    }
  }
}

template <ConvForm kForm, typename T, typename Out>
__device__ inline void store_output(const BasicConv1d<T, Out>& args, const ConvChannels<kForm>& channels, int64_t token,
                                    const Pack<Out>& y) {
  store_pack(y, args.out + token * args.state.channels + channels.channel, kPlaceOf<kForm>, channels.count);
}

// The outputs of a row that has no window: zeros for padding, else no numbers.
template <typename Out>
__device__ inline Pack<Out> output_without_window(RowKind kind) {
  return kind == RowKind::kPadding ? zero_pack<Out>() : pack_filled<Out>(__int_as_float(0x7FC00000));
}

// One token a row, for kRows rows from `first_row`: everything is loaded before the first result is stored, which is
// what keeps enough bytes on their way.
template <int kRows, ConvForm kForm, typename T, typename Out>
__device__ inline void convolve_rows(const BasicConv1d<T, Out>& args, const ConvChannels<kForm>& channels,
                                     int first_row, const ConvLimits& limits) {
  constexpr int kTaps = kTapsOf<kForm>;
  const int rows = args.rows.count - first_row;
  Pack<T> inputs[kRows][kTaps];
  ConvRow row[kRows];
  RowKind kinds[kRows];
  T* appended[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) continue;
    inputs[r][kTaps - 1] = load_input(args, channels, first_row + r);
    row[r] = ConvRow(args.rows, first_row + r, limits);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) continue;
    kinds[r] = row[r].kind(limits, first_row + r, channels.channel == 0);
    if (kinds[r] != RowKind::kLive) continue;
    const ConvWindow<T> window(args, row[r], channels.channel);
    load_history(args, channels, window, first_row + r, first_row + r, inputs[r]);
    appended[r] = window.inputs + static_cast<int64_t>(window.next) * args.state.channels;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) continue;
    if (kinds[r] != RowKind::kLive) {
      store_output(args, channels, first_row + r, output_without_window<Out>(kinds[r]));
      continue;
    }
    float y[kPackSize];
    convolve(channels, inputs[r], args.use_silu, y);
    store_output(args, channels, first_row + r, pack_of<Out>(y));
    store_pack<PackUse::kOnce>(inputs[r][kTaps - 1], appended[r], kPlaceOf<kForm>, channels.count);
  }
}

// Whether convolve_tokens writes the inputs to the window as well.
enum class ConvAppend { kYes, kNo };

// The tokens first .. last-1 of a row that begins with token `begin`, kTokens at a time. The window's new places are
// none of those that a decode window's history lies in; a prefill, whose tokens other threads share, must append later.
template <int kTokens, ConvAppend kAppend, ConvForm kForm, typename T, typename Out>
__device__ inline void convolve_tokens(const BasicConv1d<T, Out>& args, const ConvChannels<kForm>& channels,
                                       const ConvRow& row, RowKind kind, int64_t begin, int64_t first, int64_t last) {
  constexpr int kTaps = kTapsOf<kForm>;
  if (kind != RowKind::kLive) {
    for (int64_t t = first; t < last; ++t) store_output(args, channels, t, output_without_window<Out>(kind));
    return;
  }
  const ConvWindow<T> window(args, row, channels.channel);
  Pack<T> inputs[kTaps - 1 + kTokens];
  load_history(args, channels, window, begin, first, inputs);
  int place = window.next;
  for (int64_t t = first; t < last; t += kTokens) {
#pragma unroll
    for (int j = 0; j < kTokens; ++j)
      if (t + j < last) inputs[kTaps - 1 + j] = load_input(args, channels, t + j);
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      if (t + j >= last) continue;
      float y[kPackSize];
      convolve(channels, inputs + j, args.use_silu, y);
      store_output(args, channels, t + j, pack_of<Out>(y));
      if constexpr (kAppend == ConvAppend::kYes) {
        store_pack<PackUse::kOnce>(inputs[kTaps - 1 + j],
                                   window.inputs + static_cast<int64_t>(place) * args.state.channels, kPlaceOf<kForm>,
                                   channels.count);
        if (++place == args.state.capacity) place = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i) inputs[i] = inputs[i + kTokens];
  }
}

}  // namespace replayssm
