// The bytes of a state pool: cleans, copies and folds what the ledger decides.
#include "replayssm/state/pool.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

LedgerLimits ledger_limits(const StateLayout& layout, const PoolSize& size, const PoolOptions& options) {
  check_layout(layout);
  LedgerLimits limits;
  limits.slots = size.slots;
  limits.max_rows = options.max_rows == 0 ? size.slots : options.max_rows;
  limits.pages = size.pages;
  limits.page_tokens = kv_token_bytes(layout) == 0 ? 0 : layout.page_tokens;
  limits.context_tokens = layout.context_tokens;
  limits.window = layout.window;
  limits.max_step_tokens = layout.max_step_tokens;
  return limits;
}

// Layer `index` of the layout, which must be of the kind Layer.
template <typename Layer>
const Layer& layer_at(const StateLayout& layout, int index, const char* what) {
  require(index >= 0 && index < static_cast<int>(layout.layers.size()), "pool: layer must be 0 to {}, given {}",
          layout.layers.size() - 1, index);
  const auto* layer = std::get_if<Layer>(&layout.layers[index]);
  require(layer != nullptr, "pool: layer {} has no {}", index, what);
  return *layer;
}

// The array [slots, heads, capacity, size] of a ring: copies the records at `base` .. `base + count - 1` of one slot.
struct RecordCopy {
  int64_t from_slot, to_slot;
  int64_t base;
  int count;
  int capacity;

  void operator()(float* array, int64_t heads, int64_t size) const {
    for (int64_t head = 0; head < heads; ++head) {
      for (int i = 0; i < count; ++i) {
        const int64_t record = (base + i) % capacity;
        std::copy_n(array + ((from_slot * heads + head) * capacity + record) * size, size,
                    array + ((to_slot * heads + head) * capacity + record) * size);
      }
    }
  }
};

}  // namespace

StatePool::StatePool(StateLayout layout, const PoolSize& size, const PoolOptions& options)
    : layout_(std::move(layout)), ledger_(ledger_limits(layout_, size, options)), memory_(layout_.layers.size()) {
  const auto make = [&](size_t count) {
    Buffer<float> buffer(count);
    if (options.is_poisoned) std::fill(buffer.begin(), buffer.end(), std::bit_cast<float>(0x7FC07FC0u));
    return buffer;
  };
  const size_t slots = size.slots, capacity = layout_.ring_capacity();
  for (size_t index = 0; index < memory_.size(); ++index) {
    LayerMemory& memory = memory_[index];
    if (auto arrays = recurrent_arrays(layout_.layers[index], layout_.ring_capacity())) {
      memory.arrays = *std::move(arrays);
      memory.checkpoint = make(slots * memory.arrays.checkpoint_floats());
      for (const RingArray& array : memory.arrays.ring)
        memory.ring.push_back(make(slots * array.heads * capacity * array.size));
      memory.conv_window = make(slots * layout_.conv_capacity(memory.arrays.conv_width) * memory.arrays.conv_channels);
    } else {
      const auto& attention = std::get<AttentionLayer>(layout_.layers[index]);
      const size_t count =
          static_cast<size_t>(size.pages) * attention.kv_heads * layout_.page_tokens * attention.head_size;
      memory.kv_k = make(count);
      if (attention.latent_size == 0) memory.kv_v = make(count);
    }
  }
}

DeltaState StatePool::delta_state(int index) {
  const auto& layer = layer_at<DeltaLayer>(layout_, index, "state of the delta rule");
  LayerMemory& memory = memory_[index];
  DeltaState state;
  state.shape = layer.shape;
  state.slots = state.checkpoints = ledger_.limits().slots;
  state.window = layout_.window;
  state.capacity = layout_.ring_capacity();
  state.checkpoint = memory.checkpoint.data();
  state.form = layout_.form;
  float** const arrays[] = {&state.ring_k, &state.ring_k_scale, &state.ring_gram,
                            &state.ring_v, &state.ring_decay,   &state.ring_beta};
  for (size_t i = 0; i < std::size(arrays); ++i)
    *arrays[i] = memory.ring[i].size() == 0 ? nullptr : memory.ring[i].data();
  return state;
}

