// A fixture's model directory in memory, to be changed and written out.
#pragma once

#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "replayssm/core/safetensors.h"
#include "tests/bad_input.h"
#include "tests/model_rig.h"

namespace replayssm::test {

struct ModelDirectory {
  explicit ModelDirectory(const std::string& name) : file(fixture_directory(name) + "/model.safetensors") {
    std::ifstream stream(fixture_directory(name) + "/config.json");
    config = nlohmann::json::parse(stream);
    for (const Tensor& tensor : file.tensors()) tensors[tensor.name] = tensor;
  }

  // Zeros.
  Tensor& add(const std::string& name, Dtype dtype, std::vector<int64_t> shape) {
    Tensor tensor{.name = name, .dtype = dtype, .shape = std::move(shape), .bytes = {}};
    owned.emplace_back(static_cast<size_t>(tensor.elements()) * dtype_bits(dtype) / 8, std::byte{0});
    tensor.bytes = owned.back();
    return tensors[name] = tensor;
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

}  // namespace replayssm::test
