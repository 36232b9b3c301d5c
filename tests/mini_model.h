// A small hybrid model for the laws of the state pool: two delta layers with their convolutions, one with a gate a head
// and one with a gate a channel, one of Mamba-2, a layer of keys and values and one of latents, each fed by a table of
// token features. Its sequences are driven by scripts of windows and acceptances.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/core/device.h"
#include "replayssm/state/pool.h"
#include "tests/arrays.h"
#include "tests/planes.h"

namespace replayssm::test {

inline StateLayout mini_layout(int window, int max_step_tokens, CheckpointForm form = CheckpointForm::kWords) {
  StateLayout layout;
  layout.form = form;
  layout.model = "mini";
  layout.layers = {
      DeltaLayer{{.heads = 4, .key_heads = 2, .key_size = 16, .value_size = 8}, 2 * 2 * 16 + 4 * 8, 4},
      AttentionLayer{2, 4},
      DeltaLayer{{.heads = 3, .key_heads = 3, .key_size = 32, .value_size = 4, .gate_size = 32}, 2 * 3 * 32 + 3 * 4, 3},
      AttentionLayer{1, 6, 5},
      Mamba2Layer{{.heads = 4, .groups = 2, .head_size = 8, .state_size = 16}, 4 * 8 + 2 * 2 * 16, 4}};
  layout.window = window;
  layout.max_step_tokens = max_step_tokens;
  layout.page_tokens = 8;
  layout.context_tokens = 512;
  return layout;
}

// Query heads of a KV head.
inline constexpr int kGroup = 2;

inline size_t layer_output_size(const StateLayer& layer) {
  if (const auto* delta = std::get_if<DeltaLayer>(&layer)) return delta->shape.heads * delta->shape.value_size;
  if (const auto* mamba2 = std::get_if<Mamba2Layer>(&layer)) return mamba2->shape.heads * mamba2->shape.head_size;
  const auto& attention = std::get<AttentionLayer>(layer);
  const int value_size = attention.latent_size > 0 ? attention.latent_size : attention.head_size;
  return kGroup * attention.kv_heads * value_size;
}

using Outputs = std::vector<std::vector<float>>;  // [rows] of [tokens * the output size]

class MiniModel {
 public:
  static constexpr int kTokens = 32;         // the vocabulary
  static constexpr int kNanToken = kTokens;  // one more, whose features are not numbers

  explicit MiniModel(StateLayout layout, int threads = 1) : device_(threads), layout_(std::move(layout)) {
    std::mt19937_64 random(7);
    size_t workspace_bytes = materialise_workspace_bytes(layout_, device_);
    for (const StateLayer& layer : layout_.layers) {
      Tables tables;
      if (const auto* delta = std::get_if<DeltaLayer>(&layer)) {
        tables.features = random_normal(random, kTokens * delta->conv_channels);
        tables.gate = random_uniform(random, kTokens * delta->shape.heads * delta->shape.gate_size, -0.5f, -0.01f);
        tables.beta = random_uniform(random, kTokens * delta->shape.heads, 0.1f, 0.9f);
        tables.weight = random_normal(random, delta->conv_width * delta->conv_channels, 0.5f);
        add_nan(tables.features, delta->conv_channels);
        add_nan(tables.gate, delta->shape.heads * delta->shape.gate_size);
        add_nan(tables.beta, delta->shape.heads);
      } else if (const auto* mamba2 = std::get_if<Mamba2Layer>(&layer)) {
        const int heads = mamba2->shape.heads;
        tables.features = random_normal(random, kTokens * mamba2->conv_channels);
        tables.gate = random_uniform(random, kTokens * heads, 0.05f, 0.5f);
        tables.weight = random_normal(random, mamba2->conv_width * mamba2->conv_channels, 0.5f);
        tables.a_log = random_normal(random, heads, 0.3f);
        tables.d = random_normal(random, heads);
        add_nan(tables.features, mamba2->conv_channels);
        add_nan(tables.gate, heads);
      } else {
        const auto& attention = std::get<AttentionLayer>(layer);
        const int width = (kGroup + 2) * attention.kv_heads * attention.head_size;
        tables.features = random_normal(random, kTokens * width);
        add_nan(tables.features, width);
        workspace_bytes = std::max(
            workspace_bytes,
            attention_workspace_bytes(kGroup * attention.kv_heads, attention.kv_heads, attention.head_size, device_));
      }
      tables_.push_back(std::move(tables));
    }
    workspace_ = Buffer<std::byte>(workspace_bytes);
    std::memset(workspace_.data(), 0xFF, workspace_.size());
  }

  const StateLayout& layout() const { return layout_; }
  Device& device() { return device_; }
  std::span<std::byte> workspace() { return {workspace_.data(), workspace_.size()}; }

