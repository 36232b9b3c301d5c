#include "replayssm/core/utf8.h"

#include <utf8proc.h>

#include <algorithm>

namespace replayssm {

Utf8Character first_character(std::string_view text) {
  using State = Utf8Character::State;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {State::kValid, 1, lead};
  if (lead < 0xC2 || lead > 0xF4) return {State::kInvalid, 1, 0};
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range rules out long forms, surrogates and what lies past U+10FFFF.
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  char32_t code_point = lead & (0xFFu >> (length + 1));
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == text.size()) return {State::kIncomplete, i, 0};
    const unsigned next = byte(i);
    if (next < (i == 1 ? low : 0x80) || next > (i == 1 ? high : 0xBF)) return {State::kInvalid, 1, 0};
    code_point = code_point << 6 | (next & 0x3F);
  }
  return {State::kValid, length, code_point};
}

Utf8Character last_character(std::string_view text) {
  for (size_t length = 1; length <= std::min<size_t>(4, text.size()); ++length) {
    const Utf8Character character = first_character(text.substr(text.size() - length));
    if (character.is_valid() && character.length == static_cast<int>(length)) return character;
  }
  return {Utf8Character::State::kInvalid, 1, 0};
}

size_t valid_utf8_bytes(std::string_view text) {
  size_t bytes = 0;
  while (bytes < text.size()) {
    if (static_cast<unsigned char>(text[bytes]) < 0x80) {
      ++bytes;
      continue;
    }
    const Utf8Character character = first_character(text.substr(bytes));
    if (!character.is_valid()) break;
    bytes += static_cast<size_t>(character.length);
  }
  return bytes;
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_word(char32_t c) {
  if (c == 0x200C || c == 0x200D) return true;
  // Symbols that are Alphabetic: the letters in circles and squares.
  if ((c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
      (c >= 0x1F170 && c <= 0x1F189))
    return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

}  // namespace replayssm
