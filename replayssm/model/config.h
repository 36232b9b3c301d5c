// What a model is made of, read from its config.json and generation_config.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "replayssm/ops/delta.h"

namespace replayssm {

enum class Architecture {
  kQwen35,     // Qwen3.5 dense text model: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, heads contiguous
  kQwen3Next,  // Qwen3-Next, dense: in_proj_qkvz and in_proj_ba, interleaved per key head
};

enum class LayerKind {
  kDelta,      // the delta rule behind a short convolution ("linear_attention")
  kAttention,  // softmax attention with output gate ("full_attention")
};

struct AttentionConfig {
  int query_heads = 0;  // a multiple of kv_heads
  int kv_heads = 0;
  int head_size = 0;
  int rotary_size = 0;  // the leading dimensions of a head that rotate: even, 2 .. head_size
  double rope_theta = 0;
};

struct DeltaConfig {
  DeltaShape shape;    // one that ops/delta.h accepts
  int conv_width = 0;  // inputs of the causal convolution over q | k | v

  int key_channels() const { return shape.key_heads * shape.key_size; }
  int value_channels() const { return shape.heads * shape.value_size; }
  int conv_channels() const { return 2 * key_channels() + value_channels(); }
};

// Every number is within the limits that read_config documents, so that products of two of them fit 64 bits with room
// to spare; memory sized by it is bounded by what the tensors, checked against it, prove to exist.
struct ModelConfig {
  Architecture architecture = Architecture::kQwen35;
  std::string model_type;  // as in config.json: "qwen3_5", "qwen3_5_text" or "qwen3_next"
  int64_t vocabulary = 0;  // rows of the embedding
  int hidden_size = 0;
  int intermediate_size = 0;  // of the SwiGLU feed-forward of every layer
  std::vector<LayerKind> layers;
  AttentionConfig attention;
  DeltaConfig delta;
  double norm_epsilon = 0;           // of every RMSNorm
  bool has_tied_embeddings = false;  // the head is the embedding
  int64_t context_tokens = 0;        // longest sequence
  std::vector<int32_t> end_tokens;   // token ids that end a text; may be empty
  int mtp_layers = 0;                // 0 or 1: attention layers of the multi-token-prediction head

  int count(LayerKind kind) const;
};

// Parses the texts of config.json and, unless empty, generation_config.json; `source` opens the error lines.
//
// model_type qwen3_5 (fields in text_config; vision is ignored), qwen3_5_text or qwen3_next. Fields as `transformers`
// names them: vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
// max_position_embeddings and linear_{num_key_heads, num_value_heads, key_head_dim, value_head_dim} must be there;
// head_dim (256), linear_conv_kernel_dim (4), rms_norm_eps (1e-6), hidden_act, tie_word_embeddings (false; outside
// text_config it wins), layer_types or full_attention_interval (4), rope_parameters or rope_scaling or rope_theta
// (10000) and partial_rotary_factor (0.25), mtp_num_hidden_layers or num_nextn_predict_layers (0), eos_token_id have
// these defaults. End tokens are those of both files.
//
// Throws Error naming the field, the expected and the given, if a field is missing, ill-typed or past its limit
// (vocabulary 2^22, hidden_size 2^16, intermediate_size 2^20, layers 1024, heads 1024, head sizes 1024, heads times
// size 2^18, context 2^24, state of a sequence 2^33 numbers), or asks for what is not supported: another model_type,
// mixture of experts, quantization_config, biases, another activation, RoPE scaling, no output gate.
ModelConfig parse_config(std::string_view config, std::string_view generation_config, std::string_view source);

// parse_config of a model directory's config.json and, if it is there, generation_config.json.
ModelConfig read_config(const std::string& directory);

}  // namespace replayssm
