// Mamba-2 on the CPU: conventional step, ReplaySSM decode, materialise, gates. Prefill is in mamba2_prefill.cpp.
#include "replayssm/ops/mamba2.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/mamba2.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cstring>

#include "replayssm/core/error.h"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/mamba2-inl.h"
#include "replayssm/ops/mamba2_rows.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// What a thread needs for one unit of one row. The ring's C records fit every array "of records".
struct Mamba2Scratch {
  float* decays;      // [C + 1] (padded for exp)
  float* weights;     // [C, P]; of the direct readout [C]
  float* products;    // [T, C] (rows padded): products[t][j] = C_t . B_j
  float* sums;        // [T, 4] vectors
  float* scales;      // [T]
  const float** b;    // [C]
  const float** c;    // [T]
  float* queries;     // [T, N] as read_head takes them
  const float** u;    // [T] rows of `queries`
  const float** x;    // [C]
  float** outs;       // [T]
  int product_pitch;  // of products
};

Mamba2Scratch take_scratch(Carver& memory, const Mamba2Shape& shape, int capacity) {
  const size_t padded = static_cast<size_t>(capacity) + kExpPadding;
  Mamba2Scratch scratch;
  scratch.decays = memory.take<float>(padded + 1);
  scratch.weights = memory.take<float>(static_cast<size_t>(capacity) * shape.head_size);
  scratch.products = memory.take<float>(static_cast<size_t>(capacity) * padded);
  scratch.sums = memory.take<float>(static_cast<size_t>(capacity) * 4 * kFloatLanes);
  scratch.scales = memory.take<float>(capacity);
  scratch.b = memory.take<const float*>(capacity);
  scratch.c = memory.take<const float*>(capacity);
  scratch.queries = memory.take<float>(static_cast<size_t>(capacity) * shape.state_size);
  scratch.u = memory.take<const float*>(capacity);
  scratch.x = memory.take<const float*>(capacity);
  scratch.outs = memory.take<float*>(capacity);
  scratch.product_pitch = static_cast<int>(padded);
  return scratch;
}

size_t decode_scratch_bytes(const Mamba2Shape& shape, int capacity) {
  Carver sizes(nullptr);
  take_scratch(sizes, shape, capacity);
  return sizes.bytes();
}

Mamba2Scratch thread_scratch(std::span<std::byte> workspace, const Mamba2Shape& shape, int capacity, int thread) {
  Carver memory(workspace.data() + decode_scratch_bytes(shape, capacity) * thread);
  return take_scratch(memory, shape, capacity);
}

// The pointers of a unit's records and window tokens that its heads share.
HWY_INLINE void find_records(const Mamba2Window& window, const Mamba2Scratch& scratch) {
  for (int j = 0; j < window.count(); ++j) scratch.b[j] = window.b(j);
  for (int t = 0; t < window.tokens; ++t) scratch.c[t] = window.c(t);
}

// Where the outputs of a head's window tokens go; `out` is the row's first token's.
HWY_INLINE void find_outputs(const Mamba2Window& window, int head, float* out, const Mamba2Scratch& scratch) {
  const Mamba2Shape& shape = window.state->shape;
  for (int t = 0; t < window.tokens; ++t)
    scratch.outs[t] = out + (static_cast<ptrdiff_t>(t) * shape.heads + head) * shape.head_size;
}

// decays[t] <- e^{A dt'} of the window's tokens; padded for exp.
HWY_INLINE void find_decays(const Mamba2Window& window, const Mamba2Heads& heads, int head, float* decays) {
  if (window.tokens == 0) return;
  const float rate = decay_rate(heads, head);
  for (int t = 0; t < window.tokens; ++t) decays[t] = rate * window.dt(window.history + t, head);
  std::fill(decays + window.tokens, decays + window.tokens + kExpPadding, 0.0f);
  exp_in_place(decays, window.tokens);
}

// decays[j] <- those of all records in view.
HWY_INLINE void collect_decays(const Mamba2Window& window, const Mamba2Heads& heads, int head, float* decays) {
  for (int j = 0; j < window.history; ++j) decays[j] = *window.ring_decay(j, head);
  find_decays(window, heads, head, decays + window.history);
}

