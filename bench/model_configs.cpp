#include "bench/model_configs.h"

namespace replayssm::bench {
namespace {

constexpr const char* kQwen4B = R"({
  "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216,
  "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "silu",
  "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "tie_word_embeddings": true, "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
  "full_attention_interval": 4,
  "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}})";

constexpr const char* kQwen122B = R"({
  "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 3072, "moe_intermediate_size": 1024,
  "shared_expert_intermediate_size": 1024, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 48,
  "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu",
  "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "tie_word_embeddings": false, "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 64,
  "full_attention_interval": 4,
  "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}})";

// 21 layers of Mamba-2, 4 of attention, 17 feed-forwards.
constexpr const char* kNano4B = R"({
  "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 3136, "intermediate_size": 12544,
  "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
  "num_attention_heads": 40, "num_key_value_heads": 8, "attention_head_dim": 128, "head_dim": 128,
  "mamba_num_heads": 96, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
  "use_conv_bias": true, "mlp_hidden_act": "relu2", "max_position_embeddings": 262144, "layer_norm_epsilon": 1e-05,
  "tie_word_embeddings": false})";

// 40 layers of Mamba-2, 8 of attention, 40 of experts.
constexpr const char* kSuper = R"({
  "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 2688,
  "hybrid_override_pattern":
    "MEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEME",
  "num_attention_heads": 32, "num_key_value_heads": 2, "attention_head_dim": 128, "head_dim": 128,
  "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
  "use_conv_bias": true, "mlp_hidden_act": "relu2", "max_position_embeddings": 262144, "layer_norm_epsilon": 1e-05,
  "n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
  "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 5376, "n_group": 1, "topk_group": 1,
  "norm_topk_prob": true, "routed_scaling_factor": 5.0, "tie_word_embeddings": false})";

constexpr const char* kKimiLinear = R"({
  "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
  "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": null, "mla_use_nope": true,
  "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
  "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
  "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "moe_renormalize": true,
  "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": true,
  "hidden_act": "silu", "rms_norm_eps": 1e-05, "model_max_length": 1048576, "tie_word_embeddings": false})";

}  // namespace

const std::map<std::string, std::string>& model_configs() {
  static const std::map<std::string, std::string> by_name = {{"qwen3.5-4b", kQwen4B},
                                                             {"qwen3.5-122b", kQwen122B},
                                                             {"nemotron-3-nano-4b", kNano4B},
                                                             {"nemotron-3-super", kSuper},
                                                             {"kimi-linear", kKimiLinear}};
  return by_name;
}

}  // namespace replayssm::bench
