// Continuing a batch of prompts: prefill, then sample and decode a token of each sequence a step, until all have ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"
#include "replayssm/model/model.h"
#include "replayssm/model/runner.h"
#include "replayssm/ops/sample.h"
#include "replayssm/state/traffic.h"

namespace replayssm {

// How the recurrent layers decode: with their state written for every token, by replay with the query pulled back
// through the records, or by replay with the exact readout, whose logits have the bits of conventional decoding.
enum class Decoder { kConventional, kReplay, kExact };

// "conventional", "replay", "exact"; Error for another name.
Decoder parse_decoder(std::string_view name);
std::string_view decoder_name(Decoder decoder);

struct GenerationRequest {
  std::vector<int32_t> prompt;  // at least one token
  int64_t max_new_tokens = 0;   // >= 0
  SampleSettings sampling;
  uint64_t sequence = 0;  // which stream of random numbers, beside sampling.seed
};

struct GenerationOptions {
  Decoder decoder = Decoder::kReplay;
  int window = 16;  // L of the replay decoders, >= 1
};

enum class Ending {
  kNone,       // the sequence goes on
  kLength,     // max_new_tokens have been sampled
  kEndToken,   // an end token of the model was sampled; it is not among the tokens
  kBadNumber,  // a logit was not finite
};

struct GenerationCounts {
  int64_t prompt_tokens = 0;   // prefilled
  int64_t sampled_tokens = 0;  // end tokens included
  int64_t decoded_tokens = 0;  // those of the sampled that were run through the model
  int64_t flushes = 0;         // rows that folded their records
  double prefill_seconds = 0;
  double decode_seconds = 0;  // decoding and sampling
  StateTraffic traffic;       // of the decode steps
};

// One batch from start to end. A sequence's tokens depend on its own request, the decoder and the window, not on the
// batch or the thread count. The model and the device must outlive it.
class Generation {
 public:
  // Throws Error if a prompt is empty or has a token outside the vocabulary, if prompt and new tokens exceed the
  // model's context, if a setting is out of range, or if the memory cannot be had.
  Generation(const Model& model, Device& device, std::vector<GenerationRequest> requests,
             const GenerationOptions& options);

  // The same on a GPU. There a sequence's tokens depend on how many sequences of its batch still go on, too, but by
  // rounding alone: never on what the others are. Only where the library is built with REPLAYSSM_CUDA.
  Generation(const CudaModel& model, CudaDevice& device, std::vector<GenerationRequest> requests,
             const GenerationOptions& options);

  // Reads at most kPrefillTokens more of the prompts. Returns false if there was nothing left to read.
  bool prefill();
  static constexpr int64_t kPrefillTokens = 512;

  // Samples a token of every sequence that goes on, and decodes those tokens after which it still does. Returns false
  // if all had ended before. Only after prefill() has returned false.
  bool step();

  int sequences() const { return static_cast<int>(sequences_.size()); }
  // What has been sampled so far.
  std::span<const int32_t> tokens(int sequence) const { return sequences_[sequence].tokens; }
  Ending ending(int sequence) const { return sequences_[sequence].ending; }
  // The logits of its next token, [vocabulary]. Only of a sequence that goes on, once its prompt has been read.
  std::span<const float> logits(int sequence) const;
  int64_t prompt_tokens() const { return prompt_tokens_; }  // of all prompts
  const GenerationCounts& counts() const { return counts_; }

 private:
  struct Sequence {
    GenerationRequest request;
    Handle handle;
    std::vector<int32_t> tokens;
    Ending ending = Ending::kNone;
    int row = 0;  // of the runner's logits, while the sequence goes on
  };

  Generation(std::unique_ptr<Runner> runner, std::vector<GenerationRequest>&& requests, Decoder decoder);
  void sample_tokens();
  void take(Sequence& sequence, int32_t token);
  void decode_tokens();

  std::unique_ptr<Runner> runner_;
  const ModelConfig& config_;
  Decoder decoder_;
  std::vector<Sequence> sequences_;
  int64_t prompt_tokens_ = 0;
  size_t reading_ = 0;      // the sequence whose prompt is being read
  size_t read_tokens_ = 0;  // of that prompt
  std::vector<int> live_;   // the sequences that go on, by row
  GenerationCounts counts_;
  // One step's rows.
  std::vector<Handle> handles_;
  std::vector<int> ones_;
  std::vector<int32_t> row_tokens_;
  std::vector<SampleSettings> settings_;
  std::vector<uint64_t> streams_;
  std::vector<int64_t> positions_, history_begin_;
  std::vector<int32_t> history_;
};

}  // namespace replayssm
