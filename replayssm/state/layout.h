// What a slot of a state pool holds: the layers that keep state, the window, the sizes. Bytes are counted here alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "replayssm/core/safetensors.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/mamba2.h"

namespace replayssm {

// A Gated DeltaNet or Kimi Delta Attention layer: a checkpoint, a ring of records, the inputs of its convolution.
struct DeltaLayer {
  DeltaShape shape;
  int conv_channels = 0;
  int conv_width = 0;  // W, 2 .. 8

  friend bool operator==(const DeltaLayer&, const DeltaLayer&) = default;
};

// The same of a Mamba-2 layer.
struct Mamba2Layer {
  Mamba2Shape shape;
  int conv_channels = 0;
  int conv_width = 0;  // W, 2 .. 8

  friend bool operator==(const Mamba2Layer&, const Mamba2Layer&) = default;
};

// A full-attention layer: keys and values in pages.
struct AttentionLayer {
  int kv_heads = 0;   // M
  int head_size = 0;  // D
  // Above 0: no values are kept, a value is the first latent_size channels of its key (multi-head latent attention).
  int latent_size = 0;

  friend bool operator==(const AttentionLayer&, const AttentionLayer&) = default;
};

using StateLayer = std::variant<DeltaLayer, Mamba2Layer, AttentionLayer>;

// `layers` lists the layers that keep state, in the model's order; layers without state do not appear, and a layer with
// two kinds of state appears twice. A pool's views are asked for by the index into this list.
struct StateLayout {
  std::string model;  // fingerprint of the weights: sessions are moved only between pools whose fingerprints are equal
  std::vector<StateLayer> layers;
  int window = 16;             // L, the most records that are kept unfolded; >= 1
  int max_step_tokens = 1;     // T_max, the longest window of a replay step; 1 .. L
  int page_tokens = 16;        // positions of a KV page; >= 1
  int64_t context_tokens = 0;  // the most tokens of a sequence; >= 1
  // Of all checkpoints.
  CheckpointForm form = CheckpointForm::kWords;

  int ring_capacity() const { return window + max_step_tokens; }  // C
  int conv_capacity(int width) const { return width - 1 + max_step_tokens; }
  int64_t pages_for(int64_t tokens) const { return (tokens + page_tokens - 1) / page_tokens; }
};

// Throws Error, naming the field or the layer, unless the layout can be built.
void check_layout(const StateLayout& layout);

// How a pool keeps what its layout lists. Checkpoints take 4 bytes an element in either form.
struct StateStorage {
  // Of the layers' activations, kept unrounded: ring arrays of them, convolution windows, keys and values. kF32, kBF16
  // or kF16.
  Dtype element = Dtype::kF32;
  bool has_squares = true;  // square ring arrays are kept; a GPU uses none

  size_t element_bytes() const { return dtype_bits(element) / 8; }
};

// One array of a layer's ring, [slots, heads, C, size], named as in the op's state.
struct RingArray {
  std::string_view name;
  int64_t heads = 0;
  int64_t size = 0;            // numbers of a record; 0: the layer has no such array
  bool is_activation = false;  // kept in the type of the activations; else in FP32
  // The record's numbers are one for each record of the ring, by position; only those of older records mean something.
  bool is_square = false;
};

// What a layer with a recurrent state keeps: heads x values x keys floats of checkpoint, a ring, and the inputs of a
// convolution.
struct RecurrentArrays {
  std::array<int64_t, 3> checkpoint{};
  std::vector<RingArray> ring;
  int conv_channels = 0;
  int conv_width = 0;

  int64_t checkpoint_floats() const { return checkpoint[0] * checkpoint[1] * checkpoint[2]; }
};

// Nothing of an attention layer.
std::optional<RecurrentArrays> recurrent_arrays(const StateLayer& layer, int ring_capacity);

// What one slot holds apart from keys and values.
struct SlotBytes {
  size_t checkpoint = 0;
  size_t ring = 0;
  size_t convolution = 0;

  size_t total() const { return checkpoint + ring + convolution; }
};

SlotBytes slot_bytes(const StateLayout& layout, const StateStorage& storage = {});

// A number of `array`, and a slot's records; 0 if the storage leaves the array out.
size_t number_bytes(const RingArray& array, const StateStorage& storage);
size_t ring_bytes(const RingArray& array, int ring_capacity, const StateStorage& storage);

// Keys and values of one token, all layers; 0 without attention layers.
size_t kv_token_bytes(const StateLayout& layout, const StateStorage& storage = {});

inline constexpr int64_t kMaxSlots = 1 << 24;

// How many slots and KV pages a pool has.
struct PoolSize {
  int slots = 0;
  int64_t pages = 0;  // 0 .. 2^31 - 1; ignored without attention layers
};

// Pages for `slots` sequences of `tokens_per_slot` tokens each.
PoolSize pool_size(const StateLayout& layout, int slots, int64_t tokens_per_slot);

// The most slots, each with KV pages for `tokens_per_slot` tokens, that fit into `budget_bytes`; what is left becomes
// pages, as many as the slots could use. Throws Error if not even one slot fits.
PoolSize fit_pool(const StateLayout& layout, size_t budget_bytes, int64_t tokens_per_slot);

// The bytes of a pool's state arrays.
size_t pool_bytes(const StateLayout& layout, const PoolSize& size, const StateStorage& storage = {});

// The layers in words, one line: equal for two layouts exactly if a slot's checkpoint, records, inputs and keys of one
// mean the same in the other. The windows, the page size, the context and the form are not part of it.
std::string describe_layers(const StateLayout& layout);

}  // namespace replayssm
