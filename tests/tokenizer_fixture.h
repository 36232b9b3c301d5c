// A small tokenizer.json for tests: 256 bytes, a few merges, a few added tokens.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace replayssm::test {

// The character that stands for a byte in tokenizer.json.
inline std::string byte_name(int byte) {
  const auto is_itself = [](int b) { return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE; };
  int code_point = byte;
  if (!is_itself(byte)) {
    code_point = 0x100;
    for (int b = 0; b < byte; ++b) code_point += is_itself(b) ? 0 : 1;
  }
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3F))};
}

// Byte b is token b; "he", "hel", "lo", "hello", " w" and "é" follow from 256 on, then the added tokens <|end|>
// (special) and <tool>.
inline nlohmann::json small_tokenizer() {
  nlohmann::json document = nlohmann::json::parse(R"json({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [
      {"id": 262, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
       "special": true},
      {"id": 263, "content": "<tool>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
       "special": false}],
    "normalizer": null,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
       "behavior": "Isolated", "invert": false},
      {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]},
    "post_processor": null,
    "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
      "vocab": {"he": 256, "hel": 257, "lo": 258, "hello": 259, "Ġw": 260, "Ã©": 261},
      "merges": [["h", "e"], ["he", "l"], ["l", "o"], ["hel", "lo"], ["Ġ", "w"], ["Ã", "©"]]}})json");
  for (int byte = 0; byte < 256; ++byte) document["model"]["vocab"][byte_name(byte)] = byte;
  return document;
}

}  // namespace replayssm::test
