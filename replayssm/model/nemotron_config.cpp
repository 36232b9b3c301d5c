// Reads the configs of Nemotron-H and Nemotron-3 text models.
#include <algorithm>
#include <limits>

#include "replayssm/core/error.h"
#include "replayssm/model/config_fields.h"
#include "replayssm/model/nemotron.h"

namespace replayssm {
namespace {

using nlohmann::json;

constexpr double kNoBound = std::numeric_limits<double>::infinity();
constexpr double kMaxTimeStep = 1e30;  // what is above it, no time step reaches

void refuse_unsupported(const JsonObject& fields) {
  require_value(fields, "mamba_hidden_act", "silu");
  require_value(fields, "mlp_hidden_act", "relu2");
  for (const char* field : {"use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"})
    require_value(fields, field, false);
  require_nothing(fields, "sliding_window", "attention windows are not supported");
}

// The one of two names for a thing that is there, else the first.
std::string_view spelling(const JsonObject& fields, std::string_view first, std::string_view second) {
  return !fields.has(first) && fields.has(second) ? second : first;
}

char layer_letter(const json& type, const std::string& name) {
  if (type == "mamba" || type == "linear_attention") return 'M';
  if (type == "attention" || type == "full_attention") return '*';
  if (type == "mlp") return '-';
  if (type == "moe") return 'E';
  fail(
      "{}: expected \"mamba\" or \"linear_attention\", \"attention\" or \"full_attention\", \"mlp\" or \"moe\", got {}",
      name, describe(type));
}

// The pattern by one of its fields.
std::string parse_pattern(const JsonObject& fields, std::string_view field) {
  if (field != "hybrid_override_pattern") {
    std::string pattern;
    for (const json& type : fields.array(field)) pattern += layer_letter(type, fields.name_of(field));
    return pattern;
  }
  const std::string pattern = fields.string(field);
  const size_t other = pattern.find_first_not_of("M*-E");
  if (other != std::string::npos)
    fail("{}: expected layers of M, *, - and E, got {} at place {}", fields.name_of(field),
         describe(json(pattern.substr(other))), other);
  return pattern;
}

// Two fields that both give the layers must give the same.
void require_same(const std::string& name, const std::string& given, std::string_view source,
                  const std::string& pattern) {
  require(given.size() == pattern.size(), "{}: expected {} layers, as {} has, got {}", name, pattern.size(), source,
          given.size());
  for (size_t layer = 0; layer < pattern.size(); ++layer)
    require(given[layer] == pattern[layer], "{}: expected {} at layer {}, as {} has, got {}", name, pattern[layer],
            layer, source, given[layer]);
}

// A letter a layer.
std::string parse_layers(const JsonObject& fields) {
  std::string pattern;
  std::string_view source;
  for (const char* field : {"hybrid_override_pattern", "layers_block_type", "layer_types"}) {
    if (!fields.has(field)) continue;
    const std::string given = parse_pattern(fields, field);
    require(!given.empty() && given.size() <= kMaxLayers, "{}: expected 1 .. {} layers, got {}", fields.name_of(field),
            kMaxLayers, given.size());
    if (!source.empty()) require_same(fields.name_of(field), given, source, pattern);
    pattern = given;
    source = field;
  }
  require(!source.empty(), "{}: expected the layers' kinds, got nothing", fields.name_of("hybrid_override_pattern"));
  const int64_t layers = static_cast<int64_t>(pattern.size());
  const int64_t count = fields.integer("num_hidden_layers", 1, kMaxLayers, layers);
  require(count == layers, "{}: expected {}, the layers of {}, got {}", fields.name_of("num_hidden_layers"), layers,
          source, count);
  return pattern;
}

// An upper bound that is none: null, Python's Infinity (which parse_json calls "inf"), or what transformers writes for
// it.
bool is_no_bound(const json& value) {
  return value.is_null() || value == "inf" || value == "Infinity" || value == json{{"__float__", "Infinity"}};
}

void parse_time_step_limit(const JsonObject& fields, Mamba2Config& mamba) {
  const std::string_view field = spelling(fields, "time_step_limit", "mamba_dt_limit");
  mamba.time_step_min = 0;
  mamba.time_step_max = kNoBound;
  if (!fields.has(field)) return;
  const json& limit = fields.array(field);
  const bool is_pair = limit.size() == 2 && limit[0].is_number() && (limit[1].is_number() || is_no_bound(limit[1]));
  require(is_pair, "{}: expected two numbers (or a number and Infinity), got {}", fields.name_of(field),
          limit.size() == 2 ? fmt::format("{} and {}", describe(limit[0]), describe(limit[1])) : describe(limit));
  mamba.time_step_min = limit[0].get<double>();
  if (limit[1].is_number() && limit[1].get<double>() <= kMaxTimeStep) mamba.time_step_max = limit[1].get<double>();
  require(mamba.time_step_min >= 0 && mamba.time_step_min <= std::min(mamba.time_step_max, kMaxTimeStep),
          "{}: expected 0 <= first <= second, got {} and {}", fields.name_of(field), mamba.time_step_min,
          mamba.time_step_max);
}

Mamba2Config parse_mamba(const JsonObject& fields, int64_t layers) {
  Mamba2Config mamba;
  Mamba2Shape& shape = mamba.shape;
  shape.groups = small_integer(fields, spelling(fields, "n_groups", "mamba_n_groups"), 1, kMaxHeads);
  shape.heads = small_integer(fields, "mamba_num_heads", 1, kMaxHeads);
  require_multiple(fields, "mamba_num_heads", shape.heads, shape.groups);
  shape.head_size = small_integer(fields, "mamba_head_dim", 1, kMaxHeadSize);
  require_multiple(fields, "mamba_head_dim", shape.head_size, 8);
  shape.state_size = small_integer(fields, "ssm_state_size", 1, 256);
  require_multiple(fields, "ssm_state_size", shape.state_size, 16);
  require_product(fields, "mamba_head_dim", shape.heads, shape.head_size);
  require_product(fields, "ssm_state_size", shape.groups, shape.state_size);
  mamba.conv_width = static_cast<int>(fields.integer(spelling(fields, "conv_kernel", "mamba_d_conv"), 2, 8, 4));
  mamba.has_conv_bias = fields.boolean(spelling(fields, "use_conv_bias", "mamba_conv_bias"), true);
  parse_time_step_limit(fields, mamba);
  require_state(fields, "mamba_num_heads", layers, int64_t{shape.heads} * shape.head_size * shape.state_size);
  return mamba;
}

AttentionConfig parse_attention(const JsonObject& fields) {
  return parse_attention_heads(fields, fields.integer("attention_head_dim", 2, kMaxHeadSize, 128));
}

FeedForwardConfig parse_feed_forward(const JsonObject& fields) {
  return {small_integer(fields, "intermediate_size", 1, kMaxIntermediateSize), Activation::kRelu2};
}

ExpertsConfig parse_experts(const JsonObject& fields) {
  require_value(fields, "n_shared_experts", 1);
  ExpertsConfig experts;
  experts.activation = Activation::kRelu2;
  experts.experts = small_integer(fields, "n_routed_experts", 1, kMaxExperts);
  experts.top_k = small_integer(fields, "num_experts_per_tok", 1, kMaxExperts);
  require(experts.top_k <= experts.experts, "{}: expected at most {} (n_routed_experts), got {}",
          fields.name_of("num_experts_per_tok"), experts.experts, experts.top_k);
  experts.size = small_integer(fields, "moe_intermediate_size", 1, kMaxIntermediateSize);
  experts.shared_size = small_integer(fields, "moe_shared_expert_intermediate_size", 1, kMaxIntermediateSize);
  experts.latent_size = static_cast<int>(fields.integer("moe_latent_size", 1, kMaxHiddenSize, 0));
  RouterConfig& router = experts.router;
  router.scores = RouterScores::kSigmoid;
  router.has_correction = true;
  router.is_normalised = fields.boolean("norm_topk_prob", true);
  router.scale = fields.number("routed_scaling_factor", 1e-6, 1e6, 1);
  router.groups = static_cast<int>(fields.integer("n_group", 1, experts.experts, 1));
  require(experts.experts % router.groups == 0 && (router.groups == 1 || experts.experts / router.groups > 1),
          "{}: expected groups of equally many of the {} experts, at least two, got {}", fields.name_of("n_group"),
          experts.experts, router.groups);
  router.top_groups = static_cast<int>(fields.integer("topk_group", 1, router.groups, 1));
  require(router.top_groups * (experts.experts / router.groups) >= experts.top_k,
          "{}: expected groups that hold num_experts_per_tok, {}, got {} of {} experts", fields.name_of("topk_group"),
          experts.top_k, router.top_groups, experts.experts / router.groups);
  return experts;
}

double parse_norm_epsilon(const JsonObject& fields) {
  for (const char* field : {"layer_norm_epsilon", "norm_eps", "rms_norm_eps"})
    if (fields.has(field)) return fields.number(field, 1e-12, 0.1);
  return 1e-5;
}

}  // namespace

bool is_nemotron(std::string_view model_type) {
  return model_type == "nemotron_h";
}

ModelConfig parse_nemotron_config(const JsonObject& document) {
  refuse_unsupported(document);
  ModelConfig model = parse_common(document, document);
  const std::string pattern = parse_layers(document);
  model.layers = static_cast<int>(pattern.size());
  const auto has = [&](char letter) { return pattern.find(letter) != std::string::npos; };
  Mamba2Config mamba;
  AttentionConfig attention;
  FeedForwardConfig feed_forward;
  ExpertsConfig experts;
  if (has('M')) mamba = parse_mamba(document, std::ranges::count(pattern, 'M'));
  if (has('*')) attention = parse_attention(document);
  if (has('-')) feed_forward = parse_feed_forward(document);
  if (has('E')) experts = parse_experts(document);
  for (int layer = 0; layer < model.layers; ++layer) {
    const char letter = pattern[static_cast<size_t>(layer)];
    model.blocks.push_back({layer, letter == 'M'   ? BlockConfig(mamba)
                                   : letter == '*' ? BlockConfig(attention)
                                   : letter == '-' ? BlockConfig(feed_forward)
                                                   : BlockConfig(experts)});
  }
  model.norm_epsilon = parse_norm_epsilon(document);
  model.mtp_layers = static_cast<int>(document.integer("num_nextn_predict_layers", 0, kMaxLayers, 0));
  add_end_tokens(document, model.vocabulary, model.end_tokens);
  return model;
}

}  // namespace replayssm
