// How a layer's step is cut into launches: arithmetic of the host, there without CUDA too.
#include "replayssm/ops/layer_step.h"

#include "replayssm/core/error.h"
#include "replayssm/ops/tiles.h"

namespace replayssm {
namespace {

constexpr int kConvWidth = 4;

// What both families have in common. `gate_threads` and `gate_bytes` are a token's.
LayerPlan plan_launches(int rows, int tokens_per_row, int channels, int64_t gate_threads, int64_t gate_bytes,
                        int vectors, int vector_size, int element_bytes, const CudaProperties& gpu) {
  const int64_t tokens = int64_t{rows} * tokens_per_row;
  LayerPlan plan;
  plan.conv_rows_a_thread = tokens_per_row > 1 ? 1 : conv_rows_a_thread(rows, channels, gpu.multiprocessors);
  plan.conv_blocks = ceiling_quotient(rows, plan.conv_rows_a_thread) * conv_tiles(channels);
  plan.gate_blocks = ceiling_quotient(tokens * gate_threads, kTileThreads);
  const NormTiles tiles = norm_tiles(vector_size);
  plan.norm_blocks = ceiling_quotient(tokens * vectors, tiles.vectors_a_block);
  plan.norm_block_threads = tiles.threads;
  plan.norm_vector_threads = tiles.lanes * tiles.warps;
  // A token's input, output and place in the window; a row's history.
  const int64_t conv_elements = channels * (3 * tokens + int64_t{kConvWidth - 1} * rows);
  plan.prepare_bytes = conv_elements * element_bytes + tokens * gate_bytes +
                       int64_t{kConvWidth} * channels * static_cast<int64_t>(sizeof(float));
  plan.norm_bytes = tokens * vectors * vector_size * (static_cast<int64_t>(sizeof(float)) + 2 * element_bytes);
  return plan;
}

}  // namespace

LayerPlan plan_layer(const DeltaShape& shape, int rows, int tokens_per_row, int element_bytes,
                     const CudaProperties& gpu) {
  const int channels = 2 * shape.key_heads * shape.key_size + shape.heads * shape.value_size;
  const int64_t gates = int64_t{shape.heads} * (shape.gate_size + 1);
  return plan_launches(rows, tokens_per_row, channels, delta_gate_threads(shape.heads, shape.gate_size),
                       gates * (element_bytes + static_cast<int64_t>(sizeof(float))), shape.heads, shape.value_size,
                       element_bytes, gpu);
}

LayerPlan plan_layer(const Mamba2Shape& shape, int rows, int tokens_per_row, int element_bytes,
                     const CudaProperties& gpu) {
  const int inner = shape.heads * shape.head_size, channels = inner + 2 * shape.groups * shape.state_size;
  return plan_launches(rows, tokens_per_row, channels, shape.heads,
                       shape.heads * (element_bytes + static_cast<int64_t>(sizeof(float))), shape.groups,
                       inner / shape.groups, element_bytes, gpu);
}

std::string describe(const LayerPlan& plan) {
  return fmt::format(
      "convolution and gates: {} + {} blocks of {} threads, {} rows a thread, {:.2f} MB; state; norm: {} blocks of {} "
      "threads, {} a vector, {:.2f} MB",
      plan.conv_blocks, plan.gate_blocks, kTileThreads, plan.conv_rows_a_thread, plan.prepare_bytes * 1e-6,
      plan.norm_blocks, plan.norm_block_threads, plan.norm_vector_threads, plan.norm_bytes * 1e-6);
}

}  // namespace replayssm
