// A model directory in memory: what its files say, ready for a forward pass.
#pragma once

#include <cstddef>
#include <string>

#include "replayssm/model/checkpoint.h"
#include "replayssm/model/config.h"
#include "replayssm/model/tokenizer.h"
#include "replayssm/model/weight_store.h"
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
Model load_model(const std::string& directory, const LoadProgress& progress = {});

// The same in a GPU's memory, its matrices rounded to `element`: kBF16 or kF32.
struct CudaModel {
  ModelConfig config;
  Tokenizer tokenizer;
  CudaWeights weights;
  Dtype element = Dtype::kBF16;
};
CudaModel load_cuda_model(const std::string& directory, Dtype element, CudaDevice& device,
                          const LoadProgress& progress = {});

// The weights of a model of any family, as the family's header says, in the CPU's memory or, with Array DeviceBuffer,
// in a GPU's: then they stream there, no second copy in the host's memory. `progress` is told the bytes loaded so far.
template <template <typename> class Array>
BasicWeights<Array> load_weights(const Checkpoint& checkpoint, const ModelConfig& config, WeightStore<Array>& store,
                                 const LoadProgress& progress = {});
Weights load_weights(const Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace replayssm
