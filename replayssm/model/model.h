// A model directory in memory: what its files say, ready for a forward pass.
#pragma once

#include <string>

#include "replayssm/model/config.h"
#include "replayssm/model/qwen_weights.h"
#include "replayssm/model/tokenizer.h"

namespace replayssm {

struct Model {
  ModelConfig config;
  Tokenizer tokenizer;
  QwenWeights weights;
};

// Reads config.json, tokenizer.json and the safetensors of a directory in the Hugging Face layout. Throws Error as
// read_config, read_tokenizer, Checkpoint and load_qwen_weights do, and if the tokenizer has more tokens than the
// embedding has rows.
Model load_model(const std::string& directory);

}  // namespace replayssm
