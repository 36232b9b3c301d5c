// Loads the weights of a Kimi-Linear model.
#include <algorithm>

#include "replayssm/core/error.h"
#include "replayssm/model/kimi.h"
#include "replayssm/model/weight_loader.h"

namespace replayssm {
namespace {

template <template <typename> class Array>
class KimiLoader {
 public:
  KimiLoader(const Checkpoint& checkpoint, const ModelConfig& config, WeightStore<Array>& store, LoadProgress progress)
      : loader_(checkpoint, store, std::move(progress)),
        config_(config),
        prefix_(checkpoint.require_prefix({"model."}, "embed_tokens.weight")) {}

  BasicWeights<Array> load() {
    BasicWeights<Array> weights;
    weights.embedding = loader_.matrix(prefix_ + "embed_tokens.weight", config_.vocabulary, config_.hidden_size);
    for (const Block& block : config_.blocks) weights.blocks.push_back(load_block(block));
    loader_.refuse_more_layers(fmt::format("{}layers.{}.input_layernorm.weight", prefix_, config_.layers),
                               config_.layers);
    weights.norm = norm(prefix_ + "norm.weight");
    if (!config_.has_tied_embeddings)
      weights.lm_head = loader_.matrix("lm_head.weight", config_.vocabulary, config_.hidden_size);
    loader_.count_numbers({config_.norm_epsilon});
    weights.fingerprint = loader_.fingerprint();
    weights.bytes = loader_.bytes();
    return weights;
  }

 private:
  typename BasicWeights<Array>::Block load_block(const Block& block) {
    const std::string name = fmt::format("{}layers.{}.", prefix_, block.layer);
    if (const auto* delta = std::get_if<DeltaConfig>(&block.config))
      return {norm(name + "input_layernorm.weight"), load(*delta, name + "self_attn.")};
    if (const auto* attention = std::get_if<LatentAttentionConfig>(&block.config))
      return {norm(name + "input_layernorm.weight"), load(*attention, name + "self_attn.")};
    Array<float> post_norm = norm(name + "post_attention_layernorm.weight");
    const std::string dense = name + "mlp.", sparse = name + "block_sparse_moe.";
    if (const auto* experts = std::get_if<ExpertsConfig>(&block.config))
      return {std::move(post_norm), load(*experts, first_with({sparse, dense}, "gate.weight"))};
    const auto& feed_forward = std::get<FeedForwardConfig>(block.config);
    return {std::move(post_norm),
            loader_.feed_forward(first_with({dense, sparse}, "gate_proj.weight"), feed_forward.activation,
                                 feed_forward.size, config_.hidden_size)};
  }

  BasicDeltaWeights<Array> load(const DeltaConfig& sizes, const std::string& name) {
    const int64_t hidden = config_.hidden_size, keys = sizes.key_channels(), values = sizes.value_channels();
    const std::string gate = first_with({name, name + "forget_gate."}, "f_a_proj.weight");
    const bool has_low_rank = sizes.output_gate_rank > 0;
    std::vector<RowRange> rows = {loader_.all_rows(name + "q_proj.weight", keys, hidden),
                                  loader_.all_rows(name + "k_proj.weight", keys, hidden),
                                  loader_.all_rows(name + "v_proj.weight", values, hidden)};
    if (!has_low_rank) rows.push_back(loader_.all_rows(name + "g_proj.weight", values, hidden));
    rows.push_back(loader_.all_rows(name + "b_proj.weight", sizes.shape.heads, hidden));
    rows.push_back(loader_.all_rows(gate + "f_a_proj.weight", sizes.gate_rank, hidden));
    if (has_low_rank) rows.push_back(loader_.all_rows(name + "g_a_proj.weight", sizes.output_gate_rank, hidden));
    BasicDeltaWeights<Array> weights;
    weights.in_proj = loader_.matrix(rows);
    weights.gate = loader_.matrix(gate + "f_b_proj.weight", keys, sizes.gate_rank);
    if (has_low_rank) weights.output_gate = loader_.matrix(name + "g_b_proj.weight", values, sizes.output_gate_rank);
    weights.conv = convolution(sizes, name);
    weights.a_log = decays(gate + "A_log", sizes.shape.heads);
    weights.dt_bias = loader_.vector(gate + "dt_bias", keys);
    weights.norm = loader_.vector(name + "o_norm.weight", sizes.shape.value_size);
    weights.out_proj = loader_.matrix(name + "o_proj.weight", hidden, values);
    loader_.count_numbers({sizes.lower_bound});
    return weights;
  }

  // The published checkpoint has a convolution each for q, k and v.
  Array<float> convolution(const DeltaConfig& sizes, const std::string& name) {
    if (loader_.checkpoint().find(name + "conv1d.weight") != nullptr)
      return loader_.convolution({{name + "conv1d.weight", sizes.conv_channels()}}, sizes.conv_width);
    return loader_.convolution({{name + "q_conv1d.weight", sizes.key_channels()},
                                {name + "k_conv1d.weight", sizes.key_channels()},
                                {name + "v_conv1d.weight", sizes.value_channels()}},
                               sizes.conv_width);
  }

