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
  matrix.inputs = ranges[0].tensor->shape.back();
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
  count_numbers({static_cast<double>(matrix.outputs), static_cast<double>(matrix.inputs)});
  add_to_hash(std::as_bytes(std::span(matrix.bf16.data(), matrix.bf16.size())));
  add_to_hash(std::as_bytes(std::span(matrix.f32.data(), matrix.f32.size())));
  bytes_ += matrix.bytes();
  return matrix;
}

FeedForwardWeights WeightLoader::feed_forward(const std::string& name, Activation activation, int64_t size,
                                              int64_t width) {
  std::vector<RowRange> up;
  if (activation == Activation::kSwiGlu) up.push_back(all_rows(name + "gate_proj.weight", size, width));
  up.push_back(all_rows(name + "up_proj.weight", size, width));
  return {matrix(up), matrix({all_rows(name + "down_proj.weight", width, size)})};
}

std::vector<FeedForwardWeights> WeightLoader::experts(const std::string& name, const ExpertsConfig& config,
                                                      int64_t width) {
  std::vector<FeedForwardWeights> experts;
  const bool is_gated = config.activation == Activation::kSwiGlu;
  const std::string up_name = name + (is_gated ? "gate_up_proj" : "up_proj"), down_name = name + "down_proj";
  if (checkpoint_.find(up_name) == nullptr && checkpoint_.find(down_name) == nullptr) {
    for (int e = 0; e < config.experts; ++e)
      experts.push_back(feed_forward(fmt::format("{}{}.", name, e), config.activation, config.size, width));
    return experts;
  }
  const int64_t rows = is_gated ? 2 * int64_t{config.size} : config.size;
  const Tensor& up = tensor(up_name, {config.experts, rows, width});
  const Tensor& down = tensor(down_name, {config.experts, width, config.size});
  for (int64_t e = 0; e < config.experts; ++e)
    experts.push_back({matrix({{&up, e * rows, rows}}), matrix({{&down, e * width, width}})});
  return experts;
}

void WeightLoader::refuse_more_layers(const std::string& name, int layers) const {
  require(checkpoint_.find(name) == nullptr, "{}: expected {} layers (num_hidden_layers), got more", name, layers);
}

void WeightLoader::count_numbers(std::initializer_list<double> numbers) {
  add_to_hash(std::as_bytes(std::span(numbers.begin(), numbers.size())));
}

std::string WeightLoader::fingerprint() const {
  return fmt::format("{:016x}", XXH3_64bits_digest(hash_.get()));
}

}  // namespace replayssm
