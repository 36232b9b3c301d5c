#include "replayssm/model/config.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "replayssm/core/error.h"
#include "replayssm/core/json.h"
#include "replayssm/core/mapped_file.h"

namespace replayssm {
namespace {

using nlohmann::json;

constexpr int64_t kMaxVocabulary = int64_t{1} << 22;
constexpr int64_t kMaxHiddenSize = int64_t{1} << 16;
constexpr int64_t kMaxIntermediateSize = int64_t{1} << 20;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxHeadSize = 1024;
constexpr int64_t kMaxHeadsTimesSize = int64_t{1} << 18;
constexpr int64_t kMaxContextTokens = int64_t{1} << 24;
constexpr int64_t kMaxStateElements = int64_t{1} << 33;
constexpr size_t kMaxEndTokens = 64;

int small_integer(const JsonObject& fields, std::string_view field, int64_t low, int64_t high) {
  return static_cast<int>(fields.integer(field, low, high));
}

// A field that only tells apart what is supported (`expected`, or missing) from what is not.
void require_value(const JsonObject& fields, std::string_view field, const json& expected) {
  const json* value = fields.find(field);
  if (value == nullptr || *value == expected) return;
  fail("{}: expected {} (nothing else is supported), got {}", fields.name_of(field), describe(expected),
       describe(*value));
}

void require_nothing(const JsonObject& fields, std::string_view field, std::string_view reason) {
  if (const json* value = fields.find(field))
    fail("{}: expected none ({}), got {}", fields.name_of(field), reason, describe(*value));
}

void require_multiple(const JsonObject& fields, std::string_view field, int64_t value, int64_t factor) {
  require(value % factor == 0, "{}: expected a multiple of {}, got {}", fields.name_of(field), factor, value);
}

void require_product(const JsonObject& fields, std::string_view field, int64_t heads, int64_t size) {
  require(heads * size <= kMaxHeadsTimesSize, "{}: expected at most {} for {} heads, got {}", fields.name_of(field),
          kMaxHeadsTimesSize / heads, heads, size);
}

void refuse_unsupported(const JsonObject& fields) {
  require_nothing(fields, "quantization_config", "quantised checkpoints are not supported");
  require_value(fields, "hidden_act", "silu");
  require_value(fields, "attention_bias", false);
  require_value(fields, "attn_output_gate", true);
  require_value(fields, "output_gate_type", "swish");
  require_value(fields, "mtp_use_dedicated_embeddings", false);
}

// Qwen3-Next's configuration has experts unless it says otherwise; Qwen3.5's dense one never has.
void refuse_experts(const JsonObject& fields, Architecture architecture) {
  if (architecture == Architecture::kQwen35 && !fields.has("num_experts")) return;
  const json& experts = fields.at("num_experts", "0 (mixture of experts is not supported)");
  require(experts == 0, "{}: expected 0 (mixture of experts is not supported), got {}", fields.name_of("num_experts"),
          describe(experts));
}

LayerKind layer_kind(const json& value, const std::string& name) {
  if (value == "linear_attention") return LayerKind::kDelta;
  if (value == "full_attention") return LayerKind::kAttention;
  fail("{}: expected \"linear_attention\" or \"full_attention\", got {}", name, describe(value));
}

std::vector<LayerKind> parse_layers(const JsonObject& fields) {
  const int count = small_integer(fields, "num_hidden_layers", 1, kMaxLayers);
  std::vector<LayerKind> layers;
  if (fields.has("layer_types")) {
    const json& types = fields.array("layer_types");
    require(types.size() == static_cast<size_t>(count), "{}: expected {} (num_hidden_layers), got {}",
            fields.name_of("layer_types"), count, describe(types));
    for (const json& type : types) layers.push_back(layer_kind(type, fields.name_of("layer_types")));
    return layers;
  }
  const int64_t interval = fields.integer("full_attention_interval", 1, kMaxLayers, 4);
  for (int layer = 0; layer < count; ++layer)
    layers.push_back((layer + 1) % interval == 0 ? LayerKind::kAttention : LayerKind::kDelta);
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
  AttentionConfig attention;
  attention.kv_heads = small_integer(fields, "num_key_value_heads", 1, kMaxHeads);
  attention.query_heads = small_integer(fields, "num_attention_heads", 1, kMaxHeads);
  require_multiple(fields, "num_attention_heads", attention.query_heads, attention.kv_heads);
  attention.head_size = static_cast<int>(fields.integer("head_dim", 2, kMaxHeadSize, 256));
  require_product(fields, "head_dim", attention.query_heads, attention.head_size);
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
  const int64_t state = layers * shape.heads * shape.value_size * shape.key_size;
  require(state <= kMaxStateElements, "{}: expected layers with a state of at most {} numbers in all, got {}",
          fields.name_of("num_hidden_layers"), kMaxStateElements, state);
  return delta;
}

// One id or a list of them, into `tokens` without repeats.
void add_end_tokens(const JsonObject& fields, int64_t vocabulary, std::vector<int32_t>& tokens) {
  const json* value = fields.find("eos_token_id");
  if (value == nullptr) return;
  const json list = value->is_array() ? *value : json::array({*value});
  for (const json& token : list) {
    require(token.is_number_unsigned() && token.get<uint64_t>() < static_cast<uint64_t>(vocabulary),
            "{}: expected token ids in 0 .. {}, got {}", fields.name_of("eos_token_id"), vocabulary - 1,
            describe(token));
    const int32_t id = token.get<int32_t>();
    if (std::ranges::find(tokens, id) == tokens.end()) tokens.push_back(id);
    require(tokens.size() <= kMaxEndTokens, "{}: expected at most {} token ids, got more",
            fields.name_of("eos_token_id"), kMaxEndTokens);
  }
}

Architecture architecture_of(const JsonObject& fields) {
  const std::string type = fields.string("model_type");
  if (type == "qwen3_5" || type == "qwen3_5_text") return Architecture::kQwen35;
  if (type == "qwen3_next") return Architecture::kQwen3Next;
  fail("{}: expected qwen3_5, qwen3_5_text or qwen3_next, got {}", fields.name_of("model_type"), describe(json(type)));
}

int parse_mtp_layers(const JsonObject& fields) {
  const int64_t newer = fields.integer("mtp_num_hidden_layers", 0, 1, 0);
  return static_cast<int>(std::max(newer, fields.integer("num_nextn_predict_layers", 0, 1, 0)));
}

}  // namespace

int ModelConfig::count(LayerKind kind) const {
  return static_cast<int>(std::ranges::count(layers, kind));
}

ModelConfig parse_config(std::string_view config, std::string_view generation_config, std::string_view source) {
  const json document = parse_json(config, fmt::format("{}config.json", source));
  const JsonObject outer(document, fmt::format("{}config.json", source));
  ModelConfig model;
  model.model_type = outer.string("model_type");
  model.architecture = architecture_of(outer);
  const bool is_wrapped = model.model_type == "qwen3_5";
  const JsonObject fields = is_wrapped ? outer.object("text_config") : outer;
  if (is_wrapped) {
    require_value(fields, "model_type", "qwen3_5_text");
    refuse_unsupported(outer);
  }
  refuse_unsupported(fields);
  refuse_experts(fields, model.architecture);
  model.vocabulary = fields.integer("vocab_size", 1, kMaxVocabulary);
  model.hidden_size = small_integer(fields, "hidden_size", 1, kMaxHiddenSize);
  model.intermediate_size = small_integer(fields, "intermediate_size", 1, kMaxIntermediateSize);
  model.layers = parse_layers(fields);
  model.attention = parse_attention(fields);
  model.delta = parse_delta(fields, static_cast<int64_t>(model.layers.size()));
  model.norm_epsilon = fields.number("rms_norm_eps", 1e-12, 0.1, 1e-6);
  model.has_tied_embeddings = outer.boolean("tie_word_embeddings", fields.boolean("tie_word_embeddings", false));
  model.context_tokens = fields.integer("max_position_embeddings", 1, kMaxContextTokens);
  model.mtp_layers = parse_mtp_layers(fields);
  if (!generation_config.empty()) {
    const std::string name = fmt::format("{}generation_config.json", source);
    const json generation = parse_json(generation_config, name);
    add_end_tokens(JsonObject(generation, name), model.vocabulary, model.end_tokens);
  }
  add_end_tokens(fields, model.vocabulary, model.end_tokens);
  add_end_tokens(outer, model.vocabulary, model.end_tokens);
  return model;
}

ModelConfig read_config(const std::string& directory) {
  const std::string prefix = directory + (directory.ends_with('/') ? "" : "/");
  const MappedFile config(prefix + "config.json");
  const std::string generation_path = prefix + "generation_config.json";
  std::error_code error;
  if (!std::filesystem::exists(generation_path, error)) return parse_config(config.text(), {}, prefix);
  const MappedFile generation(generation_path);
  return parse_config(config.text(), generation.text(), prefix);
}

}  // namespace replayssm
