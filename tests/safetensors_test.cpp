// Safetensors: what is written is read back, and every malformed header is refused with a line that says why.
#include "replayssm/core/safetensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "replayssm/core/bf16.h"
#include "replayssm/core/fp16.h"
#include "tests/bad_input.h"

namespace replayssm {
namespace {

using test::expect_refusal;

std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}

SafetensorsContents parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "file");
}

std::string refusal_of(const std::string& header, size_t data_bytes) {
  const std::string file = file_of(header, std::string(data_bytes, 'd'));
  return test::refusal([&] { parse(file); });
}

TEST(Safetensors, WrittenFilesAreReadBack) {
  const test::TemporaryDirectory directory;
  const std::string bytes(64, 'q');
  const auto span = [&](size_t count) { return std::as_bytes(std::span(bytes.data(), count)); };
  const std::vector<Tensor> tensors = {{"flag", Dtype::kBool, {3}, span(3)},
                                       {"half", Dtype::kBF16, {2, 1, 4}, span(16)},
                                       {"none", Dtype::kF32, {0, 7}, span(0)},
                                       {"wide \"ü\"\n", Dtype::kI64, {}, span(8)},
                                       {"nibbles", Dtype::kF4, {6}, span(3)}};
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"note", "ü\n"}};
  write_safetensors(directory.path("file"), tensors, metadata);
  EXPECT_EQ(directory.entries(), 1u);
  const SafetensorsFile file(directory.path("file"));
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (const Tensor& expected : tensors) {
    const Tensor* given = file.find(expected.name);
    ASSERT_NE(given, nullptr);
    EXPECT_EQ(given->dtype, expected.dtype);
    EXPECT_EQ(given->shape, expected.shape);
    ASSERT_EQ(given->bytes.size(), expected.bytes.size());
    EXPECT_EQ(std::memcmp(given->bytes.data(), expected.bytes.data(), given->bytes.size()), 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(given->bytes.data()) % std::max(1, dtype_bits(given->dtype) / 8), 0u);
  }
  EXPECT_EQ(file.find("flag")->elements(), 3);
  EXPECT_EQ(file.find("wide \"ü\"\n")->elements(), 1);
  EXPECT_EQ(file.find("other"), nullptr);
  write_safetensors(directory.path("nothing"), {});
  EXPECT_TRUE(SafetensorsFile(directory.path("nothing")).tensors().empty());
}

TEST(Safetensors, EveryDtypeHasItsNameAndSize) {
  for (int i = 0; i <= static_cast<int>(Dtype::kC64); ++i) {
    const Dtype dtype = static_cast<Dtype>(i);
    const std::string header = fmt::format(R"({{"a":{{"dtype":"{}","shape":[8],"data_offsets":[0,{}]}}}})",
                                           dtype_name(dtype), dtype_bits(dtype));
    EXPECT_EQ(parse(file_of(header, std::string(dtype_bits(dtype), 'd'))).tensors.at(0).dtype, dtype);
  }
  EXPECT_EQ(dtype_name(Dtype::kBF16), "BF16");
  EXPECT_EQ(dtype_bits(Dtype::kF64), 64);
}

TEST(Safetensors, ReadsMisalignedNumbers) {
  const std::string header = R"({"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("f32":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},)"
                             R"("bf16":{"dtype":"BF16","shape":[2],"data_offsets":[9,13]},)"
                             R"("f16":{"dtype":"F16","shape":[2],"data_offsets":[13,17]},)"
                             R"("f64":{"dtype":"F64","shape":[2],"data_offsets":[17,33]}})";
  std::string data = "p";
  const auto append = [&](auto value) { data.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  append(1.5f), append(-2.0f);
  append(to_bf16(1.5f)), append(to_bf16(-2.0f));
  append(uint16_t{0x3E00}), append(uint16_t{0xC000});
  append(1.5), append(-2.0);
  const std::string file = file_of(header, data);
  const SafetensorsContents contents = parse(file);
  ASSERT_EQ(contents.tensors.size(), 5u);
  for (const Tensor& tensor : contents.tensors) {
    std::vector<float> values(2);
    if (tensor.name == "pad") {
      expect_refusal([&] { read_floats(tensor, std::span(values).first(1)); }, "tensor pad", "BF16", "got U8");
      continue;
    }
    read_floats(tensor, values);
    EXPECT_EQ(values, (std::vector<float>{1.5f, -2.0f})) << tensor.name;
    expect_refusal([&] { read_floats(tensor, std::span(values).first(1)); }, "room for 2 elements, got 1");
  }
}

