// Reads the configs of Kimi-Linear models.
#include <algorithm>

#include "replayssm/core/error.h"
#include "replayssm/model/config_fields.h"
#include "replayssm/model/kimi.h"

namespace replayssm {
namespace {

using nlohmann::json;

// Of the norms inside latent attention, whatever rms_norm_eps says: the published model leaves them at their default.
constexpr double kLatentNormEpsilon = 1e-6;

void refuse_unsupported(const JsonObject& fields) {
  require_value(fields, "hidden_act", "silu");
  require_value(fields, "attention_bias", false);
  require_value(fields, "mla_use_nope", true);
  require_value(fields, "mla_use_output_gate", false);
  require_nothing(fields, "attn_res_block_size", "attention residuals are not supported");
  require_nothing(fields, "routed_expert_hidden_size", "experts in a latent space are not supported");
}

// Which layers `field` names, counting from 1, in order of the list.
void add_layers(const JsonObject& fields, std::string_view field, int mark, std::vector<int>& marks) {
  for (const json& value : fields.array(field)) {
    require(value.is_number_integer() && value >= 1 && value <= marks.size(),
            "{}: expected layers of 1 .. {} (num_hidden_layers), got {}", fields.name_of(field), marks.size(),
            describe(value));
    int& given = marks[value.get<size_t>() - 1];
    require(given < 0, "{}: expected each layer once, in one list, got {} again", fields.name_of(field),
            describe(value));
    given = mark;
  }
}

// One of two names a layer: whether it is the second.
std::vector<bool> parse_types(const JsonObject& fields, std::string_view field, int layers, std::string_view first,
                              std::string_view second) {
  const json& types = fields.array(field);
  require(types.size() == static_cast<size_t>(layers), "{}: expected {} (num_hidden_layers), got {}",
          fields.name_of(field), layers, describe(types));
  std::vector<bool> is_second;
  for (const json& type : types) {
    require(type == first || type == second, "{}: expected \"{}\" or \"{}\", got {}", fields.name_of(field), first,
            second, describe(type));
    is_second.push_back(type == second);
  }
  return is_second;
}

// Whether each layer is one of attention.
std::vector<bool> parse_attention_layers(const JsonObject& fields, int layers) {
  if (!fields.has("linear_attn_config"))
    return parse_types(fields, "layer_types", layers, "linear_attention", "full_attention");
  const JsonObject linear = fields.object("linear_attn_config");
  std::vector<int> marks(layers, -1);
  add_layers(linear, "kda_layers", 0, marks);
  add_layers(linear, "full_attn_layers", 1, marks);
  for (int layer = 0; layer < layers; ++layer)
    require(marks[layer] >= 0,
            "{}: expected each of {} layers (num_hidden_layers) in kda_layers or full_attn_layers, "
            "got no {}",
            linear.name(), layers, layer + 1);
  const std::vector<bool> result(marks.begin(), marks.end());
  require(!fields.has("layer_types") ||
              parse_types(fields, "layer_types", layers, "linear_attention", "full_attention") == result,
          "{}: expected the layers of linear_attn_config, got others", fields.name_of("layer_types"));
  return result;
}

DeltaConfig parse_delta(const JsonObject& fields, int64_t layers) {
  const bool is_published = fields.has("linear_attn_config");
  const JsonObject own = is_published ? fields.object("linear_attn_config") : fields;
  const std::string heads = is_published ? "num_heads" : "linear_num_heads";
  const std::string size = is_published ? "head_dim" : "linear_head_dim";
  const std::string bound = is_published ? "gate_lower_bound" : "linear_lower_bound";
  DeltaConfig delta;
  DeltaShape& shape = delta.shape;
  shape.heads = shape.key_heads = small_integer(own, heads, 1, kMaxHeads);
  shape.key_size = shape.value_size = shape.gate_size = small_integer(own, size, 1, 256);
  require_multiple(own, size, shape.key_size, 16);
  require_product(own, size, shape.heads, shape.key_size);
  delta.conv_width =
      static_cast<int>(own.integer(is_published ? "short_conv_kernel_size" : "linear_conv_kernel_dim", 2, 8, 4));
  delta.gate_rank = shape.key_size;
  delta.output_gate_rank = own.boolean("use_full_rank_gate", false) ? 0 : shape.key_size;
  delta.has_sigmoid_gate = true;
  if (own.has(bound)) {
    delta.lower_bound = own.number(bound, -1000, 0);
    require(delta.lower_bound < 0, "{}: expected a number below 0, got 0", own.name_of(bound));
  }
  // The other spelling, where both are there, must say the same.
  require_value(fields, "linear_num_heads", shape.heads);
  require_value(fields, "linear_head_dim", shape.key_size);
  require_value(fields, "linear_conv_kernel_dim", delta.conv_width);
  if (delta.lower_bound < 0) require_value(fields, "linear_lower_bound", delta.lower_bound);
  if (delta.lower_bound == 0 && is_published)
    require_nothing(fields, "linear_lower_bound", "linear_attn_config has none");
  require_state(fields, "num_hidden_layers", layers, int64_t{shape.heads} * shape.value_size * shape.key_size);
  return delta;
}

LatentAttentionConfig parse_latent_attention(const JsonObject& fields) {
  LatentAttentionConfig attention;
  attention.heads = small_integer(fields, "num_attention_heads", 1, kMaxHeads);
  require_value(fields, "num_key_value_heads", attention.heads);
  attention.latent_size = small_integer(fields, "kv_lora_rank", 1, kMaxHiddenSize);
  attention.nope_size = small_integer(fields, "qk_nope_head_dim", 1, kMaxHeadSize);
  attention.rope_size = small_integer(fields, "qk_rope_head_dim", 0, kMaxHeadSize);
  attention.value_size = small_integer(fields, "v_head_dim", 1, kMaxHeadSize);
  attention.query_rank = static_cast<int>(fields.integer("q_lora_rank", 1, kMaxHiddenSize, 0));
  attention.norm_epsilon = kLatentNormEpsilon;
  require_product(fields, "qk_nope_head_dim", attention.heads, attention.nope_size + attention.rope_size);
  require_product(fields, "kv_lora_rank", attention.heads, attention.latent_size + attention.rope_size);
  require_product(fields, "v_head_dim", attention.heads, attention.value_size);
  return attention;
}

RouterConfig parse_router(const JsonObject& fields, int experts, int top_k) {
  RouterConfig router;
  const std::string scores = fields.string("moe_router_activation_func", "sigmoid");
  require(scores == "sigmoid" || scores == "softmax", "{}: expected \"sigmoid\" or \"softmax\", got {}",
          fields.name_of("moe_router_activation_func"), describe(json(scores)));
  router.scores = scores == "sigmoid" ? RouterScores::kSigmoid : RouterScores::kSoftmax;
  router.has_correction = true;
  router.is_normalised = fields.boolean("moe_renormalize", true);
  router.scale = fields.number("routed_scaling_factor", 1e-6, 1e6, 1);
  if (!fields.boolean("use_grouped_topk", true)) return router;
  router.groups = static_cast<int>(fields.integer("num_expert_group", 1, experts, 1));
  router.top_groups = static_cast<int>(fields.integer("topk_group", 1, router.groups, 1));
  require(experts % router.groups == 0 && (router.groups == 1 || experts / router.groups >= 2),
          "{}: expected a divisor of num_experts ({}) that leaves groups of 2 or more, got {}",
          fields.name_of("num_expert_group"), experts, router.groups);
  require(top_k <= experts / router.groups * router.top_groups,
          "{}: expected groups that hold num_experts_per_token ({}) experts, got {} of {}",
          fields.name_of("topk_group"), top_k, router.top_groups, experts / router.groups);
  return router;
}

ExpertsConfig parse_experts(const JsonObject& fields) {
  ExpertsConfig experts;
  experts.experts = small_integer(fields, "num_experts", 1, kMaxExperts);
  experts.top_k = small_integer(fields, "num_experts_per_token", 1, experts.experts);
  experts.size = small_integer(fields, "moe_intermediate_size", 1, kMaxIntermediateSize);
  experts.activation = Activation::kSwiGlu;
  const int64_t shared = fields.integer("num_shared_experts", 0, kMaxIntermediateSize / experts.size, 0);
  experts.shared_size = static_cast<int>(shared * experts.size);
  experts.router = parse_router(fields, experts.experts, experts.top_k);
  return experts;
}

// Whether each layer has experts.
std::vector<bool> parse_expert_layers(const JsonObject& fields, int layers) {
  if (fields.has("mlp_layer_types")) return parse_types(fields, "mlp_layer_types", layers, "dense", "sparse");
  std::vector<bool> has_experts(layers, false);
  if (fields.integer("num_experts", 0, kMaxExperts, 0) == 0) return has_experts;
  const int64_t dense = fields.integer("first_k_dense_replace", 0, kMaxLayers);
  const int64_t step = fields.integer("moe_layer_freq", 1, kMaxLayers, 1);
  for (int layer = 0; layer < layers; ++layer) has_experts[layer] = layer >= dense && layer % step == 0;
  return has_experts;
}

}  // namespace

bool is_kimi(std::string_view model_type) {
  return model_type == "kimi_linear";
}

ModelConfig parse_kimi_config(const JsonObject& document) {
  refuse_unsupported(document);
  ModelConfig model = parse_common(document, document,
                                   document.has("model_max_length") ? "model_max_length" : "max_position_embeddings");
  model.layers = small_integer(document, "num_hidden_layers", 1, kMaxLayers);
  const std::vector<bool> has_attention = parse_attention_layers(document, model.layers);
  const std::vector<bool> has_experts = parse_expert_layers(document, model.layers);
  const DeltaConfig delta = parse_delta(document, model.layers);
  const LatentAttentionConfig attention = parse_latent_attention(document);
  for (int layer = 0; layer < model.layers; ++layer) {
    model.blocks.push_back({layer, has_attention[layer] ? BlockConfig(attention) : BlockConfig(delta)});
    if (has_experts[layer])
      model.blocks.push_back({layer, parse_experts(document)});
    else
      model.blocks.push_back(
          {layer, FeedForwardConfig{.size = small_integer(document, "intermediate_size", 1, kMaxIntermediateSize)}});
  }
  model.norm_epsilon = document.number("rms_norm_eps", 1e-12, 0.1, 1e-5);
  model.mtp_layers = static_cast<int>(document.integer("num_nextn_predict_layers", 0, 1, 0));
  add_end_tokens(document, model.vocabulary, model.end_tokens);
  return model;
}

}  // namespace replayssm
