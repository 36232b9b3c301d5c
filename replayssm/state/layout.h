// What a slot of a state pool holds: the layers that keep state, the window, the sizes. Bytes are counted here alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "replayssm/ops/delta.h"

namespace replayssm {

// A Gated DeltaNet or Kimi Delta Attention layer: a checkpoint, a ring of records, the inputs of its convolution.
struct DeltaLayer {
  DeltaShape shape;
  int conv_channels = 0;
  int conv_width = 0;  // W, 2 .. 8
};

// A full-attention layer: keys and values in pages.
struct AttentionLayer {
  int kv_heads = 0;   // M
  int head_size = 0;  // D
};

using StateLayer = std::variant<DeltaLayer, AttentionLayer>;

// `layers` lists the layers that keep state, in the model's order; layers without state do not appear, and a layer with
// two kinds of state appears twice. A pool's views are asked for by the index into this list.
struct StateLayout {
  std::string model;  // fingerprint of the weights: sessions are moved only between pools whose fingerprints are equal
  std::vector<StateLayer> layers;
  int window = 16;             // L, the most records that are kept unfolded; >= 1
  int max_step_tokens = 1;     // T_max, the longest window of a replay step; 1 .. L
  int page_tokens = 16;        // positions of a KV page; >= 1
  int64_t context_tokens = 0;  // the most tokens of a sequence; >= 1

  int ring_capacity() const { return window + max_step_tokens; }  // C
  int conv_capacity(int width) const { return width - 1 + max_step_tokens; }
  int64_t pages_for(int64_t tokens) const { return (tokens + page_tokens - 1) / page_tokens; }
};

// Throws Error, naming the field or the layer, unless the layout can be built.
void check_layout(const StateLayout& layout);

// What one slot holds apart from keys and values.
struct SlotBytes {
  size_t checkpoint = 0;
  size_t ring = 0;
  size_t convolution = 0;

  size_t total() const { return checkpoint + ring + convolution; }
};

SlotBytes slot_bytes(const StateLayout& layout);

// Keys and values of one token, all layers; 0 without attention layers.
size_t kv_token_bytes(const StateLayout& layout);

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
size_t pool_bytes(const StateLayout& layout, const PoolSize& size);

// The layers in words, one line: equal for two layouts exactly if a slot's checkpoint, records, inputs and keys of one
// mean the same in the other. The windows, the page size and the context are not part of it.
std::string describe_layers(const StateLayout& layout);

}  // namespace replayssm