// Runs the ring's history and then the window's tokens through the update for a unit's heads. The state after the first
// `stored` records (history, all, or 0: none) goes to checkpoint_out.
void run_recurrence(const Mamba2Window& window, const Mamba2Heads& heads, int stored, float* out,
                    const Mamba2Scratch& scratch) {
  const Mamba2State& state = *window.state;
  const int P = state.shape.head_size, count = window.count();
  find_records(window, scratch);
  for (int head = window.head_begin; head < window.head_end; ++head) {
    collect_decays(window, heads, head, scratch.decays);
    for (int j = 0; j < count; ++j)
      scale_input(window.x(j, head), window.dt(j, head), P, scratch.weights + static_cast<ptrdiff_t>(j) * P);
    find_outputs(window, head, out, scratch);
    Mamba2Run run;
    run.count = count;
    run.first_read = window.history;
    run.stored = stored;
    run.decays = scratch.decays;
    run.weights = scratch.weights;
    run.b = scratch.b;
    run.c = scratch.c;
    run.outs = scratch.outs;
    run.state = checkpoint_of(state, window.checkpoint_in, head);
    run.state_out = checkpoint_of(state, window.checkpoint_out, head);
    update_head(run, state.shape, scratch.sums);
    for (int t = 0; t < window.tokens; ++t)
      finish_output(scratch.outs[t], heads.d == nullptr ? nullptr : heads.d + head, window.x(window.history + t, head),
                    window.z(t, head), P, scratch.outs[t]);
  }
}

// Appends the window's records to the ring.
void append_records(const Mamba2Window& window, const Mamba2Heads& heads, const Mamba2Scratch& scratch) {
  const Mamba2Shape& shape = window.state->shape;
  if (window.is_first_part)
    for (int j = window.history; j < window.count(); ++j)
      std::memcpy(window.ring_b(j), window.b(j), sizeof(float) * shape.state_size);
  for (int head = window.head_begin; head < window.head_end; ++head) {
    find_decays(window, heads, head, scratch.decays);
    for (int t = 0; t < window.tokens; ++t) {
      const int j = window.history + t;
      std::memcpy(window.ring_x(j, head), window.x(j, head), sizeof(float) * shape.head_size);
      *window.ring_dt(j, head) = window.dt(j, head);
      *window.ring_decay(j, head) = scratch.decays[t];
    }
  }
}

// The weights dt'_j e^{s_n - s_j} (B_j . C_n) of the records in view of window token t; returns e^{s_n}.
HWY_INLINE float weigh_records(const Mamba2Window& window, int t, int head, const Mamba2Scratch& scratch) {
  const int n = window.history + t + 1;
  const float* products = scratch.products + static_cast<ptrdiff_t>(t) * scratch.product_pitch;
  float decay = 1;  // e^{s_n - s_j}
  for (int j = n - 1; j >= 0; --j) {
    scratch.weights[j] = window.dt(j, head) * products[j] * decay;
    decay *= scratch.decays[j];
  }
  return decay;
}

// The direct readout of a unit's window.
void read_direct(const Mamba2Window& window, const Mamba2Heads& heads, float* out, const Mamba2Scratch& scratch) {
  const Mamba2State& state = *window.state;
  const int P = state.shape.head_size, N = state.shape.state_size, T = window.tokens;
  find_records(window, scratch);
  for (int t = 0; t < T; t += 2) {  // of an odd last token twice
    const int other = std::min(t + 1, T - 1);
    products_with_2(scratch.b, window.count(), scratch.c[t], scratch.c[other], N,
                    scratch.products + static_cast<ptrdiff_t>(t) * scratch.product_pitch,
                    scratch.products + static_cast<ptrdiff_t>(other) * scratch.product_pitch);
  }
  for (int t = 0; t < T; ++t) {
    float* query = scratch.queries + static_cast<ptrdiff_t>(t) * N;
    order_query(state.form, scratch.c[t], N, query);
    scratch.u[t] = query;
  }
  for (int head = window.head_begin; head < window.head_end; ++head) {
    collect_decays(window, heads, head, scratch.decays);
    for (int j = 0; j < window.count(); ++j) scratch.x[j] = window.x(j, head);
    find_outputs(window, head, out, scratch);
    for (int t = 0; t < T; ++t) {
      scratch.scales[t] = weigh_records(window, t, head, scratch);
      weighted_sum(nullptr, scratch.x, scratch.weights, window.history + t + 1, P, scratch.outs[t]);
    }
    read_head(checkpoint_of(state, window.checkpoint_in, head), N, P, T, scratch.u, scratch.scales, scratch.outs);
    for (int t = 0; t < T; ++t)
      finish_output(scratch.outs[t], heads.d == nullptr ? nullptr : heads.d + head, scratch.x[window.history + t],
                    window.z(t, head), P, scratch.outs[t]);
  }
}

