// Seeded mutations of a parser's input: what it makes of damaged bytes and damaged JSON must be an Error or right.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "replayssm/core/error.h"
#include "tests/allocation.h"

namespace replayssm::test {

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  // 1 to 4 edits of bytes: flipped bits, other bytes, cuts, insertions, removals, stretches repeated or exchanged.
  std::string bytes(std::string input) {
    for (size_t edits = 1 + below(4); edits > 0; --edits) edit_bytes(input);
    return input;
  }

  // 1 to 3 edits of JSON text that mostly leave it JSON: values replaced by odd ones or by other values of the text,
  // keys repeated, renamed, removed, deep nesting; now and then an edit of bytes.
  std::string json(std::string input) {
    for (size_t edits = 1 + below(3); edits > 0; --edits) below(8) == 0 ? edit_bytes(input) : edit_json(input);
    return input;
  }

  // A number below `limit`, which is not 0.
  size_t below(size_t limit) { return static_cast<size_t>(random_() % limit); }

 private:
  struct Token {
    size_t begin;
    size_t end;
  };

  void edit_bytes(std::string& text) {
    if (text.empty()) text = "x";
    const size_t place = below(text.size());
    const size_t length = 1 + below(std::min<size_t>(16, text.size() - place));
    switch (below(8)) {
      case 0:
        text[place] = static_cast<char>(text[place] ^ (1 << below(8)));
        break;
      case 1:
        text[place] = static_cast<char>(below(256));
        break;
      case 2:
        text.resize(place);
        break;
      case 3:
        text.insert(place, std::string(length, static_cast<char>(below(256))));
        break;
      case 4:
        text.erase(place, length);
        break;
      case 5:
        text.insert(below(text.size()), text.substr(place, length));
        break;
      case 6:
        for (size_t i = 0; i < length; ++i) text[place + i] = text[below(text.size())];
        break;
      default:
        // The sizes and offsets of binary headers: eight bytes at once.
        for (size_t i = place; i < std::min(place + 8, text.size()); ++i) text[i] = below(2) == 0 ? '\0' : '\xFF';
    }
  }

  void edit_json(std::string& text) {
    const std::vector<Token> tokens = scan(text);
    if (tokens.empty()) return edit_bytes(text);
    const Token token = tokens[below(tokens.size())];
    const std::string_view old = std::string_view(text).substr(token.begin, token.end - token.begin);
    const Token other = tokens[below(tokens.size())];
    switch (below(6)) {
      case 0:
      case 1:
        text.replace(token.begin, old.size(), odd_value());
        break;
      case 2:
        text.replace(token.begin, old.size(), text.substr(other.begin, other.end - other.begin));
        break;
      case 3:
        return repeat_or_remove(text, token);
      case 4: {
        // Below, at and above common limits of depth, and far past the stack's.
        const size_t depths[] = {8, 31, 33, 200, 5000};
        const size_t depth = depths[below(std::size(depths))];
        const bool is_closed = below(4) != 0;
        text.replace(token.begin, old.size(), std::string(depth, '[') + std::string(is_closed ? depth : 0, ']'));
        break;
      }
      default:
        if (old.size() > 1) text[token.begin + below(old.size())] = static_cast<char>(0x20 + below(0x60));
    }
  }

  // The stretch from a token to the comma behind it, which in an object is a field and in a list an element.
  void repeat_or_remove(std::string& text, Token token) {
    const size_t comma = text.find(',', token.end);
    if (comma == std::string::npos || comma - token.begin > 400) return;
    const std::string stretch = text.substr(token.begin, comma + 1 - token.begin);
    if (below(2) == 0)
      text.insert(token.begin, stretch);
    else
      text.erase(token.begin, stretch.size());
  }

  std::string odd_value() {
    static const char* const kValues[] = {"0",
                                          "1",
                                          "-1",
                                          "2",
                                          "3",
                                          "255",
                                          "256",
                                          "1.5",
                                          "-0",
                                          "0.0",
                                          "1e3",
                                          "1e308",
                                          "1e309",
                                          "-1e400",
                                          "1e-400",
                                          "2147483647",
                                          "2147483648",
                                          "-2147483649",
                                          "4294967295",
                                          "4294967296",
                                          "4611686018427387904",
                                          "9223372036854775807",
                                          "9223372036854775808",
                                          "-9223372036854775808",
                                          "-9223372036854775809",
                                          "18446744073709551615",
                                          "18446744073709551616",
                                          "99999999999999999999999999",
                                          "null",
                                          "true",
                                          "false",
                                          "\"\"",
                                          "\"a\"",
                                          "\"\\u0000\"",
                                          "\"\\ud800\"",
                                          "\"\xFF\"",
                                          "\"../x\"",
                                          "\"/\"",
                                          "[]",
                                          "{}",
                                          "[[]]",
                                          "[0]",
                                          "[0,0]",
                                          "{\"a\":0,\"a\":1}",
                                          "NaN",
                                          "//"};
    const char* value = kValues[below(std::size(kValues))];
    return below(40) == 0 ? "\"" + std::string(5000, 'q') + "\"" : value;
  }

  // Strings, numbers and words outside strings; brackets are not tokens.
  static std::vector<Token> scan(std::string_view text) {
    std::vector<Token> tokens;
    for (size_t i = 0; i < text.size();) {
      const size_t begin = i;
      if (text[i] == '"') {
        for (++i; i < text.size() && text[i] != '"'; ++i)
          if (text[i] == '\\') ++i;
        i = std::min(i + 1, text.size());
        tokens.push_back({begin, i});
      } else if (std::strchr("{}[],: \t\r\n", text[i]) == nullptr) {
        while (i < text.size() && std::strchr("{}[],: \t\r\n\"", text[i]) == nullptr) ++i;
        tokens.push_back({begin, i});
      } else {
        ++i;
      }
    }
    return tokens;
  }

  std::mt19937_64 random_;
};

struct MutationCounts {
  int refused = 0;
  int accepted = 0;
};

// Calls parse(mutated) for `count` mutations of `input`, each made by mutate(mutator, input) from a seed of its own.
// `parse` checks what it gets with expectations, or throws Error. Anything else thrown, more than `limit_bytes`
// allocated in one call, or a call of more than 10 seconds fails the test, naming the seed.
inline MutationCounts survive_mutations(const std::string& input, int count, uint64_t first_seed,
                                        const std::function<std::string(Mutator&, const std::string&)>& mutate,
                                        const std::function<void(const std::string&)>& parse,
                                        size_t limit_bytes = size_t{256} << 20) {
  MutationCounts counts;
  for (int i = 0; i < count && !testing::Test::HasFailure(); ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    Mutator mutator(seed);
    const std::string mutated = mutate(mutator, input);
    SCOPED_TRACE("mutation seed " + std::to_string(seed));
    const auto start = std::chrono::steady_clock::now();
    try {
      const AllocationLimit limit(limit_bytes);
      parse(mutated);
      ++counts.accepted;
    } catch (const Error& error) {
      ++counts.refused;
      EXPECT_EQ(std::strchr(error.what(), '\n'), nullptr) << error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "expected an Error, got " << error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  }
  return counts;
}

}  // namespace replayssm::test
