#include "bench/cuda_ops.h"

#include "replayssm/core/error.h"

#ifdef REPLAYSSM_HAS_CUDA

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <variant>

#include "bench/cuda_delta.h"
#include "bench/cuda_layer_step.h"
#include "bench/cuda_mamba2.h"
#include "bench/cuda_memory.h"
#include "bench/cuda_roof.h"
#include "bench/cuda_rows.h"
#include "bench/cuda_timing.h"
#include "bench/cursor_cycle.h"
#include "bench/machine.h"
#include "replayssm/core/cuda_device.h"

namespace replayssm::bench {
namespace {

// One line of the table.
struct Case {
  std::string decode;
  int batch, window, tokens;
  double accepted;
};

// None: a conventional step.
std::optional<Readout> readout_of(const Case& timed) {
  if (timed.decode == "conventional") return std::nullopt;
  return timed.decode == "exact" ? Readout::kExact : Readout::kDirect;
}

std::vector<Case> cases_of(const OpsOptions& options) {
  const auto has = [&](const char* decode) {
    return options.decoders.empty() || std::ranges::count(options.decoders, decode) > 0;
  };
  std::vector<Case> cases;
  for (const int batch : options.batches) {
    if (has("conventional") && std::ranges::count(options.tokens, 1) > 0)
      cases.push_back({"conventional", batch, options.windows.front(), 1, 1});
    for (const int window : options.windows)
      for (const int tokens : options.tokens)
        for (const double accepted : options.accepted.empty() ? std::vector<double>{1.0 * tokens} : options.accepted)
          for (const char* decode : {"replay", "exact"})
            if (has(decode) && tokens <= window && accepted <= tokens)
              cases.push_back({decode, batch, window, tokens, accepted});
  }
  return cases;
}

// What one call of the case moves, on average over the cycle.
double call_bytes(const Case& timed, const CudaLayerBytes& bytes, std::span<const CursorPhase> cycle,
                  bool is_half_read) {
  if (timed.decode == "conventional") return timed.batch * (2 * bytes.checkpoint + bytes.token);
  double sum = 0;
  for (const CursorPhase& cursor : cycle) {
    const bool is_flush = cursor.history + timed.tokens > timed.window;
    sum += states_moved(is_flush, is_half_read) * bytes.checkpoint + cursor.history * bytes.record;
  }
  return timed.batch * (sum / static_cast<double>(cycle.size()) + timed.tokens * (bytes.record + bytes.token));
}

// The cases of one layer, whose type is one of CudaDelta and CudaMamba2.
template <typename Layer>
class LayerTiming {
  // The layer's step has outputs of its inputs' type alone.
  static constexpr bool kHasStep = std::is_same_v<typename Layer::Input, typename Layer::Output>;

 public:
  LayerTiming(const OpsOptions& options, const typename Layer::Shape& shape, CudaDevice& device, const CudaRoofs& roofs)
      : options_(options), shape_(shape), device_(device), roofs_(roofs) {
    form_ = form_of(options);
  }

  template <typename Show>
  void run(const std::vector<Prompt>& prompts, const Show& show) {
    const std::vector<Case> cases = cases_of(options_);
    CudaArena sizes(device_);
    size_t most_bytes = 0;
    const auto add_size = [&](const CudaLayerSize& size) {
      sizes.start_over();
      Layer layer(shape_, size, sizes);
      if constexpr (kHasStep) {
        if (options_.is_layer) CudaLayerStep<Layer>(layer, size, sizes);
      }
      most_bytes = std::max(most_bytes, sizes.used_bytes());
    };
    for (const Case& timed : cases) add_size(size_of(timed));
    for (const Prompt& prompt : prompts) add_size(size_of(prompt));
    CudaArena memory(most_bytes, device_);
    for (const Case& timed : cases) decode(timed, memory, show);
    for (const Prompt& prompt : prompts) show(prefill(prompt, memory));
  }

 private:
  bool is_half_read(const Case& timed) const { return form_ == CheckpointForm::kPlanes && timed.decode == "replay"; }

