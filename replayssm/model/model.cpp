#include "replayssm/model/model.h"

#include <utility>

#include "replayssm/core/error.h"
#include "replayssm/model/kimi.h"
#include "replayssm/model/nemotron.h"
#include "replayssm/model/qwen.h"

namespace replayssm {

template <template <typename> class Array>
BasicWeights<Array> load_weights(const Checkpoint& checkpoint, const ModelConfig& config, WeightStore<Array>& store,
                                 const LoadProgress& progress) {
  if (is_qwen(config.model_type)) return load_qwen_weights(checkpoint, config, store, progress);
  if (is_nemotron(config.model_type)) return load_nemotron_weights(checkpoint, config, store, progress);
  if (is_kimi(config.model_type)) return load_kimi_weights(checkpoint, config, store, progress);
  fail("load_weights: no loader for a model_type of {}", config.model_type);
}

template Weights load_weights(const Checkpoint&, const ModelConfig&, WeightStore<Buffer>&, const LoadProgress&);
#ifdef REPLAYSSM_HAS_CUDA
template CudaWeights load_weights(const Checkpoint&, const ModelConfig&, WeightStore<DeviceBuffer>&,
                                  const LoadProgress&);
#endif

Weights load_weights(const Checkpoint& checkpoint, const ModelConfig& config) {
  WeightStore<Buffer> store;
  return load_weights(checkpoint, config, store);
}

namespace {

// What a model has besides its weights.
std::pair<ModelConfig, Tokenizer> read_texts(const std::string& directory) {
  ModelConfig config = read_config(directory);
  Tokenizer tokenizer = read_tokenizer(directory);
  require(tokenizer.vocabulary_size() <= config.vocabulary,
          "{}/tokenizer.json: expected at most {} tokens, the rows of the embedding, got {}", directory,
          config.vocabulary, tokenizer.vocabulary_size());
  return {std::move(config), std::move(tokenizer)};
}

}  // namespace

Model load_model(const std::string& directory, const LoadProgress& progress) {
  auto [config, tokenizer] = read_texts(directory);
  WeightStore<Buffer> store;
  Weights weights = load_weights(Checkpoint(directory), config, store, progress);
  return {std::move(config), std::move(tokenizer), std::move(weights)};
}

#ifdef REPLAYSSM_HAS_CUDA
CudaModel load_cuda_model(const std::string& directory, Dtype element, CudaDevice& device,
                          const LoadProgress& progress) {
  auto [config, tokenizer] = read_texts(directory);
  WeightStore<DeviceBuffer> store(device, element);
  CudaWeights weights = load_weights(Checkpoint(directory), config, store, progress);
  device.synchronize();
  return {std::move(config), std::move(tokenizer), std::move(weights), element};
}
#endif

}  // namespace replayssm
