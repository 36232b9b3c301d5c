// Mixture of experts: which experts a token goes to and with what weight, and the moves that give each expert its
// tokens as one batch. The experts' own products are `linear`'s.
//
// A block of E experts computes  y[n, :] = sum_{e chosen by n, ascending} weight_e expert_e(x[n, :]):
//   route_experts    logits -> the experts that a token chooses and their weights
//   group_choices    all choices sorted by expert, of an expert by token
//   gather_rows      the rows of one expert's tokens, side by side
//   add_rows         the expert's outputs, times their weights, back onto their tokens
// Called for the experts in ascending order, the sum of a token has one order, whatever the batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"

namespace replayssm {

enum class RouterScores {
  kSoftmax,  // over all experts
  kSigmoid,  // of each expert's own logit
};

struct RouterConfig {
  RouterScores scores = RouterScores::kSoftmax;
  bool has_correction = false;  // a bias an expert, added to the scores for choosing alone
  int groups = 1;               // equal runs of neighbouring experts, of at least two if there is more than one group
  int top_groups = 1;           // the groups that a token may choose from
  bool is_normalised = true;    // a token's weights sum to `scale`
  double scale = 1;
};

// For each token n, with E = experts:
//   s = softmax(logits[n, :]) or sigmoid(logits[n, :]);   c = s + correction (or s)
//   a group's score is the sum of the two largest c in it; the top_groups best groups stay (all, if groups is 1)
//   expert[n, :] = the top_k experts of the largest c in those groups, in falling order
//   weight[n, i] = scale * s[expert[n, i]] / (is_normalised ? sum_j s[expert[n, j]] + 1e-20 : 1)
// Of equals the lowest number wins. In float64, rounded once. Sources: the routers of transformers 5.17 for Qwen3-Next
// and Qwen3.5 (softmax), DeepSeek-V3 (arXiv 2412.19437), Nemotron-H and Kimi-Linear (sigmoid).
//
// A token's results depend on its own logits alone. If a logit or one of its c is not finite, it gets the experts
// 0 .. top_k-1 with NaN weights; other tokens are not affected. Throws Error for tokens < 0, top_k outside 1 ..
// experts, a router that `check_router` refuses, null pointers, a stride below experts, a workspace that is too small.
struct RouteExperts {
  int64_t tokens = 0;  // N
  int experts = 0;     // E
  int top_k = 0;
  RouterConfig router{};
  const float* logits = nullptr;  // [N, E], logits_stride
  int64_t logits_stride = 0;
  const float* correction = nullptr;  // [E]; needed with has_correction, else not read
  int32_t* expert = nullptr;          // [N, top_k]
  float* weight = nullptr;            // [N, top_k]
};
void route_experts(const RouteExperts& args, Device& device, std::span<std::byte> workspace);

// The bytes of `workspace`. Contents are scratch.
size_t route_experts_workspace_bytes(int experts, Device& device);

// Throws Error unless experts >= 1, top_k is 1 .. experts, groups divides experts into groups of at least two (or is
// 1), top_groups is 1 .. groups, those groups hold top_k experts, and scale is finite.
void check_router(const RouterConfig& router, int experts, int top_k);

// The choices of expert e are begin[e] .. begin[e+1]-1, by rising token: token[i] chose it with weight[i].
// Throws Error for sizes < 0, top_k < 1, null pointers, an expert outside 0 .. experts-1 or twice in one token.
struct GroupChoices {
  int64_t tokens = 0;  // N
  int experts = 0;     // E
  int top_k = 0;
  const int32_t* expert = nullptr;       // [N, top_k]
  const float* expert_weight = nullptr;  // [N, top_k]
  int64_t* begin = nullptr;              // [E + 1]
  int32_t* token = nullptr;              // [N top_k]
  float* weight = nullptr;               // [N top_k]
};
void group_choices(const GroupChoices& args);

// y[i, :] = x[token[i], :]; y may not overlap x. Throws Error for sizes < 0, null pointers, a stride below size. The
// caller answers for tokens that x has.
struct GatherRows {
  int64_t rows = 0;
  int64_t size = 0;
  const int32_t* token = nullptr;  // [rows]
  const float* x = nullptr;        // [N, size], x_stride
  int64_t x_stride = 0;
  float* y = nullptr;  // [rows, size], y_stride
  int64_t y_stride = 0;
};
void gather_rows(const GatherRows& args, Device& device);

// y[token[i], :] += weight[i] x[i, :], the product fused into the sum where the processor can; other rows of y stay.
// Each token at most once; without `token` row i is token i, without `weight` y += x. y may not overlap x. Throws Error
// as gather_rows does.
struct AddRows {
  int64_t rows = 0;
  int64_t size = 0;
  const int32_t* token = nullptr;  // [rows] or null
  const float* weight = nullptr;   // [rows] or null
  const float* x = nullptr;        // [rows, size], x_stride
  int64_t x_stride = 0;
  float* y = nullptr;  // [N, size], y_stride
  int64_t y_stride = 0;
};
void add_rows(const AddRows& args, Device& device);

// On a GPU, queued on its stream; every pointer is of device memory and is read when the work runs, so that a captured
// block serves any choices. T is float, Bf16 or Fp16. A block is
//   route_experts, place_choices, experts_linear (up), an activation of the N top_k rows, experts_linear (down),
//   add_experts
// and needs no number on the host: grids follow from N, E and top_k alone. E is 1 .. 1024 and N top_k at most 2^30.
// They throw Error for sizes outside those, null pointers, a stride below its row and a pointer that is not aligned to
// its elements; what a kernel reads in device memory the caller answers for.

// As on the CPU, in float64, from an exp of CUDA's; workspace is not needed.
void route_experts(const RouteExperts& args, CudaDevice& device);

// As group_choices, and where each choice went.
struct PlaceChoices {
  int64_t tokens = 0;  // N
  int experts = 0;     // E
  int top_k = 0;
  const int32_t* expert = nullptr;  // [N, top_k] of 0 .. E-1, none twice in a token
  int32_t* begin = nullptr;         // [E + 1] choices of expert e are begin[e] .. begin[e+1]-1, by rising token
  int32_t* token = nullptr;         // [N top_k]
  int32_t* place = nullptr;         // [N, top_k] of 0 .. N top_k - 1
};
void place_choices(const PlaceChoices& args, CudaDevice& device);

// The choices of every expert times its own matrix, summed in FP32 and rounded to T once:
//   y[i, o] = sum_k weight[e, o, k] x[token[i], k],  e the expert of choice i
// A row's bits depend on its own x and its expert's weights alone, not on how many choices its expert has. Any sizes
// and places will do; it is fast where rows of weight, x and y are whole multiples of 16 bytes. y may not overlap x.
template <typename T>
struct ExpertsLinear {
  int64_t choices = 0;  // N top_k
  int experts = 0;      // E
  int64_t inputs = 0, outputs = 0;
  const int32_t* begin = nullptr;  // [E + 1]
  const int32_t* token = nullptr;  // [choices] the row of x; null: row i
  const T* weight = nullptr;       // [E, outputs, inputs]
  const T* x = nullptr;            // x_stride
  int64_t x_stride = 0;
  T* y = nullptr;  // [choices, outputs], y_stride
  int64_t y_stride = 0;
};
template <typename T>
void experts_linear(const ExpertsLinear<T>& args, CudaDevice& device);

// y[n, :] += factor_n sum_i weight[n, i] x[place[n, i], :], the choices by ascending expert, in FP32; factor_n is
// sigmoid(gate[n]) or 1. Without weight a choice counts once; without place (top_k 1) row n of x is token n's. y may
// not overlap x.
template <typename T, typename Out>
struct AddExperts {
  int64_t tokens = 0;  // N
  int top_k = 1;
  int64_t size = 0;
  const int32_t* expert = nullptr;  // [N, top_k], for the order; null without place
  const int32_t* place = nullptr;   // [N, top_k] or null
  const float* weight = nullptr;    // [N, top_k] or null
  const T* gate = nullptr;          // [N], gate_stride; or null
  int64_t gate_stride = 0;
  const T* x = nullptr;  // [N top_k, size], x_stride
  int64_t x_stride = 0;
  bool is_added = true;  // else y = the sum
  Out* y = nullptr;      // [N, size], y_stride; Out is float or T
  int64_t y_stride = 0;
};
template <typename T, typename Out>
void add_experts(const AddExperts<T, Out>& args, CudaDevice& device);

}  // namespace replayssm
