// Sessions of a GPU's pool, by way of a pool of one slot on the CPU.
#include "replayssm/state/cuda_session.h"

#include <algorithm>
#include <bit>
#include <span>
#include <string_view>
#include <vector>

#include "replayssm/core/error.h"
#include "replayssm/state/pool.h"
#include "replayssm/state/session_file.h"

namespace replayssm {
namespace {

// One array of one slot, or of one of its KV pages, as FP32 numbers on the CPU and in `element` on the GPU. A
// checkpoint's numbers are bits, in one form on both sides.
struct SlotArray {
  std::string_view name;
  int layer;
  float* here;
  std::byte* there;
  int64_t count;
  Dtype element;
};

// The keys or the values of a sequence in one layer, `here` and `there` being all pages': a full page is one array, of
// the last one the tokens of each head are.
void add_pages(std::vector<SlotArray>& arrays, const SlotArray& all, const AttentionLayer& own, int64_t page_tokens,
               int64_t tokens, std::span<const int32_t> pages_here, std::span<const int32_t> pages_there) {
  const int64_t element_bytes = static_cast<int64_t>(dtype_bits(all.element) / 8);
  const int64_t head = page_tokens * own.head_size, page = own.kv_heads * head;
  for (int64_t index = 0; index * page_tokens < tokens; ++index) {
    const int64_t kept = std::min(page_tokens, tokens - index * page_tokens);
    const bool is_full = kept == page_tokens;
    for (int64_t part = 0; part < (is_full ? 1 : own.kv_heads); ++part) {
      SlotArray& array = arrays.emplace_back(all);
      array.here += pages_here[index] * page + part * head;
      array.there += (pages_there[index] * page + part * head) * element_bytes;
      array.count = is_full ? page : kept * own.head_size;
    }
  }
}

std::vector<SlotArray> slot_arrays(StatePool& host, Handle here, const CudaStatePool& pool, Handle there) {
  std::vector<SlotArray> arrays;
  const Dtype element = pool.storage().element;
  const int layers = static_cast<int>(pool.layout().layers.size());
  // Array `at_here` and `at_there`, of which places `number_here` and `number_there` are the sequence's.
  const auto add = [&](std::string_view name, int layer, float* at_here, int64_t number_here, std::byte* at_there,
                       int64_t number_there, int64_t count, Dtype kept) {
    arrays.push_back({name, layer, at_here + number_here * count,
                      at_there + number_there * count * (dtype_bits(kept) / 8), count, kept});
  };
  for (int layer = 0; layer < layers; ++layer) {
    if (const auto* attention = std::get_if<AttentionLayer>(&pool.layout().layers[layer])) {
      const KvCache cache = host.kv_cache(layer);
      const auto add_all = [&](std::string_view name, float* at_here, std::byte* at_there) {
        add_pages(arrays, {name, layer, at_here, at_there, 0, element}, *attention, cache.page_tokens,
                  pool.cursor(there).tokens(), host.ledger().pages(here), pool.ledger().pages(there));
      };
      add_all("k", cache.k, pool.keys(layer));
      if (cache.v != nullptr) add_all("v", cache.v, pool.values(layer));
      continue;
    }
    const RecurrentArrays& own = *pool.arrays(layer);
    add("checkpoint", layer, host.checkpoint(layer), host.ledger().checkpoint(here), pool.checkpoint(layer),
        pool.ledger().checkpoint(there), own.checkpoint_floats(), Dtype::kF32);
    for (size_t i = 0; i < own.ring.size(); ++i) {
      if (pool.ring(layer, i) == nullptr) continue;
      const RingArray& ring = own.ring[i];
      add(ring.name, layer, host.ring(layer, i), here.slot, pool.ring(layer, i), there.slot,
          ring.heads * pool.layout().ring_capacity() * ring.size, ring.is_activation ? element : Dtype::kF32);
    }
    const Conv1dState conv = host.conv_state(layer);
    add("convolution", layer, conv.window, here.slot, pool.conv_window(layer), there.slot,
        int64_t{conv.capacity} * conv.channels, element);
  }
  return arrays;
}

float widened(uint16_t half, Dtype element) {
  return element == Dtype::kBF16 ? to_float(Bf16{half}) : to_float(Fp16{half});
}

// The half that widens to `value`, if there is one; else any.
uint16_t narrowed(float value, Dtype element) {
  const auto word = std::bit_cast<uint32_t>(value);
  if (element == Dtype::kBF16) return static_cast<uint16_t>(word >> 16);
  const uint32_t sign = word >> 16 & 0x8000u, magnitude = word & 0x7FFFFFFFu;
  if (magnitude >= 0x7F800000u) return static_cast<uint16_t>(sign | 0x7C00u | (magnitude >> 13 & 0x3FFu));
  if (magnitude >= 0x38800000u) return static_cast<uint16_t>(sign | (magnitude - (112u << 23)) >> 13);
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p24f));
}