  int sets_of(const Case& timed) const {
    const double read = timed.batch * Layer::bytes(shape_).checkpoint * (is_half_read(timed) ? 0.5 : 1.0);
    return std::max(2, static_cast<int>(std::ceil(rotation_bytes(device_) / read)));
  }

  CudaLayerSize size_of(const Case& timed) const {
    return {int64_t{sets_of(timed)} * timed.batch, timed.window, timed.tokens, int64_t{timed.batch} * timed.tokens,
            form_};
  }
  CudaLayerSize size_of(const Prompt& prompt) const {
    return {prompt.sequences, 1, 1, int64_t{prompt.sequences} * prompt.tokens, form_};
  }

  template <typename Show>
  void decode(const Case& timed, CudaArena& memory, const Show& show) {
    const std::optional<Readout> readout = readout_of(timed);
    const std::vector<CursorPhase> cycle =
        !readout ? std::vector<CursorPhase>{{0, 0}}
                 : cursor_cycle(timed.window, timed.tokens, acceptance_pattern(timed.tokens, timed.accepted));
    const CudaRows rows(timed.batch, sets_of(timed), cycle, device_);
    memory.start_over();
    Layer layer(shape_, size_of(timed), memory);
    OpsResult result{options_.op, timed.decode, timed.batch, timed.window, timed.tokens, timed.accepted};
    if (form_ == CheckpointForm::kPlanes) result.read = is_half_read(timed) ? "bf16" : "fp32-planes";
    result.bytes = call_bytes(timed, Layer::bytes(shape_), cycle, is_half_read(timed));
    if (options_.is_plan) result.plan = layer.plan(rows.at(0), timed.tokens, readout, device_);
    const int enough = std::max(rows.sets(), static_cast<int>(kGraphBytes / result.bytes));
    const int calls = (enough + rows.phases() - 1) / rows.phases() * rows.phases();
    const auto call = [&](int index) {
      if (readout)
        layer.decode(rows.at(index), timed.tokens, *readout, device_);
      else
        layer.step(rows.at(index), device_);
    };
    time(layer, calls, call, result);
    set_roof(readout ? roofs_.read : roofs_.update, result);
    show(result);
    if constexpr (kHasStep) {
      if (!options_.is_layer) return;
      CudaLayerStep<Layer> step(layer, size_of(timed), memory);
      const auto step_call = [&](int index) { step.run(rows.at(index), *readout, device_); };
      OpsResult whole = step_result(timed, result, cycle);
      time(layer, calls, step_call, whole);
      set_roof(roofs_.read, whole);
      whole.us_above_op = whole.us_median - result.us_median;
      show(whole);
    }
  }

  // What is known of a layer's step before it is timed, beside its op's result.
  OpsResult step_result(const Case& timed, const OpsResult& op, std::span<const CursorPhase> cycle) const {
    const int element_bytes = static_cast<int>(sizeof(typename Layer::Input));
    const LayerPlan plan = plan_layer(shape_, timed.batch, timed.tokens, element_bytes, device_.properties());
    OpsResult result = op;
    result.op += "_layer";
    result.bytes = call_bytes(timed, CudaLayerStep<Layer>::op_bytes(shape_), cycle, is_half_read(timed)) +
                   static_cast<double>(plan.prepare_bytes + plan.norm_bytes);
    result.plan = options_.is_plan ? describe(plan) : "";
    return result;
  }

  OpsResult prefill(const Prompt& prompt, CudaArena& memory) {
    const std::vector<CursorPhase> cycle = {{0, 0}};
    const CudaRows rows(prompt.sequences, 1, cycle, device_);
    memory.start_over();
    Layer layer(shape_, size_of(prompt), memory);
    std::vector<int32_t> begin;
    for (int row = 0; row <= prompt.sequences; ++row) begin.push_back(row * prompt.tokens);
    const DeviceBuffer<int32_t> token_begin(std::span<const int32_t>(begin), device_);
    const auto call = [&](int index) { layer.prefill(rows.at(index), token_begin.data(), device_); };
    OpsResult result{options_.op + "_prefill", "conventional", prompt.sequences,
                     options_.windows.front(), prompt.tokens,  1.0 * prompt.tokens};
    if (form_ == CheckpointForm::kPlanes) result.read = "fp32-planes";
    if (options_.is_plan) result.plan = layer.prefill_plan(prompt.sequences, device_);
    const CudaLayerBytes bytes = Layer::bytes(shape_);
    result.bytes = prompt.sequences * (2 * bytes.checkpoint + prompt.tokens * bytes.token);
    time(layer, 2, call, result);
    set_roof(roofs_.update, result);
    return result;
  }

