// A tokenizer's pattern: the regular expression that cuts text into words.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace replayssm {

class Pattern {
 public:
  // An expression in the syntax that `tokenizer.json` uses (Oniguruma's, where . stops at line feeds and ^ $ match at
  // them; \s \w \d are Unicode's), or a literal string. Throws Error, its line opening with `source`, if the expression
  // is not valid, may match nothing at all, is longer than 64 KiB, or uses what PCRE2 would understand otherwise: sets
  // within brackets and &&, \S \W within brackets, \b \B \h \H \Q \E \C, flags but i, calls, verbs.
  Pattern(std::string_view expression, bool is_literal, std::string_view source);

  // Cuts `text` (valid UTF-8) into matches and what lies between them, none empty, and appends to `pieces`, in order,
  // the matches if `keeps_matches` and the rest if `keeps_rest`. Throws Error if a match takes more than a bounded
  // number of steps or much memory. Safe to call from several threads.
  void split(std::string_view text, bool keeps_matches, bool keeps_rest, std::vector<std::string_view>& pieces) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
  std::string source_;
};

}  // namespace replayssm
