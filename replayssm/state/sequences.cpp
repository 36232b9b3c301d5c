// The bytes of a state pool: cleans, copies and folds what the ledger decides.
#include "replayssm/state/sequences.h"

#include <algorithm>
#include <optional>

#include "replayssm/core/bf16.h"
#include "replayssm/core/error.h"
#include "replayssm/core/fp16.h"

namespace replayssm {
namespace {

LedgerLimits ledger_limits(const StateLayout& layout, const PoolSize& size, const SequenceLimits& sequences) {
  check_layout(layout);
  LedgerLimits limits;
  limits.slots = size.slots;
  limits.max_rows = sequences.max_rows == 0 ? size.slots : sequences.max_rows;
  limits.pages = size.pages;
  limits.page_tokens = kv_token_bytes(layout) == 0 ? 0 : layout.page_tokens;
  limits.context_tokens = sequences.max_sequence_tokens == 0 ? layout.context_tokens : sequences.max_sequence_tokens;
  limits.window = layout.window;
  limits.max_step_tokens = layout.max_step_tokens;
  limits.staggers_flushes = sequences.staggers_flushes;
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

// Rings of `capacity` records of `bytes` bytes each, `heads` a slot: copies the `count` records of slot `from` that
// begin at position `first` of each ring to slot `to`, in one move, or in two where they pass a ring's end.
struct RecordCopy {
  int64_t from, to;
  int64_t first, count, capacity;

  void operator()(std::byte* rings, int64_t heads, int64_t bytes, std::vector<PieceMove>& moves) const {
    const int64_t ring = capacity * bytes, start = first % capacity, before_end = std::min(count, capacity - start);
    const auto add = [&](int64_t record, int64_t records) {
      if (records > 0)
        moves.push_back({rings + to * heads * ring + record * bytes, rings + from * heads * ring + record * bytes,
                         records * bytes, heads, ring});
    };
    add(start, before_end);
    add(0, count - before_end);
  }
};

}  // namespace

std::vector<SequencePool::LayerMemory> SequencePool::place_layers(const StateLayout& layout, const PoolSize& size,
                                                                  const StateStorage& storage, const Take& take) {
  std::vector<LayerMemory> memory(layout.layers.size());
  const size_t slots = size.slots, element = storage.element_bytes();
  const int capacity = layout.ring_capacity();
  for (size_t index = 0; index < memory.size(); ++index) {
    LayerMemory& own = memory[index];
    if (auto arrays = recurrent_arrays(layout.layers[index], capacity)) {
      own.arrays = *std::move(arrays);
      own.checkpoint = take(slots * own.arrays.checkpoint_floats() * sizeof(float));
      for (const RingArray& array : own.arrays.ring) {
        const size_t bytes = ring_bytes(array, capacity, storage);
        own.ring.push_back(bytes == 0 ? nullptr : take(slots * bytes));
      }
      own.conv_window = take(slots * layout.conv_capacity(own.arrays.conv_width) * own.arrays.conv_channels * element);
    } else {
      const auto& attention = std::get<AttentionLayer>(layout.layers[index]);
      const size_t bytes =
          static_cast<size_t>(size.pages) * attention.kv_heads * layout.page_tokens * attention.head_size * element;
      own.kv_k = take(bytes);
      if (attention.latent_size == 0) own.kv_v = take(bytes);
    }
  }
  return memory;
}

SequencePool::SequencePool(StateLayout layout, const PoolSize& size, const StateStorage& storage,
                           const SequenceLimits& limits)
    : layout_(std::move(layout)), storage_(storage), ledger_(ledger_limits(layout_, size, limits)) {
  size_t moves = 0;  // the most that a call makes: those of a fork
  for (const StateLayer& layer : layout_.layers) {
    const std::optional<RecurrentArrays> arrays = recurrent_arrays(layer, layout_.ring_capacity());
    moves += 2 * (1 + (arrays ? arrays->ring.size() : 0));
  }
  moves_.reserve(moves);
}

template <typename State, typename Shape>
State SequencePool::recurrent_view(const LayerMemory& own, const Shape& shape) const {
  State state;
  state.shape = shape;
  state.slots = state.checkpoints = ledger_.limits().slots;
  state.window = layout_.window;
  state.capacity = layout_.ring_capacity();
  state.checkpoint = reinterpret_cast<float*>(own.checkpoint);
  state.form = layout_.form;
  return state;
}

template <typename T>
BasicDeltaState<T> SequencePool::delta_view(int index) const {
  const auto& layer = layer_at<DeltaLayer>(layout_, index, "state of the delta rule");
  const LayerMemory& own = memory_[index];
  const auto numbers = [&own](size_t array) { return reinterpret_cast<float*>(own.ring[array]); };
  auto state = recurrent_view<BasicDeltaState<T>>(own, layer.shape);
  state.ring_k = reinterpret_cast<T*>(own.ring[0]);
  state.ring_k_scale = numbers(1);
  state.ring_gram = numbers(2);
  state.ring_v = reinterpret_cast<T*>(own.ring[3]);
  state.ring_decay = numbers(4);
  state.ring_beta = numbers(5);
  return state;
}

template <typename T>
BasicMamba2State<T> SequencePool::mamba2_view(int index) const {
  const auto& layer = layer_at<Mamba2Layer>(layout_, index, "state of Mamba-2");
  const LayerMemory& own = memory_[index];
  auto state = recurrent_view<BasicMamba2State<T>>(own, layer.shape);
  state.ring_x = reinterpret_cast<T*>(own.ring[0]);
  state.ring_b = reinterpret_cast<T*>(own.ring[1]);
  state.ring_dt = reinterpret_cast<float*>(own.ring[2]);
  state.ring_decay = reinterpret_cast<float*>(own.ring[3]);
  return state;
}

template <typename T>
BasicConv1dState<T> SequencePool::conv_view(int index) const {
  const RecurrentArrays* own = arrays(index);
  require(own != nullptr, "pool: layer {} has no convolution", index);
  return {.channels = own->conv_channels,
          .width = own->conv_width,
          .slots = ledger_.limits().slots,
          .capacity = layout_.conv_capacity(own->conv_width),
          .window = reinterpret_cast<T*>(memory_[index].conv_window)};
}

template <typename T>
BasicKvCache<T> SequencePool::kv_view(int index) const {
  const auto& layer = layer_at<AttentionLayer>(layout_, index, "keys and values");
  return {.kv_heads = layer.kv_heads,
          .head_size = layer.head_size,
          .latent_size = layer.latent_size,
          .pages = ledger_.limits().pages,
          .page_tokens = layout_.page_tokens,
          .k = reinterpret_cast<T*>(memory_[index].kv_k),
          .v = reinterpret_cast<T*>(memory_[index].kv_v)};
}

template BasicDeltaState<float> SequencePool::delta_view(int) const;
template BasicMamba2State<float> SequencePool::mamba2_view(int) const;
template BasicConv1dState<float> SequencePool::conv_view(int) const;
template BasicKvCache<float> SequencePool::kv_view(int) const;
template BasicDeltaState<Bf16> SequencePool::delta_view(int) const;
template BasicMamba2State<Bf16> SequencePool::mamba2_view(int) const;
template BasicConv1dState<Bf16> SequencePool::conv_view(int) const;
template BasicKvCache<Bf16> SequencePool::kv_view(int) const;
template BasicDeltaState<Fp16> SequencePool::delta_view(int) const;
template BasicMamba2State<Fp16> SequencePool::mamba2_view(int) const;
template BasicConv1dState<Fp16> SequencePool::conv_view(int) const;
template BasicKvCache<Fp16> SequencePool::kv_view(int) const;

const RecurrentArrays* SequencePool::arrays(int index) const {
  require(index >= 0 && index < static_cast<int>(memory_.size()), "pool: layer must be 0 to {}, given {}",
          memory_.size() - 1, index);
  return memory_[index].is_recurrent() ? &memory_[index].arrays : nullptr;
}

Handle SequencePool::allocate(int64_t max_tokens) {
  const Handle handle = ledger_.allocate(max_tokens);
  clean(handle);
  return handle;
}

void SequencePool::free(Handle handle) {
  ledger_.free(handle);
}

void SequencePool::reset(Handle handle) {
  ledger_.reset(handle);
  clean(handle);
}

Handle SequencePool::restore(Cursor cursor, int64_t max_tokens) {
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

Handle SequencePool::fork(Handle parent, int64_t max_tokens) {
  const Ledger::Fork fork = ledger_.fork(parent, max_tokens);
  const Cursor cursor = ledger_.cursor(parent);
  add_records(parent, fork.child, cursor);
  add_conv_inputs(parent, fork.child, cursor.tokens());
  add_page(fork.page);
  flush_moves();
  return fork.child;
}

void SequencePool::fold_into(Handle from, Handle to, int records,
                             const std::function<void(const StateRows& rows)>& fold) {
  const PageCopy page = ledger_.materialise(from, to, records);
  const int64_t base = ledger_.cursor(from).base;
  const int32_t history = records, in = ledger_.checkpoint(from), out = ledger_.checkpoint(to);
  add_conv_inputs(from, to, base + records);
  add_page(page);
  flush_moves();
  try {
    fold({.count = 1,
          .slot = &from.slot,
          .base = &base,
          .history = &history,
          .checkpoint_in = &in,
          .checkpoint_out = &out});
  } catch (...) {
    ledger_.spoil(to);
    throw;
  }
}

const StepPlan& SequencePool::begin_step(StepKind kind, std::span<const Handle> rows, std::span<const int> tokens) {
  const StepPlan& plan = ledger_.begin_step(kind, rows, tokens);
  for (const CheckpointCopy& copy : ledger_.copies()) copy_checkpoint(copy);
  publish(plan);
  return plan;
}

void SequencePool::clean(Handle handle) {
  const int64_t checkpoint = ledger_.checkpoint(handle);
  for (const LayerMemory& own : memory_) {
    if (!own.is_recurrent()) continue;
    const int64_t bytes = own.arrays.checkpoint_floats() * int64_t{sizeof(float)};
    moves_.push_back({.to = own.checkpoint + checkpoint * bytes, .bytes = bytes});
    const int64_t inputs = int64_t{layout_.conv_capacity(own.arrays.conv_width)} * own.arrays.conv_channels *
                           static_cast<int64_t>(storage_.element_bytes());
    moves_.push_back({.to = own.conv_window + handle.slot * inputs, .bytes = inputs});
  }
  flush_moves();
}

void SequencePool::copy_checkpoint(CheckpointCopy copy) {
  for (const LayerMemory& own : memory_) {
    if (!own.is_recurrent()) continue;
    const int64_t bytes = own.arrays.checkpoint_floats() * int64_t{sizeof(float)};
    moves_.push_back({own.checkpoint + copy.to * bytes, own.checkpoint + copy.from * bytes, bytes});
  }
  flush_moves();
}

void SequencePool::add_records(Handle from, Handle to, Cursor cursor) {
  const RecordCopy copy{from.slot, to.slot, cursor.base, cursor.history, layout_.ring_capacity()};
  for (const LayerMemory& own : memory_) {
    for (size_t i = 0; i < own.ring.size(); ++i) {
      if (own.ring[i] == nullptr) continue;
      const RingArray& array = own.arrays.ring[i];
      copy(own.ring[i], array.heads, array.size * static_cast<int64_t>(number_bytes(array, storage_)), moves_);
    }
  }
}

// The last W-1 inputs before position `tokens`; those before the first token are zeros, and they lie in the window too.
void SequencePool::add_conv_inputs(Handle from, Handle to, int64_t tokens) {
  for (const LayerMemory& own : memory_) {
    if (!own.is_recurrent()) continue;
    const int64_t inputs = own.arrays.conv_width - 1, capacity = layout_.conv_capacity(own.arrays.conv_width);
    const RecordCopy copy{from.slot, to.slot, tokens - inputs + capacity, inputs, capacity};
    copy(own.conv_window, 1, own.arrays.conv_channels * static_cast<int64_t>(storage_.element_bytes()), moves_);
  }
}

void SequencePool::add_page(PageCopy copy) {
  if (copy.from < 0) return;
  for (size_t index = 0; index < memory_.size(); ++index) {
    const auto* layer = std::get_if<AttentionLayer>(&layout_.layers[index]);
    if (layer == nullptr) continue;
    const int64_t bytes = int64_t{layer->kv_heads} * layout_.page_tokens * layer->head_size *
                          static_cast<int64_t>(storage_.element_bytes());
    for (std::byte* pages : {memory_[index].kv_k, memory_[index].kv_v}) {
      if (pages == nullptr) continue;  // a latent layer keeps no values
      moves_.push_back({pages + copy.to * bytes, pages + copy.from * bytes, bytes});
    }
  }
}

void SequencePool::flush_moves() {
  move(moves_);
  moves_.clear();
}

}  // namespace replayssm
