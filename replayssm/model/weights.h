// The weights of a model, in the one arrangement that forward passes read, on the CPU and on a GPU: a block's
// projections in one matrix, a convolution's taps first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "replayssm/core/bf16.h"
#include "replayssm/core/buffer.h"
#include "replayssm/core/cuda_device.h"
#include "replayssm/model/config.h"

namespace replayssm {

// A matrix in host memory, or some of its rows.
struct MatrixRows {
  int64_t outputs = 0;
  int64_t inputs = 0;
  const Bf16* bf16 = nullptr;  // [outputs, inputs], this or f32
  const float* f32 = nullptr;
};

// [outputs, inputs], in bf16 or in f32. Array is Buffer or, on a GPU, DeviceBuffer.
template <template <typename> class Array>
struct BasicMatrix {
  int64_t outputs = 0;
  int64_t inputs = 0;
  Array<Bf16> bf16;
  Array<float> f32;

  bool is_bf16() const { return bf16.size() > 0; }
  size_t bytes() const { return bf16.size() * sizeof(Bf16) + f32.size() * sizeof(float); }

  MatrixRows rows(int64_t first, int64_t count) const {
    return {count, inputs, is_bf16() ? bf16.data() + first * inputs : nullptr,
            is_bf16() ? nullptr : f32.data() + first * inputs};
  }
  operator MatrixRows() const { return rows(0, outputs); }
};

// H value heads of V, G key heads of K, C = 2 G K + H V channels of the convolution, W its width.
// Gated DeltaNet: in_proj has rows [q G*K | k G*K | v H*V | z H*V | b H | a H]. With a gate_rank R, in place of a come
// R rows f, and gate makes the gates from them; with an output_gate_rank S there is no z, but S last rows, from which
// output_gate makes it. Heads are in order.
struct DeltaRows {
  explicit DeltaRows(const DeltaConfig& config)
      : z(config.conv_channels()),
        b(z + (config.output_gate_rank > 0 ? 0 : config.value_channels())),
        a(b + config.shape.heads),
        output_gate(a + (config.gate_rank > 0 ? config.gate_rank : config.gates())),
        count(output_gate + config.output_gate_rank) {}

  int64_t z, b, a, output_gate;  // the first of each; `a` the first of f too
  int64_t count;
};

template <template <typename> class Array>
struct BasicDeltaWeights {
  BasicMatrix<Array> in_proj;
  BasicMatrix<Array> gate;         // [H*gate_size, R] or empty
  BasicMatrix<Array> output_gate;  // [H*V, S] or empty
  Array<float> conv;               // [W, C]
  Array<float> a_log;              // [H]
  Array<float> dt_bias;            // [H, gate_size]
  Array<float> norm;               // [V], plain
  BasicMatrix<Array> out_proj;     // [hidden, H*V]
};

// H heads of P in G groups with states of N, C = H P + 2 G N channels of the convolution, W its width.
template <template <typename> class Array>
struct BasicMamba2Weights {
  BasicMatrix<Array> in_proj;   // rows [z H*P | x H*P | B G*N | C G*N | dt H], heads and groups in order
  Array<float> conv;            // [W, C]
  Array<float> conv_bias;       // [C]; empty without one
  Array<float> a_log;           // [H]
  Array<float> d;               // [H]
  Array<float> dt_bias;         // [H]
  Array<float> norm;            // [H*P], plain
  BasicMatrix<Array> out_proj;  // [hidden, H*P]
};

// Q query heads, M key/value heads of D.
template <template <typename> class Array>
struct BasicAttentionWeights {
  BasicMatrix<Array> in_proj;   // rows [q Q*D | k M*D | v M*D | gate Q*D], heads in order; no gate without a gate
  Array<float> q_norm;          // [D]; empty without head norms
  Array<float> k_norm;          // [D]
  BasicMatrix<Array> out_proj;  // [hidden, Q*D]
};

// P = nope_size + rope_size channels of a query head, C = latent_size, C + rope_size channels of a token's key.
template <template <typename> class Array>
struct BasicLatentAttentionWeights {
  BasicMatrix<Array> in_proj;   // rows [q heads*P | latent C | shared key rope_size]; with a query_rank R, q has R rows
  Array<float> query_norm;      // [R] or empty
  BasicMatrix<Array> query_up;  // [heads*P, R] or empty
  Array<float> latent_norm;     // [C]
  // [heads, C + rope_size, P]: of each head the transpose of its key projection and, for the shared part, the identity
  BasicMatrix<Array> key_up;
  BasicMatrix<Array> value_up;  // [heads, value_size, C]
  BasicMatrix<Array> out_proj;  // [hidden, heads*value_size]
};

template <template <typename> class Array>
struct BasicFeedForwardWeights {
  BasicMatrix<Array> up;    // SwiGLU: rows [gate | up]; relu^2: up
  BasicMatrix<Array> down;  // [hidden, size]
};

// E experts, whose inputs and outputs are the hidden state or, with a latent projection, of its size.
template <template <typename> class Array>
struct BasicExpertsWeights {
  BasicMatrix<Array> router;               // [E, hidden]
  Array<float> correction;                 // [E]; empty without a correction
  BasicFeedForwardWeights<Array> experts;  // of all experts, one below the other: [E, ..] of a feed-forward's
  BasicMatrix<Array> latent_down;          // [latent, hidden]; empty without a latent projection
  BasicMatrix<Array> latent_up;            // [hidden, latent]
  BasicFeedForwardWeights<Array> shared;   // empty without a shared expert
  BasicMatrix<Array> shared_gate;          // [1, hidden]; empty without a gate
};

// In the order of BlockConfig.
template <template <typename> class Array>
using BasicBlockWeights =
    std::variant<BasicDeltaWeights<Array>, BasicMamba2Weights<Array>, BasicAttentionWeights<Array>,
                 BasicLatentAttentionWeights<Array>, BasicFeedForwardWeights<Array>, BasicExpertsWeights<Array>>;

template <template <typename> class Array>
struct BasicWeights {
  struct Block {
    Array<float> norm;  // [hidden]
    BasicBlockWeights<Array> body;
  };

  BasicMatrix<Array> embedding;  // [vocabulary, hidden]
  std::vector<Block> blocks;
  Array<float> norm;           // [hidden]
  BasicMatrix<Array> lm_head;  // [vocabulary, hidden]; empty if the embedding is the head
  // 16 hexadecimal digits of every byte loaded and of the sizes: equal for equal models only.
  std::string fingerprint;
  size_t bytes = 0;

  const BasicMatrix<Array>& head() const { return lm_head.outputs > 0 ? lm_head : embedding; }
};

// On the CPU a matrix is BF16 if every tensor that it was put together from is, else FP32.
using Matrix = BasicMatrix<Buffer>;
using DeltaWeights = BasicDeltaWeights<Buffer>;
using Mamba2Weights = BasicMamba2Weights<Buffer>;
using AttentionWeights = BasicAttentionWeights<Buffer>;
using LatentAttentionWeights = BasicLatentAttentionWeights<Buffer>;
using FeedForwardWeights = BasicFeedForwardWeights<Buffer>;
using ExpertsWeights = BasicExpertsWeights<Buffer>;
using BlockWeights = BasicBlockWeights<Buffer>;
using Weights = BasicWeights<Buffer>;

// On a GPU all matrices are of the type of its activations.
using CudaMatrix = BasicMatrix<DeviceBuffer>;
using CudaWeights = BasicWeights<DeviceBuffer>;

}  // namespace replayssm
