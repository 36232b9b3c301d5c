#include "replayssm/state/pool.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace replayssm {

StatePool::StatePool(StateLayout layout, const PoolSize& size, const PoolOptions& options)
    : SequencePool(std::move(layout), size, {},
                   {.max_rows = options.max_rows, .staggers_flushes = options.staggers_flushes}) {
  place(size, [&](size_t bytes) {
    Buffer<float>& buffer = buffers_.emplace_back(bytes / sizeof(float));
    if (options.is_poisoned) std::fill(buffer.begin(), buffer.end(), std::bit_cast<float>(0x7FC07FC0u));
    return reinterpret_cast<std::byte*>(buffer.data());
  });
}

void StatePool::materialise(Handle from, Handle to, int records, Device& device, std::span<std::byte> workspace) {
  const auto fold = [&](const StateRows& rows) { fold_layers<float>(rows, device, workspace); };
  fold_into(from, to, records, std::cref(fold));  // a function of a reference allocates nothing
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