// A kernel below does the units begin .. end-1.

void mamba2_step_kernel(const Mamba2Step& args, int64_t begin, int64_t end, std::span<std::byte> workspace,
                        int thread) {
  const Mamba2Shape& shape = args.state.shape;
  const Mamba2Units units(shape);
  const Mamba2Scratch scratch = thread_scratch(workspace, shape, args.state.capacity, thread);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / units.per_row();
    const Mamba2Window window = window_of(args.state, args.rows, args.tokens, units, unit, row, 1);
    float* out = args.out + row * shape.heads * shape.head_size;
    if (window.slot == kPaddingSlot)
      zero_outputs(window, out);
    else
      run_recurrence(window, args.heads, window.count(), out, scratch);
  }
}

void mamba2_decode_kernel(const Mamba2Decode& args, int64_t begin, int64_t end, std::span<std::byte> workspace,
                          int thread) {
  const Mamba2Shape& shape = args.state.shape;
  const Mamba2Units units(shape);
  const int T = args.tokens_per_row;
  const Mamba2Scratch scratch = thread_scratch(workspace, shape, args.state.capacity, thread);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / units.per_row();
    const Mamba2Window window = window_of(args.state, args.rows, args.tokens, units, unit, row * T, T);
    float* out = args.out + row * T * shape.heads * shape.head_size;
    if (window.slot == kPaddingSlot) {
      zero_outputs(window, out);
      continue;
    }
    const bool flushes = args.rows.will_flush(row, T, args.state.window);
    if (flushes || args.readout == Readout::kExact)
      run_recurrence(window, args.heads, flushes ? window.history : 0, out, scratch);
    else
      read_direct(window, args.heads, out, scratch);
    append_records(window, args.heads, scratch);
  }
}

const Mamba2Tokens kNoTokens;

void mamba2_materialise_kernel(const Mamba2Materialise& args, int64_t begin, int64_t end,
                               std::span<std::byte> workspace, int thread) {
  const Mamba2Shape& shape = args.state.shape;
  const Mamba2Units units(shape);
  const Mamba2Scratch scratch = thread_scratch(workspace, shape, args.state.capacity, thread);
  for (int64_t unit = begin; unit < end; ++unit) {
    const Mamba2Window window = window_of(args.state, args.rows, kNoTokens, units, unit, 0, 0);
    if (window.slot == kPaddingSlot) continue;
    if (window.history > 0)
      run_recurrence(window, Mamba2Heads(), window.history, nullptr, scratch);
    else if (window.checkpoint_in != window.checkpoint_out)
      std::memcpy(checkpoint_of(args.state, window.checkpoint_out, window.head_begin).memory,
                  checkpoint_of(args.state, window.checkpoint_in, window.head_begin).memory,
                  sizeof(float) * (window.head_end - window.head_begin) * shape.head_size * shape.state_size);
  }
}

