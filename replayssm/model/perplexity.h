// How well a model predicts a text: bits per byte, by prefill and token by token with each decoder.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "replayssm/core/device.h"
#include "replayssm/model/generation.h"
#include "replayssm/model/model.h"

namespace replayssm {

// Tokens that are read in one run from an empty state; those from first_scored on are predicted and scored.
struct TextPiece {
  std::vector<int32_t> tokens;
  int64_t first_scored = 1;
};

struct ScoredText {
  std::vector<TextPiece> pieces;
  int64_t bytes = 0;          // that the scored tokens stand for
  int64_t scored_tokens = 0;  // of all pieces
  int64_t tokens = 0;         // read, the scored ones among them
};

// Cuts a text into documents at the model's end tokens. A document is read after an end token, which is given and not
// scored, as is the end token behind it (of a model without end tokens the first token of the text is given); a
// document longer than `window` tokens is read in pieces that overlap by half, each token scored once. Throws Error
// unless 2 <= window <= the model's context and there is a token to score.
ScoredText cut_text(const Model& model, std::string_view text, int64_t window);

struct TextScore {
  double bits = 0;  // -log2 of the scored tokens' probabilities, summed in the text's order
  double seconds = 0;
};

// Asked after every step how many tokens are done; false: stop there.
using KeepsScoring = std::function<bool(int64_t tokens)>;

// Reads each piece by prefill.
TextScore score_by_prefill(const Model& model, Device& device, const ScoredText& text, const KeepsScoring& keeps_on);

// Reads up to `batch` pieces at a time, a token of each a step; a piece that ends makes room for the next. The score of
// the exact decoder has the bits of the conventional one's, whatever the batch.
TextScore score_by_decoding(const Model& model, Device& device, const ScoredText& text, Decoder decoder, int window,
                            int batch, const KeepsScoring& keeps_on);

}  // namespace replayssm