  Readout readout = Readout::kDirect;
  int history_shift = 0;  // added to every cursor that the ops see: a fault to find

  // Begins a step and runs it up to its outputs; commit is left to the caller.
  Outputs run(StatePool& pool, StepKind kind, const std::vector<Handle>& rows,
              const std::vector<std::vector<int>>& tokens) {
    std::vector<int> counts;
    std::vector<int> flat;
    for (const std::vector<int>& row : tokens) {
      counts.push_back(static_cast<int>(row.size()));
      flat.insert(flat.end(), row.begin(), row.end());
    }
    const StepPlan& plan = pool.begin_step(kind, rows, counts);
    shifted_.assign(plan.rows.history, plan.rows.history + plan.rows.count);
    for (int32_t& history : shifted_) history = std::max(0, history + history_shift);
    StateRows state_rows = plan.rows;
    state_rows.history = shifted_.data();
    Outputs outputs(rows.size());
    for (size_t index = 0; index < layout_.layers.size(); ++index) {
      const int layer = static_cast<int>(index);
      const StateLayer& own = layout_.layers[index];
      const std::vector<float> out =
          std::holds_alternative<DeltaLayer>(own)    ? run_delta(pool, layer, plan, state_rows, flat)
          : std::holds_alternative<Mamba2Layer>(own) ? run_mamba2(pool, layer, plan, state_rows, flat)
                                                     : run_attention(pool, layer, plan, state_rows, flat);
      const size_t width = flat.empty() ? 0 : out.size() / flat.size();
      for (size_t row = 0; row < rows.size(); ++row) {
        outputs[row].insert(outputs[row].end(), out.begin() + plan.token_begin[row] * width,
                            out.begin() + plan.token_begin[row + 1] * width);
      }
    }
    return outputs;
  }

 private:
  struct Tables {
    std::vector<float> features, gate, beta, weight, a_log, d;
  };

  static void add_nan(std::vector<float>& table, int width) { table.insert(table.end(), width, kPoison); }

  static std::vector<float> gather(const std::vector<float>& table, const std::vector<int>& tokens, size_t width) {
    std::vector<float> rows;
    for (const int token : tokens)
      rows.insert(rows.end(), table.begin() + token * width, table.begin() + (token + 1) * width);
    return rows;
  }

  std::vector<float> run_delta(StatePool& pool, int index, const StepPlan& plan, const StateRows& rows,
                               const std::vector<int>& tokens) {
    const auto& layer = std::get<DeltaLayer>(layout_.layers[index]);
    const DeltaShape& shape = layer.shape;
    const int channels = layer.conv_channels, keys = shape.key_heads * shape.key_size;
    const std::vector<float> x = gather(tables_[index].features, tokens, channels);
    std::vector<float> mixed = poisoned(x.size()), out = poisoned(tokens.size() * shape.heads * shape.value_size);
    conv1d({.state = pool.conv_state(index),
            .rows = rows,
            .token_begin = plan.token_begin,
            .x = x.data(),
            .x_stride = channels,
            .weight = tables_[index].weight.data(),
            .out = mixed.data()},
           device_);
    const std::vector<float> g = gather(tables_[index].gate, tokens, shape.heads * shape.gate_size);
    const std::vector<float> beta = gather(tables_[index].beta, tokens, shape.heads);
    const DeltaTokens inputs{.q = mixed.data(),
                             .k = mixed.data() + keys,
                             .v = mixed.data() + 2 * keys,
                             .g = g.data(),
                             .beta = beta.data(),
                             .q_stride = channels,
                             .k_stride = channels,
                             .v_stride = channels};
    const DeltaState state = pool.delta_state(index);
    if (plan.kind == StepKind::kPrefill) {
      delta_prefill({state, rows, plan.token_begin, inputs, out.data()}, device_, workspace());
    } else if (plan.kind == StepKind::kConventional) {
      delta_step({state, rows, inputs, out.data()}, device_, workspace());
    } else {
      delta_decode({state, rows, plan.tokens_per_row, inputs, readout, out.data()}, device_, workspace());
    }
    return out;
  }

