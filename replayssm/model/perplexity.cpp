#include "replayssm/model/perplexity.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <span>

#include "replayssm/core/error.h"
#include "replayssm/model/language_model.h"

namespace replayssm {
namespace {

constexpr int kPageTokens = 16;
// Tokens of a prefill step: each needs its logits.
constexpr int kStepTokens = 128;

using Clock = std::chrono::steady_clock;

// -log2 of the probability that `logits` give to `token`.
double bits_of(std::span<const float> logits, int32_t token) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  return (std::log(sum) - (static_cast<double>(logits[token]) - largest)) / std::log(2.0);
}

// A row of logits and what it is scored for: the token at `position` of piece `piece`.
struct Prediction {
  int64_t row;
  size_t piece;
  int64_t position;
};

// The bits of every scored token, by piece: summed at the end, in the text's order.
class Scores {
 public:
  explicit Scores(const ScoredText& text) : text_(text) {
    for (const TextPiece& piece : text.pieces) bits_.emplace_back(piece.tokens.size(), 0.0);
  }

  bool is_scored(size_t piece, int64_t position) const {
    const TextPiece& own = text_.pieces[piece];
    return position >= own.first_scored && position < static_cast<int64_t>(own.tokens.size());
  }

  void add(const std::vector<Prediction>& predictions, const float* logits, int64_t vocabulary, Device& device) {
    device.threads().parallel_for(static_cast<int64_t>(predictions.size()), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const Prediction& one = predictions[i];
        bits_[one.piece][one.position] = bits_of({logits + one.row * vocabulary, static_cast<size_t>(vocabulary)},
                                                 text_.pieces[one.piece].tokens[one.position]);
      }
    });
  }

  double sum() const {
    double sum = 0;
    for (const std::vector<double>& piece : bits_) sum = std::accumulate(piece.begin(), piece.end(), sum);
    return sum;
  }

 private:
  const ScoredText& text_;
  std::vector<std::vector<double>> bits_;
};

int64_t longest_piece(const ScoredText& text) {
  size_t longest = 0;
  for (const TextPiece& piece : text.pieces) longest = std::max(longest, piece.tokens.size());
  return static_cast<int64_t>(longest);
}

// A pool and a forward pass for `slots` pieces at a time.
struct Reader {
  Reader(const Model& model, Device& device, int64_t longest, int window, int slots, int max_tokens)
      : layout(state_layout(model.config, model.weights.fingerprint, window, 1, kPageTokens)),
        pool(layout, pool_size(layout, slots, longest)),
        forward(model.config, model.weights, layout, max_tokens, device),
        logits(static_cast<size_t>(max_tokens) * model.config.vocabulary) {}

  void step(StepKind kind, std::span<const Handle> rows, std::span<const int> counts, std::span<const int32_t> tokens,
            Readout readout) {
    const StepPlan& plan = pool.begin_step(kind, rows, counts);
    wanted.resize(tokens.size());
    std::iota(wanted.begin(), wanted.end(), 0);
    try {
      forward.forward(
          {.plan = &plan, .token = tokens.data(), .readout = readout, .logit_token = wanted, .logits = logits.data()},
          pool);
    } catch (...) {
      pool.abort_step();
      throw;
    }
    pool.commit();
  }

  StateLayout layout;
  StatePool pool;
  LanguageModel forward;
  Buffer<float> logits;
  std::vector<int32_t> wanted;
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void add_document(ScoredText& text, std::span<const int32_t> document, int64_t given, int64_t window) {
  const auto count = static_cast<int64_t>(document.size());
  if (count <= given) return;
  for (int64_t begin = 0;; begin += window / 2) {
    const int64_t end = std::min(begin + window, count);
    const int64_t first_scored = begin == 0 ? given : window - window / 2;
    text.pieces.push_back({{document.begin() + begin, document.begin() + end}, first_scored});
    text.scored_tokens += end - begin - first_scored;
    text.tokens += end - begin;
    if (end == count) return;
  }
}

}  // namespace

