// A small model for the laws of the state pool on a GPU, the counterpart of MiniModel (mini_model.h): two delta layers,
// one with a gate a head and one with a gate a channel, and one of Mamba-2, each with its convolution, a layer of keys
// and values and one of latents, each fed by a table of token features. Activations and what attention puts out are in
// T, other outputs in FP32.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "replayssm/state/cuda_pool.h"
#include "tests/cuda_memory.h"
#include "tests/mini_model.h"

namespace replayssm::test {

inline StateLayout cuda_mini_layout(int window, int max_step_tokens, CheckpointForm form = CheckpointForm::kWords) {
  StateLayout layout;
  layout.form = form;
  layout.model = "mini";
  layout.layers = {
      DeltaLayer{{.heads = 4, .key_heads = 2, .key_size = 16, .value_size = 8}, 2 * 2 * 16 + 4 * 8, 4},
      AttentionLayer{2, 16},
      DeltaLayer{{.heads = 3, .key_heads = 3, .key_size = 32, .value_size = 8, .gate_size = 32}, 2 * 3 * 32 + 3 * 8, 3},
      AttentionLayer{1, 24, 20},
      Mamba2Layer{{.heads = 4, .groups = 2, .head_size = 8, .state_size = 16}, 4 * 8 + 2 * 2 * 16, 4}};
  layout.window = window;
  layout.max_step_tokens = max_step_tokens;
  layout.page_tokens = 8;
  layout.context_tokens = 512;
  return layout;
}

template <typename T>
class CudaMiniModel {
 public:
  static constexpr int kMaxTokens = 96;  // of a step

  CudaMiniModel(StateLayout layout, CudaDevice& device) : device_(device), layout_(std::move(layout)) {
    std::mt19937_64 random(7);
    for (const StateLayer& layer : layout_.layers) {
      Arrays own;
      int heads = 0;
      if (const auto* delta = std::get_if<DeltaLayer>(&layer)) {
        own.channels = delta->conv_channels;
        heads = delta->shape.heads;
        own.gates = heads * delta->shape.gate_size;
        own.gate_table = random_uniform(random, kTokens * own.gates, -0.5f, -0.01f);
        own.betas = heads;
        own.beta_table = random_uniform(random, kTokens * heads, 0.1f, 0.9f);
        own.weight = device_floats(random_normal(random, delta->conv_width * own.channels, 0.5f));
      } else if (const auto* mamba2 = std::get_if<Mamba2Layer>(&layer)) {
        own.channels = mamba2->conv_channels;
        heads = own.gates = mamba2->shape.heads;
        own.gate_table = random_uniform(random, kTokens * heads, 0.05f, 0.5f);
        own.weight = device_floats(random_normal(random, mamba2->conv_width * own.channels, 0.5f));
        own.a_log = device_floats(random_normal(random, heads, 0.3f));
        own.d = device_floats(random_normal(random, heads));
      } else {
        const auto& attention = std::get<AttentionLayer>(layer);
        own.channels = (kGroup + 2) * attention.kv_heads * attention.head_size;
        own.attended = DeviceBuffer<T>(kMaxTokens * layer_output_size(layer), device_);
      }
      own.feature_table = to_elements<T>(random_normal(random, kTokens * own.channels));
      own.feature_table.resize((kTokens + 1) * own.channels, to_element<T>(kPoison));
      own.gate_table.resize((kTokens + 1) * own.gates, kPoison);
      own.beta_table.resize((kTokens + 1) * own.betas, kPoison);
      own.features = DeviceBuffer<T>(kMaxTokens * own.channels, device_);
      own.mixed = DeviceBuffer<T>(kMaxTokens * own.channels, device_);
      own.gate = DeviceBuffer<float>(kMaxTokens * own.gates, device_);
      own.beta = DeviceBuffer<float>(kMaxTokens * own.betas, device_);
      own.out = DeviceBuffer<float>(kMaxTokens * layer_output_size(layer), device_);
      layers_.push_back(std::move(own));
    }
  }

  const StateLayout& layout() const { return layout_; }
  Readout readout = Readout::kDirect;

  // Puts what the tokens of a step are fed with where the ops read it.
  void stage(const std::vector<int>& tokens) {
    require(tokens.size() <= kMaxTokens, "test: expected at most {} tokens, got {}", kMaxTokens, tokens.size());
    for (Arrays& own : layers_) {
      upload(own.features, own.feature_table, own.channels, tokens);
      upload(own.gate, own.gate_table, own.gates, tokens);
      upload(own.beta, own.beta_table, own.betas, tokens);
    }
  }

