#include "replayssm/model/config_fields.h"

#include <algorithm>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

using nlohmann::json;

constexpr int64_t kMaxHeadsTimesSize = int64_t{1} << 18;
constexpr int64_t kMaxStateElements = int64_t{1} << 33;
constexpr size_t kMaxEndTokens = 64;

}  // namespace

int small_integer(const JsonObject& fields, std::string_view field, int64_t low, int64_t high) {
  return static_cast<int>(fields.integer(field, low, high));
}

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

void require_state(const JsonObject& fields, std::string_view field, int64_t layers, int64_t numbers) {
  require(layers * numbers <= kMaxStateElements,
          "{}: expected layers with a state of at most {} numbers in all, got {}", fields.name_of(field),
          kMaxStateElements, layers * numbers);
}

AttentionConfig parse_attention_heads(const JsonObject& fields, int64_t default_head_size) {
  AttentionConfig attention;
  attention.kv_heads = small_integer(fields, "num_key_value_heads", 1, kMaxHeads);
  attention.query_heads = small_integer(fields, "num_attention_heads", 1, kMaxHeads);
  require_multiple(fields, "num_attention_heads", attention.query_heads, attention.kv_heads);
  attention.head_size = static_cast<int>(fields.integer("head_dim", 2, kMaxHeadSize, default_head_size));
  require_product(fields, "head_dim", attention.query_heads, attention.head_size);
  return attention;
}

ModelConfig parse_common(const JsonObject& outer, const JsonObject& fields, std::string_view context) {
  ModelConfig model;
  model.model_type = outer.string("model_type");
  for (const JsonObject* object : {&outer, &fields})
    require_nothing(*object, "quantization_config", "quantised checkpoints are not supported");
  model.vocabulary = fields.integer("vocab_size", 1, kMaxVocabulary);
  model.hidden_size = small_integer(fields, "hidden_size", 1, kMaxHiddenSize);
  model.has_tied_embeddings = outer.boolean("tie_word_embeddings", fields.boolean("tie_word_embeddings", false));
  model.context_tokens = fields.integer(context, 1, kMaxContextTokens);
  return model;
}

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

}  // namespace replayssm
