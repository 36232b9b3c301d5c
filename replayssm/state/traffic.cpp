#include "replayssm/state/traffic.h"

#include <algorithm>

namespace replayssm {
namespace {

// One row of one layer, in numbers of FP32 values.
StateTraffic row_traffic(const RecurrentArrays& arrays, CheckpointForm form, StepKind kind, Readout readout,
                         int64_t history, int64_t tokens, int64_t kept_inputs, bool is_flushing) {
  const int64_t checkpoint = arrays.checkpoint_floats(), record = arrays.record_floats();
  int64_t gram_heads = 0;
  for (const RingArray& array : arrays.ring)
    if (array.is_square && array.size > 0) gram_heads = array.heads;
  const bool is_replay = kind == StepKind::kReplay;
  const bool is_half_read = form == CheckpointForm::kPlanes && is_replay && readout == Readout::kDirect && !is_flushing;
  int64_t read = (is_half_read ? checkpoint / 2 : checkpoint) + history * record +
                 int64_t{arrays.conv_channels} * (arrays.conv_width - 1);
  int64_t written = int64_t{arrays.conv_channels} * std::min(tokens, kept_inputs);
  if (!is_replay || is_flushing) written += checkpoint;
  if (is_replay) {
    const int64_t kept = is_flushing ? 0 : history;
    if (readout == Readout::kDirect) read += gram_heads * (kept * (kept - 1) / 2);
    written += tokens * record + gram_heads * (tokens * kept + tokens * (tokens - 1) / 2);
  }
  return {static_cast<size_t>(read) * sizeof(float), static_cast<size_t>(written) * sizeof(float)};
}

}  // namespace

StateTraffic step_traffic(const StateLayout& layout, const StepPlan& plan, Readout readout) {
  StateTraffic sum;
  for (const StateLayer& layer : layout.layers) {
    const std::optional<RecurrentArrays> arrays = recurrent_arrays(layer, layout.ring_capacity());
    if (!arrays) continue;
    for (int row = 0; row < plan.rows.count; ++row) {
      const int64_t tokens = plan.token_begin[row + 1] - plan.token_begin[row];
      if (plan.rows.slot[row] == kPaddingSlot || tokens == 0) continue;
      sum += row_traffic(*arrays, layout.form, plan.kind, readout, plan.rows.history[row], tokens,
                         layout.conv_capacity(arrays->conv_width), plan.is_flushing[row] != 0);
    }
  }
  return sum;
}

}  // namespace replayssm