  // Fills in the times of a graph of so many calls, whole cycles of the cursors.
  template <typename Call>
  void time(Layer& layer, int calls, const Call& call, OpsResult& result) {
    check_outputs(layer, calls, call, result);
    const CudaTimes times = time_calls(calls, call, options_.rounds, is_first_, device_);
    is_first_ = false;
    result.us_median = times.us_median;
    result.us_min = times.us_min;
    result.us_p95 = times.us_p95;
    check_outputs(layer, calls, call, result);
  }

  // Runs the calls one by one, each on poisoned outputs. Throws Error if one of them leaves a value that is not finite,
  // or mostly zeros.
  template <typename Call>
  void check_outputs(Layer& layer, int calls, const Call& call, const OpsResult& result) {
    const OutputCounts found = counts_of_calls(calls, call, layer.out(), layer.out_count(), device_);
    const uint64_t total = uint64_t{layer.out_count()} * calls;
    require(found.not_finite == 0 && found.zero < total / 2,
            "bench ops: {} {} {}, batch {}, window {}, {} tokens: of {} outputs {} are not finite, {} are zero",
            options_.shape, result.op, result.decode, result.batch, result.window, result.tokens, total,
            found.not_finite, found.zero);
  }

  static void set_roof(double bytes_per_second, OpsResult& result) {
    result.roof_gb_s = bytes_per_second * 1e-9;
    result.roof_share = result.bytes / (result.us_median * 1e-6) / bytes_per_second;
  }

  const OpsOptions& options_;
  typename Layer::Shape shape_;
  CudaDevice& device_;
  CudaRoofs roofs_;
  CheckpointForm form_;
  bool is_first_ = true;  // no case has been timed
};

template <template <typename, typename> class Layer, typename Shape>
void run_typed(const OpsOptions& options, const Shape& shape, const std::vector<Prompt>& prompts,
               const ShowResult& show) {
  CudaDevice device;
  const CudaRoofs roofs = measure_roofs(device);
  OpsMachine machine{device.properties().name, cuda_device_label(device), ""};
  machine.note = fmt::format("{}, {} with {} outputs; roofs: read {:.0f} GB/s, update in place {:.0f} GB/s",
                             machine.device, options.type, options.out, roofs.read * 1e-9, roofs.update * 1e-9);
  const auto run = [&]<typename T, typename Out>(T, Out) {
    LayerTiming<Layer<T, Out>>(options, shape, device, roofs).run(prompts, [&](const OpsResult& result) {
      show(machine, result);
    });
  };
  const bool is_fp32_out = options.out == "fp32";
  if (options.type == "fp32")
    run(float{}, float{});
  else if (options.type == "fp16")
    is_fp32_out ? run(Fp16{}, float{}) : run(Fp16{}, Fp16{});
  else
    is_fp32_out ? run(Bf16{}, float{}) : run(Bf16{}, Bf16{});
}

}  // namespace

void run_cuda_ops(const OpsOptions& options, const Layer& layer, const std::vector<Prompt>& prompts,
                  const ShowResult& show) {
  if (const auto* mamba2 = std::get_if<Mamba2Shape>(&layer.shape))
    run_typed<CudaMamba2>(options, *mamba2, prompts, show);
  else
    run_typed<CudaDelta>(options, std::get<DeltaShape>(layer.shape), prompts, show);
}

}  // namespace replayssm::bench

#else

namespace replayssm::bench {

void run_cuda_ops(const OpsOptions&, const Layer&, const std::vector<Prompt>&, const ShowResult&) {
  fail("--device cuda: this build has no CUDA");
}

}  // namespace replayssm::bench

#endif
