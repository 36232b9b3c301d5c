#include "replayssm/model/generation.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "replayssm/core/error.h"
#include "replayssm/model/cuda_runner.h"
#include "replayssm/model/host_runner.h"

namespace replayssm {
namespace {

constexpr std::array<std::string_view, 3> kDecoderNames = {"conventional", "replay", "exact"};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void check_request(const ModelConfig& config, const GenerationRequest& request, size_t number) {
  const auto prompt_tokens = static_cast<int64_t>(request.prompt.size());
  require(prompt_tokens > 0, "prompt {}: expected at least one token, got none", number);
  for (const int32_t token : request.prompt)
    require(token >= 0 && token < config.vocabulary, "prompt {}: expected tokens of 0 .. {}, got {}", number,
            config.vocabulary - 1, token);
  require(request.max_new_tokens >= 0, "new tokens: expected 0 or more, got {}", request.max_new_tokens);
  require(prompt_tokens <= config.context_tokens && request.max_new_tokens <= config.context_tokens - prompt_tokens,
          "prompt {}: expected at most the model's context of {} tokens, got a prompt of {} and {} new ones", number,
          config.context_tokens, prompt_tokens, request.max_new_tokens);
  check_settings(request.sampling);
}

// Of a prompt and its new tokens, the longest.
int64_t longest_sequence(const ModelConfig& config, const std::vector<GenerationRequest>& requests) {
  require(!requests.empty(), "generation: expected at least one prompt, got none");
  int64_t longest = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    check_request(config, requests[i], i + 1);
    longest = std::max(longest, static_cast<int64_t>(requests[i].prompt.size()) + requests[i].max_new_tokens);
  }
  return longest;
}

}  // namespace

Decoder parse_decoder(std::string_view name) {
  for (size_t i = 0; i < kDecoderNames.size(); ++i)
    if (name == kDecoderNames[i]) return static_cast<Decoder>(i);
  fail("decoder: expected conventional, replay or exact, got '{}'", name);
}

std::string_view decoder_name(Decoder decoder) {
  return kDecoderNames[static_cast<size_t>(decoder)];
}

Generation::Generation(const Model& model, Device& device, std::vector<GenerationRequest> requests,
                       const GenerationOptions& options)
    : Generation(std::make_unique<HostRunner>(model.config, model.weights, device, options.window,
                                              static_cast<int>(requests.size()),
                                              longest_sequence(model.config, requests), kPrefillTokens),
                 std::move(requests), options.decoder) {}

#ifdef REPLAYSSM_HAS_CUDA
Generation::Generation(const CudaModel& model, CudaDevice& device, std::vector<GenerationRequest> requests,
                       const GenerationOptions& options)
    : Generation(make_cuda_runner(model, device, options.window, static_cast<int>(requests.size()),
                                  longest_sequence(model.config, requests), kPrefillTokens),
                 std::move(requests), options.decoder) {}
#endif

Generation::Generation(std::unique_ptr<Runner> runner, std::vector<GenerationRequest>&& requests, Decoder decoder)
    : runner_(std::move(runner)), config_(runner_->config()), decoder_(decoder) {
  SequencePool& pool = runner_->pool();
  size_t history_tokens = 0;
  for (GenerationRequest& request : requests) {
    Sequence sequence;
    sequence.request = std::move(request);
    const auto prompt_tokens = static_cast<int64_t>(sequence.request.prompt.size());
    sequence.handle = pool.allocate(prompt_tokens + sequence.request.max_new_tokens);
    sequence.tokens.reserve(sequence.request.max_new_tokens);
    if (sequence.request.max_new_tokens == 0) sequence.ending = Ending::kLength;
    prompt_tokens_ += prompt_tokens;
    history_tokens += prompt_tokens + sequence.request.max_new_tokens;
    sequences_.push_back(std::move(sequence));
  }
  // Rows of sequences that end at once lie behind the others'.
  for (int index = 0; index < sequences(); ++index)
    if (sequences_[index].ending == Ending::kNone) live_.push_back(index);
  int row = 0;
  for (const int index : live_) sequences_[index].row = row++;
  for (Sequence& sequence : sequences_)
    if (sequence.ending != Ending::kNone) sequence.row = row++;
  ones_.assign(sequences_.size(), 1);
  row_tokens_.reserve(sequences_.size());
  history_.reserve(history_tokens);
}

std::span<const float> Generation::logits(int sequence) const {
  return runner_->logits(sequences_[sequence].row);
}

