// Strict reading of JSON files that strangers wrote: a parser with limits, and objects whose fields are checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace replayssm {

// What parse_json accepts: nesting, bytes of text, and values (a tokenizer of 250,000 tokens has about 10^6).
inline constexpr int kMaxJsonDepth = 32;
inline constexpr size_t kMaxJsonBytes = size_t{128} << 20;
inline constexpr size_t kMaxJsonValues = size_t{1} << 22;

// The document in `text` (UTF-8). Throws Error, its line opening with `source` (a file's name), if the text is not one
// JSON document, names a key twice in one object, nests deeper than kMaxJsonDepth, or has a number that no double
// holds. The memory used is at most in proportion to the text. An infinite number, which Python writes as a bare
// Infinity although JSON has none, is read as the string "inf".
nlohmann::json parse_json(std::string_view text, std::string_view source);

// `value` in a few words for an error line: scalars as they are (long strings shortened), containers by kind and size.
std::string describe(const nlohmann::json& value);

// A JSON object with a name. A reader throws Error "<name>.<field>: expected ..., got ..." when the field is ill-typed
// or out of range or, in the forms without `fallback`, missing; null counts as missing. The object must outlive it.
class JsonObject {
 public:
  // Throws Error unless `value` is an object.
  JsonObject(const nlohmann::json& value, std::string name);

  bool has(std::string_view field) const { return find(field) != nullptr; }
  // Null if missing.
  const nlohmann::json* find(std::string_view field) const;
  const nlohmann::json& at(std::string_view field, std::string_view expected) const;

  int64_t integer(std::string_view field, int64_t low, int64_t high) const;
  int64_t integer(std::string_view field, int64_t low, int64_t high, int64_t fallback) const;
  double number(std::string_view field, double low, double high) const;
  double number(std::string_view field, double low, double high, double fallback) const;
  bool boolean(std::string_view field, bool fallback) const;
  std::string string(std::string_view field) const;
  std::string string(std::string_view field, std::string_view fallback) const;
  JsonObject object(std::string_view field) const;
  const nlohmann::json& array(std::string_view field) const;

  const std::string& name() const { return name_; }
  // "<name>.<field>", or "<name>: <field>" for the fields of a file.
  std::string name_of(std::string_view field) const;
  const nlohmann::json& value() const { return *value_; }

 private:
  const nlohmann::json* value_;
  std::string name_;
};

}  // namespace replayssm
