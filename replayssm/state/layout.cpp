// Checks, byte counts and the description of a state layout.
#include "replayssm/state/layout.h"

#include <algorithm>
#include <limits>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max();

template <typename Layer>
void check_layer(const Layer& layer, size_t index) {
  check_shape(layer.shape);
  require(layer.conv_channels >= 1, "layout: layer {} needs at least 1 convolution channel, given {}", index,
          layer.conv_channels);
  require(layer.conv_width >= 2 && layer.conv_width <= 8,
          "layout: layer {} needs a convolution width of 2 to 8, given {}", index, layer.conv_width);
}

void check_layer(const AttentionLayer& layer, size_t index) {
  require(layer.kv_heads >= 1 && layer.head_size >= 1,
          "layout: layer {} needs at least 1 KV head of size 1, given {} of size {}", index, layer.kv_heads,
          layer.head_size);
  require(layer.latent_size >= 0 && layer.latent_size <= layer.head_size,
          "layout: layer {} needs a latent size of 0 to the head size of {}, given {}", index, layer.head_size,
          layer.latent_size);
}

std::string describe(const DeltaLayer& layer) {
  return fmt::format("delta {}x{}x{}x{}x{} conv {}x{}", layer.shape.heads, layer.shape.key_heads,
                     layer.shape.value_size, layer.shape.key_size, layer.shape.gate_size, layer.conv_channels,
                     layer.conv_width);
}

std::string describe(const Mamba2Layer& layer) {
  return fmt::format("mamba2 {}x{}x{}x{} conv {}x{}", layer.shape.heads, layer.shape.groups, layer.shape.head_size,
                     layer.shape.state_size, layer.conv_channels, layer.conv_width);
}

std::string describe(const AttentionLayer& layer) {
  if (layer.latent_size > 0)
    return fmt::format("attention {}x{} latent {}", layer.kv_heads, layer.head_size, layer.latent_size);
  return fmt::format("attention {}x{}", layer.kv_heads, layer.head_size);
}

RecurrentArrays arrays_of(const DeltaLayer& layer, int64_t capacity) {
  const DeltaShape& shape = layer.shape;
  const int64_t heads = shape.heads, key_heads = shape.key_heads;
  return {.checkpoint = {heads, shape.value_size, shape.key_size},
          .ring = {{"ring_k", key_heads, shape.key_size, /*is_activation=*/true},
                   {"ring_k_scale", key_heads, 1},
                   {"ring_gram", key_heads, shape.gate_size == 1 ? capacity : 0, false, /*is_square=*/true},
                   {"ring_v", heads, shape.value_size, /*is_activation=*/true},
                   {"ring_decay", heads, shape.gate_size},
                   {"ring_beta", heads, 1}},
          .conv_channels = layer.conv_channels,
          .conv_width = layer.conv_width};
}

RecurrentArrays arrays_of(const Mamba2Layer& layer, int64_t) {
  const Mamba2Shape& shape = layer.shape;
  return {.checkpoint = {shape.heads, shape.head_size, shape.state_size},
          .ring = {{"ring_x", shape.heads, shape.head_size, /*is_activation=*/true},
                   {"ring_b", shape.groups, shape.state_size, /*is_activation=*/true},
                   {"ring_dt", shape.heads, 1},
                   {"ring_decay", shape.heads, 1}},
          .conv_channels = layer.conv_channels,
          .conv_width = layer.conv_width};
}

}  // namespace

void check_layout(const StateLayout& layout) {
  require(!layout.layers.empty(), "layout: no layer keeps state");
  require(layout.window >= 1 && layout.window <= 4096, "layout: window must be 1 to 4096, given {}", layout.window);
  require(layout.max_step_tokens >= 1 && layout.max_step_tokens <= layout.window,
          "layout: the longest step must be 1 to the window of {} tokens, given {}", layout.window,
          layout.max_step_tokens);
  require(layout.page_tokens >= 1 && layout.page_tokens <= 65536,
          "layout: a KV page must hold 1 to 65536 tokens, given {}", layout.page_tokens);
  require(layout.context_tokens >= 1, "layout: the context must hold at least 1 token, given {}",
          layout.context_tokens);
  require(layout.pages_for(layout.context_tokens) <= kMaxPages,
          "layout: a context of {} tokens needs more than {} pages", layout.context_tokens, kMaxPages);
  for (size_t index = 0; index < layout.layers.size(); ++index) {
    std::visit([index](const auto& layer) { check_layer(layer, index); }, layout.layers[index]);
  }
}

