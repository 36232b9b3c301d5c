// UTF-8, one character at a time, and what counts as a space or a word.
#pragma once

#include <cstdint>
#include <string_view>

namespace replayssm {

struct Utf8Character {
  enum class State {
    kValid,
    kInvalid,     // no character opens like this
    kIncomplete,  // the text ends inside what may become a character
  };
  State state = State::kInvalid;
  int length = 0;  // bytes of the text that belong to it; 1 if invalid
  char32_t code_point = 0;

  bool is_valid() const { return state == State::kValid; }
};

// The character that `text`, not empty, opens with. Shortest forms only, no surrogates, at most U+10FFFF.
Utf8Character first_character(std::string_view text);

// The character that `text`, not empty, ends with; kInvalid unless its last bytes are a whole character.
Utf8Character last_character(std::string_view text);

// The longest opening of `text` that is valid UTF-8, in bytes.
size_t valid_utf8_bytes(std::string_view text);

// Unicode's White_Space property.
bool is_space(char32_t code_point);

// Unicode's \w: Alphabetic, marks, decimal digits, connectors and the two joiners.
bool is_word(char32_t code_point);

}  // namespace replayssm
