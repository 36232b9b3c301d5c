#include "replayssm/model/random_weights.h"

#include <cmath>

#include "replayssm/core/error.h"
#include "replayssm/ops/random_fill.h"

namespace replayssm {
namespace {

template <typename T>
void fill(Buffer<T>& array, const RandomFill<T>& args, WeightStore<Buffer>&) {
  RandomFill<T> own = args;
  own.y = array.data();
  random_fill(own);
}
#ifdef REPLAYSSM_HAS_CUDA
template <typename T>
void fill(DeviceBuffer<T>& array, const RandomFill<T>& args, WeightStore<DeviceBuffer>& store) {
  RandomFill<T> own = args;
  own.y = array.data();
  random_fill(own, store.device());
}
#endif

template <template <typename> class Array>
class RandomWeights {
 public:
  RandomWeights(const ModelConfig& config, uint64_t seed, bool is_bf16, WeightStore<Array>& store)
      : config_(config), seed_(seed), is_bf16_(store.keeps_bf16(is_bf16)), store_(store) {}

  BasicWeights<Array> make() {
    const int64_t hidden = config_.hidden_size;
    BasicWeights<Array> weights;
    weights.embedding = matrix(config_.vocabulary, hidden, std::sqrt(static_cast<double>(hidden)));
    for (const Block& block : config_.blocks)
      weights.blocks.push_back(
          {norm(hidden, config_.has_zero_centred_norms),
           std::visit([this](const auto& sizes) -> BasicBlockWeights<Array> { return block_of(sizes); },
                      block.config)});
    weights.norm = norm(hidden, config_.has_zero_centred_norms);
    if (!config_.has_tied_embeddings) weights.lm_head = matrix(config_.vocabulary, hidden, 1);
    weights.fingerprint = fmt::format("random-{}", seed_);
    weights.bytes = bytes_;
    return weights;
  }

 private:
  template <typename T>
  void fill_next(Array<T>& array, double low, double high) {
    fill(array,
         RandomFill<T>{.count = array.size(),
                       .seed = seed_ * 0x100000001B3u + ++arrays_,
                       .low = static_cast<float>(low),
                       .high = static_cast<float>(high)},
         store_);
    bytes_ += array.size() * sizeof(T);
  }

  // Uniform with a standard deviation of gain / sqrt(inputs).
  BasicMatrix<Array> matrix(int64_t outputs, int64_t inputs, double gain) {
    BasicMatrix<Array> matrix;
    matrix.outputs = outputs;
    matrix.inputs = inputs;
    const double bound = gain * std::sqrt(3.0 / static_cast<double>(inputs));
    const auto count = static_cast<size_t>(outputs) * static_cast<size_t>(inputs);
    if (is_bf16_) {
      matrix.bf16 = store_.template take<Bf16>(count);
      fill_next(matrix.bf16, -bound, bound);
    } else {
      matrix.f32 = store_.template take<float>(count);
      fill_next(matrix.f32, -bound, bound);
    }
    return matrix;
  }
  // One whose outputs are added to the residual stream.
  BasicMatrix<Array> last_matrix(int64_t outputs, int64_t inputs) {
    return matrix(outputs, inputs, 1 / std::sqrt(static_cast<double>(config_.blocks.size())));
  }
  Array<float> vector(int64_t size, double low, double high) {
    Array<float> array = store_.template take<float>(static_cast<size_t>(size));
    fill_next(array, low, high);
    return array;
  }
  Array<float> norm(int64_t size, bool is_zero_centred) {
    return is_zero_centred ? vector(size, 0, 0) : vector(size, 1, 1);
  }

  BasicDeltaWeights<Array> block_of(const DeltaConfig& sizes) {
    const int64_t hidden = config_.hidden_size;
    BasicDeltaWeights<Array> weights;
    weights.in_proj = matrix(DeltaRows(sizes).count, hidden, 1);
    if (sizes.gate_rank > 0) weights.gate = matrix(sizes.gates(), sizes.gate_rank, 1);
    if (sizes.output_gate_rank > 0) weights.output_gate = matrix(sizes.value_channels(), sizes.output_gate_rank, 1);
    weights.conv = vector(int64_t{sizes.conv_width} * sizes.conv_channels(), -0.5, 0.5);
    weights.a_log = vector(sizes.shape.heads, 0, 2);
    weights.dt_bias = vector(sizes.gates(), -6, -2);
    weights.norm = norm(sizes.shape.value_size, false);
    weights.out_proj = last_matrix(hidden, sizes.value_channels());
    return weights;
  }

