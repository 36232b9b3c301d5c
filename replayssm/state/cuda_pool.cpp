#include "replayssm/state/cuda_pool.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "replayssm/core/error.h"
#include "replayssm/ops/cuda_checks.h"
#include "replayssm/ops/ring.h"

namespace replayssm {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kRowBytes = 6 * sizeof(int32_t) + sizeof(int64_t);
constexpr int64_t kMaxCudaKeys = std::numeric_limits<int32_t>::max();  // that attention on a GPU numbers

StateStorage storage_of(const CudaPoolOptions& options) {
  return {.element = options.element, .has_squares = false};
}

// Throws Error unless the ops on a GPU take such layers.
void check_cuda_layout(const StateLayout& layout, const CudaPoolOptions& options) {
  check_layout(layout);
  const Dtype element = options.element;
  require(element == Dtype::kF32 || element == Dtype::kBF16 || element == Dtype::kF16,
          "pool: activations on a GPU are F32, BF16 or F16, given {}", dtype_name(element));
  require(options.max_rows >= 0 && options.max_rows <= kMaxCudaRows,
          "pool: max_rows on a GPU must be 0 to {}, given {}", kMaxCudaRows, options.max_rows);
  check_cuda_window("pool", layout.window, layout.max_step_tokens);
  for (const StateLayer& layer : layout.layers) {
    if (const auto* delta = std::get_if<DeltaLayer>(&layer))
      check_cuda_sizes("pool", "key size", delta->shape.key_size, options.max_rows);
    else if (const auto* mamba2 = std::get_if<Mamba2Layer>(&layer))
      check_cuda_sizes("pool", "state size", mamba2->shape.state_size, options.max_rows);
  }
  require(options.max_sequence_tokens >= 0 && options.max_sequence_tokens <= layout.context_tokens,
          "pool: max_sequence_tokens must be 0 to the context of {}, given {}", layout.context_tokens,
          options.max_sequence_tokens);
}

bool keeps_kv(const StateLayout& layout) {
  return kv_token_bytes(layout) > 0;
}

// The KV pages that attention on a GPU can number.
int64_t most_pages(const StateLayout& layout) {
  int64_t pages = kMaxCudaKeys;
  for (const StateLayer& layer : layout.layers)
    if (const auto* attention = std::get_if<AttentionLayer>(&layer))
      pages = std::min(pages, kMaxCudaKeys / attention->kv_heads / layout.page_tokens);
  return pages;
}

// The most tokens of a sequence, however many pages there are.
int64_t longest(const StateLayout& layout, const CudaPoolOptions& options) {
  return options.max_sequence_tokens > 0 ? options.max_sequence_tokens : layout.context_tokens;
}
int64_t longest(const StateLayout& layout, const PoolSize& size, const CudaPoolOptions& options) {
  if (options.max_sequence_tokens > 0 || !keeps_kv(layout)) return longest(layout, options);
  return std::min(layout.context_tokens, size.pages * layout.page_tokens);
}

// What a driver may round a pool's two blocks up by.
constexpr size_t kGranularity = size_t{4} << 20;

// The GPU's memory that a pool surely does with.
struct PoolBytes {
  SlotBytes slots;  // of all
  size_t kv = 0;
  size_t rows = 0;

