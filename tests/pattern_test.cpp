// Patterns: where they cut, what they refuse, and the pieces a tokenizer is made of: UTF-8, NFC, byte pairs.
#include "replayssm/model/pattern.h"

#include <gtest/gtest.h>
#include <utf8proc.h>

#include <map>
#include <random>

#include "replayssm/core/utf8.h"
#include "replayssm/model/byte_pairs.h"
#include "replayssm/model/nfc.h"
#include "tests/bad_input.h"
#include "tests/ref/byte_pairs.h"

namespace replayssm {
namespace {

using test::expect_refusal;
using Pieces = std::vector<std::string_view>;

Pieces split(const Pattern& pattern, std::string_view text, bool keeps_matches = true, bool keeps_rest = true) {
  Pieces pieces;
  pattern.split(text, keeps_matches, keeps_rest, pieces);
  return pieces;
}

TEST(Pattern, CutsIntoMatchesAndRest) {
  const Pattern pattern("b+|(?i:x)", false, "pattern");
  EXPECT_EQ(split(pattern, "abbaXbc"), (Pieces{"a", "bb", "a", "X", "b", "c"}));
  EXPECT_EQ(split(pattern, "abbaXbc", true, false), (Pieces{"bb", "X", "b"}));
  EXPECT_EQ(split(pattern, "abbaXbc", false, true), (Pieces{"a", "a", "c"}));
  EXPECT_EQ(split(pattern, ""), Pieces{});
  EXPECT_EQ(split(pattern, "aaa"), Pieces{"aaa"});
  EXPECT_EQ(split(Pattern("(+[", true, "literal"), "a(+[b"), (Pieces{"a", "(+[", "b"}));
}

TEST(Pattern, ClassesAreUnicodes) {
  const auto matches = [](const char* expression, std::string_view text) {
    return split(Pattern(expression, false, "pattern"), text, true, false);
  };
  EXPECT_EQ(matches(R"(\s+)", "a\u0085\u00a0\u3000\v b\u180e"), Pieces{"\u0085\u00a0\u3000\v "});
  EXPECT_EQ(matches(R"([^\s]+)", "a\u180e\u2028"), Pieces{"a\u180e"});
  EXPECT_EQ(matches(R"(\S+)", " \u180eé "), Pieces{"\u180eé"});
  EXPECT_EQ(matches(R"(\w+)", "-a\u0301_\u203f1\u00b2"), Pieces{"a\u0301_\u203f1"});
  EXPECT_EQ(matches(R"(\W+)", "a\u00b2-b"), Pieces{"\u00b2-"});
  EXPECT_EQ(matches(R"([\w-]+)", "é-ω.x"), (Pieces{"é-ω", "x"}));
  EXPECT_EQ(matches(R"(\d)", "a1\u0663"), (Pieces{"1", "\u0663"}));
  EXPECT_EQ(matches("(?i:'s)", "'S'\u017f"), (Pieces{"'S", "'\u017f"}));
  EXPECT_EQ(matches("^a.", "ab\nac"), (Pieces{"ab", "ac"}));
  EXPECT_EQ(matches("[]a]+", "]a["), Pieces{"]a"});
  EXPECT_EQ(matches(R"(\p{Han}+(?!\S))", "漢字 漢"), (Pieces{"漢字", "漢"}));
}

TEST(Pattern, RefusesWhatWouldMeanSomethingElse) {
  const auto refuse = [](const std::string& expression, const char* part) {
    expect_refusal([&] { Pattern(expression, false, "file: Regex"); }, "file: Regex: expected", part);
  };
  for (const char* expression : {"(", "[a", "a{2,1}", "\\p{Nothing}", "(?<n", "a**b)", "\\"}) refuse(expression, "");
  for (const char* expression : {"a*", "a?|b", "(?=a)", "^", "|"}) refuse(expression, "matches nothing");
  for (const char* expression : {"[a[b]]", "[a&&b]", "[^[:alpha:]]"}) refuse(expression, "a set within brackets");
  for (const char* expression : {"[\\S]", "[a\\W]"}) refuse(expression, "within brackets");
  for (const char* expression : {"\\ba", "\\Ba", "\\h", "a\\H", "\\Qa\\E", "\\C"}) refuse(expression, "got \\");
  for (const char* expression : {"(?m)a", "(?x: a)", "(?1)(a)", "(?R)a"}) refuse(expression, "a flag");
  for (const char* expression : {"(*UTF)a", "(*LIMIT_MATCH=1)a", "a(*FAIL)"}) refuse(expression, "a verb");
  refuse("a{,2}", "without lower bound");
  refuse("", "1 .. 65536 bytes, got 0");
  refuse(std::string(70000, 'a'), "got 70000");
  refuse(std::string(1000, '(') + "a" + std::string(1000, ')'), "error");
  expect_refusal([&] { split(Pattern("a\\Kb|(?=.\\K)x|.(?<=\\Ka)", false, "file"), "aab"); }, "file");
}

TEST(Pattern, StepsAndMemoryAreBounded) {
  const Pattern catastrophe("(?:x+x+)+y", false, "pattern");
  expect_refusal([&] { split(catastrophe, std::string(98, 'x') + "-y"); }, "pattern", "100 bytes", "limit");
  const Pattern deep("(?:(a)|b)+c|.", false, "pattern");
  const std::string text(1 << 20, 'a');
  try {
    EXPECT_FALSE(split(deep, text).empty());
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("limit"), std::string::npos) << error.what();
  }
}

TEST(Utf8, TellsValidFromInvalidAndIncomplete) {
  using State = Utf8Character::State;
  const auto expect = [](std::string_view text, State state, int length, char32_t code_point) {
    const Utf8Character given = first_character(text);
    EXPECT_EQ(given.state, state) << fmt::format("{:02x}",
                                                 fmt::join(std::vector<unsigned char>(text.begin(), text.end()), " "));
    EXPECT_EQ(given.length, length);
    EXPECT_EQ(given.code_point, code_point);
  };
  // Every code point, written by another's encoder.
  for (utf8proc_int32_t c = 0; c <= 0x10FFFF; c = c == 0xD7FF ? 0xE000 : c + 1) {
    utf8proc_uint8_t bytes[4];
    const auto length = utf8proc_encode_char(c, bytes);
    const std::string_view text(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
    const Utf8Character given = first_character(text);
    ASSERT_TRUE(given.is_valid() && given.length == length && given.code_point == static_cast<char32_t>(c)) << c;
    ASSERT_EQ(last_character(text).code_point, static_cast<char32_t>(c));
    for (int cut = 1; cut < length; ++cut) {
      ASSERT_EQ(first_character(text.substr(0, cut)).state, State::kIncomplete);
      ASSERT_EQ(first_character(text.substr(0, cut)).length, cut);
    }
  }
  for (const char* text : {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xE0\x9F\xBF", "\xED\xA0\x80",
                           "\xED\xBF\xBF", "\xF0\x80\x80\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80",
                           "\xF5\x80\x80\x80", "\xFF", "\xE2\x28\xA1", "\xE2\x82\x28", "\xC3("})
    expect(text, State::kInvalid, 1, 0);
  EXPECT_EQ(valid_utf8_bytes("aé\xFFz"), 3u);
  EXPECT_EQ(valid_utf8_bytes("aé\xE2\x82"), 3u);
  EXPECT_FALSE(last_character("a\x80").is_valid());
  EXPECT_FALSE(last_character("\xE2\x82").is_valid());
}

TEST(Nfc, ComposesAndOrders) {
  EXPECT_EQ(nfc(""), "");
  EXPECT_EQ(nfc("plain é"), "plain é");
  EXPECT_EQ(nfc("e\u0301"), "é");
  EXPECT_EQ(nfc(std::string("a\0e\u0301", 5)), std::string("a\0é", 4));
  EXPECT_EQ(nfc("q\u0307\u0323"), "q\u0323\u0307");
  EXPECT_EQ(nfc("\u212b\u2126"), "\u00c5\u03a9");
  EXPECT_EQ(nfc("\u1100\u1161\u11a8"), "\uac01");
  EXPECT_EQ(nfc("\u0958"), "\u0915\u093c");
}

// Long runs take another path than short ones; the same runs, each shortened below its length, must agree with it.
TEST(Nfc, LongRunsOfMarksAreOrderedAsShortOnes) {
  const char* marks[] = {"\u0301", "\u0323", "\u0327", "\u0344", "\u0f73",
                         "\u0f75", "\u0f81", "\u0f71", "\u0345", "\u05b0"};
  std::mt19937_64 random(3);
  for (int i = 0; i < 200; ++i) {
    std::string text = "xe";
    for (int n = 0; n < 100; ++n) text += marks[random() % std::size(marks)];
    text += "e\u0301";
    utf8proc_uint8_t* mapped = utf8proc_NFC(reinterpret_cast<const utf8proc_uint8_t*>(text.c_str()));
    EXPECT_EQ(nfc(text), reinterpret_cast<const char*>(mapped));
    std::free(mapped);
  }
}

TEST(BytePairs, AgreesWithOracle) {
  std::mt19937_64 random(11);
  int32_t byte_tokens[256];
  for (int byte = 0; byte < 256; ++byte) byte_tokens[byte] = byte;
  BytePairs::Scratch scratch;
  for (int round = 0; round < 200; ++round) {
    // Tokens are strings over three letters, and every merge joins two earlier ones.
    std::vector<std::string> names = {"a", "b", "c"};
    std::vector<int32_t> ids = {'a', 'b', 'c'};
    std::map<std::string, int32_t> by_name = {{"a", 'a'}, {"b", 'b'}, {"c", 'c'}};
    std::map<std::pair<int32_t, int32_t>, std::pair<int, int32_t>> merges;
    BytePairs pairs(30);
    for (int rank = 0; rank < 30; ++rank) {
      const size_t left = random() % names.size(), right = random() % names.size();
      const auto [place, is_new] =
          by_name.emplace(names[left] + names[right], 256 + static_cast<int32_t>(names.size()));
      merges[{ids[left], ids[right]}] = {rank, place->second};
      pairs.add(ids[left], ids[right], place->second);
      if (!is_new) continue;
      names.push_back(place->first);
      ids.push_back(place->second);
    }
    for (int i = 0; i < 50; ++i) {
      std::string word(random() % 40, 'a');
      for (char& letter : word) letter = static_cast<char>('a' + random() % 3);
      std::vector<int32_t> tokens;
      pairs.encode(word, byte_tokens, scratch, tokens);
      EXPECT_EQ(tokens, ref::byte_pairs(word, byte_tokens, merges)) << word;
    }
  }
}

}  // namespace
}  // namespace replayssm
