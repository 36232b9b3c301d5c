// Reads the configs of Qwen3.5 and Qwen3-Next text models.
#include <algorithm>

#include "replayssm/core/error.h"
#include "replayssm/model/config_fields.h"
#include "replayssm/model/qwen.h"

namespace replayssm {
namespace {

using nlohmann::json;

void refuse_unsupported(const JsonObject& fields) {
  require_value(fields, "hidden_act", "silu");
  require_value(fields, "attention_bias", false);
  require_value(fields, "attn_output_gate", true);
  require_value(fields, "output_gate_type", "swish");
  require_value(fields, "mtp_use_dedicated_embeddings", false);
}

ExpertsConfig parse_experts(const JsonObject& fields) {
  ExpertsConfig experts;
  experts.experts = small_integer(fields, "num_experts", 1, kMaxExperts);
  experts.top_k = small_integer(fields, "num_experts_per_tok", 1, kMaxExperts);
  require(experts.top_k <= experts.experts, "{}: expected at most {} (num_experts), got {}",
          fields.name_of("num_experts_per_tok"), experts.experts, experts.top_k);
  experts.router.is_normalised = fields.boolean("norm_topk_prob", true);
  experts.size = small_integer(fields, "moe_intermediate_size", 1, kMaxIntermediateSize);
  experts.shared_size = small_integer(fields, "shared_expert_intermediate_size", 1, kMaxIntermediateSize);
  experts.has_shared_gate = true;
  return experts;
}

// Whether each layer has experts. All of a Qwen3.5 mixture's have, and of its dense models' none.
std::vector<bool> parse_expert_layers(const JsonObject& fields, std::string_view type, int layers) {
  if (type != "qwen3_next") {
    const bool has_experts = type == "qwen3_5_moe" || type == "qwen3_5_moe_text";
    if (has_experts) {
      require_value(fields, "decoder_sparse_step", 1);
      require_value(fields, "mlp_only_layers", json::array());
      require_value(fields, "norm_topk_prob", true);
    } else {
      require_value(fields, "num_experts", 0);
    }
    return std::vector<bool>(static_cast<size_t>(layers), has_experts);
  }
  std::vector<bool> has_experts(static_cast<size_t>(layers), false);
  if (fields.integer("num_experts", 0, kMaxExperts) == 0) return has_experts;
  const int64_t step = fields.integer("decoder_sparse_step", 1, kMaxLayers, 1);
  for (int layer = 0; layer < layers; ++layer) has_experts[layer] = (layer + 1) % step == 0;
  if (!fields.has("mlp_only_layers")) return has_experts;
  for (const json& layer : fields.array("mlp_only_layers")) {
    require(layer.is_number_unsigned() && layer.get<uint64_t>() < static_cast<uint64_t>(layers),
            "{}: expected layers of 0 .. {}, got {}", fields.name_of("mlp_only_layers"), layers - 1, describe(layer));
    has_experts[layer.get<size_t>()] = false;
  }
  return has_experts;
}

// The feed-forward or the experts of each layer. A dense layer's size need not be there if there is no such layer.
std::vector<BlockConfig> parse_feed_forwards(const JsonObject& fields, std::string_view type, int layers) {
  std::vector<BlockConfig> blocks;
  for (const bool has_experts : parse_expert_layers(fields, type, layers)) {
    if (has_experts)
      blocks.push_back(parse_experts(fields));
    else
      blocks.push_back(FeedForwardConfig{small_integer(fields, "intermediate_size", 1, kMaxIntermediateSize)});
  }
  return blocks;
}

// Whether each layer is one of attention.
bool is_attention(const json& value, const std::string& name) {
  if (value == "linear_attention") return false;
  if (value == "full_attention") return true;
  fail("{}: expected \"linear_attention\" or \"full_attention\", got {}", name, describe(value));
}

std::vector<bool> parse_attention_layers(const JsonObject& fields) {
  const int count = small_integer(fields, "num_hidden_layers", 1, kMaxLayers);
  std::vector<bool> layers;
  if (fields.has("layer_types")) {
    const json& types = fields.array("layer_types");
    require(types.size() == static_cast<size_t>(count), "{}: expected {} (num_hidden_layers), got {}",
            fields.name_of("layer_types"), count, describe(types));
    for (const json& type : types) layers.push_back(is_attention(type, fields.name_of("layer_types")));
    return layers;
  }
  const int64_t interval = fields.integer("full_attention_interval", 1, kMaxLayers, 4);
  for (int layer = 0; layer < count; ++layer) layers.push_back((layer + 1) % interval == 0);
  return layers;
}

// rope_parameters is today's spelling, rope_scaling beside rope_theta the older one.
void parse_rope(const JsonObject& fields, AttentionConfig& attention) {
  double theta = fields.number("rope_theta", 1, 1e12, 10000);
  double factor = fields.number("partial_rotary_factor", 0, 1, 0.25);
  std::string factor_name = fields.name_of("partial_rotary_factor");
  for (const std::string_view field : {"rope_parameters", "rope_scaling"}) {
    if (!fields.has(field)) continue;
    const JsonObject rope = fields.object(field);
    require_value(rope, "rope_type", "default");
    require_value(rope, "type", "default");
    for (const auto& [key, unused] : rope.value().items())
      require(key == "rope_theta" || key == "rope_type" || key == "type" || key == "partial_rotary_factor" ||
                  key == "mrope_section" || key == "mrope_interleaved",
              "{}: expected plain RoPE (nothing else is supported), got {}", rope.name(), describe(json(key)));
    theta = rope.number("rope_theta", 1, 1e12, theta);
    factor = rope.number("partial_rotary_factor", 0, 1, factor);
    if (rope.has("partial_rotary_factor")) factor_name = rope.name_of("partial_rotary_factor");
  }
  attention.rope_theta = theta;
  attention.rotary_size = static_cast<int>(attention.head_size * factor);
  require(attention.rotary_size >= 2 && attention.rotary_size % 2 == 0,
          "{}: expected an even number of rotating dimensions, at least 2, got {} of {}", factor_name,
          attention.rotary_size, attention.head_size);
}

AttentionConfig parse_attention(const JsonObject& fields) {
  AttentionConfig attention = parse_attention_heads(fields, 256);
  attention.has_head_norms = attention.has_output_gate = true;
  parse_rope(fields, attention);
  return attention;
}

DeltaConfig parse_delta(const JsonObject& fields, int64_t layers) {
  DeltaConfig delta;
  DeltaShape& shape = delta.shape;
  shape.key_heads = small_integer(fields, "linear_num_key_heads", 1, kMaxHeads);
  shape.heads = small_integer(fields, "linear_num_value_heads", 1, kMaxHeads);
  require_multiple(fields, "linear_num_value_heads", shape.heads, shape.key_heads);
  shape.key_size = small_integer(fields, "linear_key_head_dim", 1, 256);
  require_multiple(fields, "linear_key_head_dim", shape.key_size, 16);
  shape.value_size = small_integer(fields, "linear_value_head_dim", 1, kMaxHeadSize);
  require_multiple(fields, "linear_value_head_dim", shape.value_size, 4);
  require_product(fields, "linear_key_head_dim", shape.key_heads, shape.key_size);
  require_product(fields, "linear_value_head_dim", shape.heads, shape.value_size);
  delta.conv_width = static_cast<int>(fields.integer("linear_conv_kernel_dim", 2, 8, 4));
  require_state(fields, "num_hidden_layers", layers, int64_t{shape.heads} * shape.value_size * shape.key_size);
  return delta;
}

int parse_mtp_layers(const JsonObject& fields) {
  const int64_t newer = fields.integer("mtp_num_hidden_layers", 0, 1, 0);
  return static_cast<int>(std::max(newer, fields.integer("num_nextn_predict_layers", 0, 1, 0)));
}

}  // namespace

bool is_qwen(std::string_view model_type) {
  return model_type == "qwen3_5" || model_type == "qwen3_5_text" || model_type == "qwen3_5_moe" ||
         model_type == "qwen3_5_moe_text" || model_type == "qwen3_next";
}

ModelConfig parse_qwen_config(const JsonObject& outer) {
  const std::string type = outer.string("model_type");
  const bool is_wrapped = type == "qwen3_5" || type == "qwen3_5_moe";
  const JsonObject fields = is_wrapped ? outer.object("text_config") : outer;
  if (is_wrapped) {
    require_value(fields, "model_type", type + "_text");
    refuse_unsupported(outer);
  }
  refuse_unsupported(fields);
  ModelConfig model = parse_common(outer, fields);
  const std::vector<bool> layers = parse_attention_layers(fields);
  const AttentionConfig attention = parse_attention(fields);
  model.layers = static_cast<int>(layers.size());
  const DeltaConfig delta = parse_delta(fields, model.layers);
  const std::vector<BlockConfig> feed_forwards = parse_feed_forwards(fields, type, model.layers);
  for (int layer = 0; layer < model.layers; ++layer) {
    model.blocks.push_back({layer, layers[layer] ? BlockConfig(attention) : BlockConfig(delta)});
    model.blocks.push_back({layer, feed_forwards[layer]});
  }
  model.norm_epsilon = fields.number("rms_norm_eps", 1e-12, 0.1, 1e-6);
  model.has_zero_centred_norms = true;
  model.mtp_layers = parse_mtp_layers(fields);
  add_end_tokens(fields, model.vocabulary, model.end_tokens);
  add_end_tokens(outer, model.vocabulary, model.end_tokens);
  return model;
}

}  // namespace replayssm