std::optional<RecurrentArrays> recurrent_arrays(const StateLayer& layer, int ring_capacity) {
  if (const auto* delta = std::get_if<DeltaLayer>(&layer)) return arrays_of(*delta, ring_capacity);
  if (const auto* mamba2 = std::get_if<Mamba2Layer>(&layer)) return arrays_of(*mamba2, ring_capacity);
  return std::nullopt;
}

size_t number_bytes(const RingArray& array, const StateStorage& storage) {
  if (array.is_square && !storage.has_squares) return 0;
  return array.is_activation ? storage.element_bytes() : sizeof(float);
}

size_t ring_bytes(const RingArray& array, int ring_capacity, const StateStorage& storage) {
  return number_bytes(array, storage) * array.heads * ring_capacity * array.size;
}

SlotBytes slot_bytes(const StateLayout& layout, const StateStorage& storage) {
  SlotBytes bytes;
  const int capacity = layout.ring_capacity();
  for (const StateLayer& layer : layout.layers) {
    const std::optional<RecurrentArrays> arrays = recurrent_arrays(layer, capacity);
    if (!arrays) continue;
    bytes.checkpoint += sizeof(float) * arrays->checkpoint_floats();
    for (const RingArray& array : arrays->ring) bytes.ring += ring_bytes(array, capacity, storage);
    bytes.convolution += storage.element_bytes() * layout.conv_capacity(arrays->conv_width) * arrays->conv_channels;
  }
  return bytes;
}

size_t kv_token_bytes(const StateLayout& layout, const StateStorage& storage) {
  size_t bytes = 0;
  for (const StateLayer& layer : layout.layers) {
    if (const auto* attention = std::get_if<AttentionLayer>(&layer)) {
      const int arrays = attention->latent_size > 0 ? 1 : 2;
      bytes += arrays * storage.element_bytes() * attention->kv_heads * attention->head_size;
    }
  }
  return bytes;
}

PoolSize pool_size(const StateLayout& layout, int slots, int64_t tokens_per_slot) {
  check_layout(layout);
  require(slots >= 1 && slots <= kMaxSlots, "pool: slots must be 1 to {}, given {}", kMaxSlots, slots);
  require(tokens_per_slot >= 1 && tokens_per_slot <= layout.context_tokens,
          "pool: tokens per slot must be 1 to the context of {}, given {}", layout.context_tokens, tokens_per_slot);
  const int64_t pages = kv_token_bytes(layout) == 0 ? 0 : layout.pages_for(tokens_per_slot);
  require(pages <= kMaxPages / slots, "pool: {} slots of {} pages are more than {} pages", slots, pages, kMaxPages);
  return {slots, slots * pages};
}

PoolSize fit_pool(const StateLayout& layout, size_t budget_bytes, int64_t tokens_per_slot) {
  const PoolSize one = pool_size(layout, 1, tokens_per_slot);
  const size_t needed_bytes = pool_bytes(layout, one);
  require(needed_bytes <= budget_bytes, "pool: one slot with KV for {} tokens needs {} bytes, the budget is {} bytes",
          tokens_per_slot, needed_bytes, budget_bytes);
  PoolSize size;
  size.slots = static_cast<int>(std::min<uint64_t>(kMaxSlots, needed_bytes == 0 ? 1 : budget_bytes / needed_bytes));
  if (const size_t page_bytes = kv_token_bytes(layout) * layout.page_tokens; page_bytes != 0) {
    size.slots = static_cast<int>(std::min<int64_t>(size.slots, kMaxPages / one.pages));
    const uint64_t affordable = (budget_bytes - size.slots * slot_bytes(layout).total()) / page_bytes;
    const uint64_t usable = size.slots * static_cast<uint64_t>(layout.pages_for(layout.context_tokens));
    size.pages = static_cast<int64_t>(std::min({affordable, usable, static_cast<uint64_t>(kMaxPages)}));
  }
  return size;
}

size_t pool_bytes(const StateLayout& layout, const PoolSize& size, const StateStorage& storage) {
  return size.slots * slot_bytes(layout, storage).total() +
         size.pages * layout.page_tokens * kv_token_bytes(layout, storage);
}

std::string describe_layers(const StateLayout& layout) {
  std::string text;
  for (const StateLayer& layer : layout.layers) {
    if (!text.empty()) text += ", ";
    text += std::visit([](const auto& one) { return describe(one); }, layer);
  }
  return text;
}

}  // namespace replayssm
