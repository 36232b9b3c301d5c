#include "replayssm/model/comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace replayssm {
namespace {

// The logits from which each sequence's tokens were drawn, one after another.
using LogitTrace = std::vector<std::vector<float>>;

float largest_difference(std::span<const float> given, std::span<const float> expected) {
  float largest = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    const float difference = std::fabs(given[i] - expected[i]);
    if (std::isnan(difference)) return std::numeric_limits<float>::infinity();
    largest = std::max(largest, difference);
  }
  return largest;
}

bool is_on_course(std::span<const int32_t> tokens, const std::vector<int32_t>& expected) {
  return tokens.size() <= expected.size() && std::equal(tokens.begin(), tokens.end(), expected.begin());
}

// Looks at the logits before a step: without a `reference` they become the trace, else they are compared with it.
void look(const Generation& generation, const DecoderRun* reference, LogitTrace& trace, DecoderRun& run) {
  for (int sequence = 0; sequence < generation.sequences(); ++sequence) {
    if (generation.ending(sequence) != Ending::kNone) continue;
    const std::span<const float> logits = generation.logits(sequence);
    if (reference == nullptr) {
      trace[sequence].insert(trace[sequence].end(), logits.begin(), logits.end());
    } else if (is_on_course(generation.tokens(sequence), reference->tokens[sequence])) {
      const size_t begin = generation.tokens(sequence).size() * logits.size();
      const std::span<const float> expected = std::span(trace[sequence]).subspan(begin, logits.size());
      run.largest_logit_difference = std::max(run.largest_logit_difference, largest_difference(logits, expected));
    }
  }
}

}  // namespace

std::vector<DecoderRun> compare_decoders(const Model& model, Device& device,
                                         const std::vector<GenerationRequest>& requests, int window,
                                         bool (*is_interrupted)()) {
  std::vector<DecoderRun> runs;
  LogitTrace trace(requests.size());
  for (const Decoder decoder : {Decoder::kConventional, Decoder::kReplay, Decoder::kExact}) {
    DecoderRun run;
    run.decoder = decoder;
    for (const bool is_timed : {false, true}) {
      Generation generation(model, device, requests, {.decoder = decoder, .window = window});
      while (!is_interrupted() && generation.prefill()) continue;
      if (is_interrupted()) return runs;
      do {
        if (!is_timed) look(generation, runs.empty() ? nullptr : &runs[0], trace, run);
        if (is_interrupted()) return runs;
      } while (generation.step());
      if (is_timed) {
        run.counts = generation.counts();
        continue;
      }
      for (int sequence = 0; sequence < generation.sequences(); ++sequence)
        run.tokens.emplace_back(generation.tokens(sequence).begin(), generation.tokens(sequence).end());
    }
    run.is_identical = runs.empty() || run.tokens == runs[0].tokens;
    runs.push_back(std::move(run));
  }
  return runs;
}

}  // namespace replayssm
