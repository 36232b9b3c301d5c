#include "replayssm/model/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "replayssm/core/error.h"
#include "replayssm/core/utf8.h"

namespace replayssm {
namespace {

// utf8proc orders marks by exchanging neighbours, which takes quadratic time on long runs; runs up to this are left
// to it.
constexpr size_t kLongRun = 64;

int combining_class(char32_t c) {
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
}

// Characters that are no marks themselves, or of another class, and yet decompose into marks alone.
std::u32string_view marks_within(char32_t c) {
  switch (c) {
    case 0x0344:
      return U"\u0308\u0301";
    case 0x0F73:
      return U"\u0F71\u0F72";
    case 0x0F75:
      return U"\u0F71\u0F74";
    case 0x0F81:
      return U"\u0F71\u0F80";
    default:
      return {};
  }
}

bool is_mark(char32_t c) {
  return c >= 0x300 && (combining_class(c) != 0 || !marks_within(c).empty());
}

void append(std::string& text, char32_t c) {
  utf8proc_uint8_t bytes[4];
  const utf8proc_ssize_t length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
}

// The text with its long runs of marks in canonical order: an equivalent text, so of the same NFC.
std::string with_ordered_runs(std::string_view text) {
  std::string ordered;
  ordered.reserve(text.size());
  for (size_t place = 0; place < text.size();) {
    std::vector<char32_t> run;
    size_t end = place;
    while (end < text.size()) {
      const Utf8Character character = first_character(text.substr(end));
      if (!is_mark(character.code_point)) break;
      const std::u32string_view within = marks_within(character.code_point);
      run.insert(run.end(), within.begin(), within.end());
      if (within.empty()) run.push_back(character.code_point);
      end += static_cast<size_t>(character.length);
    }
    if (run.size() > kLongRun) {
      std::ranges::stable_sort(run, {}, combining_class);
      for (const char32_t mark : run) append(ordered, mark);
    } else {
      ordered.append(text.substr(place, end - place));
    }
    if (end < text.size()) {
      const size_t length = static_cast<size_t>(first_character(text.substr(end)).length);
      ordered.append(text.substr(end, length));
      end += length;
    }
    place = end;
  }
  return ordered;
}

}  // namespace

std::string nfc(std::string_view text) {
  // Bytes below 0xCC belong to characters below U+0300, which are in form C and combine with nothing before them.
  const bool is_plain = std::ranges::all_of(text, [](char byte) { return static_cast<unsigned char>(byte) < 0xCC; });
  if (is_plain) return std::string(text);
  const std::string ordered = with_ordered_runs(text);
  utf8proc_uint8_t* mapped = nullptr;
  const utf8proc_ssize_t length = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(ordered.data()),
                                               static_cast<utf8proc_ssize_t>(ordered.size()), &mapped,
                                               static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  require(length >= 0, "text: cannot be normalized: {}", utf8proc_errmsg(length));
  return std::string(reinterpret_cast<const char*>(mapped), static_cast<size_t>(length));
}

}  // namespace replayssm
