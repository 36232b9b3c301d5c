// Loading a model's weights: wrapped names, shards, dtypes, tensors that are not needed, refusals that name the tensor.
#include "replayssm/model/qwen.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/bad_input.h"
#include "tests/model_directory.h"
#include "tests/model_rig.h"
#include "tests/walks.h"

namespace replayssm {
namespace {

using namespace replayssm::test;
using nlohmann::json;

std::vector<float> logits_of(const std::string& directory) {
  const ModelFixture fixture(directory);
  ModelRig rig(fixture);
  std::vector<int32_t> token;
  for (int n = 0; n < 40; ++n) token.push_back(n * 37 % 187);
  return rig.prefill(rig.pool.allocate(100), token);
}

TEST(QwenWeights, WrappingMtpAndImagesChangeNothing) {
  for (const char* name : {"qwen3_5-tiny", "qwen3_next-tiny", "qwen3_5_moe-tiny"}) {
    ModelDirectory model(name);
    std::map<std::string, Tensor> renamed;
    for (auto& [key, tensor] : model.tensors) {
      std::string other = key;
      if (key.starts_with("model.")) other = "model.language_model." + key.substr(6);
      tensor.name = other;
      renamed[other] = tensor;
    }
    model.tensors = renamed;
    model.add("model.visual.patch_embed.proj.weight", Dtype::kBF16, {3, 5});
    model.add("mtp.fc.weight", Dtype::kBF16, {56, 112});
    model.add("mtp.layers.0.self_attn.q_proj.weight", Dtype::kI64, {1});
    if (std::string(name) != "qwen3_next-tiny") {
      json text = model.config;
      const std::string type = text["model_type"];
      model.config = {{"model_type", type.substr(0, type.rfind("_text"))},
                      {"text_config", text},
                      {"vision_config", {{"depth", 2}}},
                      {"tie_word_embeddings", text["tie_word_embeddings"]}};
    }
    const TemporaryDirectory directory;
    model.write(directory);
    EXPECT_TRUE(same_bits(logits_of(directory.path()), logits_of(fixture_directory(name)))) << name;
  }
}

TEST(QwenWeights, ShardsGiveTheSameBits) {
  const ModelDirectory model("qwen3_next-tiny");
  const TemporaryDirectory directory;
  directory.write("config.json", model.config.dump());
  json map;
  const auto is_first = [](const std::string& name) { return name.find("layers.1") == std::string::npos; };
  for (const auto& [name, tensor] : model.tensors)
    map[name] = is_first(name) ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors";
  model.write_file(directory, "model-00001-of-00002.safetensors", is_first);
  model.write_file(directory, "model-00002-of-00002.safetensors", std::not_fn(is_first));
  directory.write("model.safetensors.index.json", json{{"metadata", json::object()}, {"weight_map", map}}.dump());
  EXPECT_TRUE(same_bits(logits_of(directory.path()), logits_of(fixture_directory("qwen3_next-tiny"))));
}

// All experts in one tensor a projection, as Qwen3.5 has them, or each in its own, as Qwen3-Next.
TEST(QwenWeights, FusedAndSeparateExpertsGiveTheSameBits) {
  ModelDirectory model("qwen3_5_moe-tiny");
  const std::map<std::string, Tensor> fused = model.tensors;
  int separated = 0;
  for (const auto& [name, tensor] : fused) {
    if (!name.ends_with("experts.gate_up_proj") && !name.ends_with("experts.down_proj")) continue;
    const bool is_up = name.ends_with("gate_up_proj");
    const std::string prefix = name.substr(0, name.rfind('.') + 1);
    const int64_t experts = tensor.shape[0], rows = tensor.shape[1] / (is_up ? 2 : 1), inputs = tensor.shape[2];
    const size_t bytes = static_cast<size_t>(rows * inputs) * sizeof(Bf16);
    size_t at = 0;
    for (int64_t e = 0; e < experts; ++e) {
      for (const char* part : is_up ? std::vector{"gate_proj", "up_proj"} : std::vector{"down_proj"}) {
        model.add(fmt::format("{}{}.{}.weight", prefix, e, part), Dtype::kBF16, {rows, inputs}).bytes =
            tensor.bytes.subspan(at, bytes);
        at += bytes;
        ++separated;
      }
    }
    EXPECT_EQ(at, tensor.bytes.size());
    model.tensors.erase(name);
  }
  EXPECT_EQ(separated, 4 * 9 * 3);
  const TemporaryDirectory directory;
  model.write(directory);
  const ModelFixture original(fixture_directory("qwen3_5_moe-tiny"));
  EXPECT_EQ(ModelFixture(directory.path()).weights.fingerprint, original.weights.fingerprint);
  EXPECT_TRUE(same_bits(logits_of(directory.path()), logits_of(fixture_directory("qwen3_5_moe-tiny"))));
}

// What no tensor's shape shows counts, too.
TEST(QwenWeights, TheFingerprintSeesTheRouter) {
  const ModelFixture original(fixture_directory("qwen3_next_moe-tiny"));
  for (const json& patch : {json{{"num_experts_per_tok", 2}}, json{{"norm_topk_prob", true}}}) {
    ModelDirectory model("qwen3_next_moe-tiny");
    model.config.update(patch);
    const TemporaryDirectory directory;
    model.write(directory);
    EXPECT_NE(ModelFixture(directory.path()).weights.fingerprint, original.weights.fingerprint) << patch;
  }
}

// Widened weights are the same numbers, in a whole model and where a matrix mixes dtypes.
TEST(QwenWeights, Fp32WeightsGiveTheSameBits) {
  for (const std::string& part : {std::string(), std::string("in_proj_b"), std::string("A_log"), std::string("norm")}) {
    ModelDirectory model("qwen3_5-tiny");
    for (auto& [name, tensor] : model.tensors) {
      if (name.find(part) == std::string::npos) continue;
      model.owned.emplace_back(static_cast<size_t>(tensor.elements()) * sizeof(float));
      read_floats(tensor,
                  {reinterpret_cast<float*>(model.owned.back().data()), static_cast<size_t>(tensor.elements())});
      tensor.dtype = Dtype::kF32;
      tensor.bytes = model.owned.back();
    }
    const TemporaryDirectory directory;
    model.write(directory);
    EXPECT_TRUE(same_bits(logits_of(directory.path()), logits_of(fixture_directory("qwen3_5-tiny")))) << part;
  }
}

TEST(QwenWeights, TheFingerprintSeesEveryTensor) {
  const ModelFixture original(fixture_directory("qwen3_5-tiny"));
  EXPECT_EQ(original.weights.fingerprint.size(), 16u);
  EXPECT_EQ(ModelFixture(fixture_directory("qwen3_5-tiny")).weights.fingerprint, original.weights.fingerprint);
  const ModelDirectory source("qwen3_5-tiny");
  for (const auto& [name, tensor] : source.tensors) {
    ModelDirectory model("qwen3_5-tiny");
    Tensor& changed = model.tensors[name];
    model.owned.emplace_back(changed.bytes.begin(), changed.bytes.end());
    model.owned.back().back() ^= std::byte{1};
    changed.bytes = model.owned.back();
    const TemporaryDirectory directory;
    model.write(directory);
    EXPECT_NE(ModelFixture(directory.path()).weights.fingerprint, original.weights.fingerprint) << name;
  }
}

TEST(QwenWeights, RefusalsNameTheTensor) {
  const auto refused = [](const char* name, const std::function<void(ModelDirectory&)>& change, const auto&... parts) {
    ModelDirectory model(name);
    change(model);
    const TemporaryDirectory directory;
    model.write(directory);
    expect_refusal([&] { ModelFixture fixture(directory.path()); }, parts...);
  };
  // Every tensor, missing or of one row more.
  const std::vector<const char*> all = {"qwen3_5_moe-tiny", "qwen3_next-tiny", "qwen3_5-tiny", "qwen3_next_moe-tiny"};
  for (const char* name : walked(all, 2)) {
    const ModelDirectory source(name);
    for (const auto& [key, tensor] : source.tensors) {
      const std::string missing = key;
      refused(
          name, [&](ModelDirectory& model) { model.tensors.erase(missing); }, missing);
      std::vector<int64_t> longer = tensor.shape;
      ++longer[0];
      refused(
          name, [&](ModelDirectory& model) { model.add(missing, Dtype::kBF16, longer); }, missing,
          shape_text(tensor.shape), shape_text(longer));
    }
  }
  const std::string more = "model.layers.4.input_layernorm.weight";
  refused(
      "qwen3_5-tiny", [&](ModelDirectory& model) { model.add(more, Dtype::kBF16, {56}); }, more, "expected 4 layers");
  const std::string gate = "model.layers.2.mlp.gate_proj.weight";
  refused(
      "qwen3_5-tiny",
      [&](ModelDirectory& model) {
        model.add(gate, Dtype::kI32, {100, 56});
      },
      gate, "BF16", "I32");
}

}  // namespace
}  // namespace replayssm
