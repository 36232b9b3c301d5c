// The three decoders side by side on one batch of prompts.
#pragma once

#include <cstdint>
#include <vector>

#include "replayssm/core/device.h"
#include "replayssm/model/generation.h"
#include "replayssm/model/model.h"

namespace replayssm {

struct DecoderRun {
  Decoder decoder = Decoder::kConventional;
  std::vector<std::vector<int32_t>> tokens;  // of each sequence
  bool is_identical = false;                 // the tokens are those of conventional decoding
  // Of any logit from conventional decoding's, over every step of a sequence up to its first token that differs;
  // infinity if one of two logits is not a number.
  float largest_logit_difference = 0;
  GenerationCounts counts;
};

// Runs the requests with the conventional, the replay and the exact decoder, in this order. Each runs twice: once to be
// compared and once, with nothing between its steps, to be timed. Keeps all logits of the conventional run in memory.
// `is_interrupted` is asked before every step; when it says true, what has been run so far is returned.
std::vector<DecoderRun> compare_decoders(const Model& model, Device& device,
                                         const std::vector<GenerationRequest>& requests, int window,
                                         bool (*is_interrupted)());

}  // namespace replayssm
