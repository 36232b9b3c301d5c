// Loads the weights of a Nemotron-H or Nemotron-3 text model.
#include "replayssm/core/error.h"
#include "replayssm/model/nemotron.h"
#include "replayssm/model/weight_loader.h"

namespace replayssm {
namespace {

// A kind of layer: its letter in the pattern, and a tensor that no other kind has.
struct LayerKind {
  char letter;
  const char* tensor;
};
constexpr LayerKind kKinds[] = {
    {'M', "in_proj.weight"}, {'*', "q_proj.weight"}, {'E', "gate.weight"}, {'-', "up_proj.weight"}};

struct LetterOf {
  char operator()(const Mamba2Config&) const { return 'M'; }
  char operator()(const AttentionConfig&) const { return '*'; }
  char operator()(const ExpertsConfig&) const { return 'E'; }
  char operator()(const auto&) const { return '-'; }
};

template <template <typename> class Array>
class NemotronLoader {
 public:
  NemotronLoader(const Checkpoint& checkpoint, const ModelConfig& config, WeightStore<Array>& store,
                 LoadProgress progress)
      : loader_(checkpoint, store, std::move(progress)),
        config_(config),
        prefix_(checkpoint.require_prefix({"backbone.", "model."}, "embeddings.weight")) {}

  BasicWeights<Array> load() {
    const std::string next = fmt::format("{}layers.{}.norm.weight", prefix_, config_.layers);
    require(loader_.checkpoint().find(next) == nullptr,
            "hybrid_override_pattern: expected as many layers as there are tensors of, got {} and the tensor {}",
            config_.layers, next);
    BasicWeights<Array> weights;
    weights.embedding = loader_.matrix(prefix_ + "embeddings.weight", config_.vocabulary, config_.hidden_size);
    for (const Block& block : config_.blocks) weights.blocks.push_back(load_block(block));
    weights.norm = loader_.vector(prefix_ + "norm_f.weight", config_.hidden_size);
    if (!config_.has_tied_embeddings)
      weights.lm_head = loader_.matrix("lm_head.weight", config_.vocabulary, config_.hidden_size);
    count_numbers();
    weights.fingerprint = loader_.fingerprint();
    weights.bytes = loader_.bytes();
    return weights;
  }

 private:
  typename BasicWeights<Array>::Block load_block(const Block& block) {
    const std::string name = fmt::format("{}layers.{}.", prefix_, block.layer);
    check_kind(block, name + "mixer.");
    Array<float> norm = loader_.vector(name + "norm.weight", config_.hidden_size);
    return {std::move(norm), load_body(block.config, name + "mixer.")};
  }

  BasicBlockWeights<Array> load_body(const BlockConfig& sizes, const std::string& name) {
    if (const auto* mamba = std::get_if<Mamba2Config>(&sizes)) return load(*mamba, name);
    if (const auto* attention = std::get_if<AttentionConfig>(&sizes)) return load(*attention, name);
    if (const auto* experts = std::get_if<ExpertsConfig>(&sizes)) return load(*experts, name);
    const auto& feed_forward = std::get<FeedForwardConfig>(sizes);
    return loader_.feed_forward(name, feed_forward.activation, feed_forward.size, config_.hidden_size);
  }

  // The tensors of a layer that is of another kind than the config says would be called missing; its kind is the news.
  void check_kind(const Block& block, const std::string& name) const {
    const char letter = std::visit(LetterOf(), block.config);
    for (const LayerKind& kind : kKinds)
      if (loader_.checkpoint().find(name + kind.tensor) != nullptr)
        require(kind.letter == letter,
                "hybrid_override_pattern: expected {} at layer {}, which has the tensor {}{}, got {}", kind.letter,
                block.layer, name, kind.tensor, letter);
  }

