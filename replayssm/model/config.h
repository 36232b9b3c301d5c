// What a model is made of, read from its config.json and generation_config.json.
//
// A model is a list of blocks over one residual stream, hidden <- hidden + block(norm(hidden)). A Qwen layer is two of
// them, a mixer and a feed-forward; a family differs in how its config and its tensors say so, not in how it runs.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "replayssm/ops/activation.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/experts.h"
#include "replayssm/ops/mamba2.h"

namespace replayssm {

// The delta rule behind a short convolution over q | k | v (Gated DeltaNet, Kimi Delta Attention).
struct DeltaConfig {
  DeltaShape shape;               // one that ops/delta.h accepts
  int conv_width = 0;             // inputs of the causal convolution
  int gate_rank = 0;              // of the gates' two projections, one behind the other; 0: a single one
  int output_gate_rank = 0;       // of the output gate's, likewise
  double lower_bound = 0;         // below 0: of a token's log-decay, as delta_gates has it
  bool has_sigmoid_gate = false;  // the output norm times sigmoid(z), else silu(z)

  int key_channels() const { return shape.key_heads * shape.key_size; }
  int value_channels() const { return shape.heads * shape.value_size; }
  int conv_channels() const { return 2 * key_channels() + value_channels(); }
  int gates() const { return shape.heads * shape.gate_size; }
};

// Mamba-2 behind a short convolution over x | B | C.
struct Mamba2Config {
  Mamba2Shape shape;   // one that ops/mamba2.h accepts
  int conv_width = 0;  // inputs of the causal convolution
  bool has_conv_bias = false;
  double time_step_min = 0;  // the clamp of the time step
  double time_step_max = std::numeric_limits<double>::infinity();

  int inner_channels() const { return shape.heads * shape.head_size; }
  int conv_channels() const { return inner_channels() + 2 * shape.groups * shape.state_size; }
};

// Softmax attention with grouped queries.
struct AttentionConfig {
  int query_heads = 0;  // a multiple of kv_heads
  int kv_heads = 0;
  int head_size = 0;
  int rotary_size = 0;  // the leading dimensions of a head that rotate: even, 0 (no positions) .. head_size
  double rope_theta = 0;
  bool has_head_norms = false;   // an RMSNorm over each query and each key
  bool has_output_gate = false;  // the output times sigmoid(gate), a gate a channel
};

// Softmax attention over latents that all heads share; nothing is rotated.
struct LatentAttentionConfig {
  int heads = 0;
  int latent_size = 0;      // channels of a token's latent: keys and values are made from it
  int nope_size = 0;        // of a query and key head: made from the latent
  int rope_size = 0;        // of a query and key head: shared by all heads, beside the latent
  int value_size = 0;       // of a value head
  int query_rank = 0;       // of the queries' two projections, one behind the other; 0: a single one
  double norm_epsilon = 0;  // of the norms inside

  int key_size() const { return latent_size + rope_size; }  // what a token keeps
};

// W_down (silu(W_gate x) * W_up x), or W_down relu(W_up x)^2.
struct FeedForwardConfig {
  int size = 0;
  Activation activation = Activation::kSwiGlu;
};

// A mixture of experts: the top_k feed-forwards that a token chooses, weighted, beside one that all tokens share.
struct ExpertsConfig {
  int experts = 0;
  int top_k = 0;
  RouterConfig router{};  // one that check_router accepts
  int size = 0;           // of each expert
  Activation activation = Activation::kSwiGlu;
  int latent_size = 0;           // the chosen experts work on a projection to this size; 0: on the block's input
  int shared_size = 0;           // of the shared expert; 0: there is none
  bool has_shared_gate = false;  // the shared expert's output times a sigmoid, one a token
};

using BlockConfig =
    std::variant<DeltaConfig, Mamba2Config, AttentionConfig, LatentAttentionConfig, FeedForwardConfig, ExpertsConfig>;

struct Block {
  int layer = 0;  // the model's own count, from 0
  BlockConfig config;
};

// Every number is within the limits that read_config documents, so that products of two of them fit 64 bits with room
// to spare; memory sized by it is bounded by what the tensors, checked against it, prove to exist.
struct ModelConfig {
  std::string model_type;  // as in config.json
  int64_t vocabulary = 0;  // rows of the embedding
  int hidden_size = 0;
  int layers = 0;  // as the config counts them
  std::vector<Block> blocks;
  double norm_epsilon = 0;              // of every RMSNorm
  bool has_zero_centred_norms = false;  // 1 + w in place of w, but in gated norms
  bool has_tied_embeddings = false;     // the head is the embedding
  int64_t context_tokens = 0;           // longest sequence
  std::vector<int32_t> end_tokens;      // token ids that end a text; may be empty
  int mtp_layers = 0;                   // layers of the multi-token-prediction head

  // The blocks of one kind: how many there are, and the first of them or null. Blocks of a kind have equal sizes, but
  // for feed-forwards.
  template <typename Config>
  int count() const {
    int sum = 0;
    for (const Block& block : blocks) sum += std::holds_alternative<Config>(block.config);
    return sum;
  }
  template <typename Config>
  const Config* first() const {
    for (const Block& block : blocks)
      if (const auto* config = std::get_if<Config>(&block.config)) return config;
    return nullptr;
  }
};

// Parses the texts of config.json and, unless empty, generation_config.json; `source` opens the error lines. The fields
// are those of the model's family: replayssm/model/qwen.h, nemotron.h, kimi.h. End tokens are those of both files.
//
// Throws Error naming the field, the expected and the given, if a field is missing, ill-typed or past its limit
// (vocabulary 2^22, hidden_size 2^16, intermediate sizes 2^20, experts 2^14, layers 1024, heads 1024, head sizes 1024,
// heads times size 2^18, context 2^24, state of a sequence 2^33 numbers), or asks for what is not supported: another
// model_type, quantization_config, another activation, RoPE scaling.
ModelConfig parse_config(std::string_view config, std::string_view generation_config, std::string_view source);

// parse_config of a model directory's config.json and, if it is there, generation_config.json.
ModelConfig read_config(const std::string& directory);

}  // namespace replayssm