Mamba2State StatePool::mamba2_state(int index) {
  const auto& layer = layer_at<Mamba2Layer>(layout_, index, "state of Mamba-2");
  LayerMemory& memory = memory_[index];
  Mamba2State state;
  state.shape = layer.shape;
  state.slots = state.checkpoints = ledger_.limits().slots;
  state.window = layout_.window;
  state.capacity = layout_.ring_capacity();
  state.checkpoint = memory.checkpoint.data();
  state.form = layout_.form;
  float** const arrays[] = {&state.ring_x, &state.ring_b, &state.ring_dt, &state.ring_decay};
  for (size_t i = 0; i < std::size(arrays); ++i) *arrays[i] = memory.ring[i].data();
  return state;
}

Conv1dState StatePool::conv_state(int index) {
  const RecurrentArrays* own = arrays(index);
  require(own != nullptr, "pool: layer {} has no convolution", index);
  return {.channels = own->conv_channels,
          .width = own->conv_width,
          .slots = ledger_.limits().slots,
          .capacity = layout_.conv_capacity(own->conv_width),
          .window = memory_[index].conv_window.data()};
}

const RecurrentArrays* StatePool::arrays(int index) const {
  require(index >= 0 && index < static_cast<int>(memory_.size()), "pool: layer must be 0 to {}, given {}",
          memory_.size() - 1, index);
  return memory_[index].is_recurrent() ? &memory_[index].arrays : nullptr;
}

KvCache StatePool::kv_cache(int index) {
  const auto& layer = layer_at<AttentionLayer>(layout_, index, "keys and values");
  return {.kv_heads = layer.kv_heads,
          .head_size = layer.head_size,
          .latent_size = layer.latent_size,
          .pages = ledger_.limits().pages,
          .page_tokens = layout_.page_tokens,
          .k = memory_[index].kv_k.data(),
          .v = memory_[index].kv_v.data()};
}

Handle StatePool::allocate(int64_t max_tokens) {
  const Handle handle = ledger_.allocate(max_tokens);
  clean(handle);
  return handle;
}

void StatePool::free(Handle handle) {
  ledger_.free(handle);
}

void StatePool::reset(Handle handle) {
  ledger_.reset(handle);
  clean(handle);
}

Handle StatePool::restore(Cursor cursor, int64_t max_tokens) {
  const Handle handle = ledger_.allocate(max_tokens);
  try {
    ledger_.restore(handle, cursor);
  } catch (...) {
    ledger_.free(handle);
    throw;
  }
  clean(handle);
  return handle;
}

Handle StatePool::fork(Handle parent, int64_t max_tokens) {
  const Ledger::Fork fork = ledger_.fork(parent, max_tokens);
  const Cursor cursor = ledger_.cursor(parent);
  copy_records(parent, fork.child, cursor);
  copy_conv_inputs(parent, fork.child, cursor.tokens());
  copy_page(fork.page);
  return fork.child;
}

void StatePool::materialise(Handle from, Handle to, int records, Device& device, std::span<std::byte> workspace) {
  const PageCopy page = ledger_.materialise(from, to, records);
  const int64_t base = ledger_.cursor(from).base;
  const int32_t history = records, in = ledger_.checkpoint(from), out = ledger_.checkpoint(to);
  copy_conv_inputs(from, to, base + records);
  copy_page(page);
  const StateRows rows{
      .count = 1, .slot = &from.slot, .base = &base, .history = &history, .checkpoint_in = &in, .checkpoint_out = &out};
  try {
    for (size_t index = 0; index < memory_.size(); ++index) {
      const int layer = static_cast<int>(index);
      if (std::holds_alternative<DeltaLayer>(layout_.layers[index]))
        delta_materialise({delta_state(layer), rows}, device, workspace);
      else if (std::holds_alternative<Mamba2Layer>(layout_.layers[index]))
        mamba2_materialise({mamba2_state(layer), rows}, device, workspace);
    }
  } catch (...) {
    ledger_.spoil(to);
    throw;
  }
}

