#include "replayssm/model/config.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "replayssm/core/error.h"
#include "replayssm/core/json.h"
#include "replayssm/core/mapped_file.h"
#include "replayssm/model/config_fields.h"
#include "replayssm/model/kimi.h"
#include "replayssm/model/nemotron.h"
#include "replayssm/model/qwen.h"

namespace replayssm {
namespace {

ModelConfig parse_family(const JsonObject& document) {
  const std::string type = document.string("model_type");
  if (is_qwen(type)) return parse_qwen_config(document);
  if (is_nemotron(type)) return parse_nemotron_config(document);
  if (is_kimi(type)) return parse_kimi_config(document);
  fail(
      "{}: expected qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text, qwen3_next, nemotron_h or kimi_linear, got "
      "{}",
      document.name_of("model_type"), describe(nlohmann::json(type)));
}

}  // namespace

ModelConfig parse_config(std::string_view config, std::string_view generation_config, std::string_view source) {
  const std::string name = fmt::format("{}config.json", source);
  const nlohmann::json document = parse_json(config, name);
  ModelConfig model = parse_family(JsonObject(document, name));
  if (!generation_config.empty()) {
    const std::string generation_name = fmt::format("{}generation_config.json", source);
    const nlohmann::json generation = parse_json(generation_config, generation_name);
    std::vector<int32_t> tokens;
    add_end_tokens(JsonObject(generation, generation_name), model.vocabulary, tokens);
    for (const int32_t token : model.end_tokens)
      if (std::ranges::find(tokens, token) == tokens.end()) tokens.push_back(token);
    model.end_tokens = tokens;
  }
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
