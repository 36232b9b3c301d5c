// The memory of all sequences: checkpoints, rings, convolution windows, keys and values, and the one cursor of each
// sequence. A model runs a step as begin_step, ops on the views below, commit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/attention.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/state/layout.h"
#include "replayssm/state/ledger.h"
#include "replayssm/state/step.h"

namespace replayssm {

struct PoolOptions {
  int max_rows = 0;  // the longest batch, padding rows included; 0: as many as slots
  // Fill all memory with the NaN 0x7FC07FC0 first, one as planes too (for tests: touches every page).
  bool is_poisoned = false;
};

// One thread owns a pool. Every function that throws Error leaves the pool as it was, unless it says otherwise.
//
// Memory is taken when the pool is built and touched where it is used; nothing is allocated afterwards, except that a
// prefill longer than any before may grow the array of its positions. Handles are handed out from the highest slot
// down.
class StatePool {
 public:
  // The size comes from pool_size or fit_pool.
  StatePool(StateLayout layout, const PoolSize& size, const PoolOptions& options = {});
  StatePool(const StatePool&) = delete;
  StatePool& operator=(const StatePool&) = delete;

  const StateLayout& layout() const { return layout_; }
  const Ledger& ledger() const { return ledger_; }  // counts, cursors, page tables
  PoolCounts counts() const { return ledger_.counts(); }
  Cursor cursor(Handle handle) const { return ledger_.cursor(handle); }

  // A clean sequence of up to max_tokens tokens: checkpoints and convolution windows zero, cursor (0, 0), no keys.
  // (The ring needs no cleaning: a history of 0 names none of its records.) KV pages for max_tokens are set aside, so a
  // sequence that was let in never runs out of them; one that does not fit is refused with what was needed and free.
  // Tokens of a replay step count while they are in flight: a step needs room for all its T.
  Handle allocate(int64_t max_tokens);

  // Ends a sequence; its handle is refused from then on.
  void free(Handle handle);

  // Back to what allocate gave, with the same handle and max_tokens. Also the way back for a sequence whose step was
  // aborted. Refused if pages that are now a fork's alone cannot be replaced.
  void reset(Handle handle);

  // A second sequence that continues as the parent would, bit for bit. Shares the checkpoint until one of the two folds
  // into it, and the full KV pages for good; copies the committed records, the last W-1 inputs of each convolution and
  // the last KV page. The parent does not change. max_tokens, the parent's tokens included, may differ from the
  // parent's.
  Handle fork(Handle parent, int64_t max_tokens);

  // Puts `to` where `from` stood after base + records tokens, with an empty ring: folds the first `records` committed
  // records into a checkpoint of `to`'s own, and takes the convolution inputs and the keys up to there. What `to` held
  // is dropped, its max_tokens stay; `from` keeps its bits. 0 <= records <= history; a position whose convolution
  // inputs have been overwritten is refused (T_max tokens back from the end of the last step are always there). If an
  // op throws, `to` can only be freed or reset.
  void materialise(Handle from, Handle to, int records, Device& device, std::span<std::byte> workspace);

  // Plans a step: row b runs tokens[b] tokens of sequence rows[b], or is kPaddingRow. Assigns KV pages for them and
  // makes the copies of checkpoints that a flush beside a fork needs. Refused: a handle twice, a count outside the
  // kind's range (StepKind), tokens past a sequence's max_tokens, a step begun and not ended. The plan stays valid
  // until the next begin_step. Until commit or abort_step every other call that changes the pool is refused.
  const StepPlan& begin_step(StepKind kind, std::span<const Handle> rows, std::span<const int> tokens);

  // Ends the step and moves the cursors. accepted[b], 0 .. T, is how many of a replay row's tokens stay; of a prefill
  // or conventional row all do, and a padding row's count is checked and ignored. Without counts all tokens stay. A
  // wrong count is an Error and the step remains begun. No state byte moves, however many tokens are rejected.
  void commit(std::span<const int> accepted) { ledger_.commit(accepted); }
  void commit() { ledger_.commit(); }

  // Ends a step of which an op threw. How far it came is not known, and a checkpoint folded in place cannot be
  // unfolded: the sequences of the step are lost, free and reset alone accept them. All others keep their bits, also
  // those that share a checkpoint or pages with a lost one.
  void abort_step() { ledger_.abort_step(); }

  // Layer `index` of the layout, for all slots. Throws Error if it is not of that kind.
  DeltaState delta_state(int index);
  Mamba2State mamba2_state(int index);
  Conv1dState conv_state(int index);
  KvCache kv_cache(int index);

  // For readers and writers of single sequences (session files): the arrays of layer `index` as recurrent_arrays lists
  // them, null without a recurrent state, and where they lie; checkpoints in the layout's form.
  const RecurrentArrays* arrays(int index) const;
  float* checkpoint(int index) { return memory_[index].checkpoint.data(); }
  float* ring(int index, size_t array) { return memory_[index].ring[array].data(); }

  // For readers and writers of single sequences (session files): a clean sequence whose cursor stands at `cursor` and
  // whose KV pages are assigned. Its checkpoint and convolution windows are zero; the caller writes what it holds.
  Handle restore(Cursor cursor, int64_t max_tokens);

 private:
  // One layer's arrays; those that its kind does not have are empty.
  struct LayerMemory {
    RecurrentArrays arrays;
    Buffer<float> checkpoint;
    std::vector<Buffer<float>> ring;  // in the order of arrays.ring
    Buffer<float> conv_window;
    Buffer<float> kv_k, kv_v;

    bool is_recurrent() const { return !ring.empty(); }
  };

  void clean(Handle handle);
  void copy_checkpoint(int32_t from, int32_t to);
  void copy_records(Handle from, Handle to, Cursor cursor);
  void copy_conv_inputs(Handle from, Handle to, int64_t tokens);
  void copy_page(PageCopy copy);

  StateLayout layout_;
  Ledger ledger_;
  std::vector<LayerMemory> memory_;
};

// The bytes of workspace that materialise needs.
size_t materialise_workspace_bytes(const StateLayout& layout, Device& device);

}  // namespace replayssm
