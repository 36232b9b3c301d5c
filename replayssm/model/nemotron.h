// Nemotron-H and Nemotron-3 text models: a layer is one block, of Mamba-2, of attention without positions, of a
// squared-ReLU feed-forward or of a mixture of experts.
#pragma once

#include <string_view>

#include "replayssm/core/json.h"
#include "replayssm/model/checkpoint.h"
#include "replayssm/model/config.h"
#include "replayssm/model/weight_store.h"
#include "replayssm/model/weights.h"

namespace replayssm {

// Whether model_type is of this family: nemotron_h.
bool is_nemotron(std::string_view model_type);

// The layers are hybrid_override_pattern, a string of M (Mamba-2), * (attention), - (feed-forward) and E (experts), or
// the list layers_block_type or layer_types of "mamba" or "linear_attention", "attention" or "full_attention", "mlp"
// and "moe"; those that are there must agree, with num_hidden_layers too. Fields as the published configs name them;
// what a kind of layer needs is read if the model has one:
//   all     vocab_size, hidden_size, max_position_embeddings; layer_norm_epsilon or norm_eps or rms_norm_eps (1e-5),
//           tie_word_embeddings (false), eos_token_id, num_nextn_predict_layers (0)
//   M       mamba_num_heads, mamba_head_dim, ssm_state_size, n_groups (or mamba_n_groups), conv_kernel (or
//           mamba_d_conv; 4), use_conv_bias (or mamba_conv_bias; true), time_step_limit (or mamba_dt_limit): the clamp
//           of the time step, [0, no bound] unless given. time_step_min and time_step_max only serve initialisation.
//   *       num_attention_heads, num_key_value_heads, head_dim (or attention_head_dim; 128)
//   -       intermediate_size
//   E       n_routed_experts, num_experts_per_tok, moe_intermediate_size, moe_shared_expert_intermediate_size,
//           moe_latent_size (none), n_group (1), topk_group (1), norm_topk_prob (true), routed_scaling_factor (1)
// rope_theta and partial_rotary_factor mean nothing, chunk_size and expand are not needed. Throws Error as parse_config
// says; also for heads that n_groups does not divide, a head that is no multiple of 8 or a state that is none of 16,
// more experts a token than there are, other activations than relu2 and (Mamba-2) silu, sliding windows, and biases
// but the convolution's.
ModelConfig parse_nemotron_config(const JsonObject& document);

// Copies the tensors of `checkpoint` (under "backbone." or "model.") that `config` needs; an expert's are tensors of
// their own or slices of one; those of the multi-token-prediction head are left alone. Throws Error naming the tensor,
// the expected and the given, if one is missing or of another shape, or is neither BF16, F16 nor F32; also if a layer's
// tensors are not those of the kind that the config gives it, or if there are more layers.
template <template <typename> class Array>
BasicWeights<Array> load_nemotron_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                          WeightStore<Array>& store, const LoadProgress& progress);

}  // namespace replayssm
