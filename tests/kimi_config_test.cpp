// Configs of Kimi-Linear: the published shapes, both spellings, every wrong field refused by name.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "replayssm/model/config.h"
#include "replayssm/model/language_model.h"
#include "replayssm/state/layout.h"
#include "tests/bad_input.h"

namespace replayssm {
namespace {

using nlohmann::json;
using test::expect_refusal;

json read(const std::string& directory) {
  std::ifstream stream(std::string(REPLAYSSM_SOURCE_DIR) + "/tests/fixtures/" + directory + "/config.json");
  return json::parse(stream);
}

ModelConfig parse(const json& config) {
  return parse_config(config.dump(), "", "");
}

StateLayout layout_of(const ModelConfig& config) {
  return state_layout(config, "", 16, 1, 16);
}

TEST(KimiConfig, ReadsThePublishedModel) {
  const ModelConfig config = parse(read("configs/kimi-linear"));
  EXPECT_EQ(config.model_type, "kimi_linear");
  EXPECT_EQ(config.vocabulary, 163840);
  EXPECT_EQ(config.hidden_size, 2304);
  EXPECT_EQ(config.layers, 27);
  EXPECT_EQ(config.context_tokens, 1048576);
  EXPECT_EQ(config.norm_epsilon, 1e-5);
  EXPECT_FALSE(config.has_zero_centred_norms);
  EXPECT_FALSE(config.has_tied_embeddings);
  EXPECT_EQ(config.end_tokens, std::vector<int32_t>{163586});
  ASSERT_EQ(config.blocks.size(), 54u);
  for (int layer = 0; layer < 27; ++layer) {
    EXPECT_EQ(std::holds_alternative<LatentAttentionConfig>(config.blocks[2 * layer].config),
              layer % 4 == 3 || layer == 26);
    EXPECT_EQ(std::holds_alternative<ExpertsConfig>(config.blocks[2 * layer + 1].config), layer > 0);
  }
  const DeltaConfig& delta = *config.first<DeltaConfig>();
  EXPECT_EQ(delta.shape.heads, 32);
  EXPECT_EQ(delta.shape.key_heads, 32);
  EXPECT_EQ(delta.shape.key_size, 128);
  EXPECT_EQ(delta.shape.value_size, 128);
  EXPECT_EQ(delta.shape.gate_size, 128);
  EXPECT_EQ(delta.conv_width, 4);
  EXPECT_EQ(delta.gate_rank, 128);
  EXPECT_EQ(delta.output_gate_rank, 128);
  EXPECT_EQ(delta.lower_bound, 0);
  EXPECT_TRUE(delta.has_sigmoid_gate);
  const LatentAttentionConfig& attention = *config.first<LatentAttentionConfig>();
  EXPECT_EQ(attention.heads, 32);
  EXPECT_EQ(attention.latent_size, 512);
  EXPECT_EQ(attention.nope_size, 128);
  EXPECT_EQ(attention.rope_size, 64);
  EXPECT_EQ(attention.value_size, 128);
  EXPECT_EQ(attention.query_rank, 0);
  // The published code leaves the norms inside at their default; rms_norm_eps does not reach them.
  EXPECT_EQ(attention.norm_epsilon, 1e-6);
  EXPECT_EQ(config.first<FeedForwardConfig>()->size, 9216);
  const ExpertsConfig& experts = *config.first<ExpertsConfig>();
  EXPECT_EQ(experts.experts, 256);
  EXPECT_EQ(experts.top_k, 8);
  EXPECT_EQ(experts.size, 1024);
  EXPECT_EQ(experts.shared_size, 1024);
  EXPECT_FALSE(experts.has_shared_gate);
  EXPECT_EQ(experts.router.scores, RouterScores::kSigmoid);
  EXPECT_TRUE(experts.router.has_correction);
  EXPECT_TRUE(experts.router.is_normalised);
  EXPECT_EQ(experts.router.groups, 1);
  EXPECT_EQ(experts.router.scale, 2.446);
  EXPECT_EQ(slot_bytes(layout_of(config)).checkpoint, size_t{40} << 20);
  EXPECT_EQ(kv_token_bytes(layout_of(config)), 7u * 576 * sizeof(float));
}

// The shapes of Kimi-K3. What else it publishes (see RefusesWhatIsNotSupported) is left out of this config.
TEST(KimiConfig, ReadsTheShapesOfKimiK3) {
  const ModelConfig config = parse(read("configs/kimi-k3"));
  EXPECT_EQ(config.layers, 93);
  EXPECT_EQ(config.count<DeltaConfig>(), 69);
  EXPECT_EQ(config.count<LatentAttentionConfig>(), 24);
  EXPECT_EQ(config.count<ExpertsConfig>(), 92);
  EXPECT_EQ(config.first<DeltaConfig>()->lower_bound, -5);
  EXPECT_EQ(config.first<DeltaConfig>()->output_gate_rank, 0);
  EXPECT_EQ(config.first<LatentAttentionConfig>()->query_rank, 1536);
  EXPECT_EQ(slot_bytes(layout_of(config)).checkpoint, size_t{414} << 20);
  EXPECT_EQ(kv_token_bytes(layout_of(config)), 24u * 576 * sizeof(float));
}

TEST(KimiConfig, ReadsTheSpellingOfTransformers) {
  const ModelConfig config = parse(read("models/kimi_linear_respelled-tiny"));
  const char pattern[] = "LEDFDEDF";  // latent attention, experts, delta rule, feed-forward
  ASSERT_EQ(config.blocks.size(), 8u);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(config.blocks[i].layer, i / 2);
    EXPECT_EQ(std::holds_alternative<LatentAttentionConfig>(config.blocks[i].config), pattern[i] == 'L') << i;
    EXPECT_EQ(std::holds_alternative<ExpertsConfig>(config.blocks[i].config), pattern[i] == 'E') << i;
    EXPECT_EQ(std::holds_alternative<DeltaConfig>(config.blocks[i].config), pattern[i] == 'D') << i;
    EXPECT_EQ(std::holds_alternative<FeedForwardConfig>(config.blocks[i].config), pattern[i] == 'F') << i;
  }
  EXPECT_EQ(config.first<DeltaConfig>()->shape.heads, 5);
  EXPECT_EQ(config.first<DeltaConfig>()->shape.key_size, 16);
  EXPECT_EQ(config.first<LatentAttentionConfig>()->query_rank, 23);
  EXPECT_EQ(config.first<ExpertsConfig>()->shared_size, 72);
  EXPECT_FALSE(config.first<ExpertsConfig>()->router.is_normalised);
  json bounded = read("models/kimi_linear_respelled-tiny");
  bounded["linear_lower_bound"] = -2.5;
  EXPECT_EQ(parse(bounded).first<DeltaConfig>()->lower_bound, -2.5);
}

TEST(KimiConfig, FieldsHaveDefaults) {
  json config = read("models/kimi_linear-tiny");
  for (const char* field :
       {"use_grouped_topk", "moe_layer_freq", "moe_renormalize", "moe_router_activation_func", "q_lora_rank",
        "num_shared_experts", "routed_scaling_factor", "num_expert_group", "topk_group", "rms_norm_eps", "mla_use_nope",
        "hidden_act", "num_key_value_heads", "eos_token_id", "num_nextn_predict_layers", "tie_word_embeddings"})
    config.erase(field);
  config["linear_attn_config"].erase("short_conv_kernel_size");
  const ModelConfig model = parse(config);
  EXPECT_EQ(model.norm_epsilon, 1e-5);
  EXPECT_EQ(model.first<DeltaConfig>()->conv_width, 4);
  EXPECT_EQ(model.first<ExpertsConfig>()->shared_size, 0);
  EXPECT_EQ(model.first<ExpertsConfig>()->router.groups, 1);
  EXPECT_EQ(model.first<ExpertsConfig>()->router.scale, 1);
  EXPECT_TRUE(model.first<ExpertsConfig>()->router.is_normalised);
  for (const char* field : {"num_experts", "num_experts_per_token", "moe_intermediate_size", "first_k_dense_replace"})
    config.erase(field);
  EXPECT_EQ(parse(config).count<ExpertsConfig>(), 0);
  config["max_position_embeddings"] = 77;
  config.erase("model_max_length");
  EXPECT_EQ(parse(config).context_tokens, 77);
}

TEST(KimiConfig, ReadsWhichLayersHaveExperts) {
  const auto pattern = [](const char* patch) {
    json config = read("models/kimi_linear-tiny");
    config.merge_patch(json::parse(patch));
    std::string text;
    for (const Block& block : parse(config).blocks) {
      if (std::holds_alternative<ExpertsConfig>(block.config)) text += 'E';
      if (std::holds_alternative<FeedForwardConfig>(block.config)) text += 'F';
    }
    return text;
  };
  EXPECT_EQ(pattern("{}"), "FEEE");
  EXPECT_EQ(pattern(R"({"first_k_dense_replace": 0})"), "EEEE");
  EXPECT_EQ(pattern(R"({"first_k_dense_replace": 4})"), "FFFF");
  EXPECT_EQ(pattern(R"({"num_experts": 0})"), "FFFF");
  EXPECT_EQ(pattern(R"({"num_experts": null})"), "FFFF");
  // The published code skips by moe_layer_freq; transformers does not read it.
  EXPECT_EQ(pattern(R"({"moe_layer_freq": 2})"), "FFEF");
  EXPECT_EQ(pattern(R"({"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]})"), "EFFE");
}

