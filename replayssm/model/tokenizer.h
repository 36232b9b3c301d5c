// Text to tokens and back: byte-level BPE as `tokenizer.json` describes it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "replayssm/model/added_tokens.h"
#include "replayssm/model/pattern.h"
#include "replayssm/model/vocabulary.h"

namespace replayssm {

// Safe to use from several threads. What it makes of valid UTF-8 is what the `tokenizers` package makes of it, without
// tokens added around the text.
class Tokenizer {
 public:
  // From the text of a tokenizer.json; `source` opens the error lines. Throws Error naming the field, the expected and
  // the given, if a needed part is missing or wrong, or if it asks for what is not supported. Supported are: normalizer
  // absent, NFC or a Sequence of them; pre_tokenizer ByteLevel, or a Sequence of Splits (behaviour Isolated or Removed)
  // that ends in ByteLevel; model BPE over all 256 bytes; post_processor that adds no tokens; decoder ByteLevel.
  // Padding and truncation are ignored.
  Tokenizer(std::string_view document, std::string_view source);

  // The tokens of `text`, which may hold any bytes: what is not UTF-8 becomes tokens of single bytes. Added tokens that
  // the text spells out are found. Throws Error if the text is 2 GiB or longer, or past what the pattern's limits
  // allow.
  std::vector<int32_t> encode(std::string_view text) const;

  // The bytes that `tokens` stand for. decode(encode(x)) is x, whatever x, unless the tokenizer normalizes, removes or
  // prefixes text, or has added tokens that strip white space. Throws Error for an id that is no token.
  std::string decode(std::span<const int32_t> tokens) const;

  // The bytes of one token; Error if it is none.
  std::string_view token_bytes(int32_t token) const;

  // The id of a token by its name in tokenizer.json, as "<|endoftext|>".
  std::optional<int32_t> find_token(std::string_view name) const { return vocabulary_.find(name); }
  // Whether it is an added token that is not part of the text (false for what is no token).
  bool is_special(int32_t token) const { return vocabulary_.is_special(token); }
  // The largest id + 1. (A model's own vocabulary is often padded to more.)
  int32_t vocabulary_size() const { return vocabulary_.size(); }

 private:
  struct Splitter {
    Pattern pattern;
    bool keeps_matches;
    bool keeps_rest;
  };

  explicit Tokenizer(const JsonObject& document);
  void read_normalizer(const JsonObject& document);
  void read_pre_tokenizer(const JsonObject& document);
  void add_splitter(const JsonObject& split);
  void read_byte_level(const JsonObject& byte_level);
  void read_added_tokens(const JsonObject& document);
  void encode_text(std::string_view text, BytePairs::Scratch& scratch, std::vector<int32_t>& tokens) const;
  void encode_valid(std::string_view text, BytePairs::Scratch& scratch, std::vector<int32_t>& tokens) const;
  std::string normalized(std::string_view text) const;

  Vocabulary vocabulary_;
  std::vector<Splitter> splitters_;
  std::optional<Pattern> byte_level_pattern_;
  bool is_normalizing_ = false;
  bool has_prefix_space_ = false;
  AddedTokens raw_tokens_;         // sought in the text as it is
  AddedTokens normalized_tokens_;  // sought in what the normalizer makes of it
};

// Tokenizer of a model directory's tokenizer.json.
Tokenizer read_tokenizer(const std::string& directory);

// Turns tokens into text as they come, never splitting a character: bytes that may be the beginning of one are held
// back until it is whole. What is pushed and finished, joined, is decode() of the tokens. The tokenizer must outlive
// it.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}

  // The text that is whole now; Error if `token` is none.
  std::string push(int32_t token);

  // What was held back, as it is; the stream starts anew.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  std::string held_;
};

}  // namespace replayssm