  // [1, 1, H, 1] in the published checkpoint, [H] where the gate has a lower bound.
  Array<float> decays(const std::string& name, int64_t heads) {
    const Tensor* tensor = loader_.checkpoint().find(name);
    if (tensor != nullptr && tensor->shape.size() == 4) return loader_.vector(name, {1, 1, heads, 1});
    return loader_.vector(name, heads);
  }

  BasicLatentAttentionWeights<Array> load(const LatentAttentionConfig& sizes, const std::string& name) {
    const int64_t hidden = config_.hidden_size, heads = sizes.heads;
    const int64_t query = sizes.nope_size + sizes.rope_size, up = sizes.nope_size + sizes.value_size;
    const RowRange key = loader_.all_rows(name + "kv_a_proj_with_mqa.weight", sizes.key_size(), hidden);
    BasicLatentAttentionWeights<Array> weights;
    if (sizes.query_rank > 0) {
      weights.in_proj = loader_.matrix({loader_.all_rows(name + "q_a_proj.weight", sizes.query_rank, hidden), key});
      weights.query_norm = loader_.vector(name + "q_a_layernorm.weight", sizes.query_rank);
      weights.query_up = loader_.matrix(name + "q_b_proj.weight", heads * query, sizes.query_rank);
    } else {
      weights.in_proj = loader_.matrix({loader_.all_rows(name + "q_proj.weight", heads * query, hidden), key});
    }
    weights.latent_norm = loader_.vector(name + "kv_a_layernorm.weight", sizes.latent_size);
    // Per head [key | value] rows.
    const Tensor& kv = loader_.tensor(name + "kv_b_proj.weight", {heads * up, sizes.latent_size});
    weights.key_up = loader_.key_up(kv, sizes.heads, up, sizes.nope_size, sizes.rope_size);
    weights.value_up =
        loader_.matrix(WeightLoader<Array>::part_of_heads(kv, sizes.heads, up, sizes.nope_size, sizes.value_size));
    weights.out_proj = loader_.matrix(name + "o_proj.weight", hidden, heads * sizes.value_size);
    loader_.count_numbers({static_cast<double>(sizes.nope_size), sizes.norm_epsilon});
    return weights;
  }

  BasicExpertsWeights<Array> load(const ExpertsConfig& sizes, const std::string& name) {
    BasicExpertsWeights<Array> weights;
    weights.router = loader_.matrix(name + "gate.weight", sizes.experts, config_.hidden_size);
    weights.correction = loader_.vector(name + "gate.e_score_correction_bias", sizes.experts);
    weights.experts = load_experts(sizes, name + "experts.");
    if (sizes.shared_size > 0)
      weights.shared =
          loader_.feed_forward(name + "shared_experts.", sizes.activation, sizes.shared_size, config_.hidden_size);
    const RouterConfig& router = sizes.router;
    loader_.count_numbers({static_cast<double>(sizes.top_k), static_cast<double>(router.scores),
                           static_cast<double>(router.groups), static_cast<double>(router.top_groups),
                           static_cast<double>(router.is_normalised), router.scale});
    return weights;
  }

  // In the published checkpoint an expert's gate_proj, up_proj and down_proj are w1, w3 and w2.
  BasicFeedForwardWeights<Array> load_experts(const ExpertsConfig& sizes, const std::string& name) {
    for (const char* other : {"gate_up_proj", "down_proj", "0.gate_proj.weight"})
      if (loader_.checkpoint().find(name + other) != nullptr) return loader_.experts(name, sizes, config_.hidden_size);
    return loader_.experts(name, sizes, config_.hidden_size, {"w1.weight", "w3.weight", "w2.weight"});
  }

  // The first of `prefixes` under which there is a tensor `suffix`.
  std::string first_with(std::initializer_list<std::string_view> prefixes, std::string_view suffix) const {
    return loader_.checkpoint().require_prefix(prefixes, suffix);
  }
  Array<float> norm(const std::string& name) { return loader_.vector(name, config_.hidden_size); }

  WeightLoader<Array> loader_;
  const ModelConfig& config_;
  std::string prefix_;
};

}  // namespace

template <template <typename> class Array>
BasicWeights<Array> load_kimi_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                      WeightStore<Array>& store, const LoadProgress& progress) {
  return KimiLoader<Array>(checkpoint, config, store, progress).load();
}

template Weights load_kimi_weights(const Checkpoint&, const ModelConfig&, WeightStore<Buffer>&, const LoadProgress&);
#ifdef REPLAYSSM_HAS_CUDA
template CudaWeights load_kimi_weights(const Checkpoint&, const ModelConfig&, WeightStore<DeviceBuffer>&,
                                       const LoadProgress&);
#endif

}  // namespace replayssm