  size_t total() const { return slots.total() + kv + rows; }
  std::string text() const {
    return fmt::format(
        "{} bytes of GPU memory ({} for checkpoints, {} for rings, {} for convolution windows, {} for keys and values, "
        "{} for rows and page tables)",
        total(), slots.checkpoint, slots.ring, slots.convolution, kv, rows);
  }
};

PoolBytes bytes_of(const StateLayout& layout, const PoolSize& size, const CudaPoolOptions& options) {
  const StateStorage storage = storage_of(options);
  size_t arrays = 8;  // of rows; each array may begin past the end of the one before
  for (const StateLayer& layer : layout.layers) {
    const std::optional<RecurrentArrays> own = recurrent_arrays(layer, layout.ring_capacity());
    arrays += 2 + (own ? own->ring.size() : 0);
  }
  const size_t slots = size.slots, rows = options.max_rows == 0 ? size.slots : options.max_rows;
  const size_t columns = keeps_kv(layout) ? layout.pages_for(longest(layout, size, options)) : 0;
  const SlotBytes slot = slot_bytes(layout, storage);
  return {.slots = {slots * slot.checkpoint, slots * slot.ring, slots * slot.convolution},
          .kv = size.pages * layout.page_tokens * kv_token_bytes(layout, storage),
          .rows = rows * (kRowBytes + columns * sizeof(int32_t)) + arrays * kAlignment};
}

// The largest number of low .. high that fits; if one does, all below it do, and `low` does.
template <typename Fits>
int64_t largest(int64_t low, int64_t high, const Fits& fits) {
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (fits(middle))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// The most slots of `pages` KV pages each that fit into `bytes`; 0 if none does.
int slots_in(const StateLayout& layout, size_t bytes, int64_t pages, const CudaPoolOptions& options) {
  const auto fits = [&](int64_t slots) {
    return slots == 0 || bytes_of(layout, {static_cast<int>(slots), slots * pages}, options).total() <= bytes;
  };
  int64_t most = options.max_rows == 0 ? kMaxCudaRows : kMaxSlots;
  if (pages > 0) most = std::min(most, most_pages(layout) / pages);
  return static_cast<int>(largest(0, most, fits));
}

// The most tokens of a sequence. Throws Error unless a pool of that size can be built and has room.
int64_t checked_longest(const StateLayout& layout, const PoolSize& size, const CudaDevice& device,
                        const CudaPoolOptions& options) {
  check_cuda_layout(layout, options);
  require(size.slots >= 1 && size.slots <= kMaxSlots, "pool: slots must be 1 to {}, given {}", kMaxSlots, size.slots);
  require(options.max_rows > 0 || size.slots <= kMaxCudaRows, "pool: {} slots need a max_rows of at most {}",
          size.slots, kMaxCudaRows);
  const bool has_pages = keeps_kv(layout);
  const PoolSize own = {size.slots, has_pages ? size.pages : 0};
  require(!has_pages || (own.pages >= 1 && own.pages <= most_pages(layout)),
          "pool: KV pages on a GPU must be 1 to {}, given {}", most_pages(layout), own.pages);
  const int64_t tokens = longest(layout, own, options);
  require(!has_pages || layout.pages_for(tokens) * layout.page_tokens <= kMaxCudaKeys,
          "pool: attention on a GPU takes pages for at most {} tokens of a sequence, given {}", kMaxCudaKeys, tokens);

  const size_t available = device.available_bytes(), free = available - std::min(available, kGranularity);
  const PoolBytes needed = bytes_of(layout, own, options);
  if (needed.total() <= free) return tokens;
  if (!has_pages)
    fail("pool: {} slots need {}, {} are free, which {} slots fit into", size.slots, needed.text(), free,
         slots_in(layout, free, 0, options));
  const int64_t pages = std::max<int64_t>(1, own.pages / size.slots);
  fail("pool: {} slots and {} KV pages need {}, {} are free, which {} slots of {} tokens each fit into", size.slots,
       own.pages, needed.text(), free, slots_in(layout, free, pages, options), pages * layout.page_tokens);
}

// The arrays of a step's rows.
RowArrays cut_rows(Carver& carver, size_t rows, bool has_flush_limits) {
  RowArrays arrays;
  arrays.capacity = static_cast<int>(rows);
  arrays.base = carver.take<int64_t>(rows);
  arrays.slot = carver.take<int32_t>(rows);
  arrays.history = carver.take<int32_t>(rows);
  arrays.checkpoint_in = carver.take<int32_t>(rows);
  arrays.checkpoint_out = carver.take<int32_t>(rows);
  arrays.token_begin = carver.take<int32_t>(rows + 1);
  if (has_flush_limits) arrays.flush_limit = carver.take<int32_t>(rows);
  return arrays;
}

}  // namespace

CudaStatePool::CudaStatePool(const StateLayout& layout, const PoolSize& size, CudaDevice& device,
                             const CudaPoolOptions& options)
    : SequencePool(layout, size, storage_of(options),
                   {.max_rows = options.max_rows,
                    .max_sequence_tokens = checked_longest(layout, size, device, options),
                    .staggers_flushes = options.staggers_flushes}),
      device_(device),
      table_stride_(static_cast<int>(keeps_kv(layout) ? layout.pages_for(ledger().limits().context_tokens) : 0)),
      uploads_(ledger().limits().max_rows * sizeof(int32_t) * table_stride_, device) {
  Carver count(nullptr, kAlignment);
  place_layers(layout, size, storage(), [&](size_t bytes) { return count.take<std::byte>(bytes); });
  memory_ = DeviceBuffer<std::byte>(count.bytes(), device);
  if (options.is_poisoned) device.fill_words(memory_.data(), 0x7FC07FC0u, memory_.size() / sizeof(uint32_t));
  Carver carver(memory_.data(), kAlignment);
  place(size, [&](size_t bytes) { return carver.take<std::byte>(bytes); });

  const size_t rows = ledger().limits().max_rows, entries = rows * table_stride_;
  Carver row_count(nullptr, kAlignment);
  cut_rows(row_count, rows, options.staggers_flushes);
  row_count.take<int32_t>(entries);
  row_memory_ = DeviceBuffer<std::byte>(row_count.bytes(), device);
  Carver row_carver(row_memory_.data(), kAlignment);
  row_arrays_ = cut_rows(row_carver, rows, options.staggers_flushes);
  if (entries > 0) page_table_ = row_carver.take<int32_t>(entries);
  device.fill_words(page_table_, 0xFFFFFFFFu, entries);
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

void CudaStatePool::publish(const StepPlan& plan) {
  if (page_table_ != nullptr) put_pages(plan.pages, plan.rows.count);
  put_rows(plan.rows, plan.token_begin, row_arrays_, device_);
}

// Brings the page tables [rows, table_stride] of a step, and -1 to what the step before showed around them.
void CudaStatePool::put_pages(const KvPages& pages, int rows) {
  const int64_t all_rows = std::max(rows, shown_rows_), columns = std::max(pages.table_stride, shown_columns_);
  shown_rows_ = rows;
  shown_columns_ = pages.table_stride;
  if (columns == 0) return;
  auto* const staged = static_cast<int32_t*>(uploads_.next());
  std::fill_n(staged, all_rows * columns, -1);
  for (int64_t row = 0; row < rows; ++row)
    std::copy_n(pages.page_table + row * pages.table_stride, pages.table_stride, staged + row * columns);
  uploads_.upload(page_table_, table_stride_ * sizeof(int32_t), columns * sizeof(int32_t), all_rows);
}

StateRows CudaStatePool::rows(int count) const {
  require(count >= 0 && count <= row_arrays_.capacity, "pool: expected 0 to {} rows, got {}", row_arrays_.capacity,
          count);
  return {count,
          row_arrays_.slot,
          row_arrays_.base,
          row_arrays_.history,
          row_arrays_.checkpoint_in,
          row_arrays_.checkpoint_out,
          row_arrays_.flush_limit};
}

void CudaStatePool::check_element(Dtype asked) const {
  require(asked == storage().element, "pool: its activations are {}, asked for as {}", dtype_name(storage().element),
          dtype_name(asked));
}

PoolSize fit_cuda_pool(const StateLayout& layout, size_t budget_bytes, int64_t tokens_per_slot,
                       const CudaPoolOptions& options) {
  check_cuda_layout(layout, options);
  require(tokens_per_slot >= 1 && tokens_per_slot <= longest(layout, options),
          "pool: tokens per slot must be 1 to {}, given {}", longest(layout, options), tokens_per_slot);
  const PoolSize one = pool_size(layout, 1, tokens_per_slot);
  const int64_t most = most_pages(layout);
  require(one.pages <= most, "pool: {} tokens need {} KV pages, on a GPU there are at most {}", tokens_per_slot,
          one.pages, most);
  PoolSize size;
  size.slots = slots_in(layout, budget_bytes, one.pages, options);
  require(size.slots >= 1, "pool: one slot of {} tokens needs {}, the budget is {} bytes", tokens_per_slot,
          bytes_of(layout, one, options).text(), budget_bytes);
  if (one.pages == 0) return size;
  const auto fits = [&](int64_t pages) {
    return bytes_of(layout, {size.slots, pages}, options).total() <= budget_bytes;
  };
  const int64_t usable = size.slots * layout.pages_for(longest(layout, options));
  size.pages = largest(size.slots * one.pages, std::min(usable, most), fits);
  return size;
}

}  // namespace replayssm
