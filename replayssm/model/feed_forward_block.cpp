// A feed-forward: hidden += W_down activation(W_up x).
#include "replayssm/model/forward.h"
#include "replayssm/ops/activation.h"

namespace replayssm {
namespace {

// The leading down.inputs floats of each row of `inner` <- activation(row).
void activate(Activation activation, int64_t rows, int64_t width, float* inner, Device& device) {
  if (activation == Activation::kSwiGlu)
    silu_product({.tokens = rows,
                  .size = width / 2,
                  .gate = inner,
                  .up = inner + width / 2,
                  .gate_stride = width,
                  .up_stride = width,
                  .y = inner,
                  .y_stride = width},
                 device);
  else
    relu2({.tokens = rows, .size = width, .x = inner, .x_stride = width, .y = inner, .y_stride = width}, device);
}

}  // namespace

int64_t inner_width(Activation activation, int64_t size) {
  return activation == Activation::kSwiGlu ? 2 * size : size;
}

void feed_forward(const Forward& forward, Activation activation, const MatrixRows& up, const MatrixRows& down,
                  int64_t rows, const float* x, float* inner, float* y, bool is_added) {
  project(forward, up, rows, x, up.inputs, inner, false);
  activate(activation, rows, up.outputs, inner, forward.device);
  project(forward, down, rows, inner, up.outputs, y, is_added);
}

BlockWidths block_widths(const FeedForwardConfig& config, const StateLayout&, int, Device&) {
  return {.projection = inner_width(config.activation, config.size)};
}

void run_feed_forward(const Forward& forward, const FeedForwardConfig& config, const FeedForwardWeights& weights) {
  feed_forward(forward, config.activation, weights.up, weights.down, forward.tokens, forward.arrays.normal.data(),
               forward.arrays.projection.data(), forward.arrays.hidden.data(), true);
}

}  // namespace replayssm
