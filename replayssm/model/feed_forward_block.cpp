// A feed-forward: hidden += W_down activation(W_up x).
#include "replayssm/model/forward.h"
#include "replayssm/ops/activation.h"

namespace replayssm {

BlockWidths block_widths(const FeedForwardConfig& config, const StateLayout&, int, Device&) {
  return {.projection = 2 * int64_t{config.size}};
}

void run_feed_forward(const Forward& forward, const FeedForwardConfig& config, const FeedForwardWeights& weights) {
  const int64_t size = config.size, width = weights.up.outputs;
  float* gate = forward.arrays.projection.data();
  project(forward, weights.up, forward.arrays.normal.data(), forward.config.hidden_size, gate, false);
  silu_product({.tokens = forward.tokens,
                .size = size,
                .gate = gate,
                .up = gate + size,
                .gate_stride = width,
                .up_stride = width,
                .y = gate,
                .y_stride = width},
               forward.device);
  project(forward, weights.down, gate, width, forward.arrays.hidden.data(), true);
}

}  // namespace replayssm
