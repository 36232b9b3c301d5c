// Strict JSON: what the parser refuses, and fields that name themselves when they are wrong.
#include "replayssm/core/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/bad_input.h"

namespace replayssm {
namespace {

using test::expect_refusal;

std::string nested(int depth) {
  return std::string(depth, '[') + std::string(depth, ']');
}

TEST(Json, ParsesWhatIsJson) {
  const std::string text = R"({"a": [1, -2, 2.5, 1e3, true, null, "\u00e9", {}], "b": {"a": 18446744073709551615}})";
  EXPECT_EQ(parse_json(text, "file"), nlohmann::json::parse(text));
  EXPECT_EQ(parse_json(" 7 ", "file"), 7);
  EXPECT_NO_THROW(parse_json(nested(kMaxJsonDepth), "file"));
}

TEST(Json, ReadsPythonsInfinity) {
  EXPECT_EQ(parse_json("[0.0, Infinity]", "file"), nlohmann::json::parse(R"([0.0, "inf"])"));
  EXPECT_EQ(parse_json("Infinity", "file"), "inf");
  // Not inside strings, whatever stands before it there.
  const std::string text = R"({"Infinity": "a\"Infinity", "b\\": Infinity, "c": "\\\"Infinity"})";
  EXPECT_EQ(parse_json(text, "file"),
            nlohmann::json::parse(R"({"Infinity": "a\"Infinity", "b\\": "inf", "c": "\\\"Infinity"})"));
  expect_refusal([] { parse_json("[Infinity, x]", "file"); }, "something else at byte 12");
  for (const char* bad : {"-Infinity", "[Infinityy]", "[1Infinity]", "\"Infinity"})
    expect_refusal([&] { parse_json(bad, "file"); }, "file: expected JSON, got something else at byte");
}

TEST(Json, RefusesEverythingElse) {
  for (const char* text : {"", " ", "{", "[1,]", "{\"a\":1,}", "nan", "01", "'a'", "{} {}", "\"\xff\"", "\"\\ud800\"",
                           "// comment\n{}", "\"a\nb\"", "[1 2]", "\xEF\xBB\xBF["})
    expect_refusal([&] { parse_json(text, "file"); }, "file: expected JSON, got something else at byte");
  expect_refusal([] { parse_json(std::string_view("{}\0", 3), "file"); }, "expected JSON");
  expect_refusal([] { parse_json("[1e999]", "file"); }, "file: expected numbers");
  expect_refusal([] { parse_json(R"({"a": {"b": 1, "c": 2, "b": 3}})", "file"); }, "'b' twice");
  expect_refusal([] { parse_json(nested(kMaxJsonDepth + 1), "file"); }, "nested at most 32 deep");
  expect_refusal([] { parse_json(std::string(10'000'000, '['), "file"); }, "nested at most 32 deep");
  std::string many = "[0";
  for (size_t i = 1; i < kMaxJsonValues; ++i) many += ",0";
  expect_refusal([&] { parse_json(many + "]", "file"); }, "file: expected at most 4194304 values");
  expect_refusal([] { parse_json(std::string(kMaxJsonBytes + 1, ' '), "file"); }, "at most 134217728 bytes",
                 "got 134217729");
  const std::string long_key = "\"" + std::string(100000, 'k') + "\\n\"";
  expect_refusal([&] { parse_json("{" + long_key + ":1," + long_key + ":2}", "file"); }, "kkk...' twice");
}

TEST(Json, FieldsNameThemselves) {
  const nlohmann::json value = nlohmann::json::parse(
      R"({"i": 5, "big": 18446744073709551615, "low": -9223372036854775808, "f": 2.5, "s": "x", "n": null,
          "o": {"i": -1}, "a": [1], "t": true})");
  const JsonObject object(value, "config.json");
  EXPECT_EQ(object.integer("i", 5, 5), 5);
  EXPECT_EQ(object.integer("n", 0, 9, 3), 3);
  EXPECT_EQ(object.integer("low", INT64_MIN, 0), INT64_MIN);
  EXPECT_EQ(object.object("o").integer("i", -1, 0), -1);
  EXPECT_EQ(object.number("f", 0, 3), 2.5);
  EXPECT_EQ(object.number("i", 0, 9), 5);
  EXPECT_TRUE(object.boolean("t", false));
  EXPECT_EQ(object.string("none", "y"), "y");
  EXPECT_EQ(object.array("a").size(), 1u);
  EXPECT_FALSE(object.has("n"));
  expect_refusal([&] { object.integer("i", 6, 9); }, "config.json: i: expected an integer in 6 .. 9, got 5");
  expect_refusal([&] { object.integer("i", -9, -6); }, "got 5");
  expect_refusal([&] { object.integer("big", 0, INT64_MAX); }, "got 18446744073709551615");
  expect_refusal([&] { object.integer("f", 0, 9); }, "got 2.5");
  expect_refusal([&] { object.integer("none", 0, 9); }, "config.json: none: expected an integer", "got nothing");
  expect_refusal([&] { object.integer("n", 0, 9); }, "got nothing");
  expect_refusal([&] { object.object("o").integer("i", 0, 9); }, "config.json: o.i: expected", "got -1");
  expect_refusal([&] { object.number("s", 0, 9); }, "got \"x\"");
  expect_refusal([&] { object.boolean("i", false); }, "expected true or false, got 5");
  expect_refusal([&] { object.string("o"); }, "expected a string, got an object of 1");
  expect_refusal([&] { object.object("a"); }, "config.json: a: expected an object, got an array of 1");
  expect_refusal([&] { object.array("o"); }, "expected an array, got an object of 1");
}

}  // namespace
}  // namespace replayssm
