// Mutated files of every kind that the library reads: refused, or read right; no crash, hang or huge allocation.
#include "tests/mutation.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "replayssm/core/json.h"
#include "replayssm/core/safetensors.h"
#include "replayssm/model/checkpoint.h"
#include "replayssm/model/config.h"
#include "replayssm/model/tokenizer.h"
#include "tests/bad_input.h"
#include "tests/tokenizer_fixture.h"
#include "tests/walks.h"

namespace replayssm {
namespace {

using nlohmann::json;
using test::Mutator;
using test::survive_mutations;

const int kMutations = test::walk_length(20000);

std::string safetensors_input() {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"I64","shape":[],"data_offsets":[32,40]},)"
      R"("d":{"dtype":"F16","shape":[0,5],"data_offsets":[40,40]}})";
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + std::string(40, 'd');
}

// Reads a file's header anew, plainly, and holds the parser's result against it.
void check_safetensors(const std::string& file) {
  const SafetensorsContents contents = parse_safetensors(std::as_bytes(std::span(file)), "file");
  uint64_t length;
  std::memcpy(&length, file.data(), 8);
  const json header = json::parse(file.substr(8, length));
  ASSERT_EQ(contents.tensors.size() + header.contains("__metadata__"), header.size());
  size_t bytes = 0;
  for (const Tensor& tensor : contents.tensors) {
    const json& entry = header.at(tensor.name);
    EXPECT_EQ(entry["dtype"], dtype_name(tensor.dtype));
    EXPECT_EQ(entry["shape"], json(tensor.shape));
    const size_t begin =
        static_cast<size_t>(reinterpret_cast<const char*>(tensor.bytes.data()) - file.data()) - 8 - length;
    EXPECT_EQ(entry["data_offsets"], json({begin, begin + tensor.bytes.size()}));
    EXPECT_EQ(tensor.bytes.size() * 8, static_cast<size_t>(tensor.elements() * dtype_bits(tensor.dtype)));
    bytes += tensor.bytes.size();
    if (tensor.dtype != Dtype::kF32 && tensor.dtype != Dtype::kBF16 && tensor.dtype != Dtype::kF16) continue;
    std::vector<float> values(static_cast<size_t>(tensor.elements()));
    read_floats(tensor, values);
  }
  EXPECT_EQ(8 + length + bytes, file.size());
}

// Edits the header as JSON and keeps its length right, so that more than the frame is tried.
std::string mutate_safetensors(Mutator& mutator, const std::string& file) {
  if (mutator.below(3) == 0) return mutator.bytes(file);
  uint64_t length;
  std::memcpy(&length, file.data(), 8);
  const std::string header = mutator.json(file.substr(8, length));
  length = header.size();
  std::string mutated(8, '\0');
  std::memcpy(mutated.data(), &length, 8);
  return mutated + header + file.substr(file.size() - 40);
}

TEST(Mutation, Safetensors) {
  check_safetensors(safetensors_input());
  const auto counts =
      survive_mutations(safetensors_input(), kMutations, 1'000'000, mutate_safetensors, check_safetensors);
  RecordProperty("refused", counts.refused);
  RecordProperty("accepted", counts.accepted);
  EXPECT_GT(counts.refused, kMutations / 2);
  EXPECT_GT(counts.accepted, kMutations / 200);
}

const char* const kConfig = R"({"model_type":"qwen3_5","tie_word_embeddings":true,"text_config":{
  "model_type":"qwen3_5_text","vocab_size":6144,"hidden_size":256,"intermediate_size":640,"num_hidden_layers":4,
  "num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,"hidden_act":"silu","max_position_embeddings":2048,
  "rms_norm_eps":1e-06,"attention_bias":false,"linear_conv_kernel_dim":4,"linear_key_head_dim":64,
  "linear_value_head_dim":64,"linear_num_key_heads":2,"linear_num_value_heads":4,"mtp_num_hidden_layers":1,
  "layer_types":["linear_attention","linear_attention","linear_attention","full_attention"],"eos_token_id":[0,1],
  "rope_parameters":{"rope_type":"default","rope_theta":10000000,"partial_rotary_factor":0.25,
  "mrope_section":[11,11,10],"mrope_interleaved":true}}})";

