// The layers of published models that the benchmarks time, by name.
#pragma once

#include <map>
#include <string>
#include <variant>

#include "replayssm/ops/delta.h"
#include "replayssm/ops/mamba2.h"

namespace replayssm::bench {

// Which op a layer is, and its sizes.
struct Layer {
  std::string op;
  std::variant<DeltaShape, Mamba2Shape> shape;
};

inline const std::map<std::string, Layer>& layers() {
  static const std::map<std::string, Layer> by_name = {
      {"qwen3.5-4b", {"delta", DeltaShape{32, 16, 128, 128, 1}}},
      {"qwen3.5-122b", {"delta", DeltaShape{64, 16, 128, 128, 1}}},
      {"qwen3.6-27b", {"delta", DeltaShape{48, 16, 128, 128, 1}}},
      {"kimi-linear", {"kda", DeltaShape{32, 32, 128, 128, 128}}},
      {"kimi-k3", {"kda", DeltaShape{96, 96, 128, 128, 128}}},
      {"nemotron-3-nano-4b", {"mamba2", Mamba2Shape{96, 8, 80, 128}}},
      {"nemotron-3-super", {"mamba2", Mamba2Shape{128, 8, 64, 128}}},
      {"mamba2-48x64x128", {"mamba2", Mamba2Shape{48, 8, 64, 128}}},
  };
  return by_name;
}

}  // namespace replayssm::bench
