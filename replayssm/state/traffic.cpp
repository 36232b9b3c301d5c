#include "replayssm/state/traffic.h"

#include <algorithm>

namespace replayssm {
namespace {

// One row of one layer, in numbers of FP32 values.
StateTraffic row_traffic(const DeltaLayer& layer, StepKind kind, Readout readout, int64_t history, int64_t tokens,
                         int64_t kept_inputs, bool is_flushing) {
  const DeltaShape& shape = layer.shape;
  const int64_t checkpoint = int64_t{shape.heads} * shape.value_size * shape.key_size;
  const int64_t record =
      int64_t{shape.key_heads} * (shape.key_size + 1) + int64_t{shape.heads} * (shape.value_size + shape.gate_size + 1);
  const bool is_replay = kind == StepKind::kReplay;
  int64_t read = checkpoint + history * record + int64_t{layer.conv_channels} * (layer.conv_width - 1);
  int64_t written = int64_t{layer.conv_channels} * std::min(tokens, kept_inputs);
  if (!is_replay || is_flushing) written += checkpoint;
  if (is_replay) {
    const int64_t kept = is_flushing ? 0 : history, product_heads = shape.gate_size == 1 ? shape.key_heads : 0;
    if (readout == Readout::kDirect) read += product_heads * (kept * (kept - 1) / 2);
    written += tokens * record + product_heads * (tokens * kept + tokens * (tokens - 1) / 2);
  }
  return {static_cast<size_t>(read) * sizeof(float), static_cast<size_t>(written) * sizeof(float)};
}

}  // namespace

StateTraffic step_traffic(const StateLayout& layout, const StepPlan& plan, Readout readout) {
  StateTraffic sum;
  for (const StateLayer& any : layout.layers) {
    const DeltaLayer* layer = std::get_if<DeltaLayer>(&any);
    if (layer == nullptr) continue;
    for (int row = 0; row < plan.rows.count; ++row) {
      const int64_t tokens = plan.token_begin[row + 1] - plan.token_begin[row];
      if (plan.rows.slot[row] == kPaddingSlot || tokens == 0) continue;
      sum += row_traffic(*layer, plan.kind, readout, plan.rows.history[row], tokens,
                         layout.conv_capacity(layer->conv_width), plan.is_flushing[row] != 0);
    }
  }
  return sum;
}

}  // namespace replayssm
