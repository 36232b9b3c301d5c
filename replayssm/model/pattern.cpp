#include "replayssm/model/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

constexpr size_t kMaxExpressionBytes = size_t{64} << 10;
// A word of a megabyte needs about as many steps as it has bytes; a catastrophic expression runs into the limit.
constexpr uint32_t kMaxMatchSteps = 10'000'000;
constexpr uint32_t kMaxMatchKibibytes = 256 << 10;

// Unicode's \s and \w as ranges: PCRE2's own differ by U+180E and by marks and connectors.
constexpr std::string_view kSpace =
    R"(\x09-\x0D\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr std::string_view kWord =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{24B6}-\x{24E9}\x{1F130}-\x{1F149}\x{1F150}-\x{1F169}\x{1F170}-\x{1F189})";

// Rewrites an expression for PCRE2, and refuses what would mean something else there.
class Translation {
 public:
  Translation(std::string_view expression, std::string_view source) : rest_(expression), source_(source) {
    while (!rest_.empty()) translate_one();
  }
  std::string take() { return std::move(translated_); }

 private:
  void translate_one() {
    if (rest_[0] == '\\') return translate_escape();
    if (is_in_class_) {
      refuse_if(rest_[0] == '[' || rest_.starts_with("&&"), "a set within brackets");
      if (rest_[0] == ']') is_in_class_ = false;
      return copy(1);
    }
    if (rest_[0] == '[') return open_class();
    refuse_if(rest_.starts_with("(*"), "a verb");
    refuse_if(rest_.starts_with("{,"), "a repetition without lower bound");
    if (rest_.starts_with("(?")) check_flags();
    copy(1);
  }

  void open_class() {
    is_in_class_ = true;
    copy(rest_.starts_with("[^") ? 2 : 1);
    // A bracket that comes first stands for itself.
    if (rest_.starts_with(']')) copy(1);
  }

  void translate_escape() {
    refuse_if(rest_.size() < 2, "a backslash at the end");
    const char letter = rest_[1];
    if (letter == 's' || letter == 'w' || letter == 'S' || letter == 'W') {
      const bool is_negated = letter == 'S' || letter == 'W';
      const std::string_view ranges = letter == 's' || letter == 'S' ? kSpace : kWord;
      refuse_if(is_in_class_ && is_negated, "\\S or \\W within brackets");
      translated_ += is_in_class_ ? std::string(ranges) : fmt::format("[{}{}]", is_negated ? "^" : "", ranges);
      rest_.remove_prefix(2);
      return;
    }
    refuse_if(std::string_view("BhHQEC").find(letter) != std::string_view::npos || (letter == 'b' && !is_in_class_),
              fmt::format("\\{}", letter));
    copy(2);
  }

  // (?i) and (?i: ...) mean the same everywhere, other letters do not.
  void check_flags() {
    size_t end = 2;
    while (end < rest_.size() && (std::isalnum(static_cast<unsigned char>(rest_[end])) || rest_[end] == '-')) ++end;
    const std::string_view flags = rest_.substr(2, end - 2);
    refuse_if(flags.find_first_not_of("i-") != std::string_view::npos, "a flag other than i or a call");
  }

  void copy(size_t bytes) {
    translated_ += rest_.substr(0, bytes);
    rest_.remove_prefix(std::min(bytes, rest_.size()));
  }

  void refuse_if(bool is_refused, std::string_view what) {
    require(!is_refused, "{}: expected a pattern of the supported syntax, got {}", source_, what);
  }

  std::string_view rest_;
  std::string_view source_;
  std::string translated_;
  bool is_in_class_ = false;
};

template <auto release>
struct Release {
  template <typename Object>
  void operator()(Object* object) const {
    release(object);
  }
};

using MatchData = std::unique_ptr<pcre2_match_data, Release<pcre2_match_data_free>>;

std::string message_of(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

}  // namespace

struct Pattern::Compiled {
  std::unique_ptr<pcre2_code, Release<pcre2_code_free>> code;
  std::unique_ptr<pcre2_match_context, Release<pcre2_match_context_free>> limits;
};

Pattern::Pattern(std::string_view expression, bool is_literal, std::string_view source) : source_(source) {
  require(!expression.empty() && expression.size() <= kMaxExpressionBytes,
          "{}: expected a pattern of 1 .. {} bytes, got {}", source, kMaxExpressionBytes, expression.size());
  const std::string text = is_literal ? std::string(expression) : Translation(expression, source).take();
  const uint32_t options = PCRE2_UTF | (is_literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
  const std::unique_ptr<pcre2_compile_context, Release<pcre2_compile_context_free>> context(
      pcre2_compile_context_create(nullptr));
  require(context != nullptr, "{}: not enough memory", source);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int code = 0;
  size_t place = 0;
  auto compiled = std::make_shared<Compiled>();
  compiled->code.reset(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), options, &code, &place, context.get()));
  require(compiled->code != nullptr, "{}: expected a valid pattern, got one with an error: {}", source,
          message_of(code));
  uint32_t may_be_empty = 0;
  pcre2_pattern_info(compiled->code.get(), PCRE2_INFO_MATCHEMPTY, &may_be_empty);
  require(may_be_empty == 0, "{}: expected a pattern whose matches have characters, got one that matches nothing",
          source);
  // Where there is no just-in-time compiler, or it refuses, the interpreter matches the same.
  pcre2_jit_compile(compiled->code.get(), PCRE2_JIT_COMPLETE);
  compiled->limits.reset(pcre2_match_context_create(nullptr));
  require(compiled->limits != nullptr, "{}: not enough memory", source);
  pcre2_set_match_limit(compiled->limits.get(), kMaxMatchSteps);
  pcre2_set_heap_limit(compiled->limits.get(), kMaxMatchKibibytes);
  compiled_ = std::move(compiled);
}

void Pattern::split(std::string_view text, bool keeps_matches, bool keeps_rest,
                    std::vector<std::string_view>& pieces) const {
  const MatchData data(pcre2_match_data_create(1, nullptr));
  require(data != nullptr, "{}: not enough memory", source_);
  const auto match = [&](size_t from, uint32_t options) {
    return pcre2_match(compiled_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                       PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY | options, data.get(), compiled_->limits.get());
  };
  size_t done = 0;
  while (done < text.size()) {
    int code = match(done, 0);
    // Compiled code runs on a small stack; the interpreter takes its memory from the heap.
    if (code == PCRE2_ERROR_JIT_STACKLIMIT) code = match(done, PCRE2_NO_JIT);
    if (code == PCRE2_ERROR_NOMATCH) break;
    require(code >= 0, "{}: the pattern cannot be matched with a text of {} bytes: {}", source_, text.size(),
            message_of(code));
    const size_t* ends = pcre2_get_ovector_pointer(data.get());
    // \K could move a match's beginning before `done` or past its end.
    require(ends[0] >= done && ends[1] > ends[0] && ends[1] <= text.size(),
            "{}: expected matches one after another, got one out of order", source_);
    if (keeps_rest && ends[0] > done) pieces.push_back(text.substr(done, ends[0] - done));
    if (keeps_matches) pieces.push_back(text.substr(ends[0], ends[1] - ends[0]));
    done = ends[1];
  }
  if (keeps_rest && done < text.size()) pieces.push_back(text.substr(done));
}

}  // namespace replayssm