const char* const kExpertsConfig = R"({"model_type":"qwen3_next","tie_word_embeddings":true,"vocab_size":6144,
  "hidden_size":256,"intermediate_size":640,"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,
  "max_position_embeddings":2048,"linear_key_head_dim":64,"linear_value_head_dim":64,"linear_num_key_heads":2,
  "linear_num_value_heads":4,"num_experts":16,"num_experts_per_tok":4,"moe_intermediate_size":128,
  "shared_expert_intermediate_size":64,"norm_topk_prob":true,"decoder_sparse_step":1,"mlp_only_layers":[0,2]})";

const char* const kNemotronConfig = R"({"model_type":"nemotron_h","tie_word_embeddings":false,"vocab_size":6144,
  "hidden_size":256,"intermediate_size":640,"num_hidden_layers":5,"hybrid_override_pattern":"MEM*-",
  "layers_block_type":["mamba","moe","linear_attention","attention","mlp"],"num_attention_heads":4,
  "num_key_value_heads":2,"head_dim":64,"max_position_embeddings":2048,"mamba_num_heads":8,"mamba_head_dim":32,
  "ssm_state_size":64,"n_groups":2,"conv_kernel":4,"use_conv_bias":true,"time_step_limit":[0.0,Infinity],
  "mamba_hidden_act":"silu","mlp_hidden_act":"relu2","n_routed_experts":16,"num_experts_per_tok":4,"n_group":4,
  "topk_group":2,"moe_intermediate_size":128,"moe_latent_size":48,"moe_shared_expert_intermediate_size":64,
  "norm_topk_prob":true,"routed_scaling_factor":2.5,"layer_norm_epsilon":1e-05,"eos_token_id":[2,11]})";

const char* const kKimiConfig = R"({"model_type":"kimi_linear","vocab_size":6144,"hidden_size":256,
  "intermediate_size":640,"num_hidden_layers":4,"num_attention_heads":4,"model_max_length":2048,"kv_lora_rank":64,
  "q_lora_rank":48,"qk_nope_head_dim":32,"qk_rope_head_dim":16,"v_head_dim":32,"num_experts":16,
  "num_experts_per_token":4,"moe_intermediate_size":128,"num_shared_experts":1,"first_k_dense_replace":1,
  "moe_layer_freq":1,"num_expert_group":4,"topk_group":2,"routed_scaling_factor":2.5,"linear_attn_config":{
  "kda_layers":[1,2,4],"full_attn_layers":[3],"num_heads":4,"head_dim":64,"gate_lower_bound":-5}})";

void check_config(const std::string& text) {
  const ModelConfig config = parse_config(text, "", "");
  const json outer = json::parse(text);
  const json& fields = config.model_type == "qwen3_5" ? outer.at("text_config") : outer;
  EXPECT_EQ(fields.at("hidden_size"), config.hidden_size);
  EXPECT_EQ(fields.at("vocab_size"), config.vocabulary);
  EXPECT_EQ(fields.at("num_hidden_layers"), config.layers);
  if (const auto* feed_forward = config.first<FeedForwardConfig>()) {
    EXPECT_EQ(fields.at("intermediate_size"), feed_forward->size);
  }
  if (const auto* experts = config.first<ExpertsConfig>()) {
    EXPECT_EQ(fields.at("num_experts"), experts->experts);
    EXPECT_TRUE(experts->top_k >= 1 && experts->top_k <= experts->experts);
  }
  const bool is_kimi = config.model_type == "kimi_linear";
  const bool has_length = is_kimi && !fields.value("model_max_length", json()).is_null();
  EXPECT_EQ(fields.at(has_length ? "model_max_length" : "max_position_embeddings"), config.context_tokens);
  EXPECT_GT(config.hidden_size, 0);
  if (const auto* delta = config.first<DeltaConfig>()) {  // a mutated pattern may have one kind alone
    const DeltaShape& shape = delta->shape;
    const json heads = is_kimi ? fields.at("linear_attn_config").at("num_heads") : fields.at("linear_num_value_heads");
    EXPECT_EQ(heads, shape.heads);
    EXPECT_LE(delta->lower_bound, 0);
    EXPECT_EQ(shape.heads % shape.key_heads, 0);
    EXPECT_TRUE(shape.key_size % 16 == 0 && shape.key_size <= 256 && shape.value_size % 4 == 0);
  }
  if (const auto* attention = config.first<AttentionConfig>()) {
    EXPECT_EQ(fields.at("num_attention_heads"), attention->query_heads);
    EXPECT_EQ(attention->query_heads % attention->kv_heads, 0);
    EXPECT_TRUE(attention->rotary_size % 2 == 0 && attention->rotary_size <= attention->head_size);
    EXPECT_TRUE(attention->rope_theta >= 1);
  }
  if (const auto* attention = config.first<LatentAttentionConfig>()) {
    EXPECT_EQ(fields.at("num_attention_heads"), attention->heads);
    EXPECT_EQ(fields.at("kv_lora_rank"), attention->latent_size);
  }
  EXPECT_GT(config.norm_epsilon, 0);
  for (const int32_t token : config.end_tokens) EXPECT_TRUE(token >= 0 && token < config.vocabulary);
}

