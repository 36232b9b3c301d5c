// The weights of a Qwen3.5 or Qwen3-Next text model, in the one arrangement that the forward pass reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "replayssm/core/bf16.h"
#include "replayssm/core/buffer.h"
#include "replayssm/model/checkpoint.h"
#include "replayssm/model/config.h"

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
struct QwenDeltaWeights {
  Matrix in_proj;         // rows [q G*K | k G*K | v H*V | z H*V | b H | a H], heads in order
  Buffer<float> conv;     // [W, C]
  Buffer<float> a_log;    // [H]
  Buffer<float> dt_bias;  // [H]
  Buffer<float> norm;     // [V], plain
  Matrix out_proj;        // [hidden, H*V]
};

// Q query heads, M key/value heads of D.
struct QwenAttentionWeights {
  Matrix in_proj;        // rows [q Q*D | k M*D | v M*D | gate Q*D], heads in order
  Buffer<float> q_norm;  // [D], zero-centred
  Buffer<float> k_norm;  // [D], zero-centred
  Matrix out_proj;       // [hidden, Q*D]
};

struct QwenLayerWeights {
  Buffer<float> input_norm;  // [hidden], zero-centred
  std::variant<QwenDeltaWeights, QwenAttentionWeights> mixer;
  Buffer<float> post_norm;  // [hidden], zero-centred
  Matrix gate_up;           // rows [gate | up], intermediate_size each
  Matrix down;              // [hidden, intermediate_size]
};

struct QwenWeights {
  Matrix embedding;  // [vocabulary, hidden]
  std::vector<QwenLayerWeights> layers;
  Buffer<float> norm;  // [hidden], zero-centred
  Matrix lm_head;      // [vocabulary, hidden]; empty if the embedding is the head
  // 16 hexadecimal digits of every byte loaded and of the sizes: equal for equal models only.
  std::string fingerprint;
  size_t bytes = 0;

  const Matrix& head() const { return lm_head.outputs > 0 ? lm_head : embedding; }
};

// Copies the tensors of `checkpoint` (under "model." or "model.language_model.") that `config` needs; others, as those
// of images and of the multi-token-prediction head, are left alone. Qwen3-Next's interleaved projections are put into
// Qwen3.5's order. Throws Error naming the tensor, the expected and the given, if one is missing or of another shape,
// or is neither BF16, F16 nor F32.
QwenWeights load_qwen_weights(const Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace replayssm
