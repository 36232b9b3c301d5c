// A mixture of experts, on a GPU: hidden += sum_e weight_e expert_e(x) + shared(x), the experts in one launch a
// product.
#include <algorithm>

#include "replayssm/model/cuda_forward.h"
#include "replayssm/ops/experts.h"
#include "replayssm/ops/ring.h"

namespace replayssm {
namespace {

template <typename T>
struct ExpertsArrays {
  ExpertsArrays(const ExpertsConfig& config, int64_t hidden_size, int64_t tokens, std::byte* memory)
      : width(config.latent_size > 0 ? config.latent_size : hidden_size),
        inner(inner_stride(config.activation, config.size)),
        shared_inner(inner_stride(config.activation, config.shared_size)),
        choices(tokens * config.top_k) {
    Carver carver(memory);
    logits = carver.take<float>(tokens * config.experts);
    expert = carver.take<int32_t>(choices);
    weight = carver.take<float>(choices);
    begin = carver.take<int32_t>(config.experts + 1);
    token = carver.take<int32_t>(choices);
    place = carver.take<int32_t>(choices);
    latent = carver.take<T>(config.latent_size > 0 ? tokens * width : 0);
    rows = carver.take<T>(choices * inner);
    outputs = carver.take<T>(choices * width);
    shared_rows = carver.take<T>(tokens * shared_inner);
    shared = carver.take<T>(config.has_shared_gate ? tokens * hidden_size : 0);
    gate = carver.take<T>(config.has_shared_gate ? tokens : 0);
    bytes = carver.bytes();
  }

