// The tokens of a byte-level vocabulary: their bytes, names and merges.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "replayssm/core/json.h"
#include "replayssm/model/added_tokens.h"
#include "replayssm/model/byte_pairs.h"

namespace replayssm {

// Names are as in `tokenizer.json`: there, each byte of a token is written as one character (GPT-2's alphabet:
// printable Latin-1 stands for itself, the others for U+0100 and up, so that a space is U+0120).
class Vocabulary {
 public:
  // From the object `model` of a tokenizer.json. Throws Error naming the field, the expected and the given, unless it
  // is a byte-level BPE model: every byte has a token, ids are distinct and leave few gaps, and every merge joins two
  // tokens to a third.
  explicit Vocabulary(const JsonObject& model);

  // Adds a token, or marks one that the model has. Its bytes are its content. Throws Error, its line opening with
  // `source`, if the id or the content belongs to another token or the id leaves too wide a gap.
  void add(const AddedToken& token, std::string_view source);

  // The largest id + 1.
  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
  bool has(int32_t id) const { return id >= 0 && id < size() && tokens_[static_cast<size_t>(id)].is_used; }
  bool is_special(int32_t id) const { return has(id) && tokens_[static_cast<size_t>(id)].is_special; }
  // Of a token that is there.
  std::string_view bytes(int32_t id) const { return tokens_[static_cast<size_t>(id)].bytes; }
  std::optional<int32_t> find(std::string_view name) const;

  // Appends the tokens of a word's bytes.
  void encode_word(std::string_view word, BytePairs::Scratch& scratch, std::vector<int32_t>& tokens) const;
  int32_t byte_token(unsigned char byte) const { return byte_tokens_[byte]; }

 private:
  struct TextHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  using Ids = std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>>;

  struct Token {
    std::string bytes;
    bool is_used = false;
    bool is_special = false;
  };

  void read_tokens(const nlohmann::json& vocabulary, const std::string& source);
  void find_byte_tokens(const std::string& source);
  void read_merges(const nlohmann::json& merges, const std::string& source);
  int32_t require_token(const std::string& name, size_t merge, const std::string& source) const;

  std::vector<Token> tokens_;
  int64_t used_ = 0;  // tokens among tokens_
  Ids ids_;
  // Whole words that are tokens; empty unless the model takes them whatever its merges say.
  Ids whole_words_;
  int32_t byte_tokens_[256] = {};
  BytePairs merges_{0};
};

}  // namespace replayssm
