// Loads the weights of a Qwen3.5 or Qwen3-Next text model.
#include "replayssm/core/error.h"
#include "replayssm/model/qwen.h"
#include "replayssm/model/weight_loader.h"

namespace replayssm {
namespace {

void append(std::vector<RowRange>& ranges, const std::vector<RowRange>& more) {
  ranges.insert(ranges.end(), more.begin(), more.end());
}

template <template <typename> class Array>
class QwenLoader {
 public:
  QwenLoader(const Checkpoint& checkpoint, const ModelConfig& config, WeightStore<Array>& store, LoadProgress progress)
      : loader_(checkpoint, store, std::move(progress)),
        config_(config),
        prefix_(checkpoint.require_prefix({"model.", "model.language_model."}, "embed_tokens.weight")) {}

  BasicWeights<Array> load() {
    BasicWeights<Array> weights;
    weights.embedding =
        loader_.matrix({loader_.all_rows(prefix_ + "embed_tokens.weight", config_.vocabulary, config_.hidden_size)});
    for (const Block& block : config_.blocks) weights.blocks.push_back(load_block(block));
    loader_.refuse_more_layers(fmt::format("{}layers.{}.input_layernorm.weight", prefix_, config_.layers),
                               config_.layers);
    weights.norm = loader_.vector(prefix_ + "norm.weight", config_.hidden_size);
    if (!config_.has_tied_embeddings)
      weights.lm_head = loader_.matrix({loader_.all_rows("lm_head.weight", config_.vocabulary, config_.hidden_size)});
    const AttentionConfig* attention = config_.first<AttentionConfig>();
    loader_.count_numbers({config_.norm_epsilon, attention != nullptr ? attention->rope_theta : 0.0,
                           attention != nullptr ? static_cast<double>(attention->rotary_size) : 0.0});
    if (const auto* experts = config_.first<ExpertsConfig>())
      loader_.count_numbers({static_cast<double>(experts->top_k), experts->router.is_normalised ? 1.0 : 0.0});
    weights.fingerprint = loader_.fingerprint();
    weights.bytes = loader_.bytes();
    return weights;
  }

 private:
  typename BasicWeights<Array>::Block load_block(const Block& block) {
    const std::string name = fmt::format("{}layers.{}.", prefix_, block.layer);
    if (const auto* feed_forward = std::get_if<FeedForwardConfig>(&block.config))
      return {norm(name + "post_attention_layernorm.weight"),
              loader_.feed_forward(name + "mlp.", feed_forward->activation, feed_forward->size, config_.hidden_size)};
    if (const auto* experts = std::get_if<ExpertsConfig>(&block.config))
      return {norm(name + "post_attention_layernorm.weight"), load(*experts, name + "mlp.")};
    Array<float> input_norm = norm(name + "input_layernorm.weight");
    if (const auto* delta = std::get_if<DeltaConfig>(&block.config))
      return {std::move(input_norm), load(*delta, name + "linear_attn.")};
    return {std::move(input_norm), load(std::get<AttentionConfig>(block.config), name + "self_attn.")};
  }

  Array<float> norm(const std::string& name) { return loader_.vector(name, config_.hidden_size); }

  BasicDeltaWeights<Array> load(const DeltaConfig& sizes, const std::string& name) {
    BasicDeltaWeights<Array> weights;
    weights.in_proj = loader_.matrix(config_.model_type == "qwen3_next" ? interleaved_rows(sizes, name)
                                                                        : contiguous_rows(sizes, name));
    weights.conv = loader_.convolution({{name + "conv1d.weight", sizes.conv_channels()}}, sizes.conv_width);
    weights.a_log = loader_.vector(name + "A_log", sizes.shape.heads);
    weights.dt_bias = loader_.vector(name + "dt_bias", sizes.shape.heads);
    weights.norm = loader_.vector(name + "norm.weight", sizes.shape.value_size);
    weights.out_proj =
        loader_.matrix({loader_.all_rows(name + "out_proj.weight", config_.hidden_size, sizes.value_channels())});
    return weights;
  }

