// Checks, byte counts and the description of a state layout.
#include "replayssm/state/layout.h"

#include <algorithm>
#include <limits>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxSlots = 1 << 24;

size_t ring_floats(const DeltaShape& shape, size_t capacity) {
  const size_t heads = shape.heads, key_heads = shape.key_heads;
  return capacity * (key_heads * (shape.key_size + 1) + heads * (shape.value_size + shape.gate_size + 1)) +
         ring_gram_size(shape, static_cast<int>(capacity));
}

void check_layer(const DeltaLayer& layer, size_t index) {
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
}

std::string describe(const DeltaLayer& layer) {
  return fmt::format("delta {}x{}x{}x{}x{} conv {}x{}", layer.shape.heads, layer.shape.key_heads,
                     layer.shape.value_size, layer.shape.key_size, layer.shape.gate_size, layer.conv_channels,
                     layer.conv_width);
}

std::string describe(const AttentionLayer& layer) {
  return fmt::format("attention {}x{}", layer.kv_heads, layer.head_size);
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

SlotBytes slot_bytes(const StateLayout& layout) {
  SlotBytes bytes;
  for (const StateLayer& layer : layout.layers) {
    const auto* delta = std::get_if<DeltaLayer>(&layer);
    if (delta == nullptr) continue;
    const DeltaShape& shape = delta->shape;
    bytes.checkpoint += sizeof(float) * shape.heads * shape.value_size * shape.key_size;
    bytes.ring += sizeof(float) * ring_floats(shape, layout.ring_capacity());
    bytes.convolution += sizeof(float) * layout.conv_capacity(delta->conv_width) * delta->conv_channels;
  }
  return bytes;
}

size_t kv_token_bytes(const StateLayout& layout) {
  size_t bytes = 0;
  for (const StateLayer& layer : layout.layers) {
    if (const auto* attention = std::get_if<AttentionLayer>(&layer)) {
      bytes += 2 * sizeof(float) * attention->kv_heads * attention->head_size;
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

size_t pool_bytes(const StateLayout& layout, const PoolSize& size) {
  return size.slots * slot_bytes(layout).total() + size.pages * layout.page_tokens * kv_token_bytes(layout);
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
