// Model configurations: every spelling read, every wrong field refused by name.
#include "replayssm/model/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/bad_input.h"

namespace replayssm {
namespace {

using nlohmann::json;
using test::expect_refusal;

json text_config() {
  return json::parse(R"({
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "attention_bias": false,
    "attn_output_gate": true, "tie_word_embeddings": true, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "full_attention_interval": 4, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
    "eos_token_id": 248044, "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": true}})");
}

json next_config() {
  json config = text_config();
  config["model_type"] = "qwen3_next";
  config["num_experts"] = 0;
  config.erase("mtp_num_hidden_layers");
  return config;
}

ModelConfig parse(const json& config, const std::string& generation = "") {
  return parse_config(config.dump(), generation, "");
}

bool is_attention(const ModelConfig& config, int layer) {
  return std::holds_alternative<AttentionConfig>(config.blocks[2 * layer].config);
}

TEST(Config, ReadsTextModel) {
  const ModelConfig config = parse(text_config());
  EXPECT_EQ(config.model_type, "qwen3_5_text");
  EXPECT_EQ(config.vocabulary, 248320);
  EXPECT_EQ(config.hidden_size, 2560);
  EXPECT_EQ(config.first<FeedForwardConfig>()->size, 9216);
  EXPECT_EQ(config.layers, 8);
  ASSERT_EQ(config.blocks.size(), 16u);
  for (int layer = 0; layer < 8; ++layer) EXPECT_EQ(is_attention(config, layer), layer % 4 == 3);
  EXPECT_EQ(config.count<DeltaConfig>(), 6);
  const AttentionConfig& attention = *config.first<AttentionConfig>();
  const DeltaConfig& delta = *config.first<DeltaConfig>();
  EXPECT_EQ(attention.query_heads, 16);
  EXPECT_EQ(attention.kv_heads, 4);
  EXPECT_EQ(attention.head_size, 256);
  EXPECT_EQ(attention.rotary_size, 64);
  EXPECT_EQ(attention.rope_theta, 1e7);
  EXPECT_EQ(delta.shape.heads, 32);
  EXPECT_EQ(delta.shape.key_heads, 16);
  EXPECT_EQ(delta.shape.key_size, 128);
  EXPECT_EQ(delta.shape.value_size, 128);
  EXPECT_EQ(delta.shape.gate_size, 1);
  EXPECT_EQ(delta.conv_width, 4);
  EXPECT_EQ(delta.conv_channels(), 8192);
  EXPECT_EQ(config.norm_epsilon, 1e-6);
  EXPECT_TRUE(config.has_tied_embeddings);
  EXPECT_EQ(config.context_tokens, 262144);
  EXPECT_EQ(config.end_tokens, std::vector<int32_t>{248044});
  EXPECT_EQ(config.mtp_layers, 1);
}

TEST(Config, ReadsWrappedModel) {
  json wrapped = {{"model_type", "qwen3_5"}, {"text_config", text_config()}, {"vision_config", {{"depth", 27}}}};
  EXPECT_EQ(parse(wrapped).hidden_size, 2560);
  EXPECT_EQ(parse(wrapped).model_type, "qwen3_5");
  EXPECT_TRUE(parse(wrapped).has_tied_embeddings);
  wrapped["tie_word_embeddings"] = false;
  EXPECT_FALSE(parse(wrapped).has_tied_embeddings);
  wrapped["eos_token_id"] = {7, 248044};
  EXPECT_EQ(parse(wrapped).end_tokens, (std::vector<int32_t>{248044, 7}));
  wrapped["quantization_config"] = {{"bits", 4}};
  expect_refusal([&] { parse(wrapped); }, "config.json: quantization_config: expected none", "got an object of 1");
  wrapped.erase("quantization_config");
  wrapped["text_config"]["hidden_size"] = 0;
  expect_refusal([&] { parse(wrapped); }, "config.json: text_config.hidden_size: expected an integer", "got 0");
  wrapped["text_config"] = text_config();
  wrapped["text_config"]["model_type"] = "qwen3";
  expect_refusal([&] { parse(wrapped); }, "text_config.model_type: expected \"qwen3_5_text\"", "got \"qwen3\"");
  wrapped.erase("text_config");
  expect_refusal([&] { parse(wrapped); }, "config.json: text_config: expected an object, got nothing");
}

