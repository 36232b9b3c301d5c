#include "replayssm/model/weight_loader.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

constexpr Dtype kFloatDtypes[] = {Dtype::kBF16, Dtype::kF16, Dtype::kF32};

bool is_bf16(const RowRange& range) {
  return range.tensor->dtype == Dtype::kBF16;
}

// Rows first .. first+count-1 of a tensor as a tensor of their own.
Tensor rows_of(const Tensor& tensor, int64_t first, int64_t count) {
  const int64_t inputs = tensor.shape.back();
  const auto row_bytes = static_cast<size_t>(inputs) * static_cast<size_t>(dtype_bits(tensor.dtype) / 8);
  return {tensor.name, tensor.dtype, {count, inputs}, tensor.bytes.subspan(first * row_bytes, count * row_bytes)};
}

void round_to(std::span<const float> values, float* to) {
  std::copy(values.begin(), values.end(), to);
}
void round_to(std::span<const float> values, Bf16* to) {
  for (const float value : values) *to++ = to_bf16(value);
}

}  // namespace

template <template <typename> class Array>
WeightLoader<Array>::WeightLoader(const Checkpoint& checkpoint, WeightStore<Array>& store, LoadProgress progress)
    : checkpoint_(checkpoint),
      store_(store),
      progress_(std::move(progress)),
      hash_(XXH3_createState(), XXH3_freeState) {
  require(hash_ != nullptr, "memory: cannot allocate a hash state");
  XXH3_64bits_reset(hash_.get());
}

template <template <typename> class Array>
const Tensor& WeightLoader<Array>::tensor(const std::string& name, std::initializer_list<int64_t> shape) const {
  return checkpoint_.require_tensor(name, kFloatDtypes, std::span(shape.begin(), shape.size()));
}

template <template <typename> class Array>
RowRange WeightLoader<Array>::all_rows(const std::string& name, int64_t outputs, int64_t inputs) const {
  return {&tensor(name, {outputs, inputs}), 0, outputs};
}

template <template <typename> class Array>
std::vector<RowRange> WeightLoader<Array>::part_of_heads(const Tensor& tensor, int heads, int64_t head_rows,
                                                         int64_t first, int64_t count) {
  std::vector<RowRange> ranges;
  for (int head = 0; head < heads; ++head) ranges.push_back({&tensor, head * head_rows + first, count});
  return ranges;
}

template <template <typename> class Array>
void WeightLoader<Array>::count_read(size_t bytes) {
  read_bytes_ += bytes;
  if (progress_) progress_(read_bytes_, checkpoint_.bytes());
}

template <template <typename> class Array>
std::vector<float> WeightLoader<Array>::floats(const Tensor& from) {
  std::vector<float> values(static_cast<size_t>(from.elements()));
  read_floats(from, values);
  add_to_hash(std::as_bytes(std::span(values)));
  count_read(from.bytes.size());
  return values;
}

template <template <typename> class Array>
Array<float> WeightLoader<Array>::keep(const std::vector<float>& values) {
  Array<float> array = store_.template take<float>(values.size());
  store_.write(array, 0, values.size(), [&](float* to) { std::copy(values.begin(), values.end(), to); });
  bytes_ += values.size() * sizeof(float);
  return array;
}

template <template <typename> class Array>
Array<float> WeightLoader<Array>::vector(const std::string& name, std::initializer_list<int64_t> shape) {
  return keep(floats(tensor(name, shape)));
}

template <template <typename> class Array>
Array<float> WeightLoader<Array>::convolution(const std::vector<Convolution>& parts, int64_t width) {
  int64_t channels = 0, first = 0;
  for (const Convolution& part : parts) channels += part.channels;
  std::vector<float> taps(static_cast<size_t>(channels * width));
  for (const Convolution& part : parts) {
    const std::vector<float> rows = floats(tensor(part.name, {part.channels, 1, width}));
    for (int64_t c = 0; c < part.channels; ++c)
      for (int64_t i = 0; i < width; ++i) taps[i * channels + first + c] = rows[c * width + i];
    first += part.channels;
  }
  return keep(taps);
}

// Writes a range's rows to `array` from element `at` on, a piece at a time. What is hashed is BF16 if the whole matrix
// is, else FP32, whatever the array is of.
template <template <typename> class Array>
template <typename T>
void WeightLoader<Array>::write_rows(const RowRange& range, bool is_bf16, Array<T>& array, size_t at) {
  const int64_t inputs = range.tensor->shape.back();
  const int64_t row_bytes = std::max<int64_t>(1, inputs) * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(WeightStore<Array>::kPieceBytes) / row_bytes);
  std::vector<float> values;
  for (int64_t row = 0; row < range.count; row += most) {
    const int64_t rows = std::min(most, range.count - row);
    const auto count = static_cast<size_t>(rows * inputs);
    const Tensor piece = rows_of(*range.tensor, range.first + row, rows);
    store_.write(array, at, count, [&](T* to) {
      if (std::is_same_v<T, Bf16> && is_bf16) {
        std::memcpy(to, piece.bytes.data(), piece.bytes.size());
        add_to_hash(piece.bytes);
        return;
      }
      values.resize(count);
      read_floats(piece, values);
      add_to_hash(is_bf16 ? piece.bytes : std::as_bytes(std::span(values)));
      round_to(values, to);
    });
    at += count;
    bytes_ += count * sizeof(T);
    count_read(piece.bytes.size());
  }
}