TEST(KimiConfig, EveryNeededFieldIsRequiredTypedAndLimited) {
  for (const char* field :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "model_max_length", "num_experts_per_token",
        "moe_intermediate_size", "first_k_dense_replace", "linear_attn_config/num_heads", "linear_attn_config/head_dim",
        "linear_attn_config/kda_layers", "linear_attn_config/full_attn_layers"}) {
    const json::json_pointer at(fmt::format("/{}", field));
    std::string name = field;
    std::replace(name.begin(), name.end(), '/', '.');
    json config = read("models/kimi_linear-tiny");
    config[at] = nullptr;
    expect_refusal([&] { parse(config); }, name == "model_max_length" ? "max_position_embeddings" : name + ": expected",
                   "got nothing");
    for (const json& value : {json(-1), json(1.5), json(int64_t{1} << 40), json("8"), json(true)}) {
      config[at] = value;
      expect_refusal([&] { parse(config); }, "config.json: " + name + ": expected");
    }
  }
}

TEST(KimiConfig, RefusesWhatIsNotSupported) {
  const struct {
    const char* patch;
    const char* line;
  } cases[] = {
      {R"({"model_type": "kimi_k3"})", "kimi_linear, got \"kimi_k3\""},
      {R"({"hidden_act": "situ"})", "hidden_act: expected \"silu\" (nothing else is supported), got \"situ\""},
      {R"({"attention_bias": true})", "attention_bias: expected false"},
      {R"({"mla_use_nope": false})", "mla_use_nope: expected true"},
      {R"({"mla_use_output_gate": true})", "mla_use_output_gate: expected false"},
      {R"({"attn_res_block_size": 12})", "attn_res_block_size: expected none (attention residuals are not supported)"},
      {R"({"routed_expert_hidden_size": 3584})", "routed_expert_hidden_size: expected none"},
      {R"({"quantization_config": {}})", "quantization_config: expected none"},
      {R"({"num_key_value_heads": 2})", "num_key_value_heads: expected 4 (nothing else is supported), got 2"},
      {R"({"q_lora_rank": 0})", "q_lora_rank: expected an integer in 1 .. 65536, got 0"},
      {R"({"num_attention_heads": 1024, "num_key_value_heads": 1024, "kv_lora_rank": 512})",
       "kv_lora_rank: expected at most 256 for 1024 heads, got 520"},
      {R"({"linear_attn_config": {"kda_layers": [1, 2]}})",
       "linear_attn_config: expected each of 4 layers (num_hidden_layers) in kda_layers or full_attn_layers, got no 4"},
      {R"({"num_hidden_layers": 5})", "expected each of 5 layers (num_hidden_layers)"},
      {R"({"num_hidden_layers": 3})",
       "linear_attn_config.kda_layers: expected layers of 1 .. 3 (num_hidden_layers), got 4"},
      {R"({"linear_attn_config": {"kda_layers": [0, 1, 2, 4]}})", "kda_layers: expected layers of 1 .. 4"},
      {R"({"linear_attn_config": {"kda_layers": [1, 2, 4, 2]}})", "kda_layers: expected each layer once, in one list"},
      {R"({"linear_attn_config": {"full_attn_layers": [3, 4]}})",
       "full_attn_layers: expected each layer once, in one list, got 4 again"},
      {R"({"linear_attn_config": {"full_attn_layers": [3.5]}})", "full_attn_layers: expected layers of 1 .. 4"},
      {R"({"linear_attn_config": {"full_attn_layers": ["3"]}})", "got \"3\""},
      {R"({"linear_attn_config": {"head_dim": 40}})", "linear_attn_config.head_dim: expected a multiple of 16, got 40"},
      {R"({"linear_attn_config": {"short_conv_kernel_size": 9}})", "short_conv_kernel_size: expected an integer in"},
      {R"({"linear_attn_config": {"gate_lower_bound": 0}})", "gate_lower_bound: expected a number below 0, got 0"},
      {R"({"linear_attn_config": {"gate_lower_bound": 5}})", "linear_attn_config.gate_lower_bound: expected a number"},
      {R"({"linear_attn_config": []})", "linear_attn_config: expected an object"},
      {R"({"linear_attn_config": null})", "layer_types: expected an array"},
      {R"({"linear_attn_config": null, "layer_types": ["full_attention"]})", "layer_types: expected 4"},
      {R"({"linear_attn_config": null, "layer_types": ["mamba", 1, 1, 1]})",
       "layer_types: expected \"linear_attention\" or \"full_attention\", got \"mamba\""},
      {R"({"mlp_layer_types": ["dense", "dense", "sparse", "moe"]})",
       "mlp_layer_types: expected \"dense\" or \"sparse\", got \"moe\""},
      {R"({"moe_layer_freq": 0})", "moe_layer_freq: expected an integer"},
      {R"({"num_experts_per_token": 9})", "num_experts_per_token: expected an integer in 1 .. 8, got 9"},
      {R"({"moe_router_activation_func": "tanh"})",
       "moe_router_activation_func: expected \"sigmoid\" or \"softmax\", got \"tanh\""},
      {R"({"num_expert_group": 3})", "num_expert_group: expected a divisor of num_experts (8)"},
      {R"({"num_expert_group": 8})", "that leaves groups of 2 or more, got 8"},
      {R"({"topk_group": 5})", "topk_group: expected an integer in 1 .. 4, got 5"},
      {R"({"topk_group": 1})", "topk_group: expected groups that hold num_experts_per_token (3) experts, got 1 of 2"},
      {R"({"routed_scaling_factor": 0})", "routed_scaling_factor: expected a number"},
      {R"({"layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"]})",
       "layer_types: expected the layers of linear_attn_config"},
      {R"({"linear_num_heads": 77})", "linear_num_heads: expected"},
      {R"({"linear_head_dim": 77})", "linear_head_dim: expected"},
      {R"({"linear_conv_kernel_dim": 77})", "linear_conv_kernel_dim: expected"},
      {R"({"linear_lower_bound": -7})", "linear_lower_bound: expected"},
      {R"({"num_shared_experts": -1})", "num_shared_experts: expected an integer"},
      {R"({"rms_norm_eps": 0})", "rms_norm_eps: expected a number"},
  };
  for (const auto& one : cases) {
    json config = read("models/kimi_linear-tiny");
    config.merge_patch(json::parse(one.patch));
    expect_refusal([&] { parse(config); }, "config.json: ", one.line);
  }
}

}  // namespace
}  // namespace replayssm