bool Generation::prefill() {
  if (reading_ == sequences_.size()) return false;
  const Clock::time_point start = Clock::now();
  const Sequence& sequence = sequences_[reading_];
  const std::span<const int32_t> prompt = sequence.request.prompt;
  const std::span<const int32_t> piece =
      prompt.subspan(read_tokens_, std::min<size_t>(kPrefillTokens, prompt.size() - read_tokens_));
  runner_->prefill(sequence.handle, piece, sequence.row);
  counts_.prompt_tokens += static_cast<int64_t>(piece.size());
  read_tokens_ += piece.size();
  if (read_tokens_ == prompt.size()) {
    read_tokens_ = 0;
    ++reading_;
  }
  counts_.prefill_seconds += seconds_since(start);
  return true;
}

bool Generation::step() {
  require(reading_ == sequences_.size(), "generation: a step before all prompts have been read");
  if (live_.empty()) return false;
  const Clock::time_point start = Clock::now();
  sample_tokens();
  std::erase_if(live_, [this](int index) { return sequences_[index].ending != Ending::kNone; });
  if (!live_.empty()) decode_tokens();
  counts_.decode_seconds += seconds_since(start);
  return true;
}

void Generation::sample_tokens() {
  settings_.clear();
  streams_.clear();
  positions_.clear();
  history_.clear();
  history_begin_.assign(1, 0);
  for (const int index : live_) {
    const Sequence& sequence = sequences_[index];
    const std::vector<int32_t>& prompt = sequence.request.prompt;
    settings_.push_back(sequence.request.sampling);
    streams_.push_back(sequence.request.sequence);
    positions_.push_back(static_cast<int64_t>(prompt.size() + sequence.tokens.size()));
    if (sequence.request.sampling.repetition_penalty != 1) {
      history_.insert(history_.end(), prompt.begin(), prompt.end());
      history_.insert(history_.end(), sequence.tokens.begin(), sequence.tokens.end());
    }
    history_begin_.push_back(static_cast<int64_t>(history_.size()));
  }
  row_tokens_.resize(live_.size());
  runner_->sample({.rows = static_cast<int64_t>(live_.size()),
                   .settings = settings_.data(),
                   .sequence = streams_.data(),
                   .position = positions_.data(),
                   .history = history_.data(),
                   .history_begin = history_begin_.data(),
                   .token = row_tokens_.data()});
  for (size_t row = 0; row < live_.size(); ++row) take(sequences_[live_[row]], row_tokens_[row]);
}

void Generation::take(Sequence& sequence, int32_t token) {
  const std::vector<int32_t>& end_tokens = config_.end_tokens;
  if (token == kNoToken) {
    sequence.ending = Ending::kBadNumber;
  } else {
    ++counts_.sampled_tokens;
    if (std::find(end_tokens.begin(), end_tokens.end(), token) != end_tokens.end())
      sequence.ending = Ending::kEndToken;
    else
      sequence.tokens.push_back(token);
    if (static_cast<int64_t>(sequence.tokens.size()) == sequence.request.max_new_tokens)
      sequence.ending = Ending::kLength;
  }
  if (sequence.ending != Ending::kNone) runner_->pool().free(sequence.handle);
}

void Generation::decode_tokens() {
  const size_t count = live_.size();
  handles_.clear();
  row_tokens_.clear();
  for (size_t row = 0; row < count; ++row) {
    Sequence& sequence = sequences_[live_[row]];
    sequence.row = static_cast<int>(row);
    handles_.push_back(sequence.handle);
    row_tokens_.push_back(sequence.tokens.back());
  }
  const bool is_replay = decoder_ != Decoder::kConventional && runner_->replays(static_cast<int>(count));
  const StepKind kind = is_replay ? StepKind::kReplay : StepKind::kConventional;
  const Readout readout = decoder_ == Decoder::kExact ? Readout::kExact : Readout::kDirect;
  SequencePool& pool = runner_->pool();
  const StepPlan& plan = pool.begin_step(kind, handles_, {ones_.data(), count});
  counts_.traffic += step_traffic(pool.layout(), plan, readout, pool.storage());
  counts_.flushes += plan.flushes;
  try {
    runner_->decode(plan, readout, row_tokens_);
  } catch (...) {
    pool.abort_step();
    throw;
  }
  pool.commit();
  counts_.decoded_tokens += static_cast<int64_t>(count);
}

}  // namespace replayssm