void download(const SlotArray& array, CudaDevice& device) {
  if (array.element == Dtype::kF32) return device.download(array.here, array.there, array.count * sizeof(float));
  std::vector<uint16_t> halves(array.count);
  device.download(halves.data(), array.there, halves.size() * sizeof(uint16_t));
  for (int64_t i = 0; i < array.count; ++i) array.here[i] = widened(halves[i], array.element);
}

void upload(const SlotArray& array, const std::string& path, CudaDevice& device) {
  if (array.element == Dtype::kF32) return device.upload(array.there, array.here, array.count * sizeof(float));
  std::vector<uint16_t> halves(array.count);
  for (int64_t i = 0; i < array.count; ++i) {
    halves[i] = narrowed(array.here[i], array.element);
    require(std::bit_cast<uint32_t>(widened(halves[i], array.element)) == std::bit_cast<uint32_t>(array.here[i]),
            "session {}: layers.{}.{} holds {}, which is no number of {}, this pool's element", path, array.layer,
            array.name, array.here[i], dtype_name(array.element));
  }
  device.upload(array.there, halves.data(), halves.size() * sizeof(uint16_t));
}

// What a GPU does not keep: the products of each committed record's k^ with those of older ones.
void fill_products(StatePool& host, Handle here) {
  const Cursor cursor = host.cursor(here);
  for (int layer = 0; layer < static_cast<int>(host.layout().layers.size()); ++layer) {
    if (!std::holds_alternative<DeltaLayer>(host.layout().layers[layer])) continue;
    const DeltaState state = host.delta_state(layer);
    if (state.ring_gram == nullptr) continue;
    const int64_t K = state.shape.key_size, C = state.capacity;
    for (int64_t head = here.slot * state.shape.key_heads; head < (here.slot + 1) * state.shape.key_heads; ++head) {
      for (int i = 0; i < cursor.history; ++i) {
        const int64_t later = head * C + (cursor.base + i) % C;
        for (int j = 0; j < i; ++j) {
          const int64_t earlier = head * C + (cursor.base + j) % C;
          float sum = 0;
          for (int64_t k = 0; k < K; ++k) sum += state.ring_k[later * K + k] * state.ring_k[earlier * K + k];
          state.ring_gram[later * C + earlier % C] = sum * state.ring_k_scale[earlier] * state.ring_k_scale[later];
        }
      }
    }
  }
}

// A pool of the same layout on the CPU for one sequence of up to `tokens` tokens, or as many as the context allows.
StatePool host_pool(const CudaStatePool& pool, int64_t tokens) {
  const StateLayout& layout = pool.layout();
  return StatePool(layout, pool_size(layout, 1, std::clamp<int64_t>(tokens, 1, layout.context_tokens)));
}

}  // namespace

void save_session(CudaStatePool& pool, Handle handle, const std::string& path) {
  check_saving(pool, handle);
  const Cursor cursor = pool.cursor(handle);
  const int64_t tokens = std::max<int64_t>(1, cursor.tokens());
  StatePool host = host_pool(pool, tokens);
  const Handle copy = host.restore(cursor, tokens);
  for (const SlotArray& array : slot_arrays(host, copy, pool, handle)) download(array, pool.device());
  fill_products(host, copy);
  save_session(host, copy, path);
}

Handle load_session(CudaStatePool& pool, const std::string& path, int64_t max_tokens) {
  StatePool host = host_pool(pool, max_tokens);
  for (int layer = 0; layer < static_cast<int>(pool.layout().layers.size()); ++layer) {
    if (host.arrays(layer) == nullptr) continue;
    const std::vector<RingArray>& ring = host.arrays(layer)->ring;
    for (size_t i = 0; i < ring.size(); ++i)  // records that the file has not
      std::fill_n(host.ring(layer, i), ring[i].heads * pool.layout().ring_capacity() * ring[i].size, 0.0f);
  }
  const Handle copy = load_session(host, path, max_tokens);
  const Handle handle = pool.restore(host.cursor(copy), max_tokens);
  try {
    for (const SlotArray& array : slot_arrays(host, copy, pool, handle)) upload(array, path, pool.device());
  } catch (...) {
    pool.free(handle);
    throw;
  }
  return handle;
}

}  // namespace replayssm
