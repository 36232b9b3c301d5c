// Internal to the readers of configs: fields within their limits, and refusals of what is not supported.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "replayssm/core/json.h"
#include "replayssm/model/config.h"

namespace replayssm {

inline constexpr int64_t kMaxVocabulary = int64_t{1} << 22;
inline constexpr int64_t kMaxHiddenSize = int64_t{1} << 16;
inline constexpr int64_t kMaxIntermediateSize = int64_t{1} << 20;
inline constexpr int64_t kMaxExperts = int64_t{1} << 14;
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxHeads = 1024;
inline constexpr int64_t kMaxHeadSize = 1024;
inline constexpr int64_t kMaxContextTokens = int64_t{1} << 24;

int small_integer(const JsonObject& fields, std::string_view field, int64_t low, int64_t high);

// A field that only tells apart what is supported (`expected`, or missing) from what is not.
void require_value(const JsonObject& fields, std::string_view field, const nlohmann::json& expected);
void require_nothing(const JsonObject& fields, std::string_view field, std::string_view reason);
void require_multiple(const JsonObject& fields, std::string_view field, int64_t value, int64_t factor);
// heads * size within the limit.
void require_product(const JsonObject& fields, std::string_view field, int64_t heads, int64_t size);
// The state of a sequence, `numbers` a layer, within the limit.
void require_state(const JsonObject& fields, std::string_view field, int64_t layers, int64_t numbers);

// Heads and sizes of grouped-query attention: num_attention_heads, num_key_value_heads, head_dim.
AttentionConfig parse_attention_heads(const JsonObject& fields, int64_t default_head_size);

// model_type, vocab_size, hidden_size, max_position_embeddings (or the field `context`), tie_word_embeddings (false; in
// `outer` it wins) and eos_token_id: what every family spells alike. `outer` is the whole document, `fields` the text
// model's part of it.
ModelConfig parse_common(const JsonObject& outer, const JsonObject& fields,
                         std::string_view context = "max_position_embeddings");

// eos_token_id, one id or a list of them, into `tokens` without repeats.
void add_end_tokens(const JsonObject& fields, int64_t vocabulary, std::vector<int32_t>& tokens);

}  // namespace replayssm