  // Queues all layers for `count` rows of the pool's that hold `tokens` tokens in all.
  void queue(const CudaStatePool& pool, StepKind kind, int count, int tokens) {
    for (size_t index = 0; index < layers_.size(); ++index) {
      const int layer = static_cast<int>(index);
      Arrays& own = layers_[index];
      if (std::holds_alternative<AttentionLayer>(layout_.layers[index])) {
        queue_attention(pool, layer, own, kind, count, tokens);
        continue;
      }
      const bool is_prefill = kind == StepKind::kPrefill;
      conv1d(BasicConv1d<T, T>{.state = pool.conv_state<T>(layer),
                               .rows = pool.rows(count),
                               .token_begin = is_prefill ? pool.row_arrays().token_begin : nullptr,
                               .x = own.features.data(),
                               .x_stride = own.channels,
                               .weight = own.weight.data(),
                               .out = own.mixed.data(),
                               .tokens_per_row = is_prefill ? 1 : tokens / count,
                               .tokens = tokens},
             device_);
      if (const auto* delta = std::get_if<DeltaLayer>(&layout_.layers[index]))
        queue_delta(pool, layer, delta->shape, own, kind, count, tokens);
      else
        queue_mamba2(pool, layer, std::get<Mamba2Layer>(layout_.layers[index]).shape, own, kind, count, tokens);
    }
  }

  // The outputs of a step that has been queued, one row after the other, each grouped by layer.
  Outputs read(const StepPlan& plan) {
    device_.synchronize();
    Outputs outputs(plan.rows.count);
    for (size_t index = 0; index < layers_.size(); ++index) {
      const size_t width = layer_output_size(layout_.layers[index]);
      const Arrays& own = layers_[index];
      const bool is_attention = std::holds_alternative<AttentionLayer>(layout_.layers[index]);
      const std::vector<float> out =
          is_attention ? to_floats<T>(own.attended.download(device_)) : own.out.download(device_);
      for (int row = 0; row < plan.rows.count; ++row)
        outputs[row].insert(outputs[row].end(), out.begin() + plan.token_begin[row] * width,
                            out.begin() + plan.token_begin[row + 1] * width);
    }
    return outputs;
  }

  // Begins a step and runs it up to its outputs; commit is left to the caller.
  Outputs run(CudaStatePool& pool, StepKind kind, const std::vector<Handle>& rows,
              const std::vector<std::vector<int>>& tokens) {
    std::vector<int> counts, flat;
    for (const std::vector<int>& row : tokens) {
      counts.push_back(static_cast<int>(row.size()));
      flat.insert(flat.end(), row.begin(), row.end());
    }
    const StepPlan& plan = pool.begin_step(kind, rows, counts);
    stage(flat);
    queue(pool, kind, plan.rows.count, plan.tokens);
    return read(plan);
  }

 private:
  static constexpr int kTokens = MiniModel::kTokens;

  struct Arrays {
    int channels = 0, gates = 0, betas = 0;
    std::vector<T> feature_table;
    std::vector<float> gate_table, beta_table;
    DeviceBuffer<T> features, mixed, attended;
    DeviceBuffer<float> gate, beta, weight, a_log, d, out;
  };

  DeviceBuffer<float> device_floats(const std::vector<float>& values) { return DeviceBuffer<float>(values, device_); }

  template <typename E>
  void upload(const DeviceBuffer<E>& to, const std::vector<E>& table, size_t width, const std::vector<int>& tokens) {
    std::vector<E> rows;
    for (const int token : tokens)
      rows.insert(rows.end(), table.begin() + token * width, table.begin() + (token + 1) * width);
    device_.upload(to.data(), rows.data(), rows.size() * sizeof(E));
  }

  void queue_delta(const CudaStatePool& pool, int layer, const DeltaShape& shape, Arrays& own, StepKind kind, int count,
                   int tokens) {
    const int keys = shape.key_heads * shape.key_size;
    const BasicDeltaState<T> state = pool.delta_state<T>(layer);
    const StateRows rows = pool.rows(count);
    const BasicDeltaTokens<T> inputs{.q = own.mixed.data(),
                                     .k = own.mixed.data() + keys,
                                     .v = own.mixed.data() + 2 * keys,
                                     .g = own.gate.data(),
                                     .beta = own.beta.data(),
                                     .q_stride = own.channels,
                                     .k_stride = own.channels,
                                     .v_stride = own.channels};
    float* out = own.out.data();
    if (kind == StepKind::kPrefill)
      delta_prefill(BasicDeltaPrefill<T, float>{state, rows, pool.row_arrays().token_begin, inputs, out}, device_, {});
    else if (kind == StepKind::kConventional)
      delta_step(BasicDeltaStep<T, float>{state, rows, inputs, out}, device_, {});
    else
      delta_decode(BasicDeltaDecode<T, float>{state, rows, tokens / count, inputs, readout, out}, device_, {});
  }

