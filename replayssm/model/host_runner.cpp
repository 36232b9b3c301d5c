#include "replayssm/model/host_runner.h"

#include <algorithm>
#include <numeric>

namespace replayssm {
namespace {

constexpr int kPageTokens = 16;

StatePool make_pool(const ModelConfig& config, const Weights& weights, int window, int rows, int64_t sequence_tokens) {
  const StateLayout layout = state_layout(config, weights.fingerprint, window, 1, kPageTokens);
  return StatePool(layout, pool_size(layout, rows, sequence_tokens));
}

}  // namespace

HostRunner::HostRunner(const ModelConfig& config, const Weights& weights, Device& device, int window, int rows,
                       int64_t sequence_tokens, int max_tokens)
    : device_(device),
      pool_(make_pool(config, weights, window, rows, sequence_tokens)),
      model_(config, weights, pool_.layout(), std::max(max_tokens, rows), device),
      logits_(static_cast<size_t>(rows) * config.vocabulary),
      workspace_(sample_workspace_bytes(config.vocabulary, device)),
      row_index_(rows) {
  std::iota(row_index_.begin(), row_index_.end(), 0);
}

void HostRunner::prefill(Handle handle, std::span<const int32_t> tokens, int row) {
  model_.prefill({&handle, 1}, {&tokens, 1}, logits_.data() + row * config().vocabulary, pool_);
}

void HostRunner::decode(const StepPlan& plan, Readout readout, std::span<const int32_t> tokens) {
  model_.forward({.plan = &plan,
                  .token = tokens.data(),
                  .readout = readout,
                  .logit_token = std::span(row_index_).first(tokens.size()),
                  .logits = logits_.data()},
                 pool_);
}

void HostRunner::sample(Sample args) {
  args.vocabulary = args.logits_stride = config().vocabulary;
  args.logits = logits_.data();
  replayssm::sample(args, device_, {workspace_.data(), workspace_.size()});
}

std::span<const float> HostRunner::logits(int row) {
  const auto vocabulary = static_cast<size_t>(config().vocabulary);
  return {logits_.data() + row * vocabulary, vocabulary};
}

}  // namespace replayssm
