#include "replayssm/model/tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "replayssm/core/error.h"
#include "replayssm/core/mapped_file.h"
#include "replayssm/core/utf8.h"
#include "replayssm/model/nfc.h"

namespace replayssm {
namespace {

using nlohmann::json;

constexpr size_t kMaxTextBytes = INT32_MAX;
constexpr size_t kMaxAddedTokens = size_t{1} << 16;
constexpr size_t kMaxAddedTokenBytes = 1024;
constexpr size_t kMaxSteps = 16;

// The pattern that ByteLevel brings along: contractions, words, numbers, other characters, white space.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

[[noreturn]] void fail_unsupported(const JsonObject& part, std::string_view field, std::string_view expected) {
  fail("{}: expected {} (nothing else is supported), got {}", part.name_of(field), expected,
       describe(part.at(field, expected)));
}

// Calls action(step) for each object of a Sequence's list `field`.
template <typename Action>
void for_each_step(const JsonObject& sequence, std::string_view field, Action&& action) {
  const json& steps = sequence.array(field);
  require(steps.size() <= kMaxSteps, "{}: expected at most {} steps, got {}", sequence.name_of(field), kMaxSteps,
          steps.size());
  for (size_t i = 0; i < steps.size(); ++i)
    action(JsonObject(steps[i], fmt::format("{}[{}]", sequence.name_of(field), i)));
}

// A template may put special tokens around the text; it may not here.
void check_template(const JsonObject& part) {
  const json& pieces = part.array("single");
  const bool is_text_alone = pieces.size() == 1 && pieces[0].is_object() && pieces[0].contains("Sequence");
  if (!is_text_alone) fail_unsupported(part, "single", "the text alone, no tokens around it");
}

void check_post_processor(const JsonObject& part, bool is_step) {
  const std::string type = part.string("type");
  if (type == "ByteLevel") return;
  if (type == "TemplateProcessing") return check_template(part);
  if (type != "Sequence" || is_step)
    fail_unsupported(part, "type", "ByteLevel, TemplateProcessing or a Sequence of them");
  for_each_step(part, "processors", [](const JsonObject& step) { check_post_processor(step, true); });
}

void check_decoder(const JsonObject& document) {
  const JsonObject decoder = document.object("decoder");
  if (decoder.string("type") != "ByteLevel") fail_unsupported(decoder, "type", "\"ByteLevel\"");
}

AddedToken parse_added_token(const JsonObject& entry) {
  AddedToken token;
  token.id = static_cast<int32_t>(entry.integer("id", 0, INT32_MAX));
  token.content = entry.string("content");
  require(!token.content.empty() && token.content.size() <= kMaxAddedTokenBytes, "{}: expected 1 .. {} bytes, got {}",
          entry.name_of("content"), kMaxAddedTokenBytes, token.content.size());
  token.is_special = entry.boolean("special", false);
  token.is_single_word = entry.boolean("single_word", false);
  token.strips_left = entry.boolean("lstrip", false);
  token.strips_right = entry.boolean("rstrip", false);
  token.is_normalized = entry.boolean("normalized", !token.is_special);
  return token;
}

}  // namespace

Tokenizer::Tokenizer(std::string_view text, std::string_view source)
    : Tokenizer(JsonObject(parse_json(text, source), std::string(source))) {}

Tokenizer::Tokenizer(const JsonObject& document) : vocabulary_(document.object("model")) {
  read_normalizer(document);
  read_pre_tokenizer(document);
  if (document.has("post_processor")) check_post_processor(document.object("post_processor"), false);
  check_decoder(document);
  if (document.has("added_tokens")) read_added_tokens(document);
}

void Tokenizer::read_normalizer(const JsonObject& document) {
  if (!document.has("normalizer")) return;
  const JsonObject normalizer = document.object("normalizer");
  const auto read_step = [&](const JsonObject& step) {
    if (step.string("type") != "NFC") fail_unsupported(step, "type", "\"NFC\"");
    is_normalizing_ = true;
  };
  if (normalizer.string("type") == "Sequence")
    for_each_step(normalizer, "normalizers", read_step);
  else
    read_step(normalizer);
}

void Tokenizer::read_pre_tokenizer(const JsonObject& document) {
  const JsonObject part = document.object("pre_tokenizer");
  const std::string type = part.string("type");
  if (type == "ByteLevel") return read_byte_level(part);
  if (type != "Sequence") fail_unsupported(part, "type", "ByteLevel or a Sequence that ends in it");
  bool is_complete = false;
  for_each_step(part, "pretokenizers", [&](const JsonObject& step) {
    require(!is_complete, "{}: expected nothing after ByteLevel, got {}", step.name(), describe(step.value()));
    const std::string step_type = step.string("type");
    is_complete = step_type == "ByteLevel";
    if (is_complete)
      read_byte_level(step);
    else if (step_type == "Split")
      add_splitter(step);
    else
      fail_unsupported(step, "type", "Split or ByteLevel");
  });
  require(is_complete, "{}: expected ByteLevel as its last step, got none", part.name_of("pretokenizers"));
}

void Tokenizer::add_splitter(const JsonObject& split) {
  const std::string behavior = split.string("behavior");
  if (behavior != "Isolated" && behavior != "Removed") fail_unsupported(split, "behavior", "Isolated or Removed");
  const bool is_inverted = split.boolean("invert", false);
  const bool is_isolating = behavior == "Isolated";
  const JsonObject pattern = split.object("pattern");
  const bool is_literal = pattern.has("String");
  const std::string_view field = is_literal ? "String" : "Regex";
  splitters_.push_back({Pattern(pattern.string(field), is_literal, pattern.name_of(field)), is_isolating || is_inverted,
                        is_isolating || !is_inverted});
}

void Tokenizer::read_byte_level(const JsonObject& byte_level) {
  has_prefix_space_ = byte_level.boolean("add_prefix_space", true);
  if (byte_level.boolean("use_regex", true))
    byte_level_pattern_.emplace(kByteLevelPattern, false, byte_level.name_of("use_regex"));
}

void Tokenizer::read_added_tokens(const JsonObject& document) {
  const json& entries = document.array("added_tokens");
  require(entries.size() <= kMaxAddedTokens, "{}: expected at most {}, got {}", document.name_of("added_tokens"),
          kMaxAddedTokens, entries.size());
  std::unordered_map<std::string, size_t> places;
  for (size_t i = 0; i < entries.size(); ++i) {
    const JsonObject entry(entries[i], fmt::format("{}[{}]", document.name_of("added_tokens"), i));
    const AddedToken token = parse_added_token(entry);
    const std::string content = token.is_normalized ? normalized(token.content) : token.content;
    const auto [place, is_new] = places.emplace(content, i);
    require(is_new, "{}: expected a text of its own, got that of added token {}", entry.name_of("content"),
            place->second);
    vocabulary_.add(token, entry.name());
    (token.is_normalized ? normalized_tokens_ : raw_tokens_).add(token, content);
  }
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  require(text.size() <= kMaxTextBytes, "text: expected at most {} bytes, got {}", kMaxTextBytes, text.size());
  std::vector<int32_t> tokens;
  BytePairs::Scratch scratch;
  std::vector<TextPart> parts;
  raw_tokens_.split(text, parts);
  for (const TextPart& part : parts) {
    if (part.token >= 0) {
      tokens.push_back(part.token);
      continue;
    }
    const std::string form = is_normalizing_ ? normalized(part.text) : std::string();
    std::vector<TextPart> inner;
    normalized_tokens_.split(is_normalizing_ ? std::string_view(form) : part.text, inner);
    for (const TextPart& piece : inner) {
      if (piece.token >= 0)
        tokens.push_back(piece.token);
      else
        encode_text(piece.text, scratch, tokens);
    }
  }
  return tokens;
}

// Normalizes the stretches of valid UTF-8; other bytes stay as they are.
std::string Tokenizer::normalized(std::string_view text) const {
  if (!is_normalizing_) return std::string(text);
  std::string result;
  while (!text.empty()) {
    const size_t valid = valid_utf8_bytes(text);
    result += nfc(text.substr(0, valid));
    if (valid < text.size()) result += text[valid];
    text.remove_prefix(std::min(valid + 1, text.size()));
  }
  return result;
}

void Tokenizer::encode_text(std::string_view text, BytePairs::Scratch& scratch, std::vector<int32_t>& tokens) const {
  while (!text.empty()) {
    const size_t valid = valid_utf8_bytes(text);
    if (valid > 0) encode_valid(text.substr(0, valid), scratch, tokens);
    if (valid < text.size()) tokens.push_back(vocabulary_.byte_token(static_cast<unsigned char>(text[valid])));
    text.remove_prefix(std::min(valid + 1, text.size()));
  }
}

void Tokenizer::encode_valid(std::string_view text, BytePairs::Scratch& scratch, std::vector<int32_t>& tokens) const {
  std::vector<std::string_view> pieces = {text};
  for (const Splitter& splitter : splitters_) {
    std::vector<std::string_view> cut;
    for (const std::string_view piece : pieces)
      splitter.pattern.split(piece, splitter.keeps_matches, splitter.keeps_rest, cut);
    pieces = std::move(cut);
  }
  std::string prefixed;
  std::vector<std::string_view> words;
  for (std::string_view piece : pieces) {
    if (has_prefix_space_ && !piece.starts_with(' ')) piece = prefixed = fmt::format(" {}", piece);
    words.clear();
    if (byte_level_pattern_)
      byte_level_pattern_->split(piece, true, true, words);
    else
      words.push_back(piece);
    for (const std::string_view word : words) vocabulary_.encode_word(word, scratch, tokens);
  }
}

std::string Tokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text;
  for (const int32_t token : tokens) text += token_bytes(token);
  return text;
}

std::string_view Tokenizer::token_bytes(int32_t token) const {
  require(vocabulary_.has(token), "token: expected an id of the vocabulary of {}, got {}", vocabulary_.size(), token);
  return vocabulary_.bytes(token);
}

Tokenizer read_tokenizer(const std::string& directory) {
  const MappedFile file(directory + (directory.ends_with('/') ? "" : "/") + "tokenizer.json");
  return Tokenizer(file.text(), file.path());
}

std::string TextStream::push(int32_t token) {
  held_ += tokenizer_->token_bytes(token);
  size_t whole = held_.size();
  for (size_t back = std::min<size_t>(3, held_.size()); back > 0; --back) {
    const std::string_view end = std::string_view(held_).substr(held_.size() - back);
    if (first_character(end).state != Utf8Character::State::kIncomplete) continue;
    whole -= back;
    break;
  }
  std::string text = held_.substr(0, whole);
  held_.erase(0, whole);
  return text;
}

std::string TextStream::finish() {
  return std::exchange(held_, {});
}

}  // namespace replayssm
