// Internal to the ops that CPU and GPU share a contract of: the checks at their doors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "replayssm/core/error.h"
#include "replayssm/ops/activation.h"
#include "replayssm/ops/attention.h"
#include "replayssm/ops/conv1d.h"
#include "replayssm/ops/cuda_checks.h"
#include "replayssm/ops/delta.h"
#include "replayssm/ops/experts.h"
#include "replayssm/ops/mamba2.h"
#include "replayssm/ops/sample.h"

namespace replayssm {

inline bool has_null(std::initializer_list<const void*> pointers) {
  return std::find(pointers.begin(), pointers.end(), nullptr) != pointers.end();
}

// `blocks`, as a launch takes it. Throws Error if there are too many.
inline unsigned check_blocks(const char* op, int64_t blocks) {
  require(blocks < int64_t{1} << 31, "{}: on a GPU expected fewer than 2^31 blocks of work, got {}", op, blocks);
  return static_cast<unsigned>(blocks);
}

// The sizes of a convolution.
template <typename T, typename Out>
void check_conv1d(const BasicConv1d<T, Out>& args) {
  const BasicConv1dState<T>& state = args.state;
  require(state.channels >= 1, "conv1d: expected channels >= 1, got {}", state.channels);
  require(state.width >= 2 && state.width <= 8, "conv1d: expected a width of 2 to 8, got {}", state.width);
  require(state.capacity >= state.width, "conv1d: expected a window capacity of at least the width {}, got {}",
          state.width, state.capacity);
  require(args.x_stride >= state.channels, "conv1d: expected a stride of at least {} elements, got {}", state.channels,
          args.x_stride);
  const int room = state.capacity - (state.width - 1);
  require(args.token_begin != nullptr || (args.tokens_per_row >= 1 && args.tokens_per_row <= room),
          "conv1d: expected token_begin, or 1 to {} tokens a row, got a null pointer and {}", room,
          args.tokens_per_row);
}

template <typename T, typename Out>
void check_conv1d_arrays(const BasicConv1d<T, Out>& args) {
  require(!has_null({args.x, args.weight, args.out}), "conv1d: expected x, weight and out, got a null pointer");
}

// What the three norms have in common: `Norm` has tokens, size, eps; `vectors` a token are named `what`.
template <typename Norm>
void check_norm_sizes(const char* op, const Norm& args, const char* what, int vectors) {
  require(args.tokens >= 0 && vectors >= 0 && args.size > 0,
          "{}: expected tokens and {} >= 0 and size > 0, got {}, {} and {}", op, what, args.tokens, vectors, args.size);
  require(args.eps >= 0, "{}: expected eps >= 0, got {}", op, args.eps);
}

template <typename T>
void check_silu_product(const BasicSiluProduct<T>& args) {
  require(args.tokens >= 0 && args.size >= 0, "silu_product: expected sizes >= 0, got tokens {} and size {}",
          args.tokens, args.size);
  require(args.tokens == 0 || args.size == 0 || !has_null({args.gate, args.up, args.y}),
          "silu_product: gate, up and y must not be null");
}

template <typename T>
void check_relu2(const BasicRelu2<T>& args) {
  require(args.tokens >= 0 && args.size >= 0, "relu2: expected sizes >= 0, got tokens {} and size {}", args.tokens,
          args.size);
  require(args.tokens == 0 || args.size == 0 || !has_null({args.x, args.y}), "relu2: x and y must not be null");
}

template <typename T>
void check_sigmoid_gate(const BasicSigmoidGate<T>& args) {
  require(args.tokens >= 0 && args.heads >= 0 && args.size >= 0,
          "sigmoid_gate: expected sizes >= 0, got tokens {}, heads {} and size {}", args.tokens, args.heads, args.size);
  require(args.tokens == 0 || args.heads == 0 || args.size == 0 || !has_null({args.gate, args.x}),
          "sigmoid_gate: gate and x must not be null");
}

// `Args` is that of the CPU or of a GPU.
template <typename Args>
void check_embed_sizes(const Args& args) {
  require(args.tokens >= 0 && args.vocabulary >= 0 && args.size >= 0,
          "embed: expected sizes >= 0, got tokens {}, vocabulary {} and size {}", args.tokens, args.vocabulary,
          args.size);
}
template <typename Args>
void check_rope_angles_sizes(const Args& args) {
  require(args.tokens >= 0 && args.rotary_size >= 0 && args.rotary_size % 2 == 0,
          "rope_angles: expected tokens >= 0 and an even rotary_size >= 0, got {} and {}", args.tokens,
          args.rotary_size);
  require(args.tokens == 0 || args.rotary_size == 0 || args.theta > 0, "rope_angles: expected theta > 0, got {}",
          args.theta);
}

// The sizes of an attention and the arrays that every call has.
template <typename T>
void check_attention(const BasicAttention<T>& args) {
  const BasicKvCache<T>& cache = args.cache;
  require(cache.kv_heads > 0 && cache.head_size > 0 && cache.page_tokens > 0 && cache.pages >= 0,
          "attention: expected kv_heads, head_size and page_tokens > 0, got {}, {} and {}", cache.kv_heads,
          cache.head_size, cache.page_tokens);
  require(cache.latent_size >= 0 && cache.latent_size <= cache.head_size,
          "attention: expected latent_size 0 .. {} (head_size), got {}", cache.head_size, cache.latent_size);
  require(args.query_heads > 0 && args.query_heads % cache.kv_heads == 0,
          "attention: expected query_heads a multiple of {}, got {}", cache.kv_heads, args.query_heads);
  const bool has_values = cache.latent_size == 0;
  require(cache.k != nullptr && (cache.v != nullptr || !has_values) && args.pages.page_table != nullptr,
          "attention: the cache and the page table must not be null");
  require(has_values || (cache.v == nullptr && args.v == nullptr),
          "attention: expected no values for a cache of latent_size {}, got some", cache.latent_size);
  require(args.token_begin != nullptr && args.rows.slot != nullptr && args.rows.base != nullptr &&
              args.rows.history != nullptr,
          "attention: token_begin, slot, base and history must not be null");
}

template <typename T>
void check_delta_gates(const BasicDeltaGates<T>& args) {
  require(args.tokens >= 0 && args.heads >= 1 && args.gate_size >= 1,
          "delta_gates: expected tokens >= 0, heads >= 1 and a gate size >= 1, got {}, {} and {}", args.tokens,
          args.heads, args.gate_size);
  const int64_t gates = static_cast<int64_t>(args.heads) * args.gate_size;
  require(args.a_stride >= gates && args.b_stride >= args.heads,
          "delta_gates: expected strides of at least {} gates and {} heads, got {} and {}", gates, args.heads,
          args.a_stride, args.b_stride);
  require(args.lower_bound <= 0, "delta_gates: expected a lower bound <= 0, got {}", args.lower_bound);
  require(args.tokens == 0 || !has_null({args.a, args.b, args.a_log, args.dt_bias, args.g, args.beta}),
          "delta_gates: expected a, b, a_log, dt_bias, g and beta, got a null pointer");
}

template <typename T>
void check_mamba2_gates(const BasicMamba2Gates<T>& args) {
  require(args.tokens >= 0 && args.heads >= 1, "mamba2_gates: expected tokens >= 0 and heads >= 1, got {} and {}",
          args.tokens, args.heads);
  require(args.dt_stride >= args.heads, "mamba2_gates: expected a stride of at least {} heads, got {}", args.heads,
          args.dt_stride);
  require(args.time_step_min >= 0 && args.time_step_min <= args.time_step_max,
          "mamba2_gates: expected 0 <= time_step_min <= time_step_max, got {} and {}", args.time_step_min,
          args.time_step_max);
  require(args.tokens == 0 || !has_null({args.dt, args.dt_bias, args.out}),
          "mamba2_gates: expected dt, dt_bias and out, got a null pointer");
}

// Of a router's op, but for what the CPU and a GPU do not share.
inline void check_route_experts(const RouteExperts& args) {
  require(args.tokens >= 0, "route_experts: expected tokens >= 0, got {}", args.tokens);
  check_router(args.router, args.experts, args.top_k);
  if (args.tokens == 0) return;
  require(!has_null({args.logits, args.expert, args.weight}),
          "route_experts: logits, expert and weight must not be null");
  require(!args.router.has_correction || args.correction != nullptr,
          "route_experts: a router with a correction needs one");
  require(args.tokens == 1 || args.logits_stride >= args.experts, "route_experts: expected logits_stride >= {}, got {}",
          args.experts, args.logits_stride);
}

inline void check_sample_sizes(const Sample& args) {
  require(args.rows >= 0 && args.vocabulary > 0, "sample: expected rows >= 0 and a vocabulary, got {} and {}",
          args.rows, args.vocabulary);
  require(args.rows <= 1 || args.logits_stride >= args.vocabulary, "sample: expected logits_stride >= {}, got {}",
          args.vocabulary, args.logits_stride);
}

// What the host can see of them.
inline void check_sample_arrays(const Sample& args) {
  require(!has_null({args.logits, args.settings, args.position, args.token}),
          "sample: logits, settings, position and token must not be null");
}

}  // namespace replayssm
