#include "replayssm/core/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "replayssm/core/atomic_file.h"
#include "replayssm/core/bf16.h"
#include "replayssm/core/error.h"
#include "replayssm/core/fp16.h"
#include "replayssm/core/json.h"

namespace replayssm {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little endian");

constexpr size_t kLengthBytes = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  int bits;
};

constexpr DtypeRow kDtypes[] = {
    {Dtype::kBool, "BOOL", 8},
    {Dtype::kF4, "F4", 4},
    {Dtype::kF6E2M3, "F6_E2M3", 6},
    {Dtype::kF6E3M2, "F6_E3M2", 6},
    {Dtype::kU8, "U8", 8},
    {Dtype::kI8, "I8", 8},
    {Dtype::kF8E5M2, "F8_E5M2", 8},
    {Dtype::kF8E4M3, "F8_E4M3", 8},
    {Dtype::kF8E5M2FNUZ, "F8_E5M2FNUZ", 8},
    {Dtype::kF8E4M3FNUZ, "F8_E4M3FNUZ", 8},
    {Dtype::kF8E8M0, "F8_E8M0", 8},
    {Dtype::kU16, "U16", 16},
    {Dtype::kI16, "I16", 16},
    {Dtype::kF16, "F16", 16},
    {Dtype::kBF16, "BF16", 16},
    {Dtype::kU32, "U32", 32},
    {Dtype::kI32, "I32", 32},
    {Dtype::kF32, "F32", 32},
    {Dtype::kU64, "U64", 64},
    {Dtype::kI64, "I64", 64},
    {Dtype::kF64, "F64", 64},
    {Dtype::kC64, "C64", 64},
};

const DtypeRow& row_of(Dtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)];
}

// The bytes of a tensor; nothing if the shape has a negative size, the count overflows or the last byte is not full.
std::optional<uint64_t> tensor_bytes(Dtype dtype, std::span<const int64_t> shape) {
  uint64_t bits = static_cast<uint64_t>(dtype_bits(dtype));
  for (const int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(bits, static_cast<uint64_t>(size), &bits)) return std::nullopt;
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

// `value` as a number of at most 2^63 - 1, or Error.
int64_t size_of(const json& value, const std::string& name) {
  require(value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX),
          "{}: expected integers in 0 .. 2^63 - 1, got {}", name, describe(value));
  return value.get<int64_t>();
}

Dtype dtype_of(const JsonObject& entry) {
  const std::string name = entry.string("dtype");
  for (const DtypeRow& row : kDtypes)
    if (row.name == name) return row.dtype;
  std::string known;
  for (const DtypeRow& row : kDtypes) known += fmt::format(" {}", row.name);
  fail("{}: expected one of{}, got {}", entry.name_of("dtype"), known, describe(json(name)));
}

std::map<std::string, std::string> parse_metadata(const json& value, std::string_view source) {
  const JsonObject object(value, fmt::format("{}: {}", source, kMetadataKey));
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    require(text.is_string(), "{}: expected strings, got {}", object.name_of(key), describe(text));
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

Tensor parse_entry(const std::string& name, const json& value, std::span<const std::byte> data,
                   std::string_view source) {
  const JsonObject entry(value, fmt::format("{}: tensor {}", source, describe(json(name))));
  for (const auto& [field, unused] : value.items())
    require(field == "dtype" || field == "shape" || field == "data_offsets",
            "{}: expected dtype, shape and data_offsets, got {}", entry.name(), describe(json(field)));
  Tensor tensor{name, dtype_of(entry), {}, {}};
  for (const json& size : entry.array("shape")) tensor.shape.push_back(size_of(size, entry.name_of("shape")));
  const json& offsets = entry.array("data_offsets");
  const std::string offsets_name = entry.name_of("data_offsets");
  require(offsets.size() == 2, "{}: expected [begin, end], got {}", offsets_name, describe(offsets));
  const uint64_t begin = static_cast<uint64_t>(size_of(offsets[0], offsets_name));
  const uint64_t end = static_cast<uint64_t>(size_of(offsets[1], offsets_name));
  require(begin <= end && end <= data.size(), "{}: expected 0 <= begin <= end <= {} (the bytes of data), got [{}, {}]",
          offsets_name, data.size(), begin, end);
  const std::optional<uint64_t> bytes = tensor_bytes(tensor.dtype, tensor.shape);
  require(bytes.has_value(), "{}: expected a shape of whole bytes that fits 64 bits, got {} {}", entry.name(),
          dtype_name(tensor.dtype), shape_text(tensor.shape));
  require(*bytes == end - begin, "{}: expected {} bytes for {} {}, got {}", offsets_name, *bytes,
          dtype_name(tensor.dtype), shape_text(tensor.shape), end - begin);
  tensor.bytes = data.subspan(begin, end - begin);
  return tensor;
}

// Sorts by place in the file and refuses whatever does not cover `data` exactly once.
void check_coverage(std::vector<Tensor>& tensors, std::span<const std::byte> data, std::string_view source) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.bytes.data(), a.bytes.size()) < std::pair(b.bytes.data(), b.bytes.size());
  });
  size_t covered = 0;
  for (const Tensor& tensor : tensors) {
    const size_t begin = static_cast<size_t>(tensor.bytes.data() - data.data());
    require(begin >= covered, "{}: tensor {}: expected no overlap, got data from byte {} where {} are taken", source,
            describe(json(tensor.name)), begin, covered);
    require(begin == covered, "{}: tensor {}: expected data without holes, got none for bytes {} to {}", source,
            describe(json(tensor.name)), covered, begin);
    covered = begin + tensor.bytes.size();
  }
  require(covered == data.size(), "{}: expected {} bytes of data, got {}", source, covered, data.size());
}

}  // namespace