void check_nemotron_config(const std::string& text) {
  const ModelConfig config = parse_config(text, "", "");
  const json fields = parse_json(text, "");
  EXPECT_EQ(fields.at("hidden_size"), config.hidden_size);
  EXPECT_EQ(fields.at("vocab_size"), config.vocabulary);
  EXPECT_TRUE(config.layers >= 1 && config.blocks.size() == static_cast<size_t>(config.layers));
  if (const auto* mamba = config.first<Mamba2Config>()) {
    EXPECT_NO_THROW(check_shape(mamba->shape));
    EXPECT_EQ(fields.at("mamba_num_heads"), mamba->shape.heads);
    EXPECT_TRUE(mamba->conv_width >= 2 && mamba->conv_width <= 8);
    EXPECT_TRUE(mamba->time_step_min >= 0 && mamba->time_step_min <= mamba->time_step_max);
  }
  if (const auto* attention = config.first<AttentionConfig>()) {
    EXPECT_EQ(fields.at("num_attention_heads"), attention->query_heads);
    EXPECT_EQ(attention->query_heads % attention->kv_heads, 0);
  }
  if (const auto* experts = config.first<ExpertsConfig>()) {
    EXPECT_EQ(fields.at("n_routed_experts"), experts->experts);
    EXPECT_NO_THROW(check_router(experts->router, experts->experts, experts->top_k));
  }
  EXPECT_GT(config.norm_epsilon, 0);
  for (const int32_t token : config.end_tokens) EXPECT_TRUE(token >= 0 && token < config.vocabulary);
}

TEST(Mutation, Config) {
  const std::pair<const char*, void (*)(const std::string&)> sources[] = {{kConfig, check_config},
                                                                          {kExpertsConfig, check_config},
                                                                          {kKimiConfig, check_config},
                                                                          {kNemotronConfig, check_nemotron_config}};
  for (const auto& [source, check] : sources) {
    check(source);
    const auto counts = survive_mutations(
        source, kMutations, 2'000'000,
        [](Mutator& mutator, const std::string& text) {
          return mutator.below(4) == 0 ? mutator.bytes(text) : mutator.json(text);
        },
        check);
    RecordProperty("refused", counts.refused);
    RecordProperty("accepted", counts.accepted);
    EXPECT_GT(counts.refused, kMutations / 2);
    EXPECT_GT(counts.accepted, kMutations / 200);
  }
}

// A mutation may well turn on what breaks the round trip; the rest must keep it.
bool keeps_text(const json& document) {
  for (const json& token : document.value("added_tokens", json::array()))
    for (const char* field : {"lstrip", "rstrip"})
      if (token.contains(field) && token[field] == true) return false;
  const std::string text = document.dump();
  return text.find("NFC") == std::string::npos && text.find("Removed") == std::string::npos &&
         text.find("\"add_prefix_space\":false,\"trim_offsets\":false,\"type\":\"ByteLevel\",\"use_regex\":false}]") !=
             std::string::npos;
}

