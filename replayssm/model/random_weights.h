// Weights made up from a config, for measuring models whose checkpoint is not at hand.
#pragma once

#include <cstdint>

#include "replayssm/model/config.h"
#include "replayssm/model/weight_store.h"
#include "replayssm/model/weights.h"

namespace replayssm {

// Seeded numbers, the same wherever they are kept: matrices are uniform with the variance that keeps a layer's outputs
// as large as its inputs, and those that add to the residual stream smaller by the square root of the number of blocks,
// so that activations stay finite; norms are 1; decays and time steps are spread as trained models' are. With BF16
// matrices where the store keeps such (on the CPU: is_bf16). The model writes nonsense at its real cost.
template <template <typename> class Array>
BasicWeights<Array> random_weights(const ModelConfig& config, uint64_t seed, bool is_bf16, WeightStore<Array>& store);

}  // namespace replayssm
