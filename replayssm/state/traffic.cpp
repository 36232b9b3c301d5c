#include "replayssm/state/traffic.h"

#include <algorithm>

namespace replayssm {
namespace {

// What a layer's numbers take.
struct LayerBytes {
  size_t checkpoint = 0, record = 0, input = 0;
  size_t square_heads = 0;  // of the array of products, bytes a product over all heads
};

LayerBytes layer_bytes(const RecurrentArrays& arrays, const StateStorage& storage) {
  LayerBytes bytes;
  bytes.checkpoint = arrays.checkpoint_floats() * sizeof(float);
  bytes.input = arrays.conv_channels * storage.element_bytes();
  for (const RingArray& array : arrays.ring) {
    const size_t number = array.heads * number_bytes(array, storage);
    if (!array.is_square)
      bytes.record += number * array.size;
    else if (array.size > 0)
      bytes.square_heads = number;
  }
  return bytes;
}

// One row of one layer.
StateTraffic row_traffic(const LayerBytes& bytes, int conv_width, CheckpointForm form, StepKind kind, Readout readout,
                         size_t history, size_t tokens, size_t kept_inputs, bool is_flushing) {
  const bool is_replay = kind == StepKind::kReplay;
  const bool is_half_read = form == CheckpointForm::kPlanes && is_replay && readout == Readout::kDirect && !is_flushing;
  size_t read = (is_half_read ? bytes.checkpoint / 2 : bytes.checkpoint) + history * bytes.record +
                bytes.input * static_cast<size_t>(conv_width - 1);
  size_t written = bytes.input * std::min(tokens, kept_inputs);
  if (!is_replay || is_flushing) written += bytes.checkpoint;
  if (is_replay) {
    const size_t kept = is_flushing ? 0 : history;
    if (readout == Readout::kDirect && kept > 1) read += bytes.square_heads * (kept * (kept - 1) / 2);
    written += tokens * bytes.record + bytes.square_heads * (tokens * kept + tokens * (tokens - 1) / 2);
  }
  return {read, written};
}

}  // namespace

StateTraffic step_traffic(const StateLayout& layout, const StepPlan& plan, Readout readout,
                          const StateStorage& storage) {
  StateTraffic sum;
  for (const StateLayer& layer : layout.layers) {
    const std::optional<RecurrentArrays> arrays = recurrent_arrays(layer, layout.ring_capacity());
    if (!arrays) continue;
    const LayerBytes bytes = layer_bytes(*arrays, storage);
    const auto kept_inputs = static_cast<size_t>(layout.conv_capacity(arrays->conv_width));
    for (int row = 0; row < plan.rows.count; ++row) {
      const int32_t tokens = plan.token_begin[row + 1] - plan.token_begin[row];
      if (plan.rows.slot[row] == kPaddingSlot || tokens == 0) continue;
      sum += row_traffic(bytes, arrays->conv_width, layout.form, plan.kind, readout,
                         static_cast<size_t>(plan.rows.history[row]), static_cast<size_t>(tokens), kept_inputs,
                         plan.is_flushing[row] != 0);
    }
  }
  return sum;
}

}  // namespace replayssm
