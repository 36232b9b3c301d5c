// Tokens that are found in text before it is cut into words: markers such as <|endoftext|>.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace replayssm {

struct AddedToken {
  int32_t id = 0;
  std::string content;          // not empty
  bool is_special = false;      // not part of the text that a model writes
  bool is_single_word = false;  // only where neither neighbour is a word's character
  bool strips_left = false;     // takes the white space before it
  bool strips_right = false;    // takes the white space after it
  bool is_normalized = false;   // sought in the normalized text
};

// A stretch of text, or an added token in its place.
struct TextPart {
  std::string_view text;
  int32_t token = -1;  // -1: text that holds none
};

class AddedTokens {
 public:
  // `content` is what is sought: the token's, or its normalized form.
  void add(const AddedToken& token, std::string_view content);

  bool is_empty() const { return tokens_.empty(); }

  // Cuts `text` at the leftmost longest tokens, and appends the parts, no text among them empty.
  void split(std::string_view text, std::vector<TextPart>& parts) const;

 private:
  // The longest token that `text` opens with: its place in tokens_ (or -1) and its bytes.
  std::pair<int, size_t> longest(std::string_view text) const;

  std::vector<AddedToken> tokens_;
  // A trie: (node, byte) -> node, and the token that ends at a node (or -1). Node 0 is the root.
  std::unordered_map<uint64_t, uint32_t> edges_;
  std::vector<int> ends_ = {-1};
  bool opens_[256] = {};
};

}  // namespace replayssm
