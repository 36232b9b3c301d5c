// The tokenizer: against the `tokenizers` package, any bytes there and back, streams, and documents that are refused.
#include "replayssm/model/tokenizer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "replayssm/core/mapped_file.h"
#include "replayssm/core/utf8.h"
#include "replayssm/model/nfc.h"
#include "tests/bad_input.h"
#include "tests/tokenizer_fixture.h"

namespace replayssm {
namespace {

using nlohmann::json;
using test::expect_refusal;
using Ids = std::vector<int32_t>;

Tokenizer make(const json& document) {
  return Tokenizer(document.dump(), "tokenizer.json");
}

std::string fixture(const std::string& name) {
  return fmt::format("{}/tests/fixtures/tokenizer/{}", REPLAYSSM_SOURCE_DIR, name);
}

struct Case {
  std::string text;
  Ids ids;
};

std::vector<Case> cases_of(const std::string& name) {
  const MappedFile file(fixture(name + ".cases.jsonl"));
  std::vector<Case> cases;
  for (std::string_view rest = file.text(); !rest.empty(); rest.remove_prefix(rest.find('\n') + 1)) {
    const json line = json::parse(rest.substr(0, rest.find('\n')));
    cases.push_back({line[0].get<std::string>(), line[1].get<Ids>()});
  }
  return cases;
}

Tokenizer fixture_tokenizer(const std::string& name) {
  const MappedFile file(fixture(name + ".json"));
  return Tokenizer(file.text(), name);
}

void expect_same_ids(const Tokenizer& tokenizer, const std::string& name, size_t count) {
  const std::vector<Case> cases = cases_of(name);
  EXPECT_GE(cases.size(), count);
  for (const Case& one : cases) EXPECT_EQ(tokenizer.encode(one.text), one.ids) << json(one.text).dump();
}

std::string streamed(const Tokenizer& tokenizer, const Ids& ids) {
  TextStream stream(tokenizer);
  std::string text;
  for (const int32_t id : ids) {
    const std::string part = stream.push(id);
    EXPECT_TRUE(part.empty() || last_character(part).is_valid() || valid_utf8_bytes(part) < part.size());
    text += part;
  }
  return text + stream.finish();
}

TEST(Tokenizer, AgreesWithTokenizersPackage) {
  expect_same_ids(fixture_tokenizer("qwen2"), "qwen2", 1000);
  expect_same_ids(fixture_tokenizer("qwen35"), "qwen35", 1000);
  expect_same_ids(fixture_tokenizer("gpt2"), "gpt2", 500);
  expect_same_ids(fixture_tokenizer("whole_words"), "whole_words", 300);
}

TEST(Tokenizer, TheShippedOneAgreesToo) {
  const MappedFile file(REPLAYSSM_SOURCE_DIR "/models/gdn-tiny/tokenizer.json");
  expect_same_ids(Tokenizer(file.text(), "gdn-tiny"), "gdn-tiny", 10);
}

TEST(Tokenizer, FixtureStringsComeBack) {
  for (const std::string name : {"qwen2", "gpt2"}) {
    const Tokenizer tokenizer = fixture_tokenizer(name);
    for (const Case& one : cases_of(name)) {
      // These two tokens of gpt2.json take the white space beside them.
      const bool is_stripped = name == "gpt2" && (one.text.find("<left>") != std::string::npos ||
                                                  one.text.find("<right>") != std::string::npos);
      if (!is_stripped) {
        EXPECT_EQ(tokenizer.decode(one.ids), one.text);
      }
      EXPECT_EQ(streamed(tokenizer, one.ids), tokenizer.decode(one.ids));
    }
  }
  const Tokenizer tokenizer = fixture_tokenizer("qwen35");
  for (const Case& one : cases_of("qwen35")) EXPECT_EQ(nfc(tokenizer.decode(one.ids)), nfc(one.text));
}

TEST(Tokenizer, AnyBytesComeBack) {
  const Tokenizer qwen2 = fixture_tokenizer("qwen2");
  const Tokenizer small = make(test::small_tokenizer());
  std::mt19937_64 random(7);
  const std::string pool =
      "aé<|endoftext|>\xF0\x9F\x98\x80 \n\xE2\x82\xAC\xFF\xC0\x80\xED\xA0\x80\xF4\x90\x80\x80\0'sZ1";
  for (int i = 0; i < 20000; ++i) {
    std::string text(random() % 24, '\0');
    for (char& byte : text) byte = random() % 3 == 0 ? static_cast<char>(random()) : pool[random() % pool.size()];
    for (const Tokenizer* tokenizer : {&qwen2, &small}) {
      const Ids ids = tokenizer->encode(text);
      ASSERT_EQ(tokenizer->decode(ids), text);
      ASSERT_EQ(streamed(*tokenizer, ids), text);
    }
  }
}

TEST(Tokenizer, StrayBytesAreTokensOfTheirOwn) {
  const Tokenizer tokenizer = make(test::small_tokenizer());
  EXPECT_EQ(tokenizer.encode("hello\xFFhello"), (Ids{259, 0xFF, 259}));
  EXPECT_EQ(tokenizer.encode("\xE2\x82"), (Ids{0xE2, 0x82}));
  EXPECT_EQ(tokenizer.encode("\xC3\xA9\xC3"), (Ids{261, 0xC3}));
  EXPECT_EQ(tokenizer.encode("\xED\xA0\x80"), (Ids{0xED, 0xA0, 0x80}));
}

TEST(Tokenizer, KnowsItsTokens) {
  const Tokenizer tokenizer = make(test::small_tokenizer());
  EXPECT_EQ(tokenizer.vocabulary_size(), 264);
  EXPECT_EQ(tokenizer.find_token("<|end|>"), 262);
  EXPECT_EQ(tokenizer.find_token("hello"), 259);
  EXPECT_EQ(tokenizer.find_token("nothing"), std::nullopt);
  EXPECT_TRUE(tokenizer.is_special(262));
  for (const int32_t token : {263, 259, 0, -1, 264, INT32_MAX, INT32_MIN}) EXPECT_FALSE(tokenizer.is_special(token));
  EXPECT_EQ(tokenizer.token_bytes(260), " w");
  EXPECT_EQ(tokenizer.token_bytes(262), "<|end|>");
  EXPECT_EQ(tokenizer.encode(""), Ids{});
  EXPECT_EQ(tokenizer.encode("hello<|end|>world<tool><too"),
            (Ids{259, 262, 'w', 'o', 'r', 'l', 'd', 263, '<', 't', 'o', 'o'}));
  for (const int32_t token : {-1, 264, INT32_MAX, INT32_MIN})
    expect_refusal([&] { tokenizer.decode(Ids{token}); }, "token: expected an id", fmt::format("got {}", token));
}

TEST(Tokenizer, StreamHoldsBackHalfCharacters) {
  const Tokenizer tokenizer = make(test::small_tokenizer());
  TextStream stream(tokenizer);
  EXPECT_EQ(stream.push('a'), "a");
  for (const int32_t byte : {0xF0, 0x9F, 0x98}) EXPECT_EQ(stream.push(byte), "");
  EXPECT_EQ(stream.push(0x80), "\xF0\x9F\x98\x80");
  EXPECT_EQ(stream.push(0xC3), "");
  EXPECT_EQ(stream.push(261), "\xC3\xC3\xA9");
  EXPECT_EQ(stream.push(0xE2), "");
  EXPECT_EQ(stream.push('b'),
            "\xE2"
            "b");
  EXPECT_EQ(stream.push(0x82), "\x82");
  EXPECT_EQ(stream.push(0xE2), "");
  EXPECT_EQ(stream.push(0x82), "");
  EXPECT_EQ(stream.finish(), "\xE2\x82");
  EXPECT_EQ(stream.finish(), "");
  EXPECT_EQ(stream.push(0xAC), "\xAC");
  expect_refusal([&] { stream.push(264); }, "got 264");
}

TEST(Tokenizer, ThreadsShareOne) {
  const Tokenizer tokenizer = fixture_tokenizer("qwen35");
  const std::vector<Case> cases = cases_of("qwen35");
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread)
    threads.emplace_back([&] {
      for (const Case& one : cases) wrong += tokenizer.encode(one.text) != one.ids;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// A megabyte without a break takes about a second under the sanitizers; quadratic time would take hours.
TEST(Tokenizer, LongWordsTakeNoQuadraticTime) {
  const Tokenizer tokenizer = fixture_tokenizer("qwen2");
  const Tokenizer normalizing = fixture_tokenizer("qwen35");
  std::string marks = "a";
  for (int i = 0; i < 100000; ++i) marks += i % 2 == 0 ? "\u0301" : "\u0323";
  std::string tibetan = "a";
  for (int i = 0; i < 100000; ++i) tibetan += "\u0F73";
  for (const std::string& text :
       {std::string(1 << 20, 'a'), std::string(1 << 20, ' '), std::string(1 << 20, '\n'), std::string(1 << 20, '\xFF'),
        std::string(1 << 20, '<'), std::string(1 << 20, ' ') + "x", marks, tibetan}) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
    EXPECT_FALSE(normalizing.encode(text).empty());
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  }
}

TEST(Tokenizer, RefusesDocumentsWithoutANeededPart) {
  const auto without = [](const char* pointer) {
    json document = test::small_tokenizer();
    const json::json_pointer place(pointer);
    document.at(place.parent_pointer()).erase(place.back());
    return document;
  };
  const struct {
    const char* part;
    const char* line;
  } cases[] = {
      {"/model", "tokenizer.json: model: expected an object, got nothing"},
      {"/model/vocab", "tokenizer.json: model.vocab: expected an object, got nothing"},
      {"/model/merges", "tokenizer.json: model.merges: expected an array, got nothing"},
      {"/model/vocab/a", "model.vocab: expected a token for every byte, got none for byte 97"},
      {"/model/vocab/hello", "model.merges[3]: expected tokens of the vocabulary, got \"hello\""},
      {"/pre_tokenizer", "pre_tokenizer: expected an object, got nothing"},
      {"/pre_tokenizer/type", "pre_tokenizer.type: expected a string, got nothing"},
      {"/pre_tokenizer/pretokenizers", "pre_tokenizer.pretokenizers: expected an array, got nothing"},
      {"/pre_tokenizer/pretokenizers/0/pattern", "pre_tokenizer.pretokenizers[0].pattern: expected an object"},
      {"/pre_tokenizer/pretokenizers/0/pattern/Regex", "pretokenizers[0].pattern.Regex: expected a string"},
      {"/pre_tokenizer/pretokenizers/0/behavior", "pretokenizers[0].behavior: expected a string"},
      {"/decoder", "decoder: expected an object, got nothing"},
      {"/added_tokens/0/id", "added_tokens[0].id: expected an integer"},
      {"/added_tokens/0/content", "added_tokens[0].content: expected a string"},
  };
  for (const auto& one : cases) expect_refusal([&] { make(without(one.part)); }, one.line);
  json document = test::small_tokenizer();
  document["pre_tokenizer"]["pretokenizers"].erase(1);
  expect_refusal([&] { make(document); }, "expected ByteLevel as its last step, got none");
  EXPECT_NO_THROW(make(without("/added_tokens")));
  EXPECT_NO_THROW(make(without("/normalizer")));
}

TEST(Tokenizer, RefusesWhatIsNotSupported) {
  const struct {
    const char* pointer;
    const char* value;
    const char* line;
  } cases[] = {
      {"/model/type", "\"WordPiece\"", "model.type: expected \"BPE\" (nothing else is supported), got \"WordPiece\""},
      {"/model/dropout", "0.1", "model.dropout: expected a number in 0 .. 0, got 0.1"},
      {"/model/byte_fallback", "true", "model.byte_fallback: expected false"},
      {"/model/continuing_subword_prefix", "\"##\"", "continuing_subword_prefix: expected none"},
      {"/model/end_of_word_suffix", "\"</w>\"", "end_of_word_suffix: expected none"},
      {"/model/ignore_merges", "1", "ignore_merges: expected true or false, got 1"},
      {"/model/vocab", "{}", "model.vocab: expected 1 .. 4194304 tokens, got 0"},
      {"/model/vocab/hello", "-1", "model.vocab: expected ids in 0 .. 4357 for 262 tokens, got -1 for \"hello\""},
      {"/model/vocab/hello", "2147483647", "got 2147483647 for \"hello\""},
      {"/model/vocab/hello", "18446744073709551615", "got 18446744073709551615 for \"hello\""},
      {"/model/vocab/hello", "259.0", "got 259.0 for \"hello\""},
      {"/model/vocab/hello", "256", "model.vocab: expected each id once, got 256 again"},
      {"/model/merges/0", "\"he\"", "model.merges: expected two tokens"},
      {"/model/merges/0", "\"h e l\"", "model.merges: expected two tokens"},
      {"/model/merges/0", "[\"h\"]", "model.merges: expected two tokens"},
      {"/model/merges/0", "[\"h\", 1]", "model.merges: expected two tokens"},
      {"/model/merges/0", "\"h x\"", "model.merges[0]: expected tokens of the vocabulary, got \"hx\""},
      {"/model/merges/0", "\"xx y\"", "model.merges[0]: expected tokens of the vocabulary, got \"xx\""},
      {"/normalizer", "{\"type\":\"NFKC\"}", "normalizer.type: expected \"NFC\""},
      {"/normalizer", "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Lowercase\"}]}",
       "normalizer.normalizers[0].type: expected \"NFC\""},
      {"/normalizer", "{\"type\":\"Sequence\"}", "normalizer.normalizers: expected an array"},
      {"/pre_tokenizer/type", "\"Whitespace\"", "pre_tokenizer.type: expected ByteLevel or a Sequence"},
      {"/pre_tokenizer/pretokenizers/0/type", "\"Digits\"", "pretokenizers[0].type: expected Split or ByteLevel"},
      {"/pre_tokenizer/pretokenizers/0/type", "\"ByteLevel\"", "pretokenizers[1]: expected nothing after ByteLevel"},
      {"/pre_tokenizer/pretokenizers/0/behavior", "\"MergedWithNext\"", "behavior: expected Isolated or Removed"},
      {"/pre_tokenizer/pretokenizers/0/pattern/Regex", "\"(\"", "pattern.Regex: expected a valid pattern"},
      {"/decoder/type", "\"WordPiece\"", "decoder.type: expected \"ByteLevel\""},
      {"/post_processor", "{\"type\":\"BertProcessing\"}", "post_processor.type: expected ByteLevel"},
      {"/post_processor",
       R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}]})",
       "post_processor.single: expected the text alone"},
      {"/post_processor",
       R"({"type":"Sequence","processors":[{"type":"ByteLevel"},{"type":"TemplateProcessing","single":[]}]})",
       "post_processor.processors[1].single: expected the text alone"},
      {"/added_tokens/0/content", "\"\"", "added_tokens[0].content: expected 1 .. 1024 bytes, got 0"},
      {"/added_tokens/1/content", "\"<|end|>\"", "added_tokens[1].content: expected a text of its own"},
      {"/added_tokens/0/id", "259", "added_tokens[0]: expected an id of its own, got 259"},
      {"/added_tokens/0/id", "-1", "added_tokens[0].id: expected an integer"},
      {"/added_tokens/0/id", "2147483647", "added_tokens[0]: expected an id in 0 .. 4357, got 2147483647"},
      {"/added_tokens/0/content", "\"hello\"",
       "added_tokens[0]: expected the id 259, which the vocabulary has, got 262"},
      {"/added_tokens/0/special", "\"yes\"", "added_tokens[0].special: expected true or false"},
      {"/added_tokens", "{}", "added_tokens: expected an array"},
  };
  for (const auto& one : cases) {
    json document = test::small_tokenizer();
    document[json::json_pointer(one.pointer)] = json::parse(one.value);
    expect_refusal([&] { make(document); }, "tokenizer.json: ", one.line);
  }
  json document = test::small_tokenizer();
  document["added_tokens"][0] = {{"id", 32}, {"content", test::byte_name(' ')}};
  expect_refusal([&] { make(document); }, "expected a text that the vocabulary does not use for other bytes");
  expect_refusal([] { Tokenizer("", "tokenizer.json"); }, "tokenizer.json: expected JSON");
  expect_refusal([] { Tokenizer("[]", "tokenizer.json"); }, "tokenizer.json: expected an object");
  const test::TemporaryDirectory directory;
  expect_refusal([&] { read_tokenizer(directory.path()); }, directory.path("tokenizer.json"), "No such file");
  directory.write("tokenizer.json", test::small_tokenizer().dump());
  EXPECT_EQ(read_tokenizer(directory.path()).encode("hello"), Ids{259});
}

TEST(Tokenizer, RefusesTextsThatNoLimitAllows) {
  json document = test::small_tokenizer();
  document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?:(?:a+)+)+b";
  const Tokenizer tokenizer = make(document);
  EXPECT_EQ(tokenizer.encode("aab"), (Ids{'a', 'a', 'b'}));
  expect_refusal([&] { tokenizer.encode(std::string(98, 'a') + "-b"); }, "pattern.Regex", "100 bytes", "limit");
}

}  // namespace
}  // namespace replayssm
