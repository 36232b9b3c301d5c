#include "replayssm/state/cuda_pool.h"

#include <algorithm>

#include "replayssm/core/error.h"
#include "replayssm/ops/cuda_checks.h"
#include "replayssm/ops/ring.h"

namespace replayssm {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kRowBytes = 5 * sizeof(int32_t) + sizeof(int64_t);

StateStorage storage_of(const CudaPoolOptions& options) {
  return {.element = options.element, .has_squares = false};
}

// Throws Error unless the ops on a GPU take such layers.
void check_cuda_layout(const StateLayout& layout, const CudaPoolOptions& options) {
  check_layout(layout);
  const Dtype element = options.element;
  require(element == Dtype::kF32 || element == Dtype::kBF16 || element == Dtype::kF16,
          "pool: activations on a GPU are F32, BF16 or F16, given {}", dtype_name(element));
  check_cuda_window("pool", layout.window, layout.max_step_tokens);
  for (size_t index = 0; index < layout.layers.size(); ++index) {
    if (const auto* delta = std::get_if<DeltaLayer>(&layout.layers[index]))
      check_cuda_sizes("pool", "key size", delta->shape.key_size, options.max_rows);
    else if (const auto* mamba2 = std::get_if<Mamba2Layer>(&layout.layers[index]))
      check_cuda_sizes("pool", "state size", mamba2->shape.state_size, options.max_rows);
    else
      fail("pool: layer {} keeps keys and values, a pool on a GPU has none", index);
  }
}

// What a driver may round a pool's two blocks up by.
constexpr size_t kGranularity = size_t{4} << 20;

// The slots that fit into `budget_bytes`; 0 if none does.
int64_t slots_in(const StateLayout& layout, size_t budget_bytes, const CudaPoolOptions& options) {
  size_t arrays = 6;  // of rows; each array may begin past the end of the one before
  for (const StateLayer& layer : layout.layers)
    arrays += 2 + recurrent_arrays(layer, layout.ring_capacity())->ring.size();
  const size_t fixed = arrays * kAlignment + kRowBytes * options.max_rows;
  const size_t slot = slot_bytes(layout, storage_of(options)).total() + (options.max_rows == 0 ? kRowBytes : 0);
  return budget_bytes < fixed ? 0 : std::min<int64_t>(kMaxSlots, (budget_bytes - fixed) / slot);
}

// `layout`, if a pool of it has room.
StateLayout checked(StateLayout layout, const PoolSize& size, const CudaDevice& device,
                    const CudaPoolOptions& options) {
  check_cuda_layout(layout, options);
  require(size.slots >= 1 && size.slots <= kMaxSlots, "pool: slots must be 1 to {}, given {}", kMaxSlots, size.slots);
  require(options.max_rows > 0 || size.slots <= kMaxCudaRows, "pool: {} slots need a max_rows of at most {}",
          size.slots, kMaxCudaRows);
  const size_t available = device.available_bytes(), free = available - std::min(available, kGranularity);
  const int64_t most = slots_in(layout, free, options);
  const SlotBytes bytes = slot_bytes(layout, storage_of(options));
  const size_t slots = size.slots;
  require(size.slots <= most,
          "pool: {} slots need {} bytes of GPU memory ({} for checkpoints, {} for rings, {} for convolution windows), "
          "{} are free, which {} slots fit into",
          slots, slots * bytes.total(), slots * bytes.checkpoint, slots * bytes.ring, slots * bytes.convolution, free,
          most);
  return layout;
}

// The arrays of a step's rows.
RowArrays cut_rows(Carver& carver, size_t rows) {
  RowArrays arrays;
  arrays.capacity = static_cast<int>(rows);
  arrays.base = carver.take<int64_t>(rows);
  arrays.slot = carver.take<int32_t>(rows);
  arrays.history = carver.take<int32_t>(rows);
  arrays.checkpoint_in = carver.take<int32_t>(rows);
  arrays.checkpoint_out = carver.take<int32_t>(rows);
  arrays.token_begin = carver.take<int32_t>(rows + 1);
  return arrays;
}

}  // namespace

CudaStatePool::CudaStatePool(StateLayout layout, const PoolSize& size, CudaDevice& device,
                             const CudaPoolOptions& options)
    : SequencePool(checked(std::move(layout), size, device, options), {size.slots, 0}, options.max_rows,
                   storage_of(options)),
      device_(device) {
  Carver count(nullptr, kAlignment);
  place_layers(this->layout(), size, storage(), [&](size_t bytes) { return count.take<std::byte>(bytes); });
  memory_ = DeviceBuffer<std::byte>(count.bytes(), device);
  if (options.is_poisoned) device.fill_words(memory_.data(), 0x7FC07FC0u, memory_.size() / sizeof(uint32_t));
  Carver carver(memory_.data(), kAlignment);
  place(size, [&](size_t bytes) { return carver.take<std::byte>(bytes); });

  const size_t rows = ledger().limits().max_rows;
  Carver row_count(nullptr, kAlignment);
  cut_rows(row_count, rows);
  row_memory_ = DeviceBuffer<std::byte>(row_count.bytes(), device);
  Carver row_carver(row_memory_.data(), kAlignment);
  row_arrays_ = cut_rows(row_carver, rows);
  const int32_t none = 0;
  put_rows({}, &none, row_arrays_, device);
}

void CudaStatePool::materialise(Handle from, Handle to, int records) {
  fold_into(from, to, records, [&](const StateRows& host) {
    const int32_t none[] = {0, 0};
    put_rows(host, none, row_arrays_, device_);
    const StateRows on_device = rows(1);
    if (storage().element == Dtype::kF32)
      fold_layers<float>(on_device, device_, {});
    else if (storage().element == Dtype::kBF16)
      fold_layers<Bf16>(on_device, device_, {});
    else
      fold_layers<Fp16>(on_device, device_, {});
  });
}

StateRows CudaStatePool::rows(int count) const {
  require(count >= 0 && count <= row_arrays_.capacity, "pool: expected 0 to {} rows, got {}", row_arrays_.capacity,
          count);
  return {count,
          row_arrays_.slot,
          row_arrays_.base,
          row_arrays_.history,
          row_arrays_.checkpoint_in,
          row_arrays_.checkpoint_out};
}

void CudaStatePool::check_element(Dtype asked) const {
  require(asked == storage().element, "pool: its activations are {}, asked for as {}", dtype_name(storage().element),
          dtype_name(asked));
}

PoolSize fit_cuda_pool(const StateLayout& layout, size_t budget_bytes, const CudaPoolOptions& options) {
  check_cuda_layout(layout, options);
  const int64_t slots = slots_in(layout, budget_bytes, options);
  require(slots >= 1, "pool: one slot needs {} bytes of GPU memory and some more for rows, the budget is {} bytes",
          slot_bytes(layout, storage_of(options)).total(), budget_bytes);
  return {static_cast<int>(slots), 0};
}

}  // namespace replayssm
