// Qwen3.5 and Qwen3-Next text models: layers of Gated DeltaNet and of gated attention, each followed by a feed-forward
// or a mixture of experts.
#pragma once

#include "replayssm/core/json.h"
#include "replayssm/model/checkpoint.h"
#include "replayssm/model/config.h"
#include "replayssm/model/weight_store.h"
#include "replayssm/model/weights.h"

namespace replayssm {

// Whether model_type is one of this family: qwen3_5 or qwen3_5_moe (fields in text_config; vision is ignored),
// qwen3_5_text, qwen3_5_moe_text or qwen3_next.
bool is_qwen(std::string_view model_type);

// Fields as `transformers` names them: vocab_size, hidden_size, intermediate_size, num_hidden_layers,
// num_attention_heads, num_key_value_heads, max_position_embeddings and linear_{num_key_heads, num_value_heads,
// key_head_dim, value_head_dim} must be there; head_dim (256), linear_conv_kernel_dim (4), rms_norm_eps (1e-6),
// hidden_act, tie_word_embeddings (false; outside text_config it wins), layer_types or full_attention_interval (4),
// rope_parameters or rope_scaling or rope_theta (10000) and partial_rotary_factor (0.25), mtp_num_hidden_layers or
// num_nextn_predict_layers (0), eos_token_id have these defaults. With experts num_experts, num_experts_per_tok,
// moe_intermediate_size and shared_expert_intermediate_size must be there; intermediate_size only for dense layers,
// which Qwen3-Next may have among the others: decoder_sparse_step (1), mlp_only_layers (none); its norm_topk_prob is
// true unless it says otherwise, and num_experts must be there, 0 for a dense model. Throws Error as parse_config says;
// also for biases, another activation, no output gate, more experts a token than there are.
ModelConfig parse_qwen_config(const JsonObject& outer);

// Copies the tensors of `checkpoint` (under "model." or "model.language_model.") that `config` needs; others, as those
// of images and of the multi-token-prediction head, are left alone. Qwen3-Next's interleaved projections are put into
// Qwen3.5's order; experts may lie in one tensor a projection, [experts, rows, inputs], or in one an expert. Throws
// Error naming the tensor, the expected and the given, if one is missing or of another shape, or is neither BF16, F16
// nor F32.
template <template <typename> class Array>
BasicWeights<Array> load_qwen_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                      WeightStore<Array>& store, const LoadProgress& progress);

}  // namespace replayssm