  std::vector<float> run_mamba2(StatePool& pool, int index, const StepPlan& plan, const StateRows& rows,
                                const std::vector<int>& tokens) {
    const auto& layer = std::get<Mamba2Layer>(layout_.layers[index]);
    const Mamba2Shape& shape = layer.shape;
    const int channels = layer.conv_channels, inner = shape.heads * shape.head_size;
    const std::vector<float> x = gather(tables_[index].features, tokens, channels);
    std::vector<float> mixed = poisoned(x.size()), out = poisoned(tokens.size() * inner);
    conv1d({.state = pool.conv_state(index),
            .rows = rows,
            .token_begin = plan.token_begin,
            .x = x.data(),
            .x_stride = channels,
            .weight = tables_[index].weight.data(),
            .out = mixed.data()},
           device_);
    const std::vector<float> dt = gather(tables_[index].gate, tokens, shape.heads);
    const Mamba2Heads heads{tables_[index].a_log.data(), tables_[index].d.data()};
    const Mamba2Tokens inputs{.x = mixed.data(),
                              .b = mixed.data() + inner,
                              .c = mixed.data() + inner + shape.groups * shape.state_size,
                              .dt = dt.data(),
                              .x_stride = channels,
                              .b_stride = channels,
                              .c_stride = channels};
    const Mamba2State state = pool.mamba2_state(index);
    if (plan.kind == StepKind::kPrefill) {
      mamba2_prefill({state, rows, heads, plan.token_begin, inputs, out.data()}, device_, workspace());
    } else if (plan.kind == StepKind::kConventional) {
      mamba2_step({state, rows, heads, inputs, out.data()}, device_, workspace());
    } else {
      mamba2_decode({state, rows, heads, plan.tokens_per_row, inputs, readout, out.data()}, device_, workspace());
    }
    return out;
  }

  std::vector<float> run_attention(StatePool& pool, int index, const StepPlan& plan, const StateRows& rows,
                                   const std::vector<int>& tokens) {
    const KvCache cache = pool.kv_cache(index);
    const int queries = kGroup * cache.kv_heads * cache.head_size, keys = cache.kv_heads * cache.head_size;
    const int width = queries + 2 * keys;
    const std::vector<float> qkv = gather(tables_[index].features, tokens, width);
    std::vector<float> out = poisoned(tokens.size() * layer_output_size(layout_.layers[index]));
    attention({.cache = cache,
               .pages = plan.pages,
               .rows = rows,
               .token_begin = plan.token_begin,
               .query_heads = kGroup * cache.kv_heads,
               .scale = 0.5f,
               .q = qkv.data(),
               .k = qkv.data() + queries,
               .v = cache.latent_size > 0 ? nullptr : qkv.data() + queries + keys,
               .q_stride = width,
               .k_stride = width,
               .v_stride = width,
               .out = out.data()},
              device_, workspace());
    return out;
  }

  Device device_;
  StateLayout layout_;
  std::vector<Tables> tables_;
  Buffer<std::byte> workspace_;
  std::vector<int32_t> shifted_;
};

// One sequence under test: its tokens are random, and what it put out for the tokens that stayed is kept.
struct Lane {
  Handle handle;
  std::mt19937_64 random;
  std::vector<float> outputs;
  std::vector<std::pair<StepKind, std::vector<int>>> past;  // prefills as they were cut, all others token by token

