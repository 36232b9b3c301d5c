// The configs of published models whose decoding steps are timed with random weights, by name.
#pragma once

#include <map>
#include <string>

namespace replayssm::bench {

// As a config.json says it. Sizes are those of public model cards and code; where these name no number (the experts'
// sizes of the two 120B-class models, their order of layers) one is assumed that gives the model's published size.
const std::map<std::string, std::string>& model_configs();

}  // namespace replayssm::bench