std::string_view dtype_name(Dtype dtype) {
  return row_of(dtype).name;
}
int dtype_bits(Dtype dtype) {
  return row_of(dtype).bits;
}

std::string shape_text(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

void read_floats(const Tensor& tensor, std::span<float> out) {
  require(static_cast<int64_t>(out.size()) == tensor.elements(), "tensor {}: expected room for {} elements, got {}",
          tensor.name, tensor.elements(), out.size());
  const auto read = [&]<typename Element>(Element) {
    for (size_t i = 0; i < out.size(); ++i) {
      Element element;
      std::memcpy(&element, tensor.bytes.data() + i * sizeof(Element), sizeof(Element));
      if constexpr (std::is_arithmetic_v<Element>)
        out[i] = static_cast<float>(element);
      else
        out[i] = to_float(element);
    }
  };
  switch (tensor.dtype) {
    case Dtype::kF32:
      if (!out.empty()) std::memcpy(out.data(), tensor.bytes.data(), out.size_bytes());
      return;
    case Dtype::kBF16:
      return read(Bf16{});
    case Dtype::kF16:
      return read(Fp16{});
    case Dtype::kF64:
      return read(double{});
    default:
      fail("tensor {}: expected F32, F16, BF16 or F64, got {}", tensor.name, dtype_name(tensor.dtype));
  }
}

SafetensorsContents parse_safetensors(std::span<const std::byte> file, std::string_view source) {
  require(file.size() >= kLengthBytes, "{}: expected a safetensors file, got {} bytes (truncated)", source,
          file.size());
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
  require(header_bytes <= kMaxSafetensorsHeaderBytes, "{}: expected a header of at most {} bytes, got {}", source,
          kMaxSafetensorsHeaderBytes, header_bytes);
  require(header_bytes <= file.size() - kLengthBytes, "{}: expected a header of {} bytes, got {} (truncated)", source,
          header_bytes, file.size() - kLengthBytes);
  const std::string_view header(reinterpret_cast<const char*>(file.data()) + kLengthBytes, header_bytes);
  require(header.starts_with('{'), "{}: expected a header that opens with '{{', got another", source);
  const json document = parse_json(header, fmt::format("{}: header", source));
  const std::span<const std::byte> data = file.subspan(kLengthBytes + header_bytes);
  SafetensorsContents contents;
  for (const auto& [name, value] : document.items()) {
    if (name == kMetadataKey)
      contents.metadata = parse_metadata(value, source);
    else
      contents.tensors.push_back(parse_entry(name, value, data, source));
  }
  check_coverage(contents.tensors, data, source);
  return contents;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(path), contents_(parse_safetensors(file_.bytes(), file_.path())) {
  for (size_t i = 0; i < contents_.tensors.size(); ++i) index_[contents_.tensors[i].name] = i;
}

const Tensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &contents_.tensors[found->second];
}

void write_safetensors(const std::string& path, std::span<const Tensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<const Tensor*> order;
  for (const Tensor& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(),
                   [](const Tensor* a, const Tensor* b) { return dtype_bits(a->dtype) > dtype_bits(b->dtype); });
  json header = json::object();
  if (!metadata.empty()) header[std::string(kMetadataKey)] = metadata;
  uint64_t end = 0;
  for (const Tensor* tensor : order) {
    const std::optional<uint64_t> bytes = tensor_bytes(tensor->dtype, tensor->shape);
    require(bytes == tensor->bytes.size(), "{}: tensor {}: expected the bytes of {} {}, got {}", path, tensor->name,
            dtype_name(tensor->dtype), shape_text(tensor->shape), tensor->bytes.size());
    require(tensor->name != kMetadataKey && !header.contains(tensor->name),
            "{}: expected each tensor to have a name of its own, got '{}' again", path, tensor->name);
    const uint64_t begin = std::exchange(end, end + tensor->bytes.size());
    header[tensor->name] = {
        {"dtype", dtype_name(tensor->dtype)}, {"shape", tensor->shape}, {"data_offsets", {begin, end}}};
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception&) {
    fail("{}: expected names and metadata in UTF-8, got other bytes", path);
  }
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  const uint64_t header_bytes = text.size();
  require(header_bytes <= kMaxSafetensorsHeaderBytes, "{}: expected a header of at most {} bytes, got {}", path,
          kMaxSafetensorsHeaderBytes, header_bytes);
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(&header_bytes, 1)));
  file.write(text);
  for (const Tensor* tensor : order) file.write(tensor->bytes);
  file.commit();
}

}  // namespace replayssm
