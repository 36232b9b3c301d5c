// The safetensors format: named arrays in one file.
//
// A file is  u64 n (little endian) | n bytes of JSON | data.  The JSON object maps each tensor's name to its dtype,
// shape and data_offsets [begin, end) within `data`, which the tensors cover without holes or overlaps; "__metadata__"
// maps strings to strings. Source: the format's description at github.com/huggingface/safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "replayssm/core/mapped_file.h"

namespace replayssm {

enum class Dtype {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E5M2FNUZ,
  kF8E4M3FNUZ,
  kF8E8M0,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
  kC64,
};

// "BF16", "F32", ...: the format's own names.
std::string_view dtype_name(Dtype dtype);
int dtype_bits(Dtype dtype);

// "[2560, 9216]".
std::string shape_text(std::span<const int64_t> shape);

// A named array; whoever holds the bytes says how long they live. Rows are contiguous, numbers little endian; `bytes`
// need not be aligned: read through read_floats or memcpy.
struct Tensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;  // each >= 0; empty for a scalar
  std::span<const std::byte> bytes;

  int64_t elements() const;
};

// The elements of an F32, F16, BF16 or F64 tensor as FP32 (F64 rounded to nearest, the others exact). Throws Error for
// any other dtype and unless out.size() is the tensor's number of elements.
void read_floats(const Tensor& tensor, std::span<float> out);

// What a file holds: its tensors in the order of their data, and its metadata.
struct SafetensorsContents {
  std::vector<Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

// The longest header accepted, as in the format's reference implementation.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

// Reads the header of a whole file's bytes. The tensors' bytes lie within `file`. Throws Error, its line opening with
// `source`, for every file that does not follow the format: truncated, header too long or not a JSON object, a name
// twice, an unknown dtype or field, a shape that is negative or overflows, offsets out of range, out of order,
// overlapping, leaving holes or bytes over, or at odds with dtype and shape.
SafetensorsContents parse_safetensors(std::span<const std::byte> file, std::string_view source);

// A safetensors file, mapped.
class SafetensorsFile {
 public:
  // As MappedFile's constructor and parse_safetensors.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<Tensor>& tensors() const { return contents_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return contents_.metadata; }
  // Null if there is none.
  const Tensor* find(std::string_view name) const;

 private:
  MappedFile file_;
  SafetensorsContents contents_;
  std::unordered_map<std::string_view, size_t> index_;
};

// Writes a file that parse_safetensors reads back, whole or not at all (as AtomicFile). Tensors of wider elements come
// first, so that every tensor's data is aligned to its elements. Throws Error if a name is used twice, is
// "__metadata__" or is not UTF-8, if a tensor's bytes do not fit its dtype and shape, or if the file cannot be written.
void write_safetensors(const std::string& path, std::span<const Tensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace replayssm