  BasicMamba2Weights<Array> load(const Mamba2Config& sizes, const std::string& name) {
    const int64_t hidden = config_.hidden_size, inner = sizes.inner_channels(), channels = sizes.conv_channels();
    const int64_t heads = sizes.shape.heads;
    BasicMamba2Weights<Array> weights;
    weights.in_proj = loader_.matrix(name + "in_proj.weight", inner + channels + heads, hidden);
    weights.conv = loader_.convolution({{name + "conv1d.weight", channels}}, sizes.conv_width);
    if (sizes.has_conv_bias) weights.conv_bias = loader_.vector(name + "conv1d.bias", channels);
    weights.a_log = loader_.vector(name + "A_log", heads);
    weights.d = loader_.vector(name + "D", heads);
    weights.dt_bias = loader_.vector(name + "dt_bias", heads);
    weights.norm = loader_.vector(name + "norm.weight", inner);
    weights.out_proj = loader_.matrix(name + "out_proj.weight", hidden, inner);
    return weights;
  }

  BasicAttentionWeights<Array> load(const AttentionConfig& sizes, const std::string& name) {
    const int64_t hidden = config_.hidden_size, queries = int64_t{sizes.query_heads} * sizes.head_size;
    const int64_t keys = int64_t{sizes.kv_heads} * sizes.head_size;
    BasicAttentionWeights<Array> weights;
    weights.in_proj = loader_.matrix({loader_.all_rows(name + "q_proj.weight", queries, hidden),
                                      loader_.all_rows(name + "k_proj.weight", keys, hidden),
                                      loader_.all_rows(name + "v_proj.weight", keys, hidden)});
    weights.out_proj = loader_.matrix(name + "o_proj.weight", hidden, queries);
    return weights;
  }

  BasicExpertsWeights<Array> load(const ExpertsConfig& sizes, const std::string& name) {
    const int64_t hidden = config_.hidden_size, width = sizes.latent_size > 0 ? sizes.latent_size : hidden;
    BasicExpertsWeights<Array> weights;
    weights.router = loader_.matrix(name + "gate.weight", sizes.experts, hidden);
    weights.correction = loader_.vector(name + "gate.e_score_correction_bias", sizes.experts);
    weights.experts = loader_.experts(name + "experts.", sizes, width);
    if (sizes.latent_size > 0) {
      weights.latent_down = loader_.matrix(name + "fc1_latent_proj.weight", width, hidden);
      weights.latent_up = loader_.matrix(name + "fc2_latent_proj.weight", hidden, width);
    }
    weights.shared = loader_.feed_forward(name + "shared_experts.", sizes.activation, sizes.shared_size, hidden);
    return weights;
  }

  // What no tensor's shape shows.
  void count_numbers() {
    loader_.count_numbers({config_.norm_epsilon});
    if (const auto* mamba = config_.first<Mamba2Config>())
      loader_.count_numbers({static_cast<double>(mamba->shape.groups), mamba->time_step_min, mamba->time_step_max});
    if (const auto* attention = config_.first<AttentionConfig>())
      loader_.count_numbers({static_cast<double>(attention->head_size)});
    if (const auto* experts = config_.first<ExpertsConfig>()) {
      const RouterConfig& router = experts->router;
      loader_.count_numbers({static_cast<double>(experts->top_k), static_cast<double>(router.groups),
                             static_cast<double>(router.top_groups), router.is_normalised ? 1.0 : 0.0, router.scale});
    }
  }

  WeightLoader<Array> loader_;
  const ModelConfig& config_;
  std::string prefix_;
};

}  // namespace

template <template <typename> class Array>
BasicWeights<Array> load_nemotron_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                          WeightStore<Array>& store, const LoadProgress& progress) {
  return NemotronLoader<Array>(checkpoint, config, store, progress).load();
}

template Weights load_nemotron_weights(const Checkpoint&, const ModelConfig&, WeightStore<Buffer>&,
                                       const LoadProgress&);
#ifdef REPLAYSSM_HAS_CUDA
template CudaWeights load_nemotron_weights(const Checkpoint&, const ModelConfig&, WeightStore<DeviceBuffer>&,
                                           const LoadProgress&);
#endif

}  // namespace replayssm
