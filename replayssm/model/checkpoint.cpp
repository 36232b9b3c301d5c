#include "replayssm/model/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "replayssm/core/error.h"
#include "replayssm/core/json.h"
#include "replayssm/core/mapped_file.h"

namespace replayssm {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWholeName = "model.safetensors";
constexpr std::string_view kIndexName = "model.safetensors.index.json";

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

void check_shard_name(const std::string& shard, const std::string& name) {
  require(shard.ends_with(".safetensors") && shard.find('/') == std::string::npos &&
              shard.find('\0') == std::string::npos && shard.size() <= 255,
          "{}: expected the name of a .safetensors file in the same directory, got {}", name,
          describe(nlohmann::json(shard)));
}

std::string dtype_names(std::span<const Dtype> dtypes) {
  std::string names;
  for (const Dtype dtype : dtypes) names += fmt::format("{}{}", names.empty() ? "" : " or ", dtype_name(dtype));
  return names;
}

}  // namespace

Checkpoint::Checkpoint(const std::string& directory) : directory_(directory) {
  std::error_code error;
  require(fs::exists(directory, error), "{}: expected a model directory, got nothing", directory);
  require(fs::is_directory(directory, error), "{}: expected a model directory, got a file", directory);
  const fs::path whole = fs::path(directory) / kWholeName;
  const fs::path index = fs::path(directory) / kIndexName;
  if (is_there(whole)) {
    const auto& file = shards_.emplace(kWholeName, std::make_unique<SafetensorsFile>(whole.string())).first->second;
    for (const Tensor& tensor : file->tensors()) index_[tensor.name] = &tensor;
  } else {
    require(is_there(index), "{}: expected {} or {}, got neither", directory, kWholeName, kIndexName);
    read_index(index.string());
  }
  for (const auto& [name, tensor] : index_) bytes_ += tensor->bytes.size();
}

void Checkpoint::read_index(const std::string& path) {
  const MappedFile file(path);
  const nlohmann::json document = parse_json(file.text(), path);
  const JsonObject weight_map = JsonObject(document, path).object("weight_map");
  require(!weight_map.value().empty(), "{}: expected tensors, got none", weight_map.name());
  for (const auto& [name, unused] : weight_map.value().items()) {
    const std::string shard = weight_map.string(name);
    check_shard_name(shard, weight_map.name_of(name));
    auto place = shards_.find(shard);
    if (place == shards_.end()) {
      const fs::path shard_path = fs::path(directory_) / shard;
      require(is_there(shard_path), "{}: expected the file {}, got nothing", weight_map.name_of(name),
              shard_path.string());
      place = shards_.emplace(shard, std::make_unique<SafetensorsFile>(shard_path.string())).first;
    }
    const Tensor* tensor = place->second->find(name);
    require(tensor != nullptr, "{}: expected the tensor {}, which {} places there, got none", place->second->path(),
            name, kIndexName);
    index_[tensor->name] = tensor;
  }
}

const Tensor* Checkpoint::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : found->second;
}

const Tensor& Checkpoint::require_tensor(std::string_view name, std::span<const Dtype> dtypes,
                                         std::span<const int64_t> shape) const {
  const Tensor* tensor = find(name);
  require(tensor != nullptr, "{}: tensor {}: expected {} {}, got none", directory_, name, dtype_names(dtypes),
          shape_text(shape));
  require(std::ranges::find(dtypes, tensor->dtype) != dtypes.end(), "{}: tensor {}: expected dtype {}, got {}",
          directory_, name, dtype_names(dtypes), dtype_name(tensor->dtype));
  require(std::ranges::equal(tensor->shape, shape), "{}: tensor {}: expected shape {}, got {}", directory_, name,
          shape_text(shape), shape_text(tensor->shape));
  return *tensor;
}

std::string Checkpoint::require_prefix(std::initializer_list<std::string_view> prefixes,
                                       std::string_view suffix) const {
  std::string tried;
  for (const std::string_view prefix : prefixes) {
    const std::string name = fmt::format("{}{}", prefix, suffix);
    if (find(name) != nullptr) return std::string(prefix);
    tried += fmt::format("{}{}", tried.empty() ? "" : " or ", name);
  }
  fail("{}: expected the tensor {}, got neither", directory_, tried);
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : index_) names.emplace_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace replayssm