TEST(Config, ReadsQwen3Next) {
  EXPECT_EQ(parse(next_config()).model_type, "qwen3_next");
  EXPECT_EQ(parse(next_config()).mtp_layers, 0);
  json config = next_config();
  config["num_nextn_predict_layers"] = 1;
  EXPECT_EQ(parse(config).mtp_layers, 1);
  config.erase("num_experts");
  expect_refusal([&] { parse(config); }, "num_experts: expected an integer", "got nothing");
}

json with_experts(json config) {
  config["num_experts"] = 256;
  config["num_experts_per_tok"] = 8;
  config["moe_intermediate_size"] = 512;
  config["shared_expert_intermediate_size"] = 768;
  return config;
}

json moe_config() {
  json config = with_experts(text_config());
  config["model_type"] = "qwen3_5_moe_text";
  config.erase("intermediate_size");
  return config;
}

bool has_experts(const ModelConfig& config, int layer) {
  return std::holds_alternative<ExpertsConfig>(config.blocks[2 * layer + 1].config);
}

TEST(Config, ReadsExperts) {
  const json wrapped = {{"model_type", "qwen3_5_moe"}, {"text_config", moe_config()}};
  for (const json& one : {moe_config(), wrapped}) {
    const ModelConfig config = parse(one);
    EXPECT_EQ(config.model_type, one["model_type"]);
    EXPECT_EQ(config.count<ExpertsConfig>(), 8);
    EXPECT_EQ(config.count<FeedForwardConfig>(), 0);
    const ExpertsConfig& experts = *config.first<ExpertsConfig>();
    EXPECT_EQ(experts.experts, 256);
    EXPECT_EQ(experts.top_k, 8);
    EXPECT_EQ(experts.size, 512);
    EXPECT_EQ(experts.activation, Activation::kSwiGlu);
    EXPECT_EQ(experts.latent_size, 0);
    EXPECT_EQ(experts.shared_size, 768);
    EXPECT_TRUE(experts.has_shared_gate);
    EXPECT_EQ(experts.router.scores, RouterScores::kSoftmax);
    EXPECT_FALSE(experts.router.has_correction);
    EXPECT_EQ(experts.router.groups, 1);
    EXPECT_TRUE(experts.router.is_normalised);
    EXPECT_EQ(experts.router.scale, 1);
  }
  json other = wrapped;
  other["text_config"]["model_type"] = "qwen3_5_text";
  expect_refusal([&] { parse(other); }, "text_config.model_type: expected \"qwen3_5_moe_text\"");
}

TEST(Config, ReadsExpertsOfQwen3Next) {
  json config = with_experts(next_config());
  for (int layer = 0; layer < 8; ++layer) EXPECT_TRUE(has_experts(parse(config), layer));
  EXPECT_TRUE(parse(config).first<ExpertsConfig>()->router.is_normalised);
  config["norm_topk_prob"] = false;
  EXPECT_FALSE(parse(config).first<ExpertsConfig>()->router.is_normalised);
  config["decoder_sparse_step"] = 2;
  config["mlp_only_layers"] = {3, 4};
  for (int layer = 0; layer < 8; ++layer)
    EXPECT_EQ(has_experts(parse(config), layer), layer == 1 || layer == 5 || layer == 7);
  EXPECT_EQ(parse(config).first<FeedForwardConfig>()->size, 9216);
  config.erase("intermediate_size");
  expect_refusal([&] { parse(config); }, "intermediate_size: expected an integer", "got nothing");
  config.erase("decoder_sparse_step");
  config.erase("mlp_only_layers");
  EXPECT_EQ(parse(config).count<ExpertsConfig>(), 8);
}

