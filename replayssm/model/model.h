// A model directory in memory: what its files say, ready for a forward pass.
#pragma once

#include <string>

#include "replayssm/model/checkpoint.h"
#include "replayssm/model/config.h"
#include "replayssm/model/tokenizer.h"
#include "replayssm/model/weights.h"

namespace replayssm {

struct Model {
  ModelConfig config;
  Tokenizer tokenizer;
  Weights weights;
};

// Reads config.json, tokenizer.json and the safetensors of a directory in the Hugging Face layout. Throws Error as
// read_config, read_tokenizer, Checkpoint and load_weights do, and if the tokenizer has more tokens than the embedding
// has rows.
Model load_model(const std::string& directory);

// The weights of a model of any family, as the family's header says.
Weights load_weights(const Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace replayssm
