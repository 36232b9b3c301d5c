#include "replayssm/model/model.h"

#include "replayssm/core/error.h"
#include "replayssm/model/checkpoint.h"

namespace replayssm {

Model load_model(const std::string& directory) {
  ModelConfig config = read_config(directory);
  Tokenizer tokenizer = read_tokenizer(directory);
  require(tokenizer.vocabulary_size() <= config.vocabulary,
          "{}/tokenizer.json: expected at most {} tokens, the rows of the embedding, got {}", directory,
          config.vocabulary, tokenizer.vocabulary_size());
  QwenWeights weights = load_qwen_weights(Checkpoint(directory), config);
  return {std::move(config), std::move(tokenizer), std::move(weights)};
}

}  // namespace replayssm