void mamba2_gates_kernel(const Mamba2Gates& args, int64_t token) {
  const FloatTag d;
  const float* dt = args.dt + token * args.dt_stride;
  float* out = args.out + token * args.heads;
  const Floats least = hn::Set(d, args.time_step_min), most = hn::Set(d, args.time_step_max);
  const Floats straight = hn::Set(d, 20.0f);
  for_each_vector(args.heads, [&](const auto& load, const auto& store) HWY_ATTR {
    const Floats u = hn::Add(load(dt), load(args.dt_bias));
    const Floats curved = hn::Log1p(d, exponential(hn::Min(u, straight)));
    Floats result = hn::IfThenElse(hn::Gt(u, straight), u, curved);
    // Comparisons, not Min and Max: those drop a NaN on some targets.
    result = hn::IfThenElse(hn::Lt(result, least), least, result);
    result = hn::IfThenElse(hn::Gt(result, most), most, result);
    store(hn::IfThenElse(hn::IsNaN(u), u, result), out);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(mamba2_step_kernel);
HWY_EXPORT(mamba2_decode_kernel);
HWY_EXPORT(mamba2_materialise_kernel);
HWY_EXPORT(mamba2_gates_kernel);
HWY_EXPORT(decode_scratch_bytes);

size_t mamba2_workspace_bytes(const Mamba2Shape& shape, int capacity, Device& device) {
  check_shape(shape);
  require(capacity >= 2, "mamba2: expected a ring capacity of at least 2 records, got {}", capacity);
  return std::max(HWY_DYNAMIC_DISPATCH(decode_scratch_bytes)(shape, capacity), mamba2_prefill_scratch_bytes(shape)) *
         device.threads().size();
}

// Calls kernel(begin, end, thread) for ranges of units: neighbours in memory where they can be, many for each thread,
// so that rows that flush even out.
template <typename Kernel>
void for_each_unit(const StateRows& rows, const Mamba2Shape& shape, Device& device, const Kernel& kernel) {
  const int64_t units = static_cast<int64_t>(rows.count) * Mamba2Units(shape).per_row();
  const int64_t ranges = int64_t{64} * device.threads().size();
  device.threads().parallel_for(units, (units + ranges - 1) / ranges, kernel);
}

void mamba2_step_cpu(const Mamba2Step& args, Device& device, std::span<std::byte> workspace) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(mamba2_step_kernel);
  for_each_unit(args.rows, args.state.shape, device,
                [&](int64_t begin, int64_t end, int thread) { kernel(args, begin, end, workspace, thread); });
}

void mamba2_decode_cpu(const Mamba2Decode& args, Device& device, std::span<std::byte> workspace) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(mamba2_decode_kernel);
  for_each_unit(args.rows, args.state.shape, device,
                [&](int64_t begin, int64_t end, int thread) { kernel(args, begin, end, workspace, thread); });
}

void mamba2_materialise_cpu(const Mamba2Materialise& args, Device& device, std::span<std::byte> workspace) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(mamba2_materialise_kernel);
  for_each_unit(args.rows, args.state.shape, device,
                [&](int64_t begin, int64_t end, int thread) { kernel(args, begin, end, workspace, thread); });
}

void mamba2_gates_cpu(const Mamba2Gates& args, Device& device) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(mamba2_gates_kernel);
  device.threads().parallel_for(args.tokens, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t token = begin; token < end; ++token) kernel(args, token);
  });
}

void mamba2_step(const Mamba2Step& args, Device& device, std::span<std::byte> workspace) {
  check_call("mamba2_step", args.state, args.rows, device, workspace);
  check_heads("mamba2_step", args.heads);
  check_tokens("mamba2_step", args.state.shape, args.tokens, args.out);
  mamba2_step_cpu(args, device, workspace);
}

void mamba2_decode(const Mamba2Decode& args, Device& device, std::span<std::byte> workspace) {
  check_call("mamba2_decode", args.state, args.rows, device, workspace);
  check_heads("mamba2_decode", args.heads);
  check_tokens("mamba2_decode", args.state.shape, args.tokens, args.out);
  check_window("mamba2_decode", args.tokens_per_row, args.state.window, args.state.capacity);
  mamba2_decode_cpu(args, device, workspace);
}

void mamba2_materialise(const Mamba2Materialise& args, Device& device, std::span<std::byte> workspace) {
  check_call("mamba2_materialise", args.state, args.rows, device, workspace);
  mamba2_materialise_cpu(args, device, workspace);
}

void mamba2_gates(const Mamba2Gates& args, Device& device) {
  check_mamba2_gates(args);
  mamba2_gates_cpu(args, device);
}

}  // namespace replayssm
#endif  // HWY_ONCE
