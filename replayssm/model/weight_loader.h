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
#include "replayssm/model/weights.h"

namespace replayssm {

// Rows first .. first+count-1 of a tensor [rows, inputs] or, all rows counted, [experts, rows, inputs].
struct RowRange {
  const Tensor* tensor;
  int64_t first;
  int64_t count;
};

// Every function throws Error naming the tensor, the expected and the given, if one is missing or of another shape, or
// is neither BF16, F16 nor F32. What is returned is counted in bytes() and in the fingerprint.
class WeightLoader {
 public:
  explicit WeightLoader(const Checkpoint& checkpoint);

  const Checkpoint& checkpoint() const { return checkpoint_; }
  const Tensor& tensor(const std::string& name, std::initializer_list<int64_t> shape) const;

  RowRange all_rows(const std::string& name, int64_t outputs, int64_t inputs) const;
  // A tensor whose rows are `heads` groups of head_rows: rows first .. first+count-1 of each group, one range a head.
  static std::vector<RowRange> part_of_heads(const Tensor& tensor, int heads, int64_t head_rows, int64_t first,
                                             int64_t count);

  Buffer<float> vector(const std::string& name, int64_t size) { return vector(name, {size}); }
  // A tensor of this shape, its elements in order.
  Buffer<float> vector(const std::string& name, std::initializer_list<int64_t> shape);
  // The rows of all ranges, one below the other.
  Matrix matrix(const std::vector<RowRange>& ranges);
  // gate_proj.weight (of SwiGLU), up_proj.weight and down_proj.weight under `name`, from and to `width` numbers.
  FeedForwardWeights feed_forward(const std::string& name, Activation activation, int64_t size, int64_t width);
  // The chosen experts under `name`, from and to `width` numbers: all in gate_up_proj or up_proj, [experts, rows,
  // width], and down_proj, [experts, width, size]; else each as a feed-forward under its number.
  std::vector<FeedForwardWeights> experts(const std::string& name, const ExpertsConfig& config, int64_t width);
  // A depthwise convolution's taps, [width, channels] from [channels, 1, width].
  Buffer<float> convolution(const std::string& name, int64_t channels, int64_t width);

  // Throws Error if there is a tensor of layer `layers`, which a config of that many layers does not count.
  void refuse_more_layers(const std::string& name, int layers) const;

  // Counts numbers of the config that no tensor's shape shows.
  void count_numbers(std::initializer_list<double> numbers);
  std::string fingerprint() const;
  size_t bytes() const { return bytes_; }

 private:
  Buffer<float> floats(const Tensor& from);
  void add_to_hash(std::span<const std::byte> bytes) { XXH3_64bits_update(hash_.get(), bytes.data(), bytes.size()); }

  const Checkpoint& checkpoint_;
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash_;
  size_t bytes_ = 0;
};

}  // namespace replayssm
