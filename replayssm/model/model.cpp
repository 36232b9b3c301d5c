#include "replayssm/model/model.h"

#include "replayssm/core/error.h"
#include "replayssm/model/kimi.h"
#include "replayssm/model/nemotron.h"
#include "replayssm/model/qwen.h"

namespace replayssm {

Weights load_weights(const Checkpoint& checkpoint, const ModelConfig& config) {
  if (is_qwen(config.model_type)) return load_qwen_weights(checkpoint, config);
  if (is_nemotron(config.model_type)) return load_nemotron_weights(checkpoint, config);
  if (is_kimi(config.model_type)) return load_kimi_weights(checkpoint, config);
  fail("load_weights: no loader for a model_type of {}", config.model_type);
}

Model load_model(const std::string& directory) {
  ModelConfig config = read_config(directory);
  Tokenizer tokenizer = read_tokenizer(directory);
  require(tokenizer.vocabulary_size() <= config.vocabulary,
          "{}/tokenizer.json: expected at most {} tokens, the rows of the embedding, got {}", directory,
          config.vocabulary, tokenizer.vocabulary_size());
  Weights weights = load_weights(Checkpoint(directory), config);
  return {std::move(config), std::move(tokenizer), std::move(weights)};
}

}  // namespace replayssm