  // Qwen3.5: a tensor a part.
  std::vector<RowRange> contiguous_rows(const DeltaConfig& sizes, const std::string& name) {
    const int64_t hidden = config_.hidden_size;
    return {loader_.all_rows(name + "in_proj_qkv.weight", sizes.conv_channels(), hidden),
            loader_.all_rows(name + "in_proj_z.weight", sizes.value_channels(), hidden),
            loader_.all_rows(name + "in_proj_b.weight", sizes.shape.heads, hidden),
            loader_.all_rows(name + "in_proj_a.weight", sizes.shape.heads, hidden)};
  }

  // Qwen3-Next: per key head [q K | k K | v r*V | z r*V] and [b r | a r], r = H / G.
  std::vector<RowRange> interleaved_rows(const DeltaConfig& sizes, const std::string& name) {
    const DeltaShape& shape = sizes.shape;
    const int64_t hidden = config_.hidden_size, key = shape.key_size;
    const int64_t ratio = shape.heads / shape.key_heads, value = ratio * shape.value_size;
    const Tensor& qkvz =
        loader_.tensor(name + "in_proj_qkvz.weight", {shape.key_heads * (2 * key + 2 * value), hidden});
    const Tensor& ba = loader_.tensor(name + "in_proj_ba.weight", {2 * shape.heads, hidden});
    const auto part = [&](int64_t first, int64_t count) {
      return WeightLoader<Array>::part_of_heads(qkvz, shape.key_heads, 2 * key + 2 * value, first, count);
    };
    std::vector<RowRange> rows = part(0, key);
    append(rows, part(key, key));
    append(rows, part(2 * key, value));
    append(rows, part(2 * key + value, value));
    append(rows, WeightLoader<Array>::part_of_heads(ba, shape.key_heads, 2 * ratio, 0, ratio));
    append(rows, WeightLoader<Array>::part_of_heads(ba, shape.key_heads, 2 * ratio, ratio, ratio));
    return rows;
  }

  BasicAttentionWeights<Array> load(const AttentionConfig& sizes, const std::string& name) {
    const int64_t hidden = config_.hidden_size, head = sizes.head_size, kv = sizes.kv_heads * head;
    // Per query head [query | gate].
    const Tensor& q = loader_.tensor(name + "q_proj.weight", {2 * sizes.query_heads * head, hidden});
    std::vector<RowRange> rows = WeightLoader<Array>::part_of_heads(q, sizes.query_heads, 2 * head, 0, head);
    rows.push_back(loader_.all_rows(name + "k_proj.weight", kv, hidden));
    rows.push_back(loader_.all_rows(name + "v_proj.weight", kv, hidden));
    append(rows, WeightLoader<Array>::part_of_heads(q, sizes.query_heads, 2 * head, head, head));
    BasicAttentionWeights<Array> weights;
    weights.in_proj = loader_.matrix(rows);
    weights.q_norm = loader_.vector(name + "q_norm.weight", head);
    weights.k_norm = loader_.vector(name + "k_norm.weight", head);
    weights.out_proj = loader_.matrix({loader_.all_rows(name + "o_proj.weight", hidden, sizes.query_heads * head)});
    return weights;
  }

  BasicExpertsWeights<Array> load(const ExpertsConfig& sizes, const std::string& name) {
    const int64_t hidden = config_.hidden_size;
    BasicExpertsWeights<Array> weights;
    weights.router = loader_.matrix({loader_.all_rows(name + "gate.weight", sizes.experts, hidden)});
    weights.experts = loader_.experts(name + "experts.", sizes, hidden);
    weights.shared = loader_.feed_forward(name + "shared_expert.", sizes.activation, sizes.shared_size, hidden);
    weights.shared_gate = loader_.matrix({loader_.all_rows(name + "shared_expert_gate.weight", 1, hidden)});
    return weights;
  }

  WeightLoader<Array> loader_;
  const ModelConfig& config_;
  std::string prefix_;
};

}  // namespace

template <template <typename> class Array>
BasicWeights<Array> load_qwen_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                      WeightStore<Array>& store, const LoadProgress& progress) {
  return QwenLoader<Array>(checkpoint, config, store, progress).load();
}

template Weights load_qwen_weights(const Checkpoint&, const ModelConfig&, WeightStore<Buffer>&, const LoadProgress&);
#ifdef REPLAYSSM_HAS_CUDA
template CudaWeights load_qwen_weights(const Checkpoint&, const ModelConfig&, WeightStore<DeviceBuffer>&,
                                       const LoadProgress&);
#endif

}  // namespace replayssm