  void queue_mamba2(const CudaStatePool& pool, int layer, const Mamba2Shape& shape, Arrays& own, StepKind kind,
                    int count, int tokens) {
    const int inner = shape.heads * shape.head_size;
    const BasicMamba2State<T> state = pool.mamba2_state<T>(layer);
    const StateRows rows = pool.rows(count);
    const Mamba2Heads heads{own.a_log.data(), own.d.data()};
    const BasicMamba2Tokens<T> inputs{.x = own.mixed.data(),
                                      .b = own.mixed.data() + inner,
                                      .c = own.mixed.data() + inner + shape.groups * shape.state_size,
                                      .dt = own.gate.data(),
                                      .x_stride = own.channels,
                                      .b_stride = own.channels,
                                      .c_stride = own.channels};
    float* out = own.out.data();
    if (kind == StepKind::kPrefill)
      mamba2_prefill(BasicMamba2Prefill<T, float>{state, rows, heads, pool.row_arrays().token_begin, inputs, out},
                     device_, {});
    else if (kind == StepKind::kConventional)
      mamba2_step(BasicMamba2Step<T, float>{state, rows, heads, inputs, out}, device_, {});
    else
      mamba2_decode(BasicMamba2Decode<T, float>{state, rows, heads, tokens / count, inputs, readout, out}, device_, {});
  }

  // Prefills are steps of prompts whatever their length, so that a token's bits do not depend on the longest row.
  void queue_attention(const CudaStatePool& pool, int layer, Arrays& own, StepKind kind, int count, int tokens) {
    const BasicKvCache<T> cache = pool.kv_cache<T>(layer);
    const int queries = kGroup * cache.kv_heads * cache.head_size, keys = cache.kv_heads * cache.head_size;
    BasicAttention<T> args{.cache = cache,
                           .pages = pool.pages(),
                           .rows = pool.rows(count),
                           .token_begin = pool.row_arrays().token_begin,
                           .query_heads = kGroup * cache.kv_heads,
                           .scale = 0.5f,
                           .q = own.features.data(),
                           .k = own.features.data() + queries,
                           .v = cache.latent_size > 0 ? nullptr : own.features.data() + queries + keys,
                           .q_stride = own.channels,
                           .k_stride = own.channels,
                           .v_stride = own.channels,
                           .out = own.attended.data(),
                           .tokens = tokens,
                           .max_tokens_per_row = kind == StepKind::kPrefill ? kMaxTokens : tokens / count};
    require(attention_workspace_bytes(args) == 0, "test: expected contexts of one split");
    attention(args, device_, {});
  }

  CudaDevice& device_;
  StateLayout layout_;
  std::vector<Arrays> layers_;
};

// The bytes of a slot's checkpoints in the layout's form, one array a recurrent layer.
inline std::vector<std::vector<std::byte>> checkpoints_of(const CudaStatePool& pool, Handle handle) {
  std::vector<std::vector<std::byte>> copies;
  for (int layer = 0; layer < static_cast<int>(pool.layout().layers.size()); ++layer) {
    if (pool.arrays(layer) == nullptr) continue;
    std::vector<std::byte>& bytes = copies.emplace_back(pool.arrays(layer)->checkpoint_floats() * sizeof(float));
    pool.device().download(bytes.data(), pool.checkpoint(layer) + pool.ledger().checkpoint(handle) * bytes.size(),
                           bytes.size());
  }
  return copies;
}

// All of a pool's memory, to see what changed.
inline std::vector<std::byte> pool_bytes_of(const CudaStatePool& pool) {
  std::vector<std::byte> bytes(pool.bytes().size());
  pool.device().download(bytes.data(), pool.bytes().data(), bytes.size());
  return bytes;
}

template <typename T>
constexpr Dtype kElementOf = std::is_same_v<T, float>  ? Dtype::kF32
                             : std::is_same_v<T, Bf16> ? Dtype::kBF16
                                                       : Dtype::kF16;

// A device and a model on it, for pools of its layout.
template <typename T>
struct CudaPoolRig {
  explicit CudaPoolRig(const StateLayout& layout) : model(layout, device) {}

  std::unique_ptr<CudaStatePool> pool(int slots, bool is_poisoned = true, int max_rows = 0,
                                      bool staggers_flushes = false) {
    const CudaPoolOptions options = {.max_rows = max_rows,
                                     .is_poisoned = is_poisoned,
                                     .element = kElementOf<T>,
                                     .staggers_flushes = staggers_flushes};
    const PoolSize size = pool_size(model.layout(), slots, model.layout().context_tokens);
    return std::make_unique<CudaStatePool>(model.layout(), size, device, options);
  }

  CudaDevice device;
  CudaMiniModel<T> model;
};

inline Lane cuda_lane(CudaStatePool& pool, uint64_t seed) {
  Lane lane;
  lane.handle = pool.allocate(pool.layout().context_tokens);
  lane.random.seed(seed);
  return lane;
}

// Replay steps whose windows and acceptances come from `seed`.
template <typename T>
void run_cuda_script(CudaMiniModel<T>& model, CudaStatePool& pool, const std::vector<Lane*>& lanes, uint64_t seed,
                     int steps) {
  std::mt19937_64 random(seed);
  const auto pick = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int step = 0; step < steps; ++step) {
    const int tokens = pick(1, pool.layout().max_step_tokens);
    const std::vector<int> accepted(lanes.size(), pick(0, tokens));
    advance(model, pool, lanes, StepKind::kReplay, tokens, accepted);
  }
}

}  // namespace replayssm::test