ScoredText cut_text(const Model& model, std::string_view text, int64_t window) {
  require(window >= 2 && window <= model.config.context_tokens,
          "window: expected 2 to the context of {} tokens, got {}", model.config.context_tokens, window);
  const std::vector<int32_t>& ends = model.config.end_tokens;
  const std::vector<int32_t> tokens = model.tokenizer.encode(text);
  ScoredText result;
  std::vector<int32_t> document;
  if (!ends.empty()) document.push_back(ends[0]);
  for (const int32_t token : tokens) {
    require(token < model.config.vocabulary, "text: expected tokens of 0 .. {}, got {}", model.config.vocabulary - 1,
            token);
    if (std::ranges::find(ends, token) == ends.end()) {
      if (!document.empty()) result.bytes += static_cast<int64_t>(model.tokenizer.token_bytes(token).size());
      document.push_back(token);
      continue;
    }
    add_document(result, document, 1, window);
    document.assign(1, token);
  }
  add_document(result, document, 1, window);
  require(result.scored_tokens > 0, "text: expected a token to predict, got none");
  return result;
}

TextScore score_by_prefill(const Model& model, Device& device, const ScoredText& text, const KeepsScoring& keeps_on) {
  const Clock::time_point start = Clock::now();
  Reader reader(model, device, longest_piece(text), 1, 1, kStepTokens);
  Scores scores(text);
  std::vector<Prediction> predictions;
  int64_t done = 0;
  for (size_t index = 0; index < text.pieces.size(); ++index) {
    const std::span<const int32_t> tokens = text.pieces[index].tokens;
    const Handle row = reader.pool.allocate(static_cast<int64_t>(tokens.size()));
    for (size_t begin = 0; begin < tokens.size(); begin += kStepTokens) {
      const size_t count = std::min<size_t>(kStepTokens, tokens.size() - begin);
      const int counts[] = {static_cast<int>(count)};
      reader.step(StepKind::kPrefill, {&row, 1}, counts, tokens.subspan(begin, count), Readout::kDirect);
      predictions.clear();
      for (size_t i = 0; i < count; ++i)
        if (const auto position = static_cast<int64_t>(begin + i + 1); scores.is_scored(index, position))
          predictions.push_back({static_cast<int64_t>(i), index, position});
      scores.add(predictions, reader.logits.data(), model.config.vocabulary, device);
      if (!keeps_on(done += static_cast<int64_t>(count))) return {scores.sum(), seconds_since(start)};
    }
    reader.pool.free(row);
  }
  return {scores.sum(), seconds_since(start)};
}

TextScore score_by_decoding(const Model& model, Device& device, const ScoredText& text, Decoder decoder, int window,
                            int batch, const KeepsScoring& keeps_on) {
  const Clock::time_point start = Clock::now();
  const StepKind kind = decoder == Decoder::kConventional ? StepKind::kConventional : StepKind::kReplay;
  const Readout readout = decoder == Decoder::kExact ? Readout::kExact : Readout::kDirect;
  Reader reader(model, device, longest_piece(text), window, batch, batch);
  Scores scores(text);
  struct Row {
    size_t piece;
    int64_t position;  // of the next token to be read
  };
  std::vector<Row> rows;
  std::vector<Handle> handles;
  std::vector<int32_t> tokens;
  std::vector<Prediction> predictions;
  const std::vector<int> ones(batch, 1);
  size_t next_piece = 0;
  int64_t done = 0;
  while (true) {
    for (; rows.size() < static_cast<size_t>(batch) && next_piece < text.pieces.size(); ++next_piece) {
      handles.push_back(reader.pool.allocate(static_cast<int64_t>(text.pieces[next_piece].tokens.size())));
      rows.push_back({next_piece, 0});
    }
    if (rows.empty()) break;
    tokens.clear();
    predictions.clear();
    for (size_t i = 0; i < rows.size(); ++i) {
      tokens.push_back(text.pieces[rows[i].piece].tokens[rows[i].position++]);
      if (scores.is_scored(rows[i].piece, rows[i].position))
        predictions.push_back({static_cast<int64_t>(i), rows[i].piece, rows[i].position});
    }
    reader.step(kind, handles, {ones.data(), rows.size()}, tokens, readout);
    scores.add(predictions, reader.logits.data(), model.config.vocabulary, device);
    done += static_cast<int64_t>(rows.size());
    if (!keeps_on(done)) break;
    for (size_t i = rows.size(); i-- > 0;) {
      if (rows[i].position < static_cast<int64_t>(text.pieces[rows[i].piece].tokens.size())) continue;
      reader.pool.free(handles[i]);
      rows.erase(rows.begin() + static_cast<ptrdiff_t>(i));
      handles.erase(handles.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  return {scores.sum(), seconds_since(start)};
}

}  // namespace replayssm