  BasicMamba2Weights<Array> block_of(const Mamba2Config& sizes) {
    const int64_t hidden = config_.hidden_size, inner = sizes.inner_channels(), channels = sizes.conv_channels();
    BasicMamba2Weights<Array> weights;
    weights.in_proj = matrix(inner + channels + sizes.shape.heads, hidden, 1);
    weights.conv = vector(int64_t{sizes.conv_width} * channels, -0.5, 0.5);
    if (sizes.has_conv_bias) weights.conv_bias = vector(channels, -0.1, 0.1);
    weights.a_log = vector(sizes.shape.heads, 0, 2);
    weights.d = vector(sizes.shape.heads, 0.5, 1.5);
    weights.dt_bias = vector(sizes.shape.heads, -6, -2);
    weights.norm = norm(inner, false);
    weights.out_proj = last_matrix(hidden, inner);
    return weights;
  }

  BasicAttentionWeights<Array> block_of(const AttentionConfig& sizes) {
    const int64_t hidden = config_.hidden_size, queries = int64_t{sizes.query_heads} * sizes.head_size;
    const int64_t keys = int64_t{sizes.kv_heads} * sizes.head_size;
    BasicAttentionWeights<Array> weights;
    weights.in_proj = matrix((sizes.has_output_gate ? 2 : 1) * queries + 2 * keys, hidden, 1);
    if (sizes.has_head_norms) {
      weights.q_norm = norm(sizes.head_size, config_.has_zero_centred_norms);
      weights.k_norm = norm(sizes.head_size, config_.has_zero_centred_norms);
    }
    weights.out_proj = last_matrix(hidden, queries);
    return weights;
  }

  // key_up's part for the shared key is random, too.
  BasicLatentAttentionWeights<Array> block_of(const LatentAttentionConfig& sizes) {
    const int64_t hidden = config_.hidden_size, heads = sizes.heads, query = sizes.nope_size + sizes.rope_size;
    BasicLatentAttentionWeights<Array> weights;
    const int64_t queries = sizes.query_rank > 0 ? sizes.query_rank : heads * query;
    weights.in_proj = matrix(queries + sizes.key_size(), hidden, 1);
    if (sizes.query_rank > 0) {
      weights.query_norm = norm(sizes.query_rank, false);
      weights.query_up = matrix(heads * query, sizes.query_rank, 1);
    }
    weights.latent_norm = norm(sizes.latent_size, false);
    weights.key_up = matrix(heads * sizes.key_size(), query, 1);
    weights.value_up = matrix(heads * sizes.value_size, sizes.latent_size, 1);
    weights.out_proj = last_matrix(hidden, heads * sizes.value_size);
    return weights;
  }

  BasicFeedForwardWeights<Array> feed_forward(Activation activation, int64_t size, int64_t width, int64_t count) {
    return {matrix(count * (activation == Activation::kSwiGlu ? 2 : 1) * size, width, 1),
            last_matrix(count * width, size)};
  }
  BasicFeedForwardWeights<Array> block_of(const FeedForwardConfig& sizes) {
    return feed_forward(sizes.activation, sizes.size, config_.hidden_size, 1);
  }

  BasicExpertsWeights<Array> block_of(const ExpertsConfig& sizes) {
    const int64_t hidden = config_.hidden_size, width = sizes.latent_size > 0 ? sizes.latent_size : hidden;
    BasicExpertsWeights<Array> weights;
    weights.router = matrix(sizes.experts, hidden, 1);
    if (sizes.router.has_correction) weights.correction = vector(sizes.experts, -0.01, 0.01);
    weights.experts = feed_forward(sizes.activation, sizes.size, width, sizes.experts);
    if (sizes.latent_size > 0) {
      weights.latent_down = matrix(width, hidden, 1);
      weights.latent_up = last_matrix(hidden, width);
    }
    if (sizes.shared_size > 0) weights.shared = feed_forward(sizes.activation, sizes.shared_size, hidden, 1);
    if (sizes.has_shared_gate) weights.shared_gate = matrix(1, hidden, 1);
    return weights;
  }

  const ModelConfig& config_;
  uint64_t seed_;
  bool is_bf16_;
  WeightStore<Array>& store_;
  uint64_t arrays_ = 0;
  size_t bytes_ = 0;
};

}  // namespace

template <template <typename> class Array>
BasicWeights<Array> random_weights(const ModelConfig& config, uint64_t seed, bool is_bf16, WeightStore<Array>& store) {
  return RandomWeights<Array>(config, seed, is_bf16, store).make();
}

template Weights random_weights(const ModelConfig&, uint64_t, bool, WeightStore<Buffer>&);
#ifdef REPLAYSSM_HAS_CUDA
template CudaWeights random_weights(const ModelConfig&, uint64_t, bool, WeightStore<DeviceBuffer>&);
#endif

}  // namespace replayssm
