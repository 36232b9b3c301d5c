#include "replayssm/core/json.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

using nlohmann::json;

// `text` on one line and not longer than a line should be.
std::string shortened(std::string_view text) {
  constexpr size_t kLongest = 48;
  std::string line;
  for (const char letter : text.substr(0, kLongest)) line += static_cast<unsigned char>(letter) < 0x20 ? '?' : letter;
  return text.size() > kLongest ? line + "..." : line;
}

// Builds the document from the parser's events, so that limits hold while it grows.
class DocumentBuilder : public nlohmann::json_sax<json> {
 public:
  explicit DocumentBuilder(std::string_view source) : source_(source) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    const auto [place, is_new] = open_.back()->get_ref<json::object_t&>().emplace(std::move(name), nullptr);
    require(is_new, "{}: expected each key once, got '{}' twice", source_, shortened(place->first));
    field_ = &place->second;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    if (error.id == 406)
      fail("{}: expected numbers within a double's range, got one past it (byte {})", source_, position);
    fail("{}: expected JSON, got something else at byte {}", source_, position);
  }

  json take() { return std::move(document_); }

 private:
  template <typename Value>
  bool put(Value&& value) {
    place() = std::forward<Value>(value);
    return true;
  }

  // Where the next value goes.
  json& place() {
    require(++values_ <= kMaxJsonValues, "{}: expected at most {} values, got more", source_, kMaxJsonValues);
    if (open_.empty()) return document_;
    if (open_.back()->is_object()) return *field_;
    return open_.back()->get_ref<json::array_t&>().emplace_back();
  }

  bool open(json&& container) {
    require(static_cast<int>(open_.size()) < kMaxJsonDepth, "{}: expected JSON nested at most {} deep, got deeper",
            source_, kMaxJsonDepth);
    json& value = place();
    value = std::move(container);
    open_.push_back(&value);
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view source_;
  json document_;
  size_t values_ = 0;
  json* field_ = nullptr;
  // No container that holds an open one grows before that one is closed, so these stay valid.
  std::vector<json*> open_;
};

// `text` with every bare Infinity replaced by the string "inf" and spaces: places keep their number.
std::string quote_infinities(std::string_view text) {
  constexpr std::string_view kBare = "Infinity", kQuoted = "\"inf\"   ";
  static_assert(kBare.size() == kQuoted.size());
  std::string quoted(text);
  bool is_string = false;
  for (size_t i = 0; i < quoted.size(); ++i) {
    if (quoted[i] == '"') {
      is_string = !is_string;
    } else if (is_string) {
      i += quoted[i] == '\\';
    } else if (text.substr(i, kBare.size()) == kBare && (i == 0 || text[i - 1] != '-')) {
      quoted.replace(i, kBare.size(), kQuoted);
      i += kBare.size() - 1;
    }
  }
  return quoted;
}

}  // namespace

json parse_json(std::string_view text, std::string_view source) {
  require(text.size() <= kMaxJsonBytes, "{}: expected at most {} bytes of JSON, got {}", source, kMaxJsonBytes,
          text.size());
  // The parser takes a zero byte for the end of the text.
  const size_t zero = text.find('\0');
  require(zero == std::string_view::npos, "{}: expected JSON, got something else at byte {}", source, zero);
  DocumentBuilder builder(source);
  if (text.find("Infinity") == std::string_view::npos) {
    json::sax_parse(text.begin(), text.end(), &builder);
  } else {
    const std::string quoted = quote_infinities(text);
    json::sax_parse(quoted.begin(), quoted.end(), &builder);
  }
  return builder.take();
}

std::string describe(const json& value) {
  switch (value.type()) {
    case json::value_t::object:
      return fmt::format("an object of {}", value.size());
    case json::value_t::array:
      return fmt::format("an array of {}", value.size());
    case json::value_t::string:
      return fmt::format("\"{}\"", shortened(value.get_ref<const std::string&>()));
    default:
      return value.dump();
  }
}

JsonObject::JsonObject(const json& value, std::string name) : value_(&value), name_(std::move(name)) {
  require(value.is_object(), "{}: expected an object, got {}", name_, describe(value));
}

const json* JsonObject::find(std::string_view field) const {
  const auto found = value_->find(field);
  return found == value_->end() || found->is_null() ? nullptr : &*found;
}

const json& JsonObject::at(std::string_view field, std::string_view expected) const {
  const json* value = find(field);
  require(value != nullptr, "{}: expected {}, got nothing", name_of(field), expected);
  return *value;
}

int64_t JsonObject::integer(std::string_view field, int64_t low, int64_t high) const {
  const std::string expected = fmt::format("an integer in {} .. {}", low, high);
  const json& value = at(field, expected);
  const bool is_signed = value.is_number_integer() && !value.is_number_unsigned();
  const bool fits = is_signed ? value.get<int64_t>() >= low && value.get<int64_t>() <= high
                              : value.is_number_unsigned() && high >= 0 &&
                                    value.get<uint64_t>() <= static_cast<uint64_t>(high) &&
                                    static_cast<int64_t>(value.get<uint64_t>()) >= low;
  require(fits, "{}: expected {}, got {}", name_of(field), expected, describe(value));
  return value.get<int64_t>();
}

int64_t JsonObject::integer(std::string_view field, int64_t low, int64_t high, int64_t fallback) const {
  return has(field) ? integer(field, low, high) : fallback;
}

double JsonObject::number(std::string_view field, double low, double high) const {
  const std::string expected = fmt::format("a number in {} .. {}", low, high);
  const json& value = at(field, expected);
  const bool fits = value.is_number() && value.get<double>() >= low && value.get<double>() <= high;
  require(fits, "{}: expected {}, got {}", name_of(field), expected, describe(value));
  return value.get<double>();
}

double JsonObject::number(std::string_view field, double low, double high, double fallback) const {
  return has(field) ? number(field, low, high) : fallback;
}

bool JsonObject::boolean(std::string_view field, bool fallback) const {
  const json* value = find(field);
  if (value == nullptr) return fallback;
  require(value->is_boolean(), "{}: expected true or false, got {}", name_of(field), describe(*value));
  return value->get<bool>();
}

std::string JsonObject::string(std::string_view field) const {
  const json& value = at(field, "a string");
  require(value.is_string(), "{}: expected a string, got {}", name_of(field), describe(value));
  return value.get<std::string>();
}

std::string JsonObject::string(std::string_view field, std::string_view fallback) const {
  return has(field) ? string(field) : std::string(fallback);
}

JsonObject JsonObject::object(std::string_view field) const {
  return {at(field, "an object"), name_of(field)};
}

const json& JsonObject::array(std::string_view field) const {
  const json& value = at(field, "an array");
  require(value.is_array(), "{}: expected an array, got {}", name_of(field), describe(value));
  return value;
}

std::string JsonObject::name_of(std::string_view field) const {
  const bool is_file = name_.find(": ") == std::string::npos;
  return fmt::format("{}{}{}", name_, is_file ? ": " : ".", field);
}

}  // namespace replayssm
