#include "replayssm/model/vocabulary.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "replayssm/core/error.h"
#include "replayssm/core/utf8.h"

namespace replayssm {
namespace {

using nlohmann::json;

constexpr size_t kMaxTokens = size_t{1} << 22;
// Ids that a vocabulary may skip: memory is sized by the largest.
constexpr int64_t kMaxGaps = 4096;

bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

// The byte that each character of the alphabet stands for, -1 for other characters.
std::array<int, 0x144> alphabet() {
  std::array<int, 0x144> bytes;
  bytes.fill(-1);
  size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) bytes[stands_for_itself(byte) ? static_cast<size_t>(byte) : next++] = byte;
  return bytes;
}

// The bytes that a token's name stands for; nothing if the name has other characters.
std::optional<std::string> bytes_of(const std::string& name) {
  static const std::array<int, 0x144> kAlphabet = alphabet();
  std::string bytes;
  for (std::string_view rest = name; !rest.empty();) {
    const Utf8Character character = first_character(rest);
    const bool is_known = character.is_valid() && character.code_point < kAlphabet.size();
    const int byte = is_known ? kAlphabet[character.code_point] : -1;
    if (byte < 0) return std::nullopt;
    bytes += static_cast<char>(byte);
    rest.remove_prefix(static_cast<size_t>(character.length));
  }
  return bytes;
}

// The names of a merge's two tokens: "a b" or ["a", "b"].
std::pair<std::string, std::string> parts_of(const json& merge, const std::string& source) {
  if (merge.is_string()) {
    const std::string& text = merge.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos)
      return {text.substr(0, space), text.substr(space + 1)};
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  fail("{}: expected two tokens, \"a b\" or [\"a\", \"b\"], got {}", source, describe(merge));
}

void require_empty(const JsonObject& model, std::string_view field) {
  const std::string given = model.string(field, "");
  require(given.empty(), "{}: expected none (a byte-level vocabulary), got {}", model.name_of(field),
          describe(json(given)));
}

}  // namespace

Vocabulary::Vocabulary(const JsonObject& model) {
  const std::string type = model.string("type", "BPE");
  require(type == "BPE", "{}: expected \"BPE\" (nothing else is supported), got {}", model.name_of("type"),
          describe(json(type)));
  model.number("dropout", 0, 0, 0);
  require_empty(model, "continuing_subword_prefix");
  require_empty(model, "end_of_word_suffix");
  require(!model.boolean("byte_fallback", false), "{}: expected false (a byte-level vocabulary), got true",
          model.name_of("byte_fallback"));
  read_tokens(model.object("vocab").value(), model.name_of("vocab"));
  read_merges(model.array("merges"), model.name_of("merges"));
  if (!model.boolean("ignore_merges", false)) return;
  for (const auto& [name, id] : ids_)
    if (const std::optional<std::string> word = bytes_of(name)) whole_words_.emplace(*word, id);
}

void Vocabulary::read_tokens(const json& vocabulary, const std::string& source) {
  require(!vocabulary.empty() && vocabulary.size() <= kMaxTokens, "{}: expected 1 .. {} tokens, got {}", source,
          kMaxTokens, vocabulary.size());
  const uint64_t ids = vocabulary.size() + kMaxGaps;
  ids_.reserve(vocabulary.size());
  for (const auto& [name, id] : vocabulary.items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= ids)
      fail("{}: expected ids in 0 .. {} for {} tokens, got {} for {}", source, ids - 1, vocabulary.size(), describe(id),
           describe(json(name)));
    const size_t place = id.get<size_t>();
    if (place >= tokens_.size()) tokens_.resize(place + 1);
    if (tokens_[place].is_used)
      fail("{}: expected each id once, got {} again for {}", source, place, describe(json(name)));
    // No merge of bytes makes a token of other characters, so it is written out only if it is an added token.
    tokens_[place] = {bytes_of(name).value_or(name), true, false};
    ids_.emplace(name, static_cast<int32_t>(place));
  }
  used_ = static_cast<int64_t>(vocabulary.size());
  find_byte_tokens(source);
}

void Vocabulary::find_byte_tokens(const std::string& source) {
  std::ranges::fill(byte_tokens_, -1);
  for (const auto& [name, id] : ids_) {
    const std::optional<std::string> word = bytes_of(name);
    if (word && word->size() == 1) byte_tokens_[static_cast<unsigned char>((*word)[0])] = id;
  }
  for (int byte = 0; byte < 256; ++byte)
    require(byte_tokens_[byte] >= 0, "{}: expected a token for every byte, got none for byte {}", source, byte);
}

int32_t Vocabulary::require_token(const std::string& name, size_t merge, const std::string& source) const {
  const auto found = ids_.find(name);
  if (found == ids_.end())
    fail("{}[{}]: expected tokens of the vocabulary, got {}", source, merge, describe(json(name)));
  return found->second;
}

void Vocabulary::read_merges(const json& merges, const std::string& source) {
  require(merges.size() <= kMaxTokens, "{}: expected at most {}, got {}", source, kMaxTokens, merges.size());
  merges_ = BytePairs(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const auto [left, right] = parts_of(merges[i], source);
    const int32_t left_id = require_token(left, i, source);
    const int32_t right_id = require_token(right, i, source);
    merges_.add(left_id, right_id, require_token(left + right, i, source));
  }
}

void Vocabulary::add(const AddedToken& token, std::string_view source) {
  const int64_t highest = used_ + kMaxGaps - 1;
  require(token.id >= 0 && token.id <= highest, "{}: expected an id in 0 .. {}, got {}", source, highest, token.id);
  const auto named = ids_.find(token.content);
  const bool is_known = named != ids_.end();
  require(!is_known || named->second == token.id, "{}: expected the id {}, which the vocabulary has, got {}", source,
          is_known ? named->second : 0, token.id);
  require(is_known || !has(token.id), "{}: expected an id of its own, got {}, which is another token's", source,
          token.id);
  require(!is_known || bytes(token.id) == token.content,
          "{}: expected a text that the vocabulary does not use for other bytes, got {}", source, token.content);
  const size_t place = static_cast<size_t>(token.id);
  if (place >= tokens_.size()) tokens_.resize(place + 1);
  if (!is_known) ++used_;
  tokens_[place] = {token.content, true, token.is_special};
  ids_.emplace(token.content, token.id);
}

std::optional<int32_t> Vocabulary::find(std::string_view name) const {
  const auto found = ids_.find(name);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

void Vocabulary::encode_word(std::string_view word, BytePairs::Scratch& scratch, std::vector<int32_t>& tokens) const {
  if (const auto whole = whole_words_.find(word); whole != whole_words_.end()) {
    tokens.push_back(whole->second);
    return;
  }
  merges_.encode(word, byte_tokens_, scratch, tokens);
}

}  // namespace replayssm
