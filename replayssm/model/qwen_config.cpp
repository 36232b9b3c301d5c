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

// Qwen3-Next's configuration has experts unless it says otherwise; Qwen3.5's dense one never has.
void refuse_experts(const JsonObject& fields, bool is_next) {
  if (!is_next && !fields.has("num_experts")) return;
  const json& experts = fields.at("num_experts", "0 (mixture of experts is not supported)");
  require(experts == 0, "{}: expected 0 (mixture of experts is not supported), got {}", fields.name_of("num_experts"),
          describe(experts));
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
  return model_type == "qwen3_5" || model_type == "qwen3_5_text" || model_type == "qwen3_next";
}

ModelConfig parse_qwen_config(const JsonObject& outer) {
  const std::string type = outer.string("model_type");
  const bool is_wrapped = type == "qwen3_5";
  const JsonObject fields = is_wrapped ? outer.object("text_config") : outer;
  if (is_wrapped) {
    require_value(fields, "model_type", "qwen3_5_text");
    refuse_unsupported(outer);
  }
  refuse_unsupported(fields);
  refuse_experts(fields, type == "qwen3_next");
  ModelConfig model = parse_common(outer, fields);
  const FeedForwardConfig feed_forward{small_integer(fields, "intermediate_size", 1, kMaxIntermediateSize)};
  const std::vector<bool> layers = parse_attention_layers(fields);
  const AttentionConfig attention = parse_attention(fields);
  model.layers = static_cast<int>(layers.size());
  const DeltaConfig delta = parse_delta(fields, model.layers);
  for (int layer = 0; layer < model.layers; ++layer) {
    model.blocks.push_back({layer, layers[layer] ? BlockConfig(attention) : BlockConfig(delta)});
    model.blocks.push_back({layer, feed_forward});
  }
  model.norm_epsilon = fields.number("rms_norm_eps", 1e-12, 0.1, 1e-6);
  model.has_zero_centred_norms = true;
  model.mtp_layers = parse_mtp_layers(fields);
  add_end_tokens(fields, model.vocabulary, model.end_tokens);
  add_end_tokens(outer, model.vocabulary, model.end_tokens);
  return model;
}

}  // namespace replayssm
