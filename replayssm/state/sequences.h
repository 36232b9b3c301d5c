// The sequences of a state pool, wherever its memory lies: what StatePool (pool.h) and CudaStatePool (cuda_pool.h) have
// in common. A model runs a step as begin_step, ops on the pool's views, commit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "replayssm/ops/attention.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/ops/moves.h"
#include "replayssm/state/layout.h"
#include "replayssm/state/ledger.h"
#include "replayssm/state/step.h"

namespace replayssm {

// What a pool's ledger is told beside the layout and the size.
struct SequenceLimits {
  int max_rows = 0;                 // of the longest batch; 0: as many as slots
  int64_t max_sequence_tokens = 0;  // of a sequence; 0: the context
  bool staggers_flushes = false;
};

// One thread owns a pool. Every function that throws Error leaves the pool as it was, unless it says otherwise.
//
// Memory is taken when the pool is built; nothing is allocated afterwards, except that a prefill longer than any before
// may grow the array of its positions. Handles are handed out from the highest slot down.
class SequencePool {
 public:
  SequencePool(const SequencePool&) = delete;
  SequencePool& operator=(const SequencePool&) = delete;
  virtual ~SequencePool() = default;

  const StateLayout& layout() const { return layout_; }
  const StateStorage& storage() const { return storage_; }
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
  // parent's. (Where flushes are staggered, direct readouts keep the bits until a prefill or a conventional step.)
  Handle fork(Handle parent, int64_t max_tokens);

  // Plans a step: row b runs tokens[b] tokens of sequence rows[b], or is kPaddingRow. Assigns KV pages for them and
  // makes the copies of checkpoints that a flush beside a fork needs. Refused: a handle twice, a count outside the
  // kind's range (StepKind), tokens past a sequence's max_tokens, a step begun and not ended. The plan, in host memory,
  // stays valid until the next begin_step. Until commit or abort_step every other call that changes the pool is
  // refused.
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

  // For readers and writers of single sequences (session files): the arrays of layer `index` as recurrent_arrays lists
  // them, null without a recurrent state. Throws Error if there is no such layer.
  const RecurrentArrays* arrays(int index) const;

  // For readers and writers of single sequences (session files): a clean sequence whose cursor stands at `cursor` and
  // whose KV pages are assigned. Its checkpoint and convolution windows are zero; the caller writes what it holds.
  Handle restore(Cursor cursor, int64_t max_tokens);

 protected:
  // Where one layer's arrays lie, each for all slots; those that its kind or the storage does not have are null.
  struct LayerMemory {
    RecurrentArrays arrays;
    std::byte* checkpoint = nullptr;
    std::vector<std::byte*> ring;  // in the order of arrays.ring
    std::byte* conv_window = nullptr;
    std::byte *kv_k = nullptr, *kv_v = nullptr;

    bool is_recurrent() const { return !ring.empty(); }
  };
  // Gives the memory of one array.
  using Take = std::function<std::byte*(size_t bytes)>;
  static std::vector<LayerMemory> place_layers(const StateLayout& layout, const PoolSize& size,
                                               const StateStorage& storage, const Take& take);

  // The arrays are placed next, by place.
  SequencePool(StateLayout layout, const PoolSize& size, const StateStorage& storage, const SequenceLimits& limits);
  void place(const PoolSize& size, const Take& take) { memory_ = place_layers(layout_, size, storage_, take); }
  const LayerMemory& memory(int index) const { return memory_[index]; }

  // Moves pieces of the pool's memory, after the work that was given to it before.
  virtual void move(std::span<const PieceMove> moves) = 0;
  // Tells a step's rows to where its ops will read them.
  virtual void publish(const StepPlan&) {}

  // What materialise does, around the fold of `rows` (one, in host memory) in all layers. If the fold throws, `to` is
  // spoilt.
  void fold_into(Handle from, Handle to, int records, const std::function<void(const StateRows& rows)>& fold);
  template <typename T, typename AnyDevice>
  void fold_layers(const StateRows& rows, AnyDevice& device, std::span<std::byte> workspace) const {
    for (int index = 0; index < static_cast<int>(layout_.layers.size()); ++index) {
      if (std::holds_alternative<DeltaLayer>(layout_.layers[index]))
        delta_materialise(BasicDeltaMaterialise<T>{delta_view<T>(index), rows}, device, workspace);
      else if (std::holds_alternative<Mamba2Layer>(layout_.layers[index]))
        mamba2_materialise(BasicMamba2Materialise<T>{mamba2_view<T>(index), rows}, device, workspace);
    }
  }

  // Layer `index` of the layout, for all slots; T is the storage's element. Throws Error if it is not of that kind.
  template <typename T>
  BasicDeltaState<T> delta_view(int index) const;
  template <typename T>
  BasicMamba2State<T> mamba2_view(int index) const;
  template <typename T>
  BasicConv1dState<T> conv_view(int index) const;
  template <typename T>
  BasicKvCache<T> kv_view(int index) const;

 private:
  // A view of a layer's state without its ring.
  template <typename State, typename Shape>
  State recurrent_view(const LayerMemory& own, const Shape& shape) const;

  void clean(Handle handle);
  void copy_checkpoint(CheckpointCopy copy);
  void add_records(Handle from, Handle to, Cursor cursor);
  void add_conv_inputs(Handle from, Handle to, int64_t tokens);
  void add_page(PageCopy copy);
  void flush_moves();

  StateLayout layout_;
  StateStorage storage_;
  Ledger ledger_;
  std::vector<LayerMemory> memory_;
  std::vector<PieceMove> moves_;  // of the call that runs
};

}  // namespace replayssm
