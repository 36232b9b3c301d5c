// The weights of a model, in the one arrangement that the forward pass reads: a block's projections in one matrix, a
// convolution's taps first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "replayssm/core/bf16.h"
#include "replayssm/core/buffer.h"

namespace replayssm {

// [outputs, inputs]: BF16 if every tensor that it was put together from is, else FP32.
struct Matrix {
  int64_t outputs = 0;
  int64_t inputs = 0;
  Buffer<Bf16> bf16;
  Buffer<float> f32;

  bool is_bf16() const { return bf16.size() > 0; }
  size_t bytes() const { return bf16.size() * sizeof(Bf16) + f32.size() * sizeof(float); }
};

// H value heads of V, G key heads of K, C = 2 G K + H V channels of the convolution, W its width.
// Gated DeltaNet: in_proj has rows [q G*K | k G*K | v H*V | z H*V | b H | a H]. With a gate_rank R, in place of a come
// R rows f, and gate makes the gates from them; with an output_gate_rank S there is no z, but S last rows, from which
// output_gate makes it. Heads are in order.
struct DeltaWeights {
  Matrix in_proj;
  Matrix gate;            // [H*gate_size, R] or empty
  Matrix output_gate;     // [H*V, S] or empty
  Buffer<float> conv;     // [W, C]
  Buffer<float> a_log;    // [H]
  Buffer<float> dt_bias;  // [H, gate_size]
  Buffer<float> norm;     // [V], plain
  Matrix out_proj;        // [hidden, H*V]
};

// H heads of P in G groups with states of N, C = H P + 2 G N channels of the convolution, W its width.
struct Mamba2Weights {
  Matrix in_proj;           // rows [z H*P | x H*P | B G*N | C G*N | dt H], heads and groups in order
  Buffer<float> conv;       // [W, C]
  Buffer<float> conv_bias;  // [C]; empty without one
  Buffer<float> a_log;      // [H]
  Buffer<float> d;          // [H]
  Buffer<float> dt_bias;    // [H]
  Buffer<float> norm;       // [H*P], plain
  Matrix out_proj;          // [hidden, H*P]
};

// Q query heads, M key/value heads of D.
struct AttentionWeights {
  Matrix in_proj;        // rows [q Q*D | k M*D | v M*D | gate Q*D], heads in order; no gate without an output gate
  Buffer<float> q_norm;  // [D]; empty without head norms
  Buffer<float> k_norm;  // [D]
  Matrix out_proj;       // [hidden, Q*D]
};

// P = nope_size + rope_size channels of a query head, C = latent_size.
struct LatentAttentionWeights {
  Matrix in_proj;              // rows [q heads*P | latent C | shared key rope_size]; with a query_rank R, q has R rows
  Buffer<float> query_norm;    // [R] or empty
  Matrix query_up;             // [heads*P, R] or empty
  Buffer<float> latent_norm;   // [C]
  std::vector<Matrix> key_up;  // a head: [C, nope_size], the key projection's transpose
  std::vector<Matrix> value_up;  // a head: [value_size, C]
  Matrix out_proj;               // [hidden, heads*value_size]
};

struct FeedForwardWeights {
  Matrix up;    // SwiGLU: rows [gate | up]; relu^2: up
  Matrix down;  // [hidden, size]
};

// E experts, whose inputs and outputs are the hidden state or, with a latent projection, of its size.
struct ExpertsWeights {
  Matrix router;                            // [E, hidden]
  Buffer<float> correction;                 // [E]; empty without a correction
  std::vector<FeedForwardWeights> experts;  // [E]
  Matrix latent_down;                       // [latent, hidden]; empty without a latent projection
  Matrix latent_up;                         // [hidden, latent]
  FeedForwardWeights shared;                // empty without a shared expert
  Matrix shared_gate;                       // [1, hidden]; empty without a gate
};

// In the order of BlockConfig.
using BlockWeights = std::variant<DeltaWeights, Mamba2Weights, AttentionWeights, LatentAttentionWeights,
                                  FeedForwardWeights, ExpertsWeights>;

struct Weights {
  struct Block {
    Buffer<float> norm;  // [hidden]
    BlockWeights body;
  };

  Matrix embedding;  // [vocabulary, hidden]
  std::vector<Block> blocks;
  Buffer<float> norm;  // [hidden]
  Matrix lm_head;      // [vocabulary, hidden]; empty if the embedding is the head
  // 16 hexadecimal digits of every byte loaded and of the sizes: equal for equal models only.
  std::string fingerprint;
  size_t bytes = 0;

  const Matrix& head() const { return lm_head.outputs > 0 ? lm_head : embedding; }
};

}  // namespace replayssm