void check_tokenizer(const std::string& document) {
  const Tokenizer tokenizer(document, "tokenizer.json");
  const std::string text = "hello, wörld<|end|> it's\r\n\n  42 \xFF\xE2\x82 <tool>\u3000é\xF0\x9F\x98\x80";
  const std::vector<int32_t> ids = tokenizer.encode(text);
  for (const int32_t id : ids) ASSERT_TRUE(id >= 0 && id < tokenizer.vocabulary_size());
  if (keeps_text(json::parse(document))) {
    EXPECT_EQ(tokenizer.decode(ids), text);
  }
}

// The 256 byte tokens would take nearly every edit: what is edited stands before and after them, or among them at
// times.
std::string mutate_tokenizer(Mutator& mutator, const std::string& text) {
  const size_t vocabulary = text.find("\"vocab\":{") + 9;
  const size_t end = text.find('}', text.find("\"hello\":259"));
  switch (mutator.below(6)) {
    case 0:
      return mutator.bytes(text);
    case 1:
      return mutator.json(text);
    case 2:
    case 3:
      return mutator.json(text.substr(0, vocabulary)) + text.substr(vocabulary);
    default:
      return text.substr(0, end) + mutator.json(text.substr(end));
  }
}

TEST(Mutation, Tokenizer) {
  const std::string text = test::small_tokenizer().dump();
  check_tokenizer(text);
  ASSERT_TRUE(keeps_text(test::small_tokenizer()));
  const auto counts = survive_mutations(text, kMutations, 3'000'000, mutate_tokenizer, check_tokenizer);
  RecordProperty("refused", counts.refused);
  RecordProperty("accepted", counts.accepted);
  EXPECT_GT(counts.refused, kMutations / 2);
  EXPECT_GT(counts.accepted, kMutations / 200);
}

TEST(Mutation, CheckpointIndex) {
  const test::TemporaryDirectory directory;
  const std::string bytes(8, 'b');
  const Tensor a{"a", Dtype::kF32, {2}, std::as_bytes(std::span(bytes))};
  const Tensor b{"b", Dtype::kF32, {2}, std::as_bytes(std::span(bytes))};
  write_safetensors(directory.path("one.safetensors"), std::vector{a});
  write_safetensors(directory.path("two.safetensors"), std::vector{a, b});
  const std::string index =
      R"({"metadata":{"total_size":16},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})";
  const auto check = [&](const std::string& text) {
    directory.write("model.safetensors.index.json", text);
    const Checkpoint checkpoint(directory.path());
    const json weight_map = json::parse(text).at("weight_map");
    ASSERT_EQ(checkpoint.names().size(), weight_map.size());
    for (const std::string& name : checkpoint.names())
      EXPECT_TRUE(weight_map.at(name) == "one.safetensors" || weight_map.at(name) == "two.safetensors");
  };
  check(index);
  const auto mutate = [](Mutator& mutator, const std::string& text) {
    return mutator.below(2) == 0 ? mutator.bytes(text) : mutator.json(text);
  };
  // Fewer, since each writes and maps files; the parser below is the one that config.json goes through.
  const auto counts = survive_mutations(index, kMutations / 20, 4'000'000, mutate, check);
  EXPECT_GT(counts.refused, kMutations / 40);
  EXPECT_GT(counts.accepted, kMutations / 2000);
}

TEST(Mutation, AllocationsAreCounted) {
  const auto allocate = [](const std::string&) { std::vector<char> memory(1 << 20); };
  const auto keep = [](Mutator&, const std::string& text) { return text; };
  EXPECT_EQ(survive_mutations("x", 3, 1, keep, allocate, 2 << 20).accepted, 3);
  const test::AllocationLimit limit(1 << 20);
  EXPECT_THROW(std::vector<char>(2 << 20), std::bad_alloc);
  std::vector<char> memory(1000);
  EXPECT_EQ(limit.used_bytes(), 1000u);
}

}  // namespace
}  // namespace replayssm
