// Choosing the next token: a thread owns whole rows.
#include "replayssm/ops/sample.h"

#include <algorithm>
#include <cmath>

#include "replayssm/core/error.h"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/uniform.h"

namespace replayssm {
namespace {

struct Candidate {
  float logit;
  int32_t token;
};

// Falling logits, of equals rising tokens.
bool comes_first(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Candidates in falling order, taken one by one from a heap: most rows need few of them.
class FallingOrder {
 public:
  explicit FallingOrder(std::span<Candidate> candidates) : all_(candidates) {
    std::make_heap(all_.begin(), all_.end(), comes_last);
  }

  bool is_empty() const { return taken_ == all_.size(); }
  const Candidate& next() const { return all_[0]; }
  // Moves the next candidate to the end of the heap's array.
  void take() {
    std::pop_heap(all_.begin(), all_.end() - static_cast<std::ptrdiff_t>(taken_), comes_last);
    ++taken_;
  }
  // What was taken, last one first.
  std::span<Candidate> taken() const { return all_.last(taken_); }

 private:
  static bool comes_last(const Candidate& a, const Candidate& b) { return comes_first(b, a); }

  std::span<Candidate> all_;
  size_t taken_ = 0;
};

double weight(const Candidate& candidate, float largest) {
  return std::exp(static_cast<double>(candidate.logit) - static_cast<double>(largest));
}

// Steps 3 to 5: what is left of `candidates`, in falling order.
std::span<Candidate> filter(const SampleSettings& settings, std::span<Candidate> candidates, float largest) {
  std::span<Candidate> left = candidates;
  if (settings.top_k > 0 && static_cast<size_t>(settings.top_k) < left.size()) {
    FallingOrder order(left);
    for (int k = 0; k < settings.top_k; ++k) order.take();
    const float smallest = order.taken().front().logit;
    while (!order.is_empty() && order.next().logit == smallest) order.take();
    left = order.taken();
  }
  double total = 0;
  if (settings.top_p < 1)
    for (const Candidate& candidate : left) total += weight(candidate, largest);
  FallingOrder order(left);
  double sum = 0;
  while (!order.is_empty()) {
    const double next = weight(order.next(), largest);
    const bool is_first = order.taken().empty();
    if (!is_first && settings.top_p < 1 && sum >= static_cast<double>(settings.top_p) * total) break;
    if (!is_first && next < static_cast<double>(settings.min_p)) break;
    sum += next;
    order.take();
  }
  left = order.taken();
  std::reverse(left.begin(), left.end());
  return left;
}

int32_t draw(std::span<const Candidate> candidates, float largest, double uniform) {
  double total = 0;
  for (const Candidate& candidate : candidates) total += weight(candidate, largest);
  double sum = 0;
  for (const Candidate& candidate : candidates) {
    sum += weight(candidate, largest);
    if (sum > uniform * total) return candidate.token;
  }
  return candidates.back().token;
}

int32_t sample_row(const Sample& args, int64_t row, std::span<Candidate> candidates) {
  const SampleSettings& settings = args.settings[row];
  const float* logits = args.logits + row * args.logits_stride;
  for (int64_t v = 0; v < args.vocabulary; ++v) {
    if (!std::isfinite(logits[v])) return kNoToken;
    candidates[v] = {logits[v], static_cast<int32_t>(v)};
  }
  if (settings.repetition_penalty != 1 && args.history != nullptr) {
    for (int64_t i = args.history_begin[row]; i < args.history_begin[row + 1]; ++i) {
      const int32_t token = args.history[i];
      const float logit = logits[token];
      candidates[token].logit = logit > 0 ? logit / settings.repetition_penalty : logit * settings.repetition_penalty;
    }
  }
  Candidate best = candidates[0];
  for (const Candidate& candidate : candidates)
    if (candidate.logit > best.logit) best = candidate;
  if (settings.temperature == 0) return best.token;

  for (Candidate& candidate : candidates) {
    candidate.logit /= settings.temperature;
    if (!std::isfinite(candidate.logit)) return best.token;
  }
  const float largest = best.logit / settings.temperature;
  const bool is_filtered = settings.top_k > 0 || settings.top_p < 1 || settings.min_p > 0;
  const std::span<const Candidate> left = is_filtered ? filter(settings, candidates, largest) : candidates;
  const uint64_t sequence = args.sequence == nullptr ? 0 : args.sequence[row];
  return draw(left, largest, sample_uniform(settings.seed, sequence, args.position[row]));
}

void check_row(const Sample& args, int64_t row) {
  check_settings(args.settings[row]);
  if (args.history == nullptr) return;
  require(args.history_begin[row] <= args.history_begin[row + 1], "sample: history_begin falls at row {}", row);
  for (int64_t i = args.history_begin[row]; i < args.history_begin[row + 1]; ++i)
    require(args.history[i] >= 0 && args.history[i] < args.vocabulary,
            "sample: expected history tokens of 0 .. {}, got {} in row {}", args.vocabulary - 1, args.history[i], row);
}

}  // namespace

void check_settings(const SampleSettings& settings) {
  require(settings.temperature >= 0 && std::isfinite(settings.temperature), "temperature: expected 0 or more, got {}",
          settings.temperature);
  require(settings.top_k >= 0, "top_k: expected 0 (off) or more, got {}", settings.top_k);
  require(settings.top_p >= 0 && settings.top_p <= 1, "top_p: expected 0 to 1, got {}", settings.top_p);
  require(settings.min_p >= 0 && settings.min_p <= 1, "min_p: expected 0 to 1, got {}", settings.min_p);
  require(settings.repetition_penalty > 0 && std::isfinite(settings.repetition_penalty),
          "repetition_penalty: expected a number above 0, got {}", settings.repetition_penalty);
}

double sample_uniform(uint64_t seed, uint64_t sequence, int64_t position) {
  return uniform_number(seed, sequence, position);
}

void sample(const Sample& args, Device& device, std::span<std::byte> workspace) {
  check_sample_sizes(args);
  if (args.rows == 0) return;
  check_sample_arrays(args);
  require(args.history == nullptr || args.history_begin != nullptr, "sample: history needs history_begin");
  require(workspace.size() >= sample_workspace_bytes(args.vocabulary, device),
          "sample: expected a workspace of {} bytes, got {}", sample_workspace_bytes(args.vocabulary, device),
          workspace.size());
  for (int64_t row = 0; row < args.rows; ++row) check_row(args, row);
  device.threads().parallel_for(args.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    auto* candidates = reinterpret_cast<Candidate*>(workspace.data()) + thread * args.vocabulary;
    for (int64_t row = begin; row < end; ++row)
      args.token[row] = sample_row(args, row, {candidates, static_cast<size_t>(args.vocabulary)});
  });
}

size_t sample_workspace_bytes(int64_t vocabulary, Device& device) {
  return sizeof(Candidate) * static_cast<size_t>(vocabulary) * static_cast<size_t>(device.threads().size());
}

}  // namespace replayssm
