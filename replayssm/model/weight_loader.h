// Internal to the families: puts a model's weights together from the tensors of a checkpoint.
#pragma once

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "replayssm/model/checkpoint.h"
#include "replayssm/model/config.h"
#include "replayssm/model/weight_store.h"
#include "replayssm/model/weights.h"

namespace replayssm {

// Rows first .. first+count-1 of a tensor [rows, inputs] or, all rows counted, [experts, rows, inputs].
struct RowRange {
  const Tensor* tensor;
  int64_t first;
  int64_t count;
};

// Every function throws Error naming the tensor, the expected and the given, if one is missing or of another shape, or
// is neither BF16, F16 nor F32. What is returned is counted in bytes() and in the fingerprint, which is of the tensors'
// numbers and the same wherever they go. Array is Buffer or DeviceBuffer.
template <template <typename> class Array>
class WeightLoader {
 public:
  // The store and the checkpoint outlive it.
  WeightLoader(const Checkpoint& checkpoint, WeightStore<Array>& store, LoadProgress progress);

  const Checkpoint& checkpoint() const { return checkpoint_; }
  const Tensor& tensor(const std::string& name, std::initializer_list<int64_t> shape) const;

  RowRange all_rows(const std::string& name, int64_t outputs, int64_t inputs) const;
  // A tensor whose rows are `heads` groups of head_rows: rows first .. first+count-1 of each group, one range a head.
  static std::vector<RowRange> part_of_heads(const Tensor& tensor, int heads, int64_t head_rows, int64_t first,
                                             int64_t count);

  Array<float> vector(const std::string& name, int64_t size) { return vector(name, {size}); }
  // A tensor of this shape, its elements in order.
  Array<float> vector(const std::string& name, std::initializer_list<int64_t> shape);
  // The rows of all ranges, one below the other.
  BasicMatrix<Array> matrix(const std::vector<RowRange>& ranges);
  BasicMatrix<Array> matrix(const std::string& name, int64_t outputs, int64_t inputs) {
    return matrix({all_rows(name, outputs, inputs)});
  }
  // LatentAttentionWeights::key_up from a tensor of `heads` groups of head_rows rows, whose first nope_size are a
  // head's key projection.
  BasicMatrix<Array> key_up(const Tensor& tensor, int heads, int64_t head_rows, int nope_size, int rope_size);
  // gate_proj.weight (of SwiGLU), up_proj.weight and down_proj.weight under `name`, from and to `width` numbers.
  BasicFeedForwardWeights<Array> feed_forward(const std::string& name, Activation activation, int64_t size,
                                              int64_t width);
  // The chosen experts under `name`, from and to `width` numbers: all in gate_up_proj or up_proj, [experts, rows,
  // width], and down_proj, [experts, width, size]; else each under its number, its tensors named as given (gate is of
  // SwiGLU alone).
  struct ExpertNames {
    const char* gate = "gate_proj.weight";
    const char* up = "up_proj.weight";
    const char* down = "down_proj.weight";
  };
  BasicFeedForwardWeights<Array> experts(const std::string& name, const ExpertsConfig& config, int64_t width,
                                         const ExpertNames& names);
  BasicFeedForwardWeights<Array> experts(const std::string& name, const ExpertsConfig& config, int64_t width) {
    return experts(name, config, width, {});
  }
  // Depthwise convolutions' taps, [width, channels] from [channels, 1, width], those of several side by side.
  struct Convolution {
    std::string name;
    int64_t channels;
  };
  Array<float> convolution(const std::vector<Convolution>& parts, int64_t width);

  // Throws Error if there is a tensor of layer `layers`, which a config of that many layers does not count.
  void refuse_more_layers(const std::string& name, int layers) const;

  // Counts numbers of the config that no tensor's shape shows.
  void count_numbers(std::initializer_list<double> numbers);
  std::string fingerprint() const;
  size_t bytes() const { return bytes_; }

 private:
  // All of a tensor, counted.
  std::vector<float> floats(const Tensor& from);
  Array<float> keep(const std::vector<float>& values);
  template <typename T>
  void write_rows(const RowRange& range, bool is_bf16, Array<T>& array, size_t at);
  void add_to_hash(std::span<const std::byte> bytes) { XXH3_64bits_update(hash_.get(), bytes.data(), bytes.size()); }
  void count_read(size_t bytes);

  const Checkpoint& checkpoint_;
  WeightStore<Array>& store_;
  LoadProgress progress_;
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash_;
  size_t bytes_ = 0, read_bytes_ = 0;
};

}  // namespace replayssm