  std::vector<int> draw(int count) {
    std::vector<int> tokens(count);
    for (int& token : tokens) token = std::uniform_int_distribution<int>(0, MiniModel::kTokens - 1)(random);
    return tokens;
  }
};

// Runs one step of all lanes, `tokens` drawn ones each, of which accepted[lane] stay (of a replay step).
template <typename Model, typename Pool>
void advance(Model& model, Pool& pool, const std::vector<Lane*>& lanes, StepKind kind, int tokens,
             std::vector<int> accepted = {}) {
  std::vector<Handle> rows;
  std::vector<std::vector<int>> drawn;
  if (kind != StepKind::kReplay || accepted.empty()) accepted.assign(lanes.size(), tokens);
  for (Lane* lane : lanes) {
    rows.push_back(lane->handle);
    drawn.push_back(lane->draw(tokens));
  }
  const Outputs outputs = model.run(pool, kind, rows, drawn);
  pool.commit(accepted);
  for (size_t row = 0; row < lanes.size(); ++row) {
    Lane& lane = *lanes[row];
    // A row's outputs are grouped by layer; the tokens that stay are picked out of each group.
    size_t begin = 0;
    for (const StateLayer& layer : model.layout().layers) {
      const size_t width = layer_output_size(layer);
      lane.outputs.insert(lane.outputs.end(), outputs[row].begin() + begin,
                          outputs[row].begin() + begin + accepted[row] * width);
      begin += tokens * width;
    }
    drawn[row].resize(accepted[row]);
    if (kind == StepKind::kPrefill) {
      lane.past.emplace_back(kind, drawn[row]);
    } else {
      for (const int token : drawn[row]) lane.past.emplace_back(StepKind::kConventional, std::vector<int>{token});
    }
  }
}

// Rows that begin together in `pool`, which staggers flushes, beside a pool decoded conventionally, both empty: exact
// outputs are the same, a fold has the bits that the other's checkpoint had before the step, and no step has more than
// its share of folds. checkpoints(pool, handle): the sequence's, to compare.
template <typename Model, typename Pool, typename Checkpoints>
void expect_staggered_rows_are_conventional(Model& model, Pool& pool, Pool& conventional,
                                            const Checkpoints& checkpoints) {
  const int rows = pool.ledger().limits().slots, window = pool.layout().window;
  model.readout = Readout::kExact;
  std::vector<Lane> lanes(rows), twins(rows);
  std::vector<Lane*> all, all_twins;
  for (int row = 0; row < rows; ++row) {
    lanes[row].handle = pool.allocate(pool.layout().context_tokens);
    twins[row].handle = conventional.allocate(pool.layout().context_tokens);
    for (Lane* lane : {&lanes[row], &twins[row]}) lane->random.seed(row);
    all.push_back(&lanes[row]);
    all_twins.push_back(&twins[row]);
  }
  int flushes = 0;
  for (int step = 0; step < 5 * window; ++step) {
    if (step % (3 * window) == 0) {
      advance(model, pool, all, StepKind::kPrefill, 9);
      advance(model, conventional, all_twins, StepKind::kPrefill, 9);
    }
    int folded = 0;
    std::vector<int64_t> base;
    std::vector<decltype(checkpoints(conventional, lanes[0].handle))> before;
    for (int row = 0; row < rows; ++row) {
      base.push_back(pool.cursor(lanes[row].handle).base);
      before.push_back(checkpoints(conventional, twins[row].handle));
    }
    advance(model, pool, all, StepKind::kReplay, 1);
    advance(model, conventional, all_twins, StepKind::kConventional, 1);
    for (int row = 0; row < rows; ++row) {
      if (pool.cursor(lanes[row].handle).base == base[row]) continue;
      ++folded;
      ASSERT_EQ(checkpoints(pool, lanes[row].handle), before[row]) << "step " << step << " row " << row;
    }
    ASSERT_LE(folded, (rows + window - 1) / window) << "step " << step;
    flushes += folded;
  }
  EXPECT_GT(flushes, 3 * rows);
  for (int row = 0; row < rows; ++row) EXPECT_TRUE(same_bits(lanes[row].outputs, twins[row].outputs)) << "row " << row;
}

// Brings `handle`, a clean sequence, to where `past` leads by prefills and conventional steps.
template <typename Model, typename Pool>
void relive(Model& model, Pool& pool, Handle handle, const std::vector<std::pair<StepKind, std::vector<int>>>& past) {
  for (const auto& [kind, tokens] : past) {
    model.run(pool, kind, {handle}, {tokens});
    pool.commit();
  }
}

// The words of a slot's checkpoints, one array a recurrent layer.
inline std::vector<std::vector<float>> checkpoints_of(StatePool& pool, Handle handle) {
  std::vector<std::vector<float>> copies;
  for (size_t index = 0; index < pool.layout().layers.size(); ++index) {
    const RecurrentArrays* arrays = pool.arrays(static_cast<int>(index));
    if (arrays == nullptr) continue;
    const int64_t count = arrays->checkpoint_floats();
    const float* begin = pool.checkpoint(static_cast<int>(index)) + pool.ledger().checkpoint(handle) * count;
    std::vector<float>& words = copies.emplace_back(begin, begin + count);
    if (pool.layout().form == CheckpointForm::kWords) continue;
    std::vector<uint16_t> halves(2 * count);
    std::memcpy(halves.data(), begin, count * sizeof(float));
    from_planes(halves, count / arrays->checkpoint[0], words);
  }
  return copies;
}

// All of a pool's memory, to see what changed.
inline std::vector<uint32_t> pool_bits(StatePool& pool) {
  std::vector<uint32_t> bits;
  const auto add = [&bits](const float* array, int64_t count) {
    const size_t begin = bits.size();
    bits.resize(begin + count);
    std::memcpy(bits.data() + begin, array, count * sizeof(float));
  };
  for (size_t index = 0; index < pool.layout().layers.size(); ++index) {
    const int layer = static_cast<int>(index);
    if (const RecurrentArrays* arrays = pool.arrays(layer)) {
      const int64_t slots = pool.ledger().limits().slots, records = slots * pool.layout().ring_capacity();
      add(pool.checkpoint(layer), slots * arrays->checkpoint_floats());
      for (size_t i = 0; i < arrays->ring.size(); ++i)
        add(pool.ring(layer, i), records * arrays->ring[i].heads * arrays->ring[i].size);
      const Conv1dState conv = pool.conv_state(layer);
      add(conv.window, conv.slots * conv.capacity * conv.channels);
    } else {
      const KvCache cache = pool.kv_cache(layer);
      const int64_t count = cache.pages * cache.kv_heads * cache.page_tokens * cache.head_size;
      add(cache.k, count);
      if (cache.latent_size == 0) add(cache.v, count);
    }
  }
  return bits;
}

}  // namespace replayssm::test