TEST(Config, RefusesWrongExperts) {
  for (const char* field :
       {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}) {
    for (const json& value : {json(nullptr), json(0), json(-1), json(1.5), json(int64_t{1} << 40), json("8")}) {
      json config = moe_config();
      config[field] = value;
      expect_refusal([&] { parse(config); }, fmt::format("config.json: {}: expected an integer in", field));
    }
  }
  const struct {
    const char* patch;
    const char* line;
  } cases[] = {
      {R"({"num_experts_per_tok": 257})", "num_experts_per_tok: expected at most 256 (num_experts), got 257"},
      {R"({"num_experts": 16385})", "num_experts: expected an integer in 1 .. 16384, got 16385"},
      {R"({"norm_topk_prob": false})", "norm_topk_prob: expected true (nothing else is supported), got false"},
      {R"({"decoder_sparse_step": 2})", "decoder_sparse_step: expected 1"},
      {R"({"mlp_only_layers": [0]})", "mlp_only_layers: expected an array of 0"},
      {R"({"hidden_act": "gelu"})", "hidden_act: expected \"silu\""},
      {R"({"model_type": "qwen3_next", "mlp_only_layers": [8]})", "mlp_only_layers: expected layers of 0 .. 7, got 8"},
      {R"({"model_type": "qwen3_next", "mlp_only_layers": [-1]})", "expected layers of 0 .. 7, got -1"},
      {R"({"model_type": "qwen3_next", "mlp_only_layers": 1})", "mlp_only_layers: expected an array"},
      {R"({"model_type": "qwen3_next", "decoder_sparse_step": 0})", "decoder_sparse_step: expected an integer in 1"},
      {R"({"model_type": "qwen3_next", "norm_topk_prob": 1})", "norm_topk_prob: expected true or false"},
  };
  for (const auto& one : cases) {
    json config = moe_config();
    config.update(json::parse(one.patch));
    expect_refusal([&] { parse(config); }, "config.json: ", one.line);
  }
}

// The configs of published models: what is known of their shapes.
TEST(Config, ReadsPublishedQwenShapes) {
  const auto read = [](const char* name) {
    return read_config(fmt::format("{}/tests/fixtures/configs/{}", REPLAYSSM_SOURCE_DIR, name));
  };
  const ModelConfig small = read("qwen3.5-4b"), dense = read("qwen3.6-27b"), large = read("qwen3.5-122b");
  EXPECT_EQ(small.count<DeltaConfig>(), 24);
  EXPECT_EQ(small.count<AttentionConfig>(), 8);
  EXPECT_EQ(small.first<DeltaConfig>()->shape.heads, 32);
  EXPECT_EQ(dense.count<DeltaConfig>(), 48);
  EXPECT_EQ(dense.count<FeedForwardConfig>(), 64);
  EXPECT_EQ(dense.first<DeltaConfig>()->shape.heads, 48);
  EXPECT_EQ(large.layers, 48);
  EXPECT_EQ(large.count<DeltaConfig>(), 36);
  EXPECT_EQ(large.count<AttentionConfig>(), 12);
  EXPECT_EQ(large.count<ExpertsConfig>(), 48);
  EXPECT_EQ(large.first<DeltaConfig>()->shape.heads, 64);
  EXPECT_EQ(large.first<ExpertsConfig>()->experts, 256);
  EXPECT_EQ(large.first<ExpertsConfig>()->top_k, 8);
}

TEST(Config, ReadsOlderAndDefaultSpellings) {
  json config = text_config();
  config.erase("rope_parameters");
  EXPECT_EQ(parse(config).first<AttentionConfig>()->rope_theta, 10000);
  EXPECT_EQ(parse(config).first<AttentionConfig>()->rotary_size, 64);
  config["rope_theta"] = 500000.5;
  config["partial_rotary_factor"] = 0.5;
  config["rope_scaling"] = nullptr;
  EXPECT_EQ(parse(config).first<AttentionConfig>()->rope_theta, 500000.5);
  EXPECT_EQ(parse(config).first<AttentionConfig>()->rotary_size, 128);
  config["rope_scaling"] = {{"type", "default"}, {"mrope_section", {11, 11, 10}}};
  EXPECT_EQ(parse(config).first<AttentionConfig>()->rotary_size, 128);
  config["layer_types"] = {"full_attention",   "full_attention",   "linear_attention", "linear_attention",
                           "linear_attention", "linear_attention", "linear_attention", "full_attention"};
  EXPECT_EQ(parse(config).count<AttentionConfig>(), 3);
  EXPECT_TRUE(is_attention(parse(config), 0));
  for (const char* field : {"head_dim", "linear_conv_kernel_dim", "rms_norm_eps", "hidden_act", "attention_bias",
                            "tie_word_embeddings", "eos_token_id", "mtp_num_hidden_layers", "attn_output_gate"})
    config.erase(field);
  EXPECT_EQ(parse(config).first<AttentionConfig>()->head_size, 256);
  EXPECT_EQ(parse(config).norm_epsilon, 1e-6);
  EXPECT_FALSE(parse(config).has_tied_embeddings);
  EXPECT_TRUE(parse(config).end_tokens.empty());
  EXPECT_EQ(parse(config).mtp_layers, 0);
}