TEST(Safetensors, HalvesConvertExactly) {
  const auto value = [](uint16_t bits) { return to_float(Fp16{bits}); };
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const double exponent = static_cast<double>(bits >> 10), fraction = static_cast<double>(bits & 0x3FF);
    const double expected = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, bits / 1024 - 25);
    EXPECT_EQ(value(bits), expected) << bits;
    EXPECT_EQ(value(bits | 0x8000), -expected) << bits;
    EXPECT_TRUE(std::signbit(value(bits | 0x8000)));
  }
  EXPECT_EQ(value(0x7C00), INFINITY);
  EXPECT_EQ(value(0xFC00), -INFINITY);
  EXPECT_TRUE(std::isnan(value(0x7C01)));
  EXPECT_TRUE(std::isnan(value(0xFE00)));
}

TEST(Safetensors, RefusesBrokenFrames) {
  expect_refusal([] { parse(""); }, "file: expected a safetensors file, got 0 bytes");
  expect_refusal([] { parse("1234567"); }, "got 7 bytes (truncated)");
  expect_refusal([] { parse(std::string("\x03\0\0\0\0\0\0\0{}", 10)); }, "header of 3 bytes, got 2 (truncated)");
  expect_refusal([] { parse(std::string("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10)); }, "at most 100000000 bytes",
                 "got 18446744073709551615");
  expect_refusal([] { parse(std::string("\x01\xE1\xF5\x05\0\0\0\0{}", 10)); }, "got 100000001");
  expect_refusal([] { parse(file_of("", "")); }, "opens with '{'");
  expect_refusal([] { parse(file_of(" {}", "")); }, "opens with '{'");
  expect_refusal([] { parse(file_of("[]", "")); }, "opens with '{'");
  expect_refusal([] { parse(file_of("{\"a\":", "")); }, "file: header: expected JSON");
  expect_refusal([] { parse(file_of("{} {}", "")); }, "file: header: expected JSON");
  expect_refusal([] { parse(file_of("{\"a\":" + std::string(100000, '['), "")); }, "nested at most");
  expect_refusal([] { parse(file_of("{}", "x")); }, "expected 0 bytes of data, got 1");
  EXPECT_NO_THROW(parse(file_of("{}   ", "")));
}

TEST(Safetensors, RefusesBrokenEntries) {
  const struct {
    const char* entry;
    const char* line;
  } cases[] = {
      {R"([])", "tensor \"a\": expected an object"},
      {R"({"shape":[2],"data_offsets":[0,8]})", "dtype: expected a string, got nothing"},
      {R"({"dtype":"F32","data_offsets":[0,8]})", "shape: expected an array, got nothing"},
      {R"({"dtype":"F32","shape":[2]})", "data_offsets: expected an array, got nothing"},
      {R"({"dtype":"F33","shape":[2],"data_offsets":[0,8]})", "got \"F33\""},
      {R"({"dtype":7,"shape":[2],"data_offsets":[0,8]})", "dtype: expected a string, got 7"},
      {R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})", "shape: expected an array, got 2"},
      {R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", "shape: expected integers in 0 .. 2^63 - 1, got -2"},
      {R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})", "got 2.0"},
      {R"({"dtype":"F32","shape":["2"],"data_offsets":[0,8]})", "got \"2\""},
      {R"({"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,8]})", "shape: expected integers"},
      {R"({"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8]})", "shape: expected integers"},
      {R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]})", "fits 64 bits"},
      {R"({"dtype":"F32","shape":[2305843009213693954],"data_offsets":[0,8]})", "fits 64 bits"},
      {R"({"dtype":"F4","shape":[3],"data_offsets":[0,8]})", "whole bytes"},
      {R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})", "expected 12 bytes for F32 [3], got 8"},
      {R"({"dtype":"F32","shape":[1],"data_offsets":[0,8]})", "expected 4 bytes for F32 [1], got 8"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[0,9]})", "got [0, 9]"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})", "got [8, 0]"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[-8,0]})", "got -8"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[0]})", "expected [begin, end], got an array of 1"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[0,8,8]})", "got an array of 3"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[0,8.0]})", "got 8.0"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,0]})", "data_offsets: expected integers"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"strides":[1]})", "got \"strides\""},
      {R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})", "expected data without holes"},
      {R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})", "expected 4 bytes of data, got 8"},
  };
  for (const auto& one : cases) {
    const std::string line = refusal_of(fmt::format(R"({{"a":{}}})", one.entry), 8);
    EXPECT_NE(line.find(one.line), std::string::npos) << one.entry << ": " << line;
    EXPECT_EQ(line.find("file: "), 0u) << line;
  }
  EXPECT_NO_THROW(parse(file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678")));
}

TEST(Safetensors, RefusesNamesTwiceOverlapsAndHoles) {
  const auto entry = [](const char* name, int begin, int end) {
    return fmt::format(R"("{}":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}})", name, end - begin, begin, end);
  };
  const auto line = [&](std::initializer_list<std::string> entries) {
    return refusal_of(fmt::format("{{{}}}", fmt::join(entries, ",")), 8);
  };
  EXPECT_NE(line({entry("a", 0, 4), entry("a", 4, 8)}).find("'a' twice"), std::string::npos);
  EXPECT_NE(line({entry("a", 0, 5), entry("b", 4, 8)}).find("\"b\": expected no overlap"), std::string::npos);
  EXPECT_NE(line({entry("a", 0, 8), entry("b", 0, 8)}).find("expected no overlap"), std::string::npos);
  EXPECT_NE(line({entry("a", 0, 8), entry("b", 4, 4)}).find("expected no overlap"), std::string::npos);
  EXPECT_NE(line({entry("a", 0, 3), entry("b", 4, 8)}).find("\"b\": expected data without holes"), std::string::npos);
  EXPECT_NE(line({entry("b", 1, 8)}).find("without holes"), std::string::npos);
  EXPECT_NE(line({entry("b", 0, 7)}).find("expected 7 bytes of data, got 8"), std::string::npos);
  const std::string whole = fmt::format("{{{},{},{}}}", entry("b", 4, 8), entry("a", 0, 4), entry("c", 8, 8));
  EXPECT_EQ(parse(file_of(whole, "12345678")).tensors.at(1).name, "b");
}

TEST(Safetensors, RefusesMetadataThatIsNotStrings) {
  EXPECT_NE(refusal_of(R"({"__metadata__":[]})", 0).find("__metadata__: expected an object"), std::string::npos);
  EXPECT_NE(refusal_of(R"({"__metadata__":{"a":1}})", 0).find("__metadata__.a: expected strings, got 1"),
            std::string::npos);
  EXPECT_NE(refusal_of(R"({"__metadata__":{"a":"1","a":"1"}})", 0).find("'a' twice"), std::string::npos);
}

TEST(Safetensors, WriterRefusesWhatReadersWould) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path("file");
  const std::string bytes(8, 'x');
  const auto write = [&](std::vector<Tensor> tensors, std::map<std::string, std::string> metadata = {}) {
    write_safetensors(path, tensors, metadata);
  };
  const std::span<const std::byte> data = std::as_bytes(std::span(bytes));
  expect_refusal([&] { write({{"a", Dtype::kF32, {3}, data}}); }, "tensor a", "F32 [3]", "got 8");
  expect_refusal([&] { write({{"a", Dtype::kF32, {-2}, data}}); }, "F32 [-2]");
  expect_refusal([&] { write({{"a", Dtype::kF4, {17}, data}}); }, "F4 [17]");
  expect_refusal([&] { write({{"a", Dtype::kU8, {8}, data}, {"a", Dtype::kU8, {8}, data}}); }, "'a' again");
  expect_refusal([&] { write({{"__metadata__", Dtype::kU8, {8}, data}}); }, "__metadata__");
  expect_refusal([&] { write({{"\xFF", Dtype::kU8, {8}, data}}); }, "UTF-8");
  expect_refusal([&] { write({}, {{"a", "\xFF"}}); }, "UTF-8");
  EXPECT_EQ(directory.entries(), 0u);
  expect_refusal([&] { write_safetensors(directory.path("none/file"), {}); }, "none/file");
}

TEST(Safetensors, FilesAreNamedInErrors) {
  const test::TemporaryDirectory directory;
  expect_refusal([&] { SafetensorsFile(directory.path("none")); }, directory.path("none"));
  expect_refusal([&] { SafetensorsFile(directory.write("cut", "123")); }, directory.path("cut"), "truncated");
}

}  // namespace
}  // namespace replayssm
