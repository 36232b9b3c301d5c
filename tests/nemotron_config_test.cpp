// Configs of Nemotron-H: the published shapes, every spelling of the layers, the clamp of the time step, refusals that
// name the field.
#include "replayssm/model/nemotron.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "replayssm/model/language_model.h"
#include "tests/bad_input.h"

namespace replayssm {
namespace {

using nlohmann::json;
using test::expect_refusal;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string directory_of(const std::string& name) {
  return std::string(REPLAYSSM_SOURCE_DIR) + "/tests/fixtures/configs/" + name;
}

// The dense model's config and the one with experts.
json config_of(const std::string& name) {
  std::ifstream stream(directory_of(name) + "/config.json");
  std::stringstream text;
  text << stream.rdbuf();
  return parse_json(text.str(), name);
}
json nano() {
  return config_of("nemotron-3-nano-4b");
}
json super() {
  return config_of("nemotron-3-super");
}

ModelConfig parse(const json& config) {
  return parse_config(config.dump(), "", "");
}

std::string letters(const ModelConfig& config) {
  std::string pattern;
  for (const Block& block : config.blocks)
    pattern += std::holds_alternative<Mamba2Config>(block.config)      ? 'M'
               : std::holds_alternative<AttentionConfig>(block.config) ? '*'
               : std::holds_alternative<ExpertsConfig>(block.config)   ? 'E'
                                                                       : '-';
  return pattern;
}

TEST(NemotronConfig, ReadsThePublishedDenseShape) {
  const ModelConfig config = read_config(directory_of("nemotron-3-nano-4b"));
  EXPECT_EQ(config.model_type, "nemotron_h");
  EXPECT_EQ(config.vocabulary, 131072);
  EXPECT_EQ(config.hidden_size, 3136);
  EXPECT_EQ(config.layers, 42);
  EXPECT_EQ(letters(config), "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-");
  EXPECT_EQ(config.blocks[12].layer, 12);
  const Mamba2Config& mamba = *config.first<Mamba2Config>();
  EXPECT_EQ(mamba.shape.heads, 96);
  EXPECT_EQ(mamba.shape.groups, 8);
  EXPECT_EQ(mamba.shape.head_size, 80);
  EXPECT_EQ(mamba.shape.state_size, 128);
  EXPECT_EQ(mamba.conv_width, 4);
  EXPECT_EQ(mamba.conv_channels(), 9728);
  EXPECT_TRUE(mamba.has_conv_bias);
  EXPECT_EQ(mamba.time_step_min, 0);
  EXPECT_EQ(mamba.time_step_max, kInfinity);
  const AttentionConfig& attention = *config.first<AttentionConfig>();
  EXPECT_EQ(attention.query_heads, 40);
  EXPECT_EQ(attention.kv_heads, 8);
  EXPECT_EQ(attention.head_size, 128);
  EXPECT_EQ(attention.rotary_size, 0);
  EXPECT_FALSE(attention.has_head_norms || attention.has_output_gate);
  EXPECT_EQ(config.first<FeedForwardConfig>()->size, 12544);
  EXPECT_EQ(config.first<FeedForwardConfig>()->activation, Activation::kRelu2);
  EXPECT_EQ(config.norm_epsilon, 1e-5);
  EXPECT_FALSE(config.has_zero_centred_norms || config.has_tied_embeddings);
  EXPECT_EQ(config.context_tokens, 262144);
  EXPECT_EQ(config.end_tokens, (std::vector<int32_t>{2}));
  EXPECT_EQ(config.mtp_layers, 0);
  // 21 layers of 96 x 80 x 128 numbers.
  EXPECT_EQ(slot_bytes(state_layout(config, "", 16, 1, 16)).checkpoint, 82575360u);
}

TEST(NemotronConfig, ReadsThePublishedShapeWithExperts) {
  const ModelConfig config = read_config(directory_of("nemotron-3-super"));
  EXPECT_EQ(config.layers, 88);
  EXPECT_EQ(config.count<Mamba2Config>(), 40);
  EXPECT_EQ(config.count<AttentionConfig>(), 8);
  EXPECT_EQ(config.count<ExpertsConfig>(), 40);
  EXPECT_EQ(config.first<Mamba2Config>()->shape.heads, 128);
  EXPECT_EQ(config.first<AttentionConfig>()->kv_heads, 2);
  const ExpertsConfig& experts = *config.first<ExpertsConfig>();
  EXPECT_EQ(experts.experts, 512);
  EXPECT_EQ(experts.top_k, 22);
  EXPECT_EQ(experts.size, 2688);
  EXPECT_EQ(experts.latent_size, 1024);
  EXPECT_EQ(experts.shared_size, 5376);
  EXPECT_EQ(experts.activation, Activation::kRelu2);
  EXPECT_FALSE(experts.has_shared_gate);
  EXPECT_EQ(experts.router.scores, RouterScores::kSigmoid);
  EXPECT_TRUE(experts.router.has_correction && experts.router.is_normalised);
  EXPECT_EQ(experts.router.groups, 1);
  EXPECT_EQ(experts.router.scale, 5);
  EXPECT_EQ(config.mtp_layers, 1);
  // 40 layers of 128 x 64 x 128 numbers.
  EXPECT_EQ(slot_bytes(state_layout(config, "", 16, 1, 16)).checkpoint, 167772160u);
}

TEST(NemotronConfig, EverySpellingOfTheLayersIsRead) {
  json config = super();
  config["hybrid_override_pattern"] = "M*-E";
  config["num_hidden_layers"] = 4;
  for (const char* field : {"layers_block_type", "layer_types"}) {
    for (const json& list :
         {json{"mamba", "attention", "mlp", "moe"}, json{"linear_attention", "full_attention", "mlp", "moe"}}) {
      json other = config;
      other[field] = list;
      EXPECT_EQ(letters(parse(other)), "M*-E");
      other.erase("hybrid_override_pattern");
      EXPECT_EQ(letters(parse(other)), "M*-E");
      other.erase("num_hidden_layers");
      EXPECT_EQ(letters(parse(other)), "M*-E");
    }
  }
}

// Only what the model's layers need must be there.
TEST(NemotronConfig, OtherSpellingsAndDefaults) {
  json config = nano();
  config["hybrid_override_pattern"] = "M";
  for (const char* field : {"num_hidden_layers", "layer_norm_epsilon", "time_step_limit", "conv_kernel",
                            "use_conv_bias", "n_groups", "mlp_hidden_act", "mamba_hidden_act", "tie_word_embeddings",
                            "eos_token_id", "num_attention_heads", "num_key_value_heads", "intermediate_size"})
    config.erase(field);
  config.update({{"mamba_n_groups", 4}, {"mamba_d_conv", 3}, {"mamba_conv_bias", false}, {"rms_norm_eps", 1e-6}});
  EXPECT_EQ(parse(config).norm_epsilon, 1e-6);
  config["norm_eps"] = 1e-7;
  EXPECT_EQ(parse(config).norm_epsilon, 1e-7);
  const Mamba2Config mamba = *parse(config).first<Mamba2Config>();
  EXPECT_EQ(mamba.shape.groups, 4);
  EXPECT_EQ(mamba.conv_width, 3);
  EXPECT_FALSE(mamba.has_conv_bias);
  EXPECT_EQ(mamba.time_step_max, kInfinity);
  json attention = nano();
  attention.erase("head_dim");
  EXPECT_EQ(parse(attention).first<AttentionConfig>()->head_size, 128);
  attention["attention_head_dim"] = 64;
  EXPECT_EQ(parse(attention).first<AttentionConfig>()->head_size, 64);
  json experts = super();
  for (const char* field : {"moe_latent_size", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"})
    experts.erase(field);
  EXPECT_EQ(parse(experts).first<ExpertsConfig>()->latent_size, 0);
  EXPECT_EQ(parse(experts).first<ExpertsConfig>()->router.scale, 1);
}

TEST(NemotronConfig, TheTimeStepsClampIsThatOfTheLimitAlone) {
  const auto clamp = [](const std::string& limit) {
    std::string text = nano().dump();
    const std::string field = "\"time_step_limit\":[0.0,\"inf\"]";
    const size_t place = text.find(field);
    text.replace(place, field.size(), "\"time_step_limit\":" + limit);
    const Mamba2Config mamba = *parse_config(text, "", "").first<Mamba2Config>();
    return std::pair(mamba.time_step_min, mamba.time_step_max);
  };
  for (const char* limit : {"[0.0, Infinity]", "[0, \"Infinity\"]", "[0.0, {\"__float__\": \"Infinity\"}]", "[0, null]",
                            "[0, 1e300]", "null"})
    EXPECT_EQ(clamp(limit), (std::pair<double, double>(0, kInfinity))) << limit;
  EXPECT_EQ(clamp("[0.25, 100]"), (std::pair<double, double>(0.25, 100)));
  EXPECT_EQ(clamp("[0.5, 0.5]"), (std::pair<double, double>(0.5, 0.5)));
  for (const char* limit : {"[1, 0.5]", "[-1, 1]", "[1e31, Infinity]"})
    expect_refusal([&] { clamp(limit); }, "config.json: time_step_limit: expected 0 <= first <= second, got ");
  for (const char* limit : {"[]", "[0]", "[0, 1, 2]", "[Infinity, Infinity]", "[\"0\", 1]", "[0, \"1\"]", "[null, 1]"})
    expect_refusal([&] { clamp(limit); },
                   "config.json: time_step_limit: expected two numbers (or a number and Infinity), got ");
  expect_refusal([&] { clamp("0.5"); }, "config.json: time_step_limit: expected an array, got 0.5");
}

TEST(NemotronConfig, EveryNeededFieldIsRequiredAndTyped) {
  for (const char* field :
       {"vocab_size", "hidden_size", "max_position_embeddings", "mamba_num_heads", "mamba_head_dim", "ssm_state_size",
        "n_groups", "num_attention_heads", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok",
        "moe_intermediate_size", "moe_shared_expert_intermediate_size", "hybrid_override_pattern"}) {
    json config = super();
    config[field] = json::object();
    expect_refusal([&] { parse(config); }, fmt::format("config.json: {}: expected", field), "got an object of 0");
    config.erase(field);
    expect_refusal([&] { parse(config); }, fmt::format("config.json: {}: expected", field), "got nothing");
  }
  json config = nano();
  config.erase("intermediate_size");
  expect_refusal([&] { parse(config); }, "config.json: intermediate_size: expected an integer", "got nothing");
}

TEST(NemotronConfig, RefusesWhatIsNotSupported) {
  const struct {
    const char* patch;
    const char* line;
  } cases[] = {
      {R"({"hybrid_override_pattern": "MXE"})",
       "hybrid_override_pattern: expected layers of M, *, - and E, got \"XE\" at place 1"},
      {R"({"hybrid_override_pattern": ""})", "hybrid_override_pattern: expected 1 .. 1024 layers, got 0"},
      {R"({"hybrid_override_pattern": "ME*"})",
       "num_hidden_layers: expected 3, the layers of hybrid_override_pattern, got 88"},
      {R"({"hybrid_override_pattern": "ME", "num_hidden_layers": 2, "layers_block_type": ["mamba", "mlp"]})",
       "layers_block_type: expected E at layer 1, as hybrid_override_pattern has, got -"},
      {R"({"hybrid_override_pattern": "ME", "num_hidden_layers": 2, "layer_types": ["mamba"]})",
       "layer_types: expected 2 layers, as hybrid_override_pattern has, got 1"},
      {R"({"hybrid_override_pattern": null, "layer_types": ["mamba", "conv"]})",
       "layer_types: expected \"mamba\" or \"linear_attention\", \"attention\" or \"full_attention\", \"mlp\" or "
       "\"moe\", got \"conv\""},
      {R"({"hybrid_override_pattern": null})", "hybrid_override_pattern: expected the layers' kinds, got nothing"},
      {R"({"mamba_num_heads": 100})", "mamba_num_heads: expected a multiple of 8, got 100"},
      {R"({"mamba_head_dim": 20})", "mamba_head_dim: expected a multiple of 8, got 20"},
      {R"({"ssm_state_size": 120})", "ssm_state_size: expected a multiple of 16, got 120"},
      {R"({"ssm_state_size": 512})", "ssm_state_size: expected an integer in 1 .. 256, got 512"},
      {R"({"mamba_num_heads": 1024, "mamba_head_dim": 1024})", "mamba_head_dim: expected at most 256 for 1024 heads"},
      {R"({"conv_kernel": 9})", "conv_kernel: expected an integer in 2 .. 8, got 9"},
      {R"({"mamba_hidden_act": "gelu"})", "mamba_hidden_act: expected \"silu\" (nothing else is supported), got"},
      {R"({"mlp_hidden_act": "silu"})", "mlp_hidden_act: expected \"relu2\" (nothing else is supported), got \"silu\""},
      {R"({"use_bias": true})", "use_bias: expected false (nothing else is supported), got true"},
      {R"({"mamba_proj_bias": true})", "mamba_proj_bias: expected false"},
      {R"({"attention_bias": true})", "attention_bias: expected false"},
      {R"({"mlp_bias": true})", "mlp_bias: expected false"},
      {R"({"use_conv_bias": 1})", "use_conv_bias: expected true or false, got 1"},
      {R"({"sliding_window": 4096})", "sliding_window: expected none (attention windows are not supported), got 4096"},
      {R"({"num_experts_per_tok": 513})", "num_experts_per_tok: expected at most 512 (n_routed_experts), got 513"},
      {R"({"n_group": 3})", "n_group: expected groups of equally many of the 512 experts, at least two, got 3"},
      {R"({"n_group": 512})", "n_group: expected groups of equally many of the 512 experts, at least two, got 512"},
      {R"({"n_group": 64, "topk_group": 2})",
       "topk_group: expected groups that hold num_experts_per_tok, 22, got 2 of 8 experts"},
      {R"({"topk_group": 2})", "topk_group: expected an integer in 1 .. 1, got 2"},
      {R"({"n_shared_experts": 2})", "n_shared_experts: expected 1 (nothing else is supported), got 2"},
      {R"({"routed_scaling_factor": 0})", "routed_scaling_factor: expected a number"},
      {R"({"num_attention_heads": 33})", "num_attention_heads: expected a multiple of 2, got 33"},
      {R"({"layer_norm_epsilon": 0})", "layer_norm_epsilon: expected a number"},
      {R"({"num_nextn_predict_layers": -1})", "num_nextn_predict_layers: expected an integer"},
      {R"({"quantization_config": {}})", "quantization_config: expected none"},
  };
  for (const auto& one : cases) {
    json config = super();
    config.update(json::parse(one.patch));
    expect_refusal([&] { parse(config); }, "config.json: ", one.line);
  }
}

}  // namespace
}  // namespace replayssm