  int64_t width;  // of a routed expert's inputs and outputs
  int64_t inner, shared_inner, choices;
  float* logits;    // [N, E]
  int32_t* expert;  // [N, top_k]
  float* weight;    // [N, top_k]
  int32_t *begin, *token, *place;
  T* latent;   // [N, width] before and after the experts
  T* rows;     // [choices, inner]
  T* outputs;  // [choices, width]
  T *shared_rows, *shared, *gate;
  size_t bytes;
};

template <typename T>
void choose(const CudaForward<T>& forward, const ExpertsConfig& config,
            const BasicExpertsWeights<DeviceBuffer>& weights, const ExpertsArrays<T>& arrays) {
  const int64_t tokens = forward.step.tokens;
  project(forward, weights.router, tokens, forward.normal, forward.config.hidden_size, arrays.logits, config.experts);
  forward.begin(StepPart::kOther);
  route_experts(RouteExperts{.tokens = tokens,
                             .experts = config.experts,
                             .top_k = config.top_k,
                             .router = config.router,
                             .logits = arrays.logits,
                             .logits_stride = config.experts,
                             .correction = weights.correction.data(),
                             .expert = arrays.expert,
                             .weight = arrays.weight},
                forward.device);
  place_choices(PlaceChoices{.tokens = tokens,
                             .experts = config.experts,
                             .top_k = config.top_k,
                             .expert = arrays.expert,
                             .begin = arrays.begin,
                             .token = arrays.token,
                             .place = arrays.place},
                forward.device);
}

template <typename T>
void multiply_experts(const CudaForward<T>& forward, const ExpertsConfig& config, const CudaMatrix& matrix,
                      const ExpertsArrays<T>& arrays, const int32_t* token, const T* x, int64_t x_stride, T* y,
                      int64_t y_stride) {
  forward.begin(StepPart::kProducts);
  experts_linear(ExpertsLinear<T>{.choices = arrays.choices,
                                  .experts = config.experts,
                                  .inputs = matrix.inputs,
                                  .outputs = matrix.outputs / config.experts,
                                  .begin = arrays.begin,
                                  .token = token,
                                  .weight = data_of<T>(matrix),
                                  .x = x,
                                  .x_stride = x_stride,
                                  .y = y,
                                  .y_stride = y_stride},
                 forward.device);
}

// y = or += the weighted sum of the experts' outputs for x, [N, width].
template <typename T, typename Out>
void sum_experts(const CudaForward<T>& forward, const ExpertsConfig& config,
                 const BasicExpertsWeights<DeviceBuffer>& weights, const ExpertsArrays<T>& arrays, const T* x, Out* y,
                 bool is_added) {
  multiply_experts(forward, config, weights.experts.up, arrays, arrays.token, x, arrays.width, arrays.rows,
                   arrays.inner);
  activate(forward, config.activation, arrays.choices, int64_t{config.size}, arrays.rows, arrays.inner);
  multiply_experts(forward, config, weights.experts.down, arrays, nullptr, arrays.rows, arrays.inner, arrays.outputs,
                   arrays.width);
  forward.begin(StepPart::kOther);
  add_experts(AddExperts<T, Out>{.tokens = forward.step.tokens,
                                 .top_k = config.top_k,
                                 .size = arrays.width,
                                 .expert = arrays.expert,
                                 .place = arrays.place,
                                 .weight = arrays.weight,
                                 .x = arrays.outputs,
                                 .x_stride = arrays.width,
                                 .is_added = is_added,
                                 .y = y,
                                 .y_stride = arrays.width},
              forward.device);
}

template <typename T>
void add_shared(const CudaForward<T>& forward, const ExpertsConfig& config,
                const BasicExpertsWeights<DeviceBuffer>& weights, const ExpertsArrays<T>& arrays) {
  const int64_t tokens = forward.step.tokens, hidden_size = forward.config.hidden_size;
  BasicLinear<T, T> up =
      product_of(weights.shared.up, tokens, forward.normal, hidden_size, arrays.shared_rows, arrays.shared_inner);
  up.activation = config.activation;
  project(forward, up);
  if (!config.has_shared_gate)
    return add_projected(forward, weights.shared.down, arrays.shared_rows, arrays.shared_inner);
  project(forward, weights.shared.down, tokens, arrays.shared_rows, arrays.shared_inner, arrays.shared, hidden_size);
  project(forward, weights.shared_gate, tokens, forward.normal, hidden_size, arrays.gate, int64_t{1});
  forward.begin(StepPart::kOther);
  add_experts(AddExperts<T, float>{.tokens = tokens,
                                   .size = hidden_size,
                                   .gate = arrays.gate,
                                   .gate_stride = 1,
                                   .x = arrays.shared,
                                   .x_stride = hidden_size,
                                   .y = forward.hidden,
                                   .y_stride = hidden_size},
              forward.device);
}

}  // namespace

template <typename T>
size_t block_bytes(const ExpertsConfig& config, const ModelConfig& model, const CudaStepLimits& limits) {
  return ExpertsArrays<T>(config, model.hidden_size, limits.tokens, nullptr).bytes;
}

template <typename T>
void run_experts(const CudaForward<T>& forward, const ExpertsConfig& config,
                 const BasicExpertsWeights<DeviceBuffer>& weights) {
  const int64_t tokens = forward.step.tokens, hidden_size = forward.config.hidden_size;
  const ExpertsArrays<T> arrays(config, hidden_size, tokens, forward.workspace.data());
  normalize(forward);
  choose(forward, config, weights, arrays);
  if (config.latent_size > 0) {
    project(forward, weights.latent_down, tokens, forward.normal, hidden_size, arrays.latent, arrays.width);
    sum_experts(forward, config, weights, arrays, arrays.latent, arrays.latent, false);
    add_projected(forward, weights.latent_up, arrays.latent, arrays.width);
  } else {
    sum_experts(forward, config, weights, arrays, forward.normal, forward.hidden, true);
  }
  if (config.shared_size > 0) add_shared(forward, config, weights, arrays);
}

#define REPLAYSSM_BLOCK(T)                                                                         \
  template size_t block_bytes<T>(const ExpertsConfig&, const ModelConfig&, const CudaStepLimits&); \
  template void run_experts(const CudaForward<T>&, const ExpertsConfig&, const BasicExpertsWeights<DeviceBuffer>&);
REPLAYSSM_BLOCK(float)
REPLAYSSM_BLOCK(Bf16)
#undef REPLAYSSM_BLOCK

}  // namespace replayssm
