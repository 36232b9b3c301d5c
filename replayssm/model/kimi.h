// Kimi-Linear text models: layers of Kimi Delta Attention and of latent attention without positions, each followed by a
// feed-forward or by experts.
#pragma once

#include <string_view>

#include "replayssm/core/json.h"
#include "replayssm/model/checkpoint.h"
#include "replayssm/model/config.h"
#include "replayssm/model/weight_store.h"
#include "replayssm/model/weights.h"

namespace replayssm {

// Whether model_type is one of this family: kimi_linear.
bool is_kimi(std::string_view model_type);

// Fields as the published checkpoint names them: vocab_size, hidden_size, intermediate_size, num_hidden_layers,
// num_attention_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim (never rotated), v_head_dim, model_max_length
// (or max_position_embeddings), linear_attn_config.{kda_layers, full_attn_layers (both from 1), num_heads, head_dim}
// must be there; linear_attn_config.short_conv_kernel_size (4), linear_attn_config.gate_lower_bound (none),
// linear_attn_config.use_full_rank_gate (false), q_lora_rank (none), num_experts (0), rms_norm_eps (1e-5) have these
// defaults. In place of linear_attn_config, as current `transformers` saves it: layer_types, linear_num_heads,
// linear_head_dim, linear_conv_kernel_dim, linear_lower_bound. With experts: num_experts_per_token,
// moe_intermediate_size and first_k_dense_replace (or mlp_layer_types) must be there; moe_layer_freq (1: of the layers
// past the dense ones, those whose number from 0 is a multiple of it have experts), num_shared_experts (0),
// moe_router_activation_func (sigmoid), moe_renormalize (true), routed_scaling_factor (1), use_grouped_topk (true),
// num_expert_group (1) and topk_group (1) have these defaults. Throws Error as parse_config says; also for layers that
// are in neither list or in both, more experts a token than there are, latent attention with positions or an output
// gate, attention residuals and experts in a latent space (Kimi-K3 has the last three).
ModelConfig parse_kimi_config(const JsonObject& document);

// Copies the tensors of `checkpoint` that `config` needs. Experts may be a tensor each or one for all, convolutions one
// for q, k and v each or one for all; dense layers and experts may lie under mlp or block_sparse_moe, and the gate
// under forget_gate, as `transformers` writes them. Throws Error naming the tensor, the expected and the given, if one
// is missing or of another shape, or is neither BF16, F16 nor F32.
template <template <typename> class Array>
BasicWeights<Array> load_kimi_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                      WeightStore<Array>& store, const LoadProgress& progress);

}  // namespace replayssm
