// The memory of all sequences on the CPU: checkpoints, rings, convolution windows, keys and values, in FP32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/attention.h"
#include "replayssm/state/sequences.h"

namespace replayssm {

struct PoolOptions {
  int max_rows = 0;  // the longest batch, padding rows included; 0: as many as slots
  // Fill all memory with the NaN 0x7FC07FC0 first, one as planes too (for tests: touches every page).
  bool is_poisoned = false;
  // Rows that are prefilled together and decoded in lockstep would all fold their records in one step of every L. With
  // this each folds first when its slot says (ledger.h), so that the folds are spread over the steps. The direct
  // readouts of a sequence then depend on its slot, within rounding; the exact ones do not, nor does a folded state.
  bool staggers_flushes = false;
};

// Memory is touched where it is used. A step's ops take StepPlan::rows as they are.
class StatePool final : public SequencePool {
 public:
  // The size comes from pool_size or fit_pool.
  StatePool(StateLayout layout, const PoolSize& size, const PoolOptions& options = {});

  // Puts `to` where `from` stood after base + records tokens, with an empty ring: folds the first `records` committed
  // records into a checkpoint of `to`'s own, and takes the convolution inputs and the keys up to there. What `to` held
  // is dropped, its max_tokens stay; `from` keeps its bits. 0 <= records <= history; a position whose convolution
  // inputs have been overwritten is refused (T_max tokens back from the end of the last step are always there). If an
  // op throws, `to` can only be freed or reset.
  void materialise(Handle from, Handle to, int records, Device& device, std::span<std::byte> workspace);

  // Layer `index` of the layout, for all slots. Throws Error if it is not of that kind.
  DeltaState delta_state(int index) { return delta_view<float>(index); }
  Mamba2State mamba2_state(int index) { return mamba2_view<float>(index); }
  Conv1dState conv_state(int index) { return conv_view<float>(index); }
  KvCache kv_cache(int index) { return kv_view<float>(index); }

  // For readers and writers of single sequences (session files): where the arrays of a layer lie; checkpoints in the
  // layout's form.
  float* checkpoint(int index) { return reinterpret_cast<float*>(memory(index).checkpoint); }
  float* ring(int index, size_t array) { return reinterpret_cast<float*>(memory(index).ring[array]); }

 private:
  void move(std::span<const PieceMove> moves) override { move_pieces(moves); }

  std::vector<Buffer<float>> buffers_;
};

// The bytes of workspace that materialise needs.
size_t materialise_workspace_bytes(const StateLayout& layout, Device& device);

}  // namespace replayssm
