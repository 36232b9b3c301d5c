#include "replayssm/model/weight_loader.h"

#include <cstring>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

constexpr Dtype kFloatDtypes[] = {Dtype::kBF16, Dtype::kF16, Dtype::kF32};

}  // namespace

WeightLoader::WeightLoader(const Checkpoint& checkpoint)
    : checkpoint_(checkpoint), hash_(XXH3_createState(), XXH3_freeState) {
  require(hash_ != nullptr, "memory: cannot allocate a hash state");
  XXH3_64bits_reset(hash_.get());
}

const Tensor& WeightLoader::tensor(const std::string& name, std::initializer_list<int64_t> shape) const {
  return checkpoint_.require_tensor(name, kFloatDtypes, std::span(shape.begin(), shape.size()));
}

RowRange WeightLoader::all_rows(const std::string& name, int64_t outputs, int64_t inputs) const {
  return {&tensor(name, {outputs, inputs}), 0, outputs};
}

std::vector<RowRange> WeightLoader::part_of_heads(const Tensor& tensor, int heads, int64_t head_rows, int64_t first,
                                                  int64_t count) {
  std::vector<RowRange> ranges;
  for (int head = 0; head < heads; ++head) ranges.push_back({&tensor, head * head_rows + first, count});
  return ranges;
}

Buffer<float> WeightLoader::vector(const std::string& name, std::initializer_list<int64_t> shape) {
  return floats(tensor(name, shape));
}

Buffer<float> WeightLoader::floats(const Tensor& from) {
  Buffer<float> values(static_cast<size_t>(from.elements()));
  read_floats(from, {values.data(), values.size()});
  add_to_hash(std::as_bytes(std::span(values.data(), values.size())));
  bytes_ += values.size() * sizeof(float);
  return values;
}

Buffer<float> WeightLoader::convolution(const std::string& name, int64_t channels, int64_t width) {
  const Buffer<float> rows = floats(tensor(name, {channels, 1, width}));
  Buffer<float> taps(rows.size());
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t i = 0; i < width; ++i) taps[i * channels + c] = rows[c * width + i];
  return taps;
}

Matrix WeightLoader::matrix(const std::vector<RowRange>& ranges) {
  Matrix matrix;
  matrix.inputs = ranges[0].tensor->shape[1];
  bool is_bf16 = true;
  for (const RowRange& range : ranges) {
    matrix.outputs += range.count;
    is_bf16 = is_bf16 && range.tensor->dtype == Dtype::kBF16;
  }
  const size_t elements = static_cast<size_t>(matrix.outputs) * static_cast<size_t>(matrix.inputs);
  if (is_bf16)
    matrix.bf16 = Buffer<Bf16>(elements);
  else
    matrix.f32 = Buffer<float>(elements);
  size_t at = 0;
  for (const RowRange& range : ranges) {
    const size_t row_bytes =
        static_cast<size_t>(matrix.inputs) * static_cast<size_t>(dtype_bits(range.tensor->dtype) / 8);
    const auto bytes = range.tensor->bytes.subspan(static_cast<size_t>(range.first) * row_bytes,
                                                   static_cast<size_t>(range.count) * row_bytes);
    const size_t count = static_cast<size_t>(range.count) * static_cast<size_t>(matrix.inputs);
    if (is_bf16)
      std::memcpy(matrix.bf16.data() + at, bytes.data(), bytes.size());
    else
      read_floats({range.tensor->name, range.tensor->dtype, {range.count, matrix.inputs}, bytes},
                  {matrix.f32.data() + at, count});
    at += count;
  }
  add_to_hash(std::as_bytes(std::span(matrix.bf16.data(), matrix.bf16.size())));
  add_to_hash(std::as_bytes(std::span(matrix.f32.data(), matrix.f32.size())));
  bytes_ += matrix.bytes();
  return matrix;
}

void WeightLoader::count_numbers(std::initializer_list<double> numbers) {
  add_to_hash(std::as_bytes(std::span(numbers.begin(), numbers.size())));
}

std::string WeightLoader::fingerprint() const {
  return fmt::format("{:016x}", XXH3_64bits_digest(hash_.get()));
}

}  // namespace replayssm
