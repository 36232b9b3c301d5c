// Loading Kimi-Linear: every spelling of its tensors, refusals that name the tensor; and one layer of the gate with a
// lower bound against transformers.
#include <gtest/gtest.h>

#include <map>

#include "replayssm/model/forward.h"
#include "tests/bad_input.h"
#include "tests/model_directory.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;
using nlohmann::json;

const char* const kModels[] = {"kimi_linear-tiny", "kimi_linear_respelled-tiny", "kimi_linear_bounded-tiny"};

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// One tensor of each name, whatever the numbers of layers and experts in it.
std::vector<std::string> kinds_of_tensors(const ModelDirectory& model) {
  std::map<std::string, std::string> kinds;
  for (const auto& [name, tensor] : model.tensors) {
    std::string kind = name;
    std::erase_if(kind, [](char letter) { return letter >= '0' && letter <= '9'; });
    kinds[kind] = name;
  }
  std::vector<std::string> names;
  for (const auto& [kind, name] : kinds) names.push_back(name);
  return names;
}

// Puts tensors of equal trailing shape below each other.
void pack(ModelDirectory& model, const std::vector<std::string>& parts, const std::string& name) {
  std::vector<std::byte> bytes;
  Tensor first = model.tensors.at(parts[0]);
  first.shape[0] = 0;
  for (const std::string& part : parts) {
    const Tensor tensor = model.tensors.at(part);
    bytes.insert(bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
    first.shape[0] += tensor.shape[0];
    model.tensors.erase(part);
  }
  Tensor& packed = model.add(name, first.dtype, first.shape);
  model.owned.back() = bytes;
  packed.bytes = model.owned.back();
}

TEST(KimiWeights, EverySpellingGivesTheSameBits) {
  const std::vector<float> expected = logits_of(fixture_directory(kModels[0]));
  const std::string layer = "model.layers.1.self_attn.";
  const std::function<void(ModelDirectory&)> spellings[] = {
      [](ModelDirectory& model) {  // what save_pretrained writes
        model.rename(
            [](const std::string& name) { return replaced(name, "layers.0.mlp.", "layers.0.block_sparse_moe."); });
      },
      [](ModelDirectory& model) {
        model.rename([](const std::string& name) { return replaced(name, "block_sparse_moe", "mlp"); });
      },
      [](ModelDirectory& model) {
        model.rename([](std::string name) {
          for (const char* part : {"f_a_proj", "f_b_proj", "A_log", "dt_bias"})
            name = replaced(name, fmt::format("self_attn.{}", part), fmt::format("self_attn.forget_gate.{}", part));
          return name;
        });
      },
      [&](ModelDirectory& model) {
        pack(model, {layer + "q_conv1d.weight", layer + "k_conv1d.weight", layer + "v_conv1d.weight"},
             layer + "conv1d.weight");
      },
      [&](ModelDirectory& model) { model.tensors[layer + "A_log"].shape = {3}; },
  };
  for (const auto& respell : spellings) {
    ModelDirectory model(kModels[0]);
    respell(model);
    const TemporaryDirectory directory;
    model.write(directory);
    EXPECT_TRUE(same_bits(logits_of(directory.path()), expected));
  }
}

// A full-rank output gate that is the product of the two it replaces.
TEST(KimiWeights, AFullRankGateIsTheProductOfTwo) {
  ModelDirectory model("kimi_linear_bounded-tiny");
  model.config["linear_attn_config"]["use_full_rank_gate"] = true;
  for (int layer : {0, 2}) {
    const std::string name = fmt::format("model.layers.{}.self_attn.", layer);
    const std::vector<float> down = model.floats(name + "g_a_proj.weight"), up = model.floats(name + "g_b_proj.weight");
    const int64_t hidden = 56, rank = 48, values = 96;
    std::vector<float> product(values * hidden);
    for (int64_t v = 0; v < values; ++v)
      for (int64_t i = 0; i < hidden; ++i) {
        double sum = 0;
        for (int64_t r = 0; r < rank; ++r) sum += static_cast<double>(up[v * rank + r]) * down[r * hidden + i];
        product[v * hidden + i] = static_cast<float>(sum);
      }
    model.add(name + "g_proj.weight", {values, hidden}, product);
    model.tensors.erase(name + "g_a_proj.weight");
    model.tensors.erase(name + "g_b_proj.weight");
  }
  const TemporaryDirectory directory;
  model.write(directory);
  EXPECT_LE(relative_error(logits_of(directory.path()), logits_of(fixture_directory("kimi_linear_bounded-tiny"))),
            kModelBound);
}

// As the config says and the published code does; transformers 5.17 keeps a head of its own all the same.
TEST(KimiWeights, ATiedHeadIsTheEmbedding) {
  ModelDirectory tied(kModels[0]), copied(kModels[0]);
  tied.config["tie_word_embeddings"] = true;
  tied.tensors.erase("lm_head.weight");
  const std::string embedding = "model.embed_tokens.weight";
  copied.add("lm_head.weight", {187, 56}, copied.floats(embedding));
  copied.add(embedding, {187, 56}, copied.floats(embedding));
  const TemporaryDirectory directory, other;
  tied.write(directory);
  copied.write(other);
  EXPECT_TRUE(same_bits(logits_of(directory.path()), logits_of(other.path())));
}

TEST(KimiWeights, TheFingerprintSeesEveryTensorAndNumber) {
  const auto fingerprint_of = [](const ModelDirectory& model) {
    const TemporaryDirectory directory;
    model.write(directory);
    return ModelFixture(directory.path()).weights.fingerprint;
  };
  const std::string original = fingerprint_of(ModelDirectory(kModels[0]));
  for (const std::string& name : kinds_of_tensors(ModelDirectory(kModels[0]))) {
    ModelDirectory model(kModels[0]);
    const Tensor& tensor = model.tensors.at(name);
    model.owned.emplace_back(tensor.bytes.begin(), tensor.bytes.end());
    model.owned.back().back() ^= std::byte{1};
    model.tensors[name].bytes = model.owned.back();
    EXPECT_NE(fingerprint_of(model), original) << name;
  }
  for (const char* patch :
       {R"({"rms_norm_eps": 1e-6})", R"({"num_experts_per_token": 2})", R"({"topk_group": 3})",
        R"({"num_expert_group": 2})", R"({"moe_renormalize": false})", R"({"routed_scaling_factor": 1})",
        R"({"moe_router_activation_func": "softmax"})", R"({"linear_attn_config": {"gate_lower_bound": -5}})"}) {
    ModelDirectory model(kModels[0]);
    model.config.merge_patch(json::parse(patch));
    EXPECT_NE(fingerprint_of(model), original) << patch;
  }
}

TEST(KimiWeights, RefusalsNameTheTensor) {
  for (const char* name : kModels) {
    for (const std::string& key : kinds_of_tensors(ModelDirectory(name))) {
      ModelDirectory missing(name);
      missing.tensors.erase(key);
      const TemporaryDirectory directory;
      missing.write(directory);
      // Where no convolution is packed, q's is the first that is missed.
      expect_refusal([&] { ModelFixture fixture(directory.path()); }, key.substr(0, key.find("conv1d")));
      ModelDirectory wrong(name);
      std::vector<int64_t> longer = wrong.tensors.at(key).shape;
      ++longer[0];
      wrong.add(key, Dtype::kBF16, longer);
      const TemporaryDirectory other;
      wrong.write(other);
      expect_refusal([&] { ModelFixture fixture(other.path()); }, key, shape_text(longer));
    }
    ModelDirectory more(name);
    const int layers = more.config.at("num_hidden_layers");
    const std::string one_more = "model.layers." + std::to_string(layers) + ".input_layernorm.weight";
    more.add(one_more, Dtype::kBF16, {48});
    const TemporaryDirectory directory;
    more.write(directory);
    expect_refusal([&] { ModelFixture fixture(directory.path()); }, one_more,
                   "expected " + std::to_string(layers) + " layers");
  }
}

// The layer of fixtures/layers as the first block of a model whose other weights are zeros.
struct BoundedLayer {
  BoundedLayer() : file(std::string(REPLAYSSM_SOURCE_DIR) + "/tests/fixtures/layers/glm5_next_kda.safetensors") {
    ModelDirectory model("kimi_linear_bounded-tiny");
    model.config["hidden_size"] = kHidden;
    model.config["vocab_size"] = 2;
    model.config["num_hidden_layers"] = 1;
    model.config["linear_attn_config"]["kda_layers"] = {1};
    model.config["linear_attn_config"]["full_attn_layers"] = json::array();
    model.config["linear_attn_config"]["num_heads"] = 5;
    model.config["linear_attn_config"]["head_dim"] = 16;
    model.tensors.clear();
    for (const Tensor& tensor : file.tensors()) {
      if (tensor.name == "x" || tensor.name == "y") continue;
      Tensor renamed = tensor;
      renamed.name = "model.layers.0.self_attn." + tensor.name;
      model.tensors[renamed.name] = renamed;
    }
    for (const char* name : {"model.norm.weight", "model.layers.0.input_layernorm.weight",
                             "model.layers.0.post_attention_layernorm.weight"})
      model.add(name, Dtype::kF32, {kHidden});
    for (const char* name : {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"})
      model.add(name, Dtype::kBF16, {100, kHidden});
    model.add("model.layers.0.mlp.down_proj.weight", Dtype::kBF16, {kHidden, 100});
    for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"})
      model.add(name, Dtype::kBF16, {2, kHidden});
    model.write(directory);
    for (const char* name : {"x", "y"}) {
      std::vector<float>& values = *name == 'x' ? x : y;
      values.resize(static_cast<size_t>(file.find(name)->elements()));
      read_floats(*file.find(name), values);
    }
  }

  static constexpr int64_t kHidden = 40;
  SafetensorsFile file;
  TemporaryDirectory directory;
  std::vector<float> x, y;  // [tokens, hidden]
};

TEST(KimiWeights, ABoundedLayerHasTheOutputsOfTransformers) {
  const BoundedLayer layer;
  const ModelFixture fixture(layer.directory.path());
  const DeltaConfig& sizes = *fixture.config.first<DeltaConfig>();
  EXPECT_EQ(sizes.lower_bound, -5);
  const int64_t tokens = static_cast<int64_t>(layer.x.size()) / BoundedLayer::kHidden, prompt = 70;
  Device device(2);
  const StateLayout layout = state_layout(fixture.config, "", 8, 2, 16);
  for (Decoder decoder : {Decoder::kConventional, Decoder::kDirect, Decoder::kExact}) {
    StatePool pool(layout, pool_size(layout, 1, 200), {.max_rows = 1, .is_poisoned = true});
    const Handle row = pool.allocate(200);
    const BlockWidths widths = block_widths(sizes, layout, static_cast<int>(tokens), device);
    Activations arrays;
    const auto floats = [&](int64_t width) { return Buffer<float>(static_cast<size_t>(tokens * width)); };
    arrays.hidden = floats(BoundedLayer::kHidden);
    arrays.normal = floats(BoundedLayer::kHidden);
    arrays.projection = floats(widths.projection);
    arrays.convolved = floats(widths.convolved);
    arrays.gate = floats(widths.gate);
    arrays.beta = floats(widths.beta);
    arrays.mixed = floats(widths.mixed);
    arrays.workspace = Buffer<std::byte>(widths.workspace_bytes);
    std::vector<float> given;
    for (int64_t n = 0; n < tokens;) {
      const int count = n == 0 ? static_cast<int>(prompt) : decoder == Decoder::kConventional ? 1 : 2;
      const StepKind kind = n == 0                              ? StepKind::kPrefill
                            : decoder == Decoder::kConventional ? StepKind::kConventional
                                                                : StepKind::kReplay;
      ModelStep step{.plan = &pool.begin_step(kind, {{row}}, {{count}}),
                     .readout = decoder == Decoder::kExact ? Readout::kExact : Readout::kDirect,
                     .logit_token = {}};
      std::copy_n(layer.x.data() + n * BoundedLayer::kHidden, count * BoundedLayer::kHidden, arrays.normal.data());
      std::fill_n(arrays.hidden.data(), count * BoundedLayer::kHidden, 0.0f);
      const Forward forward{fixture.config, step, pool, arrays, device, count};
      run_delta(forward, sizes, std::get<DeltaWeights>(fixture.weights.blocks[0].body), 0);
      pool.commit();
      given.insert(given.end(), arrays.hidden.data(), arrays.hidden.data() + count * BoundedLayer::kHidden);
      n += count;
    }
    EXPECT_LE(relative_error(given, layer.y), kModelBound);
  }
}

}  // namespace
}  // namespace replayssm
