// The memory of all sequences on a GPU: checkpoints in FP32, rings and convolution windows in the type of the model's
// activations. The functions are defined only where the library is built with REPLAYSSM_CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "replayssm/core/bf16.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/core/fp16.h"
#include "replayssm/state/sequences.h"

namespace replayssm {

struct CudaPoolOptions {
  int max_rows = 0;  // the longest batch, padding rows included; 0: as many as slots
  // Fill all memory with the NaN 0x7FC07FC0 first, one in 16 bits too (for tests).
  bool is_poisoned = false;
  // Of the activations kept in rings and convolution windows: kF32, kBF16 or kF16.
  Dtype element = Dtype::kBF16;
};

// Decisions and cursors are the ledger's, on the host. No call waits for the GPU: allocate, reset, fork, materialise,
// restore and begin_step queue their work on the device's stream, where it runs after the steps queued before it, and
// must not be called while the stream is captured. The device outlives the pool. An Error of CUDA itself leaves the
// pool unusable.
//
// A step's ops read its rows in the GPU's memory, at rows(): begin_step writes there what it has planned, so a graph
// captured with them serves the rows, cursors and acceptances of any step of its size. commit moves the ledger; the
// next begin_step brings the cursors. Acceptance that only the GPU knows comes to the host by CudaDevice::download,
// which waits, before commit; after a replay step commit_rows may move the cursors of row_arrays() meanwhile, to where
// that commit moves the ledger's.
class CudaStatePool final : public SequencePool {
 public:
  // size.slots alone counts. Throws Error, before anything is allocated, if there is not so much memory (naming what is
  // needed for what, what is free, and how many slots fit), if the ops on a GPU do not take the layout's sizes, or if a
  // layer keeps keys and values, of which the pool on a GPU has none.
  CudaStatePool(StateLayout layout, const PoolSize& size, CudaDevice& device, const CudaPoolOptions& options = {});

  // As StatePool's. Writes rows().
  void materialise(Handle from, Handle to, int records);

  // In device memory, and there as long as the pool is: the first `count` rows of the last step begun, at most
  // max_rows. Rows past the step's are padding rows, and before the first step all are.
  StateRows rows(int count) const;
  const RowArrays& row_arrays() const { return row_arrays_; }  // of max_rows rows

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

  // For readers and writers of single sequences (session files): where the arrays of a layer lie in device memory, null
  // for one that is not kept; checkpoints in the layout's form, the others in FP32 or, of activations, the element.
  std::byte* checkpoint(int index) const { return memory(index).checkpoint; }
  std::byte* ring(int index, size_t array) const { return memory(index).ring[array]; }
  std::byte* conv_window(int index) const { return memory(index).conv_window; }

  CudaDevice& device() const { return device_; }

  // The pool's arrays, one after the other; for tests, which compare all of its bytes.
  std::span<std::byte> bytes() const { return {memory_.data(), memory_.size()}; }

 private:
  void move(std::span<const PieceMove> moves) override { move_pieces(moves, device_); }
  void publish(const StepPlan& plan) override { put_rows(plan.rows, plan.token_begin, row_arrays_, device_); }

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
};

// As many slots as surely fit into `budget_bytes` of a GPU's memory, the rows' arrays included; the ops' scratch memory
// is not. Throws Error if not even one does.
PoolSize fit_cuda_pool(const StateLayout& layout, size_t budget_bytes, const CudaPoolOptions& options = {});

}  // namespace replayssm