TEST(Config, CollectsEndTokensOfBothFiles) {
  json config = text_config();
  EXPECT_EQ(parse(config, R"({"eos_token_id":[5,248044,6]})").end_tokens, (std::vector<int32_t>{5, 248044, 6}));
  EXPECT_EQ(parse(config, R"({"eos_token_id":9})").end_tokens, (std::vector<int32_t>{9, 248044}));
  EXPECT_EQ(parse(config, R"({"temperature":1})").end_tokens, (std::vector<int32_t>{248044}));
  expect_refusal([&] { parse(config, R"({"eos_token_id":248320})"); },
                 "generation_config.json: eos_token_id: expected token ids in 0 .. 248319, got 248320");
  expect_refusal([&] { parse(config, R"({"eos_token_id":[1,-1]})"); }, "got -1");
  expect_refusal([&] { parse(config, R"({"eos_token_id":"x"})"); }, "got \"x\"");
  expect_refusal([&] { parse(config, "[]"); }, "generation_config.json: expected an object");
  expect_refusal([&] { parse(config, "{"); }, "generation_config.json: expected JSON");
  json many = json::object({{"eos_token_id", json::array()}});
  for (int id = 0; id < 65; ++id) many["eos_token_id"].push_back(id);
  expect_refusal([&] { parse(config, many.dump()); }, "at most 64 token ids");
}

TEST(Config, EveryNeededFieldIsRequiredAndTyped) {
  for (const char* field :
       {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "linear_num_key_heads", "linear_num_value_heads",
        "linear_key_head_dim", "linear_value_head_dim"}) {
    json config = text_config();
    config[field] = json::array();
    expect_refusal([&] { parse(config); }, fmt::format("config.json: {}: expected", field), "got an array of 0");
    config[field] = nullptr;
    expect_refusal([&] { parse(config); }, fmt::format("config.json: {}: expected", field), "got nothing");
    config.erase(field);
    expect_refusal([&] { parse(config); }, fmt::format("config.json: {}: expected", field), "got nothing");
  }
}

TEST(Config, NumbersHaveLimits) {
  for (const char* field :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "linear_num_key_heads", "linear_num_value_heads",
        "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"}) {
    for (const json& value : {json(0), json(-1), json(1.5), json(1e30), json(int64_t{1} << 40), json(INT64_MIN),
                              json(UINT64_MAX), json("8"), json(true)}) {
      json config = text_config();
      config[field] = value;
      expect_refusal([&] { parse(config); }, fmt::format("config.json: {}: expected an integer in", field));
    }
  }
}

