// Matrix products: rows of weights times tokens as dot products vectorised along the inputs.
#include "replayssm/ops/linear.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/linear.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <hwy/cache_control.h>

#include <algorithm>

#include "replayssm/core/error.h"
#include "replayssm/ops/vectors-inl.h"

#ifndef REPLAYSSM_OPS_LINEAR_SIZES
#define REPLAYSSM_OPS_LINEAR_SIZES
namespace replayssm {
// Tokens whose activations stay in a core's second-level cache while the weights stream past them.
constexpr int64_t kLinearBlockTokens = 66;
constexpr int64_t kLinearBlockBytes = 1 << 20;
// Inputs of one pass over a block: the widened weights and the activations of a tile fit the first-level cache.
constexpr int64_t kLinearPassInputs = 768;
// Up to here weights are widened in registers; beyond, once a pass.
constexpr int64_t kLinearDirectTokens = 12;
// How far ahead of a product its row of weights is fetched: 93% of a plain read's speed instead of 86% (Xeon, AVX-512,
// one thread, 2560 x 9216).
constexpr int64_t kLinearAheadBytes = 512;
// Outputs of a tile. The grid of the parallel loop, too, hence one number for every target.
constexpr int64_t kLinearTileOutputs = 8;
}  // namespace replayssm
#endif

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {
namespace {

// A tile's sums, the weights and one token's activations fit the registers.
constexpr int kTileTokens = 3;
#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif
static_assert(kLinearTileOutputs % kTileRows == 0 && kLinearPassInputs % kFloatLanes == 0);

HWY_INLINE float widen_one(float value) {
  return value;
}
HWY_INLINE float widen_one(Bf16 value) {
  return to_float(value);
}

// The last elements of a row, fewer than a vector, followed by zeros.
template <typename T>
HWY_INLINE Floats widen_rest(const T* from, int64_t count) {
  HWY_ALIGN float lanes[kFloatLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = widen_one(from[i]);
  return hn::Load(FloatTag(), lanes);
}

// The sums of a tile, `Rows` weight rows times `Tokens` tokens: lane l takes the inputs l, l + lanes, ... in that
// order.
template <int Rows, int Tokens>
HWY_INLINE void clear(Floats (&sums)[Rows * Tokens]) {
  unrolled<Rows * Tokens>([&](auto i) REPLAYSSM_INLINE { sums[i] = hn::Zero(FloatTag()); });
}

template <int Rows, int Tokens>
HWY_INLINE void load(Floats (&sums)[Rows * Tokens], const float* from, int64_t row_stride) {
  unrolled<Rows * Tokens>([&](auto i) REPLAYSSM_INLINE {
    sums[i] = hn::Load(FloatTag(), from + i / Tokens * row_stride + i % Tokens * kFloatLanes);
  });
}

template <int Rows, int Tokens>
HWY_INLINE void save(const Floats (&sums)[Rows * Tokens], float* to, int64_t row_stride) {
  unrolled<Rows * Tokens>([&](auto i) REPLAYSSM_INLINE {
    hn::Store(sums[i], FloatTag(), to + i / Tokens * row_stride + i % Tokens * kFloatLanes);
  });
}

template <int Rows, int Tokens, bool IsFromMemory, typename W>
HWY_INLINE void add(Floats (&sums)[Rows * Tokens], const W* w, int64_t w_stride, const float* x, int64_t x_stride,
                    int64_t count) {
  int64_t i = 0;
  for (; i + kFloatLanes <= count; i += kFloatLanes) {
    Floats activations[Tokens];
    unrolled<Tokens>([&](auto t) REPLAYSSM_INLINE { activations[t] = hn::LoadU(FloatTag(), x + t * x_stride + i); });
    unrolled<Rows>([&](auto r) REPLAYSSM_INLINE {
      const Floats weights = widen(w + r * w_stride + i);
      if constexpr (IsFromMemory) hwy::Prefetch(w + r * w_stride + i + kLinearAheadBytes / sizeof(W));
      // Keeps g++ from loading a weight again for every product: two loads a cycle are the limit.
      asm volatile("" ::: "memory");
      unrolled<Tokens>([&](auto t) REPLAYSSM_INLINE {
        sums[r * Tokens + t] = hn::MulAdd(weights, activations[t], sums[r * Tokens + t]);
      });
    });
  }
  if (i == count) return;
  unrolled<Rows>([&](auto r) REPLAYSSM_INLINE {
    const Floats weights = widen_rest(w + r * w_stride + i, count - i);
    unrolled<Tokens>([&](auto t) REPLAYSSM_INLINE {
      sums[r * Tokens + t] = hn::MulAdd(weights, widen_rest(x + t * x_stride + i, count - i), sums[r * Tokens + t]);
    });
  });
}

template <int Rows, int Tokens>
HWY_INLINE void finish(const Floats (&sums)[Rows * Tokens], const Linear& args, int64_t token, int64_t output) {
  constexpr int kFours = (Rows * Tokens + 3) / 4;
  HWY_ALIGN float totals[kFours * 4];
  unrolled<kFours>([&](auto i) REPLAYSSM_INLINE {
    constexpr int kFirst = i * 4, kLast = Rows * Tokens - 1;
    sum_lanes_of_4(sums[kFirst], sums[std::min(kFirst + 1, kLast)], sums[std::min(kFirst + 2, kLast)],
                   sums[std::min(kFirst + 3, kLast)], totals + kFirst);
  });
  for (int t = 0; t < Tokens; ++t) {
    float* y = args.y + (token + t) * args.y_stride + output;
    if (args.residual == nullptr) {
      for (int r = 0; r < Rows; ++r) y[r] = totals[r * Tokens + t];
    } else {
      const float* residual = args.residual + (token + t) * args.residual_stride + output;
      for (int r = 0; r < Rows; ++r) y[r] = totals[r * Tokens + t] + residual[r];
    }
  }
}

// Calls body.template operator()<Tokens>(token) for tiles that cover the tokens.
template <typename Body>
HWY_INLINE void for_each_tile(int64_t token_begin, int64_t token_end, const Body& body) {
  int64_t token = token_begin;
  for (; token + kTileTokens <= token_end; token += kTileTokens)
    body(std::integral_constant<int, kTileTokens>(), token);
  if (token_end - token == 2) body(std::integral_constant<int, 2>(), token);
  if (token_end - token == 1) body(std::integral_constant<int, 1>(), token);
}

// The weights that the next pass will widen: fetched tile by tile, since a core has too few buffers for all at once.
template <typename W>
struct Ahead {
  static constexpr int64_t kLineElements = 64 / sizeof(W);

  Ahead(const Linear& args, const W* weight, int64_t output, int64_t begin, int rows, int64_t tokens)
      : stride(args.inputs) {
    // After the last pass the next rows' first one; past the last row there is nothing to fetch.
    const bool is_next_row = begin >= args.inputs;
    const int64_t row = is_next_row ? output + rows : output;
    const int64_t first = is_next_row ? 0 : begin;
    if (row + rows > args.outputs) return;
    from = weight + row * args.inputs + first;
    row_lines = std::min(kLinearPassInputs, args.inputs - first) / kLineElements;
    lines = row_lines * rows;
    token_lines = (lines + tokens - 1) / tokens;
  }

  HWY_INLINE void fetch(int64_t token) const {
    int64_t line = token * token_lines;
    const int64_t end = std::min(lines, (token + kTileTokens) * token_lines);
    if (line >= end) return;
    const W* row = from + line / row_lines * stride;
    int64_t column = line % row_lines;
    for (; line < end; ++line) {
      hwy::Prefetch(row + column * kLineElements);
      if (++column < row_lines) continue;
      column = 0;
      row += stride;
    }
  }

  int64_t stride;
  const W* from = nullptr;
  int64_t row_lines = 0, lines = 0, token_lines = 0;
};

// Few tokens: the weights are read once, straight from memory.
template <int Rows, typename W>
void multiply_directly(const Linear& args, const W* weight, int64_t token_begin, int64_t token_end, int64_t output) {
  for_each_tile(token_begin, token_end, [&](auto tokens, int64_t token) HWY_ATTR {
    Floats sums[Rows * tokens()];
    clear<Rows, tokens()>(sums);
    add<Rows, tokens(), true>(sums, weight + output * args.inputs, args.inputs, args.x + token * args.x_stride,
                              args.x_stride, args.inputs);
    finish<Rows, tokens()>(sums, args, token, output);
  });
}

// Many tokens: in passes over the inputs, between which the sums rest in memory.
template <int Rows, typename W>
void multiply_in_passes(const Linear& args, const W* weight, int64_t token_begin, int64_t token_end, int64_t output) {
  HWY_ALIGN float widened[Rows * kLinearPassInputs];
  HWY_ALIGN float saved[Rows * kLinearBlockTokens * kFloatLanes];
  constexpr int64_t kSavedStride = kLinearBlockTokens * kFloatLanes;
  for (int64_t begin = 0; begin < args.inputs; begin += kLinearPassInputs) {
    const int64_t count = std::min(kLinearPassInputs, args.inputs - begin);
    const W* w = weight + output * args.inputs + begin;
    const Ahead<W> ahead(args, weight, output, begin + count, Rows, token_end - token_begin);
    for (int r = 0; r < Rows; ++r) {
      int64_t i = 0;
      for (; i + kFloatLanes <= count; i += kFloatLanes)
        hn::Store(widen(w + r * args.inputs + i), FloatTag(), widened + r * kLinearPassInputs + i);
      if (i < count)
        hn::Store(widen_rest(w + r * args.inputs + i, count - i), FloatTag(), widened + r * kLinearPassInputs + i);
    }
    for_each_tile(token_begin, token_end, [&](auto tokens, int64_t token) HWY_ATTR {
      float* tile = saved + (token - token_begin) * kFloatLanes;
      ahead.fetch(token - token_begin);
      Floats sums[Rows * tokens()];
      if (begin == 0)
        clear<Rows, tokens()>(sums);
      else
        load<Rows, tokens()>(sums, tile, kSavedStride);
      add<Rows, tokens(), false>(sums, widened, kLinearPassInputs, args.x + token * args.x_stride + begin,
                                 args.x_stride, count);
      if (begin + count < args.inputs)
        save<Rows, tokens()>(sums, tile, kSavedStride);
      else
        finish<Rows, tokens()>(sums, args, token, output);
    });
  }
}

template <int Rows, typename W>
void multiply(const Linear& args, const W* weight, int64_t token_begin, int64_t token_end, int64_t output) {
  if (token_end - token_begin <= kLinearDirectTokens)
    multiply_directly<Rows>(args, weight, token_begin, token_end, output);
  else
    multiply_in_passes<Rows>(args, weight, token_begin, token_end, output);
}

template <typename W>
void multiply_outputs(const Linear& args, const W* weight, int64_t token_begin, int64_t token_end, int64_t output_begin,
                      int64_t output_end) {
  int64_t output = output_begin;
  for (; output + kTileRows <= output_end; output += kTileRows)
    multiply<kTileRows>(args, weight, token_begin, token_end, output);
  for (; output < output_end; ++output) multiply<1>(args, weight, token_begin, token_end, output);
}

}  // namespace

// One call owns the outputs output_begin .. output_end-1 of the tokens token_begin .. token_end-1.
void linear_kernel(const Linear& args, int64_t token_begin, int64_t token_end, int64_t output_begin,
                   int64_t output_end) {
  if (args.weight != nullptr)
    multiply_outputs(args, args.weight, token_begin, token_end, output_begin, output_end);
  else
    multiply_outputs(args, args.weight_f32, token_begin, token_end, output_begin, output_end);
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(linear_kernel);

namespace {

void check(const Linear& args) {
  require(args.tokens >= 0 && args.inputs >= 0 && args.outputs >= 0,
          "linear: expected sizes >= 0, got tokens {} inputs {} outputs {}", args.tokens, args.inputs, args.outputs);
  require((args.weight != nullptr) != (args.weight_f32 != nullptr) || args.inputs == 0 || args.outputs == 0,
          "linear: expected exactly one of weight and weight_f32");
  if (args.tokens == 0 || args.outputs == 0) return;
  require((args.x != nullptr || args.inputs == 0) && args.y != nullptr, "linear: x and y must not be null");
  require(args.tokens == 1 || args.x_stride >= args.inputs, "linear: expected x_stride >= {}, got {}", args.inputs,
          args.x_stride);
  require(args.tokens == 1 || args.y_stride >= args.outputs, "linear: expected y_stride >= {}, got {}", args.outputs,
          args.y_stride);
  require(args.residual == nullptr || args.tokens == 1 || args.residual_stride >= args.outputs,
          "linear: expected residual_stride >= {}, got {}", args.outputs, args.residual_stride);
}

}  // namespace

void linear(const Linear& args, Device& device) {
  check(args);
  if (args.tokens == 0 || args.outputs == 0) return;
  const int64_t input_bytes = std::max<int64_t>(args.inputs, 1) * static_cast<int64_t>(sizeof(float));
  // Whole tiles of three tokens, so that only the last block has a narrower one.
  const int64_t block_tokens = std::clamp<int64_t>(kLinearBlockBytes / input_bytes / 3 * 3, 9, kLinearBlockTokens);
  const int64_t blocks = (args.tokens + block_tokens - 1) / block_tokens;
  const int64_t groups = (args.outputs + kLinearTileOutputs - 1) / kLinearTileOutputs;
  const int64_t products = std::max<int64_t>(1, std::min(args.tokens, block_tokens) * kLinearTileOutputs * args.inputs);
  // Ranges of at least some 5 us, and a few a thread so that a slow one does not hold up the rest.
  const int64_t grain = std::max<int64_t>({1, blocks * groups / (device.threads().size() * 6), 65536 / products});
  const auto kernel = HWY_DYNAMIC_DISPATCH(linear_kernel);
  device.threads().parallel_for(blocks * groups, grain, [&](int64_t begin, int64_t end, int) {
    while (begin < end) {
      const int64_t block = begin / groups;
      const int64_t stop = std::min(end, (block + 1) * groups);
      kernel(args, block * block_tokens, std::min(args.tokens, (block + 1) * block_tokens),
             (begin - block * groups) * kLinearTileOutputs,
             std::min(args.outputs, (stop - block * groups) * kLinearTileOutputs));
      begin = stop;
    }
  });
}

}  // namespace replayssm
#endif  // HWY_ONCE
