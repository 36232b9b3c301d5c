// A model directory's tensors: model.safetensors, or the shards that model.safetensors.index.json names.
#pragma once

#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "replayssm/core/safetensors.h"

namespace replayssm {

class Checkpoint {
 public:
  // Maps model.safetensors or, if there is none, every shard of the index. Throws Error if the directory has neither, a
  // file does not follow its format, a shard is missing or named by more than a plain file name (it could lie outside
  // the directory), or a shard lacks a tensor that the index places there.
  explicit Checkpoint(const std::string& directory);

  const std::string& directory() const { return directory_; }

  // Null if there is none. Tensors live as long as the checkpoint; a shard's tensors that the index does not name are
  // not seen.
  const Tensor* find(std::string_view name) const;

  // The tensor `name`. Throws Error, naming the tensor, the expected and the given, if it is missing, its dtype is none
  // of `dtypes`, or its shape is another.
  const Tensor& require_tensor(std::string_view name, std::span<const Dtype> dtypes,
                               std::span<const int64_t> shape) const;
  const Tensor& require_tensor(std::string_view name, std::initializer_list<Dtype> dtypes,
                               std::initializer_list<int64_t> shape) const {
    return require_tensor(name, std::span(dtypes.begin(), dtypes.size()), std::span(shape.begin(), shape.size()));
  }

  // The first of `prefixes` for which the tensor prefix + suffix exists; Error naming all if there is none. (A text
  // model's tensors lie under "model." or, in a checkpoint that also sees images, under "model.language_model.".)
  std::string require_prefix(std::initializer_list<std::string_view> prefixes, std::string_view suffix) const;

  // Of all its tensors.
  size_t bytes() const { return bytes_; }

  // The names of all tensors, sorted.
  std::vector<std::string> names() const;

 private:
  void read_index(const std::string& path);

  std::string directory_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>, std::less<>> shards_;
  std::unordered_map<std::string_view, const Tensor*> index_;
  size_t bytes_ = 0;
};

}  // namespace replayssm