TEST(Config, RefusesWhatIsNotSupported) {
  const struct {
    const char* patch;
    const char* line;
  } cases[] = {
      {R"({"model_type": "llama"})", "qwen3_next, nemotron_h or kimi_linear, got \"llama\""},
      {R"({"model_type": "qwen3_5_moe_text"})", "num_experts: expected an integer in 1 .. 16384, got nothing"},
      {R"({"hidden_act": "gelu"})", "hidden_act: expected \"silu\" (nothing else is supported), got \"gelu\""},
      {R"({"attention_bias": true})", "attention_bias: expected false"},
      {R"({"attn_output_gate": false})", "attn_output_gate: expected true"},
      {R"({"output_gate_type": "sigmoid"})", "output_gate_type: expected \"swish\""},
      {R"({"mtp_use_dedicated_embeddings": true})", "mtp_use_dedicated_embeddings: expected false"},
      {R"({"mtp_num_hidden_layers": 2})", "mtp_num_hidden_layers: expected an integer in 0 .. 1, got 2"},
      {R"({"quantization_config": {}})", "quantization_config: expected none"},
      {R"({"num_experts": 8})", "num_experts: expected 0"},
      {R"({"num_attention_heads": 18})", "num_attention_heads: expected a multiple of 4, got 18"},
      {R"({"linear_num_value_heads": 24})", "linear_num_value_heads: expected a multiple of 16, got 24"},
      {R"({"linear_key_head_dim": 100})", "linear_key_head_dim: expected a multiple of 16, got 100"},
      {R"({"linear_value_head_dim": 30})", "linear_value_head_dim: expected a multiple of 4, got 30"},
      {R"({"num_attention_heads": 1024, "head_dim": 1024})", "head_dim: expected at most 256 for 1024 heads, got 1024"},
      {R"({"linear_num_value_heads": 1024, "linear_value_head_dim": 1024})", "linear_value_head_dim: expected at most"},
      {R"({"num_hidden_layers": 1024, "linear_num_value_heads": 256, "linear_value_head_dim": 1024,
           "linear_key_head_dim": 256, "linear_num_key_heads": 256})",
       "num_hidden_layers: expected layers with a state of at most 8589934592 numbers"},
      {R"({"layer_types": ["full_attention"]})", "layer_types: expected 8 (num_hidden_layers), got an array of 1"},
      {R"({"layer_types": [1,2,3,4,5,6,7,8]})", "\"full_attention\", got 1"},
      {R"({"layer_types": "x"})", "layer_types: expected an array"},
      {R"({"full_attention_interval": 0})", "full_attention_interval: expected an integer"},
      {R"({"rms_norm_eps": 0})", "rms_norm_eps: expected a number"},
      {R"({"rms_norm_eps": "x"})", "rms_norm_eps: expected a number"},
      {R"({"tie_word_embeddings": 1})", "tie_word_embeddings: expected true or false"},
      {R"({"rope_parameters": {"rope_type": "yarn"}})", "rope_parameters.rope_type: expected \"default\""},
      {R"({"rope_parameters": {"rope_theta": 0}})", "rope_parameters.rope_theta: expected a number"},
      {R"({"rope_parameters": {"full_attention": {}}})", "expected plain RoPE"},
      {R"({"rope_parameters": {"partial_rotary_factor": 0.003}})", "rope_parameters.partial_rotary_factor: expected"},
      {R"({"rope_parameters": {"partial_rotary_factor": 1.5}})", "rope_parameters.partial_rotary_factor: expected"},
      {R"({"rope_parameters": {"partial_rotary_factor": 0.06}})", "got 15 of 256"},
      {R"({"rope_parameters": []})", "rope_parameters: expected an object"},
      {R"({"rope_scaling": {"type": "linear", "factor": 2}})", "rope_scaling.type: expected \"default\""},
      {R"({"eos_token_id": 248320})", "eos_token_id: expected token ids in 0 .. 248319"},
  };
  for (const auto& one : cases) {
    json config = text_config();
    config.update(json::parse(one.patch));
    expect_refusal([&] { parse(config); }, "config.json: ", one.line);
  }
  expect_refusal([] { parse_config("[]", "", ""); }, "config.json: expected an object");
  expect_refusal([] { parse_config("{\"model_type\":", "", "dir/"); }, "dir/config.json: expected JSON");
}

TEST(Config, ReadsDirectories) {
  const test::TemporaryDirectory directory;
  expect_refusal([&] { read_config(directory.path()); }, directory.path("config.json"), "No such file");
  directory.write("config.json", text_config().dump());
  EXPECT_EQ(read_config(directory.path()).hidden_size, 2560);
  directory.write("generation_config.json", R"({"eos_token_id":[1,2]})");
  EXPECT_EQ(read_config(directory.path() + "/").end_tokens, (std::vector<int32_t>{1, 2, 248044}));
  directory.write("generation_config.json", "nothing");
  expect_refusal([&] { read_config(directory.path()); }, "/generation_config.json: expected JSON");
}

}  // namespace
}  // namespace replayssm
