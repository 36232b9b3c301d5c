// A model directory in memory, to be changed and written out.
#pragma once

#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/bad_input.h"
#include "tests/model_rig.h"

namespace replayssm::test {

struct ModelDirectory {
  explicit ModelDirectory(const std::string& name) : file(fixture_directory(name) + "/model.safetensors") {
    std::ifstream stream(fixture_directory(name) + "/config.json");
    config = nlohmann::json::parse(stream);
    for (const Tensor& tensor : file.tensors()) tensors[tensor.name] = tensor;
  }

  // A tensor of zeros, in place of one of the same name.
  Tensor& add(const std::string& name, Dtype dtype, std::vector<int64_t> shape) {
    Tensor tensor{.name = name, .dtype = dtype, .shape = std::move(shape), .bytes = {}};
    owned.emplace_back(static_cast<size_t>(tensor.elements()) * dtype_bits(dtype) / 8, std::byte{0});
    tensor.bytes = owned.back();
    return tensors[name] = tensor;
  }
  void add(const std::string& name, std::vector<int64_t> shape, const std::vector<float>& values) {
    add(name, Dtype::kF32, std::move(shape));
    std::memcpy(owned.back().data(), values.data(), owned.back().size());
  }

  std::vector<float> floats(const std::string& name) const {
    std::vector<float> values(static_cast<size_t>(tensors.at(name).elements()));
    read_floats(tensors.at(name), values);
    return values;
  }

  void rename(const std::function<std::string(const std::string&)>& name_of) {
    std::map<std::string, Tensor> renamed;
    for (auto& [name, tensor] : tensors) {
      tensor.name = name_of(name);
      renamed[tensor.name] = tensor;
    }
    tensors = renamed;
  }

  void write_file(const TemporaryDirectory& directory, const std::string& name,
                  const std::function<bool(const std::string&)>& is_wanted) const {
    std::vector<Tensor> some;
    for (const auto& [key, tensor] : tensors)
      if (is_wanted(key)) some.push_back(tensor);
    write_safetensors(directory.path(name), some);
  }

  void write(const TemporaryDirectory& directory) const {
    directory.write("config.json", config.dump());
    write_file(directory, "model.safetensors", [](const std::string&) { return true; });
  }

  SafetensorsFile file;
  nlohmann::json config;
  std::map<std::string, Tensor> tensors;
  std::deque<std::vector<std::byte>> owned;
};

// Of 40 tokens, by prefill.
inline std::vector<float> logits_of(const std::string& directory) {
  const ModelFixture fixture(directory);
  ModelRig rig(fixture);
  std::vector<int32_t> token;
  for (int n = 0; n < 40; ++n) token.push_back(n * 37 % 187);
  return rig.prefill(rig.pool.allocate(100), token);
}

}  // namespace replayssm::test