const StepPlan& StatePool::begin_step(StepKind kind, std::span<const Handle> rows, std::span<const int> tokens) {
  const StepPlan& plan = ledger_.begin_step(kind, rows, tokens);
  for (const CheckpointCopy& copy : ledger_.copies()) copy_checkpoint(copy.from, copy.to);
  return plan;
}

void StatePool::clean(Handle handle) {
  const int64_t checkpoint = ledger_.checkpoint(handle);
  for (LayerMemory& memory : memory_) {
    if (!memory.is_recurrent()) continue;
    const int64_t floats = memory.arrays.checkpoint_floats();
    std::fill_n(memory.checkpoint.data() + checkpoint * floats, floats, 0.0f);
    const int64_t inputs = int64_t{layout_.conv_capacity(memory.arrays.conv_width)} * memory.arrays.conv_channels;
    std::fill_n(memory.conv_window.data() + handle.slot * inputs, inputs, 0.0f);
  }
}

void StatePool::copy_checkpoint(int32_t from, int32_t to) {
  for (LayerMemory& memory : memory_) {
    if (!memory.is_recurrent()) continue;
    const int64_t floats = memory.arrays.checkpoint_floats();
    float* checkpoints = memory.checkpoint.data();
    std::copy_n(checkpoints + from * floats, floats, checkpoints + to * floats);
  }
}

void StatePool::copy_records(Handle from, Handle to, Cursor cursor) {
  const RecordCopy copy{from.slot, to.slot, cursor.base, cursor.history, layout_.ring_capacity()};
  for (LayerMemory& memory : memory_)
    for (size_t i = 0; i < memory.ring.size(); ++i)
      copy(memory.ring[i].data(), memory.arrays.ring[i].heads, memory.arrays.ring[i].size);
}

// The last W-1 inputs before position `tokens`; those before the first token are zeros, and they lie in the window too.
void StatePool::copy_conv_inputs(Handle from, Handle to, int64_t tokens) {
  for (LayerMemory& memory : memory_) {
    if (!memory.is_recurrent()) continue;
    const int width = memory.arrays.conv_width;
    const int64_t capacity = layout_.conv_capacity(width), channels = memory.arrays.conv_channels;
    float* window = memory.conv_window.data();
    for (int64_t position = tokens - (width - 1); position < tokens; ++position) {
      const int64_t input = (position + capacity) % capacity;
      std::copy_n(window + (from.slot * capacity + input) * channels, channels,
                  window + (to.slot * capacity + input) * channels);
    }
  }
}

void StatePool::copy_page(PageCopy copy) {
  if (copy.from < 0) return;
  for (size_t index = 0; index < memory_.size(); ++index) {
    const auto* layer = std::get_if<AttentionLayer>(&layout_.layers[index]);
    if (layer == nullptr) continue;
    const int64_t floats = int64_t{layer->kv_heads} * layout_.page_tokens * layer->head_size;
    for (float* pages : {memory_[index].kv_k.data(), memory_[index].kv_v.data()}) {
      if (pages == nullptr) continue;  // a latent layer keeps no values
      std::copy_n(pages + copy.from * floats, floats, pages + copy.to * floats);
    }
  }
}

size_t materialise_workspace_bytes(const StateLayout& layout, Device& device) {
  size_t bytes = 0;
  for (const StateLayer& layer : layout.layers) {
    if (const auto* delta = std::get_if<DeltaLayer>(&layer)) {
      bytes = std::max(bytes, delta_workspace_bytes(delta->shape, layout.ring_capacity(), device));
    } else if (const auto* mamba2 = std::get_if<Mamba2Layer>(&layer)) {
      bytes = std::max(bytes, mamba2_workspace_bytes(mamba2->shape, layout.ring_capacity(), device));
    }
  }
  return bytes;
}

}  // namespace replayssm
