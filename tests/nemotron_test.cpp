// Nemotron-H beside its reference: the clamp of the time step, and the spellings of a checkpoint.
#include "replayssm/model/nemotron.h"

#include <gtest/gtest.h>

#include "tests/bad_input.h"
#include "tests/model_directory.h"
#include "tests/model_rig.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;
using nlohmann::json;

const char* const kModels[] = {"nemotron_h-tiny", "nemotron_h_moe-tiny"};

std::vector<float> logits_of(const std::string& directory, const std::vector<int32_t>& token) {
  const ModelFixture fixture(directory);
  ModelRig rig(fixture, {.max_tokens = 200});
  return rig.prefill(rig.pool.allocate(200), token);
}

std::vector<float> logits_of(const ModelDirectory& model, const std::vector<int32_t>& token) {
  const TemporaryDirectory directory;
  model.write(directory);
  return logits_of(directory.path(), token);
}

// transformers 5.17 clamps at time_step_min, whatever time_step_limit says. Given that clamp in the config, its own
// logits come out; and with the config's they are others.
TEST(Nemotron, TheClampIsTheConfigsWhereTransformersTakesAnother) {
  for (const char* name : kModels) {
    const ExpectedLogits ours(name), theirs(name, "logits_of_time_step_min");
    ModelDirectory model(name);
    const std::vector<float> logits = logits_of(model, ours.token);
    EXPECT_LE(relative_error(logits, ours.logits), kModelBound) << name;
    EXPECT_GT(relative_error(logits, theirs.logits), kFaultBound) << name;
    model.config["time_step_limit"] = {model.config["time_step_min"], "Infinity"};
    EXPECT_LE(relative_error(logits_of(model, ours.token), theirs.logits), kModelBound) << name;
  }
}

// Either prefix, experts apart or in one tensor, a head beside the embedding or none, tensors that are not needed.
TEST(Nemotron, TheSpellingOfTheTensorsChangesNothing) {
  for (const char* name : kModels) {
    const std::vector<int32_t> token = ExpectedLogits(name).token;
    const std::vector<float> expected = logits_of(fixture_directory(name), token);
    ModelDirectory model(name);
    const std::string before = std::string(name) == kModels[0] ? "model." : "backbone.";
    const std::string after = std::string(name) == kModels[0] ? "backbone." : "model.";
    std::map<std::string, Tensor> renamed;
    for (auto& [key, tensor] : model.tensors) {
      tensor.name = key.starts_with(before) ? after + key.substr(before.size()) : key;
      renamed[tensor.name] = tensor;
    }
    model.tensors = renamed;
    model.add("mtp.layers.0.norm.weight", Dtype::kBF16, {3});
    EXPECT_TRUE(same_bits(logits_of(model, token), expected)) << name;
  }
}

// The experts' tensors of one layer under one name, [experts, rows, inputs].
void fuse_experts(ModelDirectory& model, const std::string& layer, const std::string& projection) {
  std::vector<Tensor> parts;
  for (;;) {
    const auto part = model.tensors.find(fmt::format("{}experts.{}.{}.weight", layer, parts.size(), projection));
    if (part == model.tensors.end()) break;
    parts.push_back(part->second);
    model.tensors.erase(part);
  }
  const Tensor& first = parts.front();
  model.add(layer + "experts." + projection, first.dtype,
            {static_cast<int64_t>(parts.size()), first.shape[0], first.shape[1]});
  std::byte* to = model.owned.back().data();
  for (const Tensor& part : parts) to = std::copy(part.bytes.begin(), part.bytes.end(), to);
}

TEST(Nemotron, FusedExpertsGiveTheSameModel) {
  ModelDirectory model("nemotron_h_moe-tiny");
  for (const char* layer : {"backbone.layers.1.mixer.", "backbone.layers.4.mixer."})
    for (const char* projection : {"up_proj", "down_proj"}) fuse_experts(model, layer, projection);
  const TemporaryDirectory directory;
  model.write(directory);
  const ModelFixture fused(directory.path()), apart(fixture_directory("nemotron_h_moe-tiny"));
  EXPECT_EQ(fused.weights.fingerprint, apart.weights.fingerprint);
  EXPECT_EQ(fused.weights.bytes, apart.weights.bytes);
}

TEST(Nemotron, TheEmbeddingMayBeTheHead) {
  ModelDirectory model(kModels[0]);
  const std::vector<int32_t> token = {1, 2, 3};
  model.tensors["lm_head.weight"].bytes = model.tensors["model.embeddings.weight"].bytes;
  const std::vector<float> expected = logits_of(model, token);
  model.tensors.erase("lm_head.weight");
  model.config["tie_word_embeddings"] = true;
  EXPECT_TRUE(same_bits(logits_of(model, token), expected));
}

// Numbers that no tensor's shape shows are part of the fingerprint.
TEST(Nemotron, TheFingerprintSeesTheConfig) {
  const ModelFixture original(fixture_directory("nemotron_h_moe-tiny"));
  for (const json& change :
       {json{{"time_step_limit", {0.0005, 0.8}}}, json{{"time_step_limit", {0.0004, 0.75}}},
        json{{"layer_norm_epsilon", 1e-6}}, json{{"num_experts_per_tok", 3}}, json{{"topk_group", 3}},
        json{{"n_group", 2}}, json{{"norm_topk_prob", false}}, json{{"routed_scaling_factor", 2}}}) {
    ModelDirectory model("nemotron_h_moe-tiny");
    model.config.update(change);
    const TemporaryDirectory directory;
    model.write(directory);
    EXPECT_NE(ModelFixture(directory.path()).weights.fingerprint, original.weights.fingerprint) << change.dump();
  }
}

TEST(Nemotron, RefusalsNameTheTensorOrTheLayer) {
  const auto refused = [](const std::string& name, const auto& change, const auto&... parts) {
    ModelDirectory model(name);
    change(model);
    const TemporaryDirectory directory;
    model.write(directory);
    expect_refusal([&] { ModelFixture fixture(directory.path()); }, parts...);
  };
  // Every tensor, missing or of one row more; of the many experts those of the first and the last.
  for (const std::string name : kModels) {
    const ModelDirectory source(name);
    for (const auto& [key, tensor] : source.tensors) {
      const size_t experts = key.find(".experts.");
      if (experts != std::string::npos && key.compare(experts, 11, ".experts.0.") != 0 &&
          key.compare(experts, 12, ".experts.11.") != 0)
        continue;
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
  const auto pattern = [](const char* text) {
    return [text](ModelDirectory& model) {
      model.config["hybrid_override_pattern"] = text;
      model.config["num_hidden_layers"] = std::string_view(text).size();
    };
  };
  refused(kModels[1], pattern("MEMME*"),
          "hybrid_override_pattern: expected * at layer 3, which has the tensor backbone.layers.3.mixer.q_proj.weight, "
          "got M");
  refused(kModels[1], pattern("-EM*EM"), "expected M at layer 0, which has", "got -");
  refused(kModels[1], pattern("M-M*EM"), "expected E at layer 1, which has", "got -");
  refused(kModels[1], pattern("MEM*E"), "hybrid_override_pattern: expected as many layers as there are tensors of",
          "backbone.layers.5.norm.weight");
  refused(kModels[1], pattern("MEM*EMM"), "backbone.layers.6.norm.weight");
}

}  // namespace
}  // namespace replayssm
