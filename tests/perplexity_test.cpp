// Scoring a text: it is cut so that every token is scored once, and all ways to read it agree.
#include "replayssm/model/perplexity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/bad_input.h"
#include "tests/model_rig.h"
#include "tests/tokenizer_fixture.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

const KeepsScoring kToTheEnd = [](int64_t) { return true; };

const Model& shipped_model() {
  static const Model model = load_model(std::string(REPLAYSSM_SOURCE_DIR) + "/models/gdn-tiny");
  return model;
}

// A tiny random model; its pieces are made of tokens, not of text.
const Model& random_model() {
  static const Model model = [] {
    const std::string directory = fixture_directory("qwen3_5-tiny");
    ModelConfig config = read_config(directory);
    Weights weights = load_weights(Checkpoint(directory), config);
    return Model{std::move(config), Tokenizer(small_tokenizer().dump(), "tokenizer.json"), std::move(weights)};
  }();
  return model;
}

ScoredText random_pieces() {
  ScoredText text;
  const std::pair<int, int> sizes[] = {{150, 1}, {2, 1}, {40, 20}, {129, 1}, {7, 3}};
  for (const auto& [count, first_scored] : sizes) {
    TextPiece piece;
    for (int i = 0; i < count; ++i) piece.tokens.push_back((count * 31 + i * i * 7) % 187);
    piece.first_scored = first_scored;
    text.pieces.push_back(piece);
    text.tokens += count;
    text.scored_tokens += count - first_scored;
  }
  text.bytes = text.scored_tokens;
  return text;
}

// Straight from the definition, in float64, from logits of one prefill a piece.
double expected_bits(const ScoredText& text) {
  const ModelFixture fixture(fixture_directory("qwen3_5-tiny"));
  double bits = 0;
  for (const TextPiece& piece : text.pieces) {
    ModelRig rig(fixture, {.max_tokens = 200});
    const std::vector<float> logits = rig.prefill(rig.pool.allocate(200), piece.tokens);
    for (size_t i = piece.first_scored; i < piece.tokens.size(); ++i) {
      const float* row = &logits[(i - 1) * 187];
      double sum = 0;
      for (int token = 0; token < 187; ++token) sum += std::exp(double(row[token]) - double(row[piece.tokens[i]]));
      bits += std::log2(sum);
    }
  }
  return bits;
}

TEST(Perplexity, AllWaysToReadAgree) {
  const ScoredText text = random_pieces();
  const double expected = expected_bits(text);
  Device device(2);
  EXPECT_LE(std::fabs(score_by_prefill(random_model(), device, text, kToTheEnd).bits / expected - 1), kFloat32Bound);
  const double conventional =
      score_by_decoding(random_model(), device, text, replayssm::Decoder::kConventional, 8, 3, kToTheEnd).bits;
  EXPECT_LE(std::fabs(conventional / expected - 1), kFloat32Bound);
  for (const int batch : {1, 2, 16}) {
    EXPECT_EQ(score_by_decoding(random_model(), device, text, replayssm::Decoder::kExact, 5, batch, kToTheEnd).bits,
              conventional);
    const double replay =
        score_by_decoding(random_model(), device, text, replayssm::Decoder::kReplay, 5, batch, kToTheEnd).bits;
    EXPECT_LE(std::fabs(replay / expected - 1), kFloat32Bound);
  }
  ScoredText other = text;
  other.pieces[0].tokens[75] ^= 1;
  EXPECT_GT(std::fabs(score_by_prefill(random_model(), device, other, kToTheEnd).bits / expected - 1), kModelBound);
}

TEST(Perplexity, StopsWhenTold) {
  const ScoredText text = random_pieces();
  Device device(1);
  int64_t last = 0;
  const KeepsScoring stop = [&](int64_t done) {
    last = done;
    return done < 10;
  };
  score_by_decoding(random_model(), device, text, replayssm::Decoder::kReplay, 5, 2, stop);
  EXPECT_EQ(last, 10);
}

// What the scored tokens of all pieces say, one after another.
std::string scored_text(const ScoredText& text) {
  std::string result;
  for (const TextPiece& piece : text.pieces)
    result += shipped_model().tokenizer.decode(std::span(piece.tokens).subspan(piece.first_scored));
  return result;
}

TEST(Perplexity, EveryTokenIsScoredOnce) {
  const std::string first = "When the device is closed, the kernel frees its memory.", second = "A second document.";
  const std::string end = "<|endoftext|>";
  for (const int window : {2, 3, 5, 8, 1000}) {
    for (const std::string& text : {first + end + second + end, end + first + end + end + second}) {
      const ScoredText cut = cut_text(shipped_model(), text, window);
      EXPECT_EQ(scored_text(cut), first + second) << window;
      EXPECT_EQ(cut.bytes, static_cast<int64_t>(first.size() + second.size()));
      int64_t scored = 0, read = 0;
      for (const TextPiece& piece : cut.pieces) {
        EXPECT_LE(piece.tokens.size(), static_cast<size_t>(window));
        EXPECT_TRUE(piece.first_scored >= 1 && piece.first_scored < static_cast<int64_t>(piece.tokens.size()));
        read += static_cast<int64_t>(piece.tokens.size());
        scored += static_cast<int64_t>(piece.tokens.size()) - piece.first_scored;
      }
      EXPECT_EQ(cut.scored_tokens, scored);
      EXPECT_EQ(cut.tokens, read);
      EXPECT_EQ(cut.pieces[0].tokens[0], shipped_model().config.end_tokens[0]);
    }
  }
}

TEST(Perplexity, RefusesWhatCannotBeScored) {
  expect_refusal([] { cut_text(shipped_model(), "", 16); }, "text: expected a token to predict");
  expect_refusal([] { cut_text(shipped_model(), "<|endoftext|><|endoftext|>", 16); }, "expected a token to predict");
  expect_refusal([] { cut_text(shipped_model(), "text", 1); }, "window: expected 2 to the context of 4096");
  expect_refusal([] { cut_text(shipped_model(), "text", 4097); }, "window: expected 2", "got 4097");
}

}  // namespace
}  // namespace replayssm
