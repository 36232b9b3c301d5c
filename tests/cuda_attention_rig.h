// Attention on a GPU for tests: a cache of poison whose pages are dealt out in a shuffled order, and its calls.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "replayssm/ops/attention.h"
#include "tests/attention_cases.h"
#include "tests/cuda_memory.h"

namespace replayssm::test {

// A sequence whose numbers are ones that a T can hold.
template <typename T>
Sequence rounded_sequence(const Heads& heads, int64_t positions, uint64_t seed) {
  Sequence sequence(heads, positions, seed);
  for (float& value : sequence.rows) value = to_float(to_element<T>(value));
  return sequence;
}

struct AttentionRows {
  const Sequence* sequence;  // null: padding
  int slot;
  int64_t begin, end;
};

template <typename T>
class CudaAttentionRig {
 public:
  static constexpr double kBound = std::is_same_v<T, float> ? kFloat32Bound : kBf16Bound;

  CudaAttentionRig(const Heads& heads, int slots, int64_t positions, CudaDevice& device, int64_t spare_pages = 0)
      : heads_(heads), device_(device), stride_((heads.query_heads + 2 * heads.kv_heads) * heads.size) {
    args.cache.kv_heads = heads.kv_heads;
    args.cache.head_size = heads.size;
    args.cache.latent_size = heads.latent_size;
    args.cache.page_tokens = heads.page_tokens;
    args.pages.table_stride = static_cast<int>(positions / heads.page_tokens + 1);
    args.cache.pages = int64_t{slots} * args.pages.table_stride + spare_pages;
    args.query_heads = heads.query_heads;
    args.scale = 1.0f / std::sqrt(static_cast<float>(heads.size));
    args.q_stride = args.k_stride = args.v_stride = stride_;
    // An even number of elements, so that words of poison fill them.
    const size_t count = (args.cache.pages * heads.kv_heads * heads.page_tokens * heads.size + 1) / 2 * 2;
    k_ = poisoned_on_device(count);
    args.cache.k = k_.data();
    if (heads.latent_size == 0) {
      v_ = poisoned_on_device(count);
      args.cache.v = v_.data();
    }
    page_table.resize(slots * args.pages.table_stride);
    std::iota(page_table.begin(), page_table.end(), static_cast<int32_t>(spare_pages));
    std::mt19937_64 random(9);
    std::shuffle(page_table.begin(), page_table.end(), random);
  }

  // Puts a step's rows where args points to: at the places of the step before if that had as many rows and tokens.
  void put(const std::vector<AttentionRows>& rows, int max_tokens_per_row = 0) {
    std::vector<int32_t> slot, history, token_begin = {0}, table;
    std::vector<int64_t> base;
    std::vector<float> input;
    for (const AttentionRows& row : rows) {
      slot.push_back(row.sequence == nullptr ? kPaddingSlot : row.slot);
      history.push_back(static_cast<int32_t>(std::min<int64_t>(row.begin, 3)));
      base.push_back(row.begin - history.back());
      const auto tokens = static_cast<int32_t>(row.end - row.begin);
      token_begin.push_back(token_begin.back() + tokens);
      max_tokens_per_row = std::max(max_tokens_per_row, tokens);
      // Entries past the row's pages are not looked at.
      const int64_t used = (row.end + heads_.page_tokens - 1) / heads_.page_tokens;
      for (int64_t i = 0; i < args.pages.table_stride; ++i)
        table.push_back(i < used && row.sequence != nullptr ? page_table[row.slot * args.pages.table_stride + i] : -1);
      if (row.sequence == nullptr)
        input.insert(input.end(), tokens * stride_, kPoison);
      else
        input.insert(input.end(), row.sequence->rows.begin() + row.begin * stride_,
                     row.sequence->rows.begin() + row.end * stride_);
    }
    args.rows.count = static_cast<int>(rows.size());
    args.rows.slot = place(slot_, slot);
    args.rows.base = place(base_, base);
    args.rows.history = place(history_, history);
    args.token_begin = place(token_begin_, token_begin);
    args.pages.page_table = place(table_, table);
    args.tokens = token_begin.back();
    args.max_tokens_per_row = std::max(1, max_tokens_per_row);
    args.q = place(input_, to_elements<T>(input));
    args.k = args.q + heads_.query_heads * heads_.size;
    args.v = heads_.latent_size > 0 ? nullptr : args.k + heads_.kv_heads * heads_.size;
    poison_outputs();
  }
  void poison_outputs() {
    args.out = place(out_, to_elements<T>(poisoned(args.tokens * heads_.width())));
    const size_t bytes = attention_workspace_bytes(args);
    if (workspace_.size() < bytes) workspace_ = DeviceBuffer<std::byte>(bytes, device_);
    device_.fill_words(workspace_.data(), 0x7FC00000u, workspace_.size() / sizeof(uint32_t));
  }
  std::span<std::byte> workspace() const { return {workspace_.data(), workspace_.size()}; }
  void call() { attention(args, device_, workspace()); }
  std::vector<float> read() { return to_floats<T>(out_.download(device_)); }

  // Appends and attends; returns [N, Q, E].
  std::vector<float> run(const std::vector<AttentionRows>& rows, int max_tokens_per_row = 0) {
    put(rows, max_tokens_per_row);
    call();
    device_.synchronize();
    return read();
  }

  BasicAttention<T> args;
  std::vector<int32_t> page_table;

 private:
  DeviceBuffer<T> poisoned_on_device(size_t count) {
    DeviceBuffer<T> array(count, device_);
    device_.fill_words(array.data(), sizeof(T) == 4 ? 0x7FC00000u : 0x7FC07FC0u, count * sizeof(T) / sizeof(uint32_t));
    return array;
  }
  template <typename U>
  U* place(DeviceBuffer<U>& array, const std::vector<U>& values) {
    if (array.size() != values.size()) array = DeviceBuffer<U>(values.size(), device_);
    array.upload(values, device_);
    return array.data();
  }

  Heads heads_;
  CudaDevice& device_;
  int64_t stride_;
  DeviceBuffer<T> k_, v_, input_, out_;
  DeviceBuffer<int32_t> slot_, history_, token_begin_, table_;
  DeviceBuffer<int64_t> base_;
  DeviceBuffer<std::byte> workspace_;
};

}  // namespace replayssm::test
