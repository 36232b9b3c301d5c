// The memory of all sequences on a GPU: checkpoints in FP32, rings, convolution windows, keys and values in the type of
// the model's activations. The functions are defined only where the library is built with REPLAYSSM_CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "replayssm/core/bf16.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/core/fp16.h"
#include "replayssm/ops/attention.h"
#include "replayssm/state/sequences.h"

namespace replayssm {

struct CudaPoolOptions {
  int max_rows = 0;  // the longest batch, padding rows included; 0: as many as slots
  // Fill all memory with the NaN 0x7FC07FC0 first, one in 16 bits too (for tests).
  bool is_poisoned = false;
  // Of the activations kept in rings and convolution windows, and of keys and values: kF32, kBF16 or kF16.
  Dtype element = Dtype::kBF16;
  // The most tokens of a sequence, 1 to the context; 0: the context, but no more than all KV pages hold. A page of one
  // takes 4 bytes of page table a row on the GPU, and 12 of page-locked memory on the host.
  int64_t max_sequence_tokens = 0;
  bool staggers_flushes = false;  // as PoolOptions'
};

// Decisions and cursors are the ledger's, on the host. No call waits for the GPU, except that with keys and values a
// step can be begun only if at most two before it still wait for their page tables: allocate, reset, fork, materialise,
// restore and begin_step queue their work on the device's stream, where it runs after the steps queued before it, and
// must not be called while the stream is captured. The device outlives the pool. An Error of CUDA itself leaves the
// pool unusable.
//
// A step's ops read its rows and page tables in the GPU's memory, at rows() and pages(): begin_step writes there what
// it has planned, so a graph captured with them serves the rows, pages, cursors and acceptances of any step of its
// size. commit moves the ledger; the next begin_step brings the cursors. Acceptance that only the GPU knows comes to
// the host by CudaDevice::download, which waits, before commit; after a replay step commit_rows may move the cursors of
// row_arrays() meanwhile, to where that commit moves the ledger's.
class CudaStatePool final : public SequencePool {
 public:
  // The size comes from pool_size or fit_cuda_pool. Throws Error, before anything is allocated, if there is not so much
  // memory (naming what is needed for what, what is free, and how many slots fit), or if the ops on a GPU do not take
  // the layout's sizes.
  CudaStatePool(const StateLayout& layout, const PoolSize& size, CudaDevice& device,
                const CudaPoolOptions& options = {});

  // As StatePool's. Writes rows().
  void materialise(Handle from, Handle to, int records);

  // In device memory, and there as long as the pool is: the first `count` rows of the last step begun, at most
  // max_rows. Rows past the step's are padding rows, and before the first step all are.
  StateRows rows(int count) const;
  const RowArrays& row_arrays() const { return row_arrays_; }  // of max_rows rows
  // The page tables of max_rows rows, there as rows() are, with entries for the longest sequence: those of the last
  // step begun, and -1 past a row's pages, in padding rows and in rows past the step's. Null without attention layers.
  KvPages pages() const { return {page_table_, table_stride_}; }

  // Layer `index` of the layout, for all slots, in device memory; without ring_gram. Throws Error if it is not of that
  // kind, or if T (float, Bf16, Fp16) is not the pool's element.
  template <typename T>
  BasicDeltaState<T> delta_state(int index) const {
    require_element<T>();
    return delta_view<T>(index);
  }
  template <typename T>
  BasicMamba2State<T> mamba2_state(int index) const {
    require_element<T>();
    return mamba2_view<T>(index);
  }
  template <typename T>
  BasicConv1dState<T> conv_state(int index) const {
    require_element<T>();
    return conv_view<T>(index);
  }
  template <typename T>
  BasicKvCache<T> kv_cache(int index) const {
    require_element<T>();
    return kv_view<T>(index);
  }

  // For readers and writers of single sequences (session files): where the arrays of a layer lie in device memory, null
  // for one that is not kept; checkpoints in the layout's form, the others in FP32 or, of activations, the element.
  std::byte* checkpoint(int index) const { return memory(index).checkpoint; }
  std::byte* ring(int index, size_t array) const { return memory(index).ring[array]; }
  std::byte* conv_window(int index) const { return memory(index).conv_window; }
  std::byte* keys(int index) const { return memory(index).kv_k; }
  std::byte* values(int index) const { return memory(index).kv_v; }

  CudaDevice& device() const { return device_; }

  // The pool's arrays, one after the other; for tests, which compare all of its bytes.
  std::span<std::byte> bytes() const { return {memory_.data(), memory_.size()}; }

 private:
  void move(std::span<const PieceMove> moves) override { move_pieces(moves, device_); }
  void publish(const StepPlan& plan) override;
  void put_pages(const KvPages& pages, int rows);

  template <typename T>
  void require_element() const {
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, Bf16> || std::is_same_v<T, Fp16>);
    check_element(std::is_same_v<T, float> ? Dtype::kF32 : std::is_same_v<T, Bf16> ? Dtype::kBF16 : Dtype::kF16);
  }
  void check_element(Dtype asked) const;

  CudaDevice& device_;
  DeviceBuffer<std::byte> memory_;  // the state's arrays
  DeviceBuffer<std::byte> row_memory_;
  RowArrays row_arrays_;
  int32_t* page_table_ = nullptr;  // [max_rows, table_stride_]; in the rows and columns shown the last step's, else -1
  int table_stride_;
  int shown_rows_ = 0, shown_columns_ = 0;
  PinnedUploads uploads_;  // of page tables
};

// The most slots, each with KV pages for `tokens_per_slot` tokens, that surely fit into `budget_bytes` of a GPU's
// memory, rows and page tables included; what is left becomes pages, as many as the slots could use. The ops' scratch
// memory is not included. Throws Error if not even one slot fits.
PoolSize fit_cuda_pool(const StateLayout& layout, size_t budget_bytes, int64_t tokens_per_slot,
                       const CudaPoolOptions& options = {});

}  // namespace replayssm