template <template <typename> class Array>
BasicMatrix<Array> WeightLoader<Array>::matrix(const std::vector<RowRange>& ranges) {
  BasicMatrix<Array> matrix;
  matrix.inputs = ranges[0].tensor->shape.back();
  for (const RowRange& range : ranges) matrix.outputs += range.count;
  const bool are_bf16 = std::ranges::all_of(ranges, is_bf16);
  const size_t elements = static_cast<size_t>(matrix.outputs) * static_cast<size_t>(matrix.inputs);
  const auto write = [&](auto& array) {
    array = store_.template take<std::remove_pointer_t<decltype(array.data())>>(elements);
    size_t at = 0;
    for (const RowRange& range : ranges) {
      write_rows(range, are_bf16, array, at);
      at += static_cast<size_t>(range.count * matrix.inputs);
    }
  };
  if (store_.keeps_bf16(are_bf16))
    write(matrix.bf16);
  else
    write(matrix.f32);
  count_numbers({static_cast<double>(matrix.outputs), static_cast<double>(matrix.inputs)});
  return matrix;
}

template <template <typename> class Array>
BasicMatrix<Array> WeightLoader<Array>::key_up(const Tensor& tensor, int heads, int64_t head_rows, int nope_size,
                                               int rope_size) {
  const int64_t latent = tensor.shape.back(), key = latent + rope_size, query = nope_size + rope_size;
  BasicMatrix<Array> matrix;
  matrix.outputs = heads * key;
  matrix.inputs = query;
  const auto write = [&](auto& array) {
    using T = std::remove_pointer_t<decltype(array.data())>;
    const auto head_size = static_cast<size_t>(key * query);
    array = store_.template take<T>(heads * head_size);
    std::vector<float> full(head_size);
    for (int head = 0; head < heads; ++head) {
      const std::vector<float> rows = floats(rows_of(tensor, head * head_rows, nope_size));
      std::fill(full.begin(), full.end(), 0.0f);
      for (int64_t c = 0; c < latent; ++c)
        for (int64_t i = 0; i < nope_size; ++i) full[c * query + i] = rows[i * latent + c];
      for (int64_t i = 0; i < rope_size; ++i) full[(latent + i) * query + nope_size + i] = 1.0f;
      store_.write(array, head * head_size, head_size, [&](T* to) { round_to(full, to); });
    }
    bytes_ += array.size() * sizeof(T);
  };
  if (store_.keeps_bf16(tensor.dtype == Dtype::kBF16))
    write(matrix.bf16);
  else
    write(matrix.f32);
  return matrix;
}

template <template <typename> class Array>
BasicFeedForwardWeights<Array> WeightLoader<Array>::feed_forward(const std::string& name, Activation activation,
                                                                 int64_t size, int64_t width) {
  std::vector<RowRange> up;
  if (activation == Activation::kSwiGlu) up.push_back(all_rows(name + "gate_proj.weight", size, width));
  up.push_back(all_rows(name + "up_proj.weight", size, width));
  return {matrix(up), matrix(name + "down_proj.weight", width, size)};
}

template <template <typename> class Array>
BasicFeedForwardWeights<Array> WeightLoader<Array>::experts(const std::string& name, const ExpertsConfig& config,
                                                            int64_t width, const ExpertNames& names) {
  const bool is_gated = config.activation == Activation::kSwiGlu;
  const std::string up_name = name + (is_gated ? "gate_up_proj" : "up_proj"), down_name = name + "down_proj";
  const int64_t size = config.size, rows = is_gated ? 2 * size : size;
  std::vector<RowRange> up, down;
  if (checkpoint_.find(up_name) != nullptr || checkpoint_.find(down_name) != nullptr) {
    up.push_back({&tensor(up_name, {config.experts, rows, width}), 0, config.experts * rows});
    down.push_back({&tensor(down_name, {config.experts, width, size}), 0, config.experts * width});
  } else {
    for (int e = 0; e < config.experts; ++e) {
      const std::string own = fmt::format("{}{}.", name, e);
      if (is_gated) up.push_back(all_rows(own + names.gate, size, width));
      up.push_back(all_rows(own + names.up, size, width));
      down.push_back(all_rows(own + names.down, width, size));
    }
  }
  return {matrix(up), matrix(down)};
}

template <template <typename> class Array>
void WeightLoader<Array>::refuse_more_layers(const std::string& name, int layers) const {
  require(checkpoint_.find(name) == nullptr, "{}: expected {} layers (num_hidden_layers), got more", name, layers);
}

template <template <typename> class Array>
void WeightLoader<Array>::count_numbers(std::initializer_list<double> numbers) {
  add_to_hash(std::as_bytes(std::span(numbers.begin(), numbers.size())));
}

template <template <typename> class Array>
std::string WeightLoader<Array>::fingerprint() const {
  return fmt::format("{:016x}", XXH3_64bits_digest(hash_.get()));
}

template class WeightLoader<Buffer>;
#ifdef REPLAYSSM_HAS_CUDA
template class WeightLoader<DeviceBuffer>;
#endif

}  // namespace replayssm
