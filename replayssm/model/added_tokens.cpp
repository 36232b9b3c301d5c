#include "replayssm/model/added_tokens.h"

#include <algorithm>
#include <utility>

#include "replayssm/core/utf8.h"

namespace replayssm {
namespace {

uint64_t edge(uint32_t node, char byte) {
  return uint64_t{node} << 8 | static_cast<unsigned char>(byte);
}

bool ends_in_word(std::string_view text) {
  if (text.empty()) return false;
  const Utf8Character character = last_character(text);
  return character.is_valid() && is_word(character.code_point);
}

bool opens_with_word(std::string_view text) {
  if (text.empty()) return false;
  const Utf8Character character = first_character(text);
  return character.is_valid() && is_word(character.code_point);
}

size_t trailing_space_bytes(std::string_view text) {
  const size_t size = text.size();
  while (!text.empty()) {
    const Utf8Character character = last_character(text);
    if (!character.is_valid() || !is_space(character.code_point)) break;
    text.remove_suffix(static_cast<size_t>(character.length));
  }
  return size - text.size();
}

size_t leading_space_bytes(std::string_view text) {
  const size_t size = text.size();
  while (!text.empty()) {
    const Utf8Character character = first_character(text);
    if (!character.is_valid() || !is_space(character.code_point)) break;
    text.remove_prefix(static_cast<size_t>(character.length));
  }
  return size - text.size();
}

}  // namespace

void AddedTokens::add(const AddedToken& token, std::string_view content) {
  uint32_t node = 0;
  for (const char byte : content) {
    const auto [place, is_new] = edges_.emplace(edge(node, byte), static_cast<uint32_t>(ends_.size()));
    if (is_new) ends_.push_back(-1);
    node = place->second;
  }
  ends_[node] = static_cast<int>(tokens_.size());
  opens_[static_cast<unsigned char>(content.front())] = true;
  tokens_.push_back(token);
}

std::pair<int, size_t> AddedTokens::longest(std::string_view text) const {
  std::pair<int, size_t> found = {-1, 0};
  uint32_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto next = edges_.find(edge(node, text[i]));
    if (next == edges_.end()) break;
    node = next->second;
    if (ends_[node] >= 0) found = {ends_[node], i + 1};
  }
  return found;
}

void AddedTokens::split(std::string_view text, std::vector<TextPart>& parts) const {
  size_t done = 0;  // everything before is in `parts`
  for (size_t place = 0; place < text.size();) {
    const auto [index, bytes] =
        opens_[static_cast<unsigned char>(text[place])] ? longest(text.substr(place)) : std::pair<int, size_t>(-1, 0);
    if (index < 0) {
      ++place;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    size_t begin = place;
    size_t end = place + bytes;
    place = end;
    if (token.is_single_word && (ends_in_word(text.substr(0, begin)) || opens_with_word(text.substr(end)))) continue;
    if (token.strips_left) begin -= trailing_space_bytes(text.substr(0, begin));
    if (token.strips_right) end += leading_space_bytes(text.substr(end));
    begin = std::max(begin, done);
    if (begin > done) parts.push_back({text.substr(done, begin - done)});
    parts.push_back({text.substr(begin, std::max(begin, end) - begin), token.id});
    done = std::max(done, end);
  }
  if (done < text.size()) parts.push_back({text.substr(done)});
}

}  // namespace replayssm
