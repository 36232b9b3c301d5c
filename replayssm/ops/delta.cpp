// The delta rule on the CPU: conventional step, ReplaySSM decode, materialise. Prefill is in delta_prefill.cpp, the
// gates in delta_gates.cpp.
#include "replayssm/ops/delta.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/delta.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cstring>

#include "replayssm/core/error.h"
#include "replayssm/ops/delta-inl.h"
#include "replayssm/ops/delta_rows.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// What a thread needs for one key head of one row. The ring's C records fit every array "of records".
struct DeltaScratch {
  float* k;               // [C, K] normalised, in logical order
  float* q;               // [C, K] normalised and scaled
  float* u;               // [C, K] queries pulled back
  float* channel_decays;  // [C, K] e^g for every channel, in logical order
  float* decayed_k;       // [C, K] e^g k; with a gate a channel
  float* decays;          // [C] products of decays, in logical order
  float* coefficients;    // [C] by ring position
  float* weights;         // [C] in logical order
  float* products_q;      // [C, C + 3]: products_q[t][j] = q_t . k_j; with one gate a head
  float* products_k;      // [C + 3]
  float* state_rows;      // [2 kRowBlock, K]
  float* scales;          // [C]
  const float** rows;     // [C]
  const float** queries;  // [C]
  float** outs;           // [C]
  DeltaRecord* records;   // [C]
};

DeltaScratch take_scratch(Carver& memory, const DeltaShape& shape, int capacity) {
  const size_t vectors = static_cast<size_t>(capacity) * shape.key_size;
  const size_t padded = static_cast<size_t>(capacity) + kProductPadding;
  const bool is_per_channel = shape.gate_size > 1;
  DeltaScratch scratch;
  scratch.k = memory.take<float>(vectors);
  scratch.q = memory.take<float>(vectors);
  scratch.u = memory.take<float>(vectors);
  scratch.channel_decays = memory.take<float>(vectors);
  scratch.decayed_k = memory.take<float>(is_per_channel ? vectors : 0);
  scratch.decays = memory.take<float>(capacity);
  scratch.coefficients = memory.take<float>(capacity);
  scratch.weights = memory.take<float>(capacity);
  scratch.products_q = memory.take<float>(is_per_channel ? 0 : static_cast<size_t>(capacity) * padded);
  scratch.products_k = memory.take<float>(padded);
  scratch.state_rows = memory.take<float>(2 * static_cast<size_t>(kRowBlock) * shape.key_size);
  scratch.scales = memory.take<float>(capacity);
  scratch.rows = memory.take<const float*>(capacity);
  scratch.queries = memory.take<const float*>(capacity);
  scratch.outs = memory.take<float*>(capacity);
  scratch.records = memory.take<DeltaRecord>(capacity);
  return scratch;
}

// Scratch of the step's and the decode's thread `thread`.
DeltaScratch thread_scratch(std::span<std::byte> workspace, const DeltaShape& shape, int capacity, int thread) {
  Carver sizes(nullptr);
  take_scratch(sizes, shape, capacity);
  Carver memory(workspace.data() + sizes.bytes() * thread);
  return take_scratch(memory, shape, capacity);
}

size_t decode_scratch_bytes(const DeltaShape& shape, int capacity) {
  Carver sizes(nullptr);
  take_scratch(sizes, shape, capacity);
  return sizes.bytes();
}

// Record j of a window, as value head `head` sees it, from the ring or from the window's tokens. The keys and queries
// are in the scratch; the state is not to be stored.
void fill_record(const DeltaState& state, const DeltaWindow& window, int head, int j, float* out,
                 const DeltaScratch& scratch) {
  const DeltaShape& shape = state.shape;
  const int K = shape.key_size, V = shape.value_size, t = j - window.history;
  const HeadRing ring = head_ring_view(state, window.slot, head);
  const ptrdiff_t position = ring_position(window.start, j, state.capacity);
  DeltaRecord& record = scratch.records[j];
  float* decays = scratch.channel_decays + static_cast<ptrdiff_t>(j) * K;
  record.k = record.read_k = scratch.k + static_cast<ptrdiff_t>(j) * K;
  record.decays = decays;
  if (t >= 0)
    channel_decays(window.g(t, head), shape.gate_size, K, decays);
  else if (shape.gate_size == 1)
    std::fill_n(decays, K, ring.decay[position]);
  else
    record.decays = ring.decay + position * K;
  record.read_scale = record.decays[0];
  if (shape.gate_size > 1) {
    float* decayed_k = scratch.decayed_k + static_cast<ptrdiff_t>(j) * K;
    multiply_channels(record.k, record.decays, K, decayed_k);
    record.read_k = decayed_k;
    record.read_scale = 1.0f;
  }
  record.v = t < 0 ? ring.v + position * V : window.v(t, head);
  record.q = scratch.q + static_cast<ptrdiff_t>(std::max(t, 0)) * K;
  record.beta = t < 0 ? ring.beta[position] : window.beta(t, head);
  record.out = t < 0 ? nullptr : out + (static_cast<ptrdiff_t>(t) * shape.heads + head) * V;
  record.state_out = nullptr;
}

// Runs `history` records of the ring and then `tokens` window tokens through the update for the value heads of one key
// head. The state after record number `stored_records` (counted from 1, 0: none) goes to checkpoint_out.
void run_recurrence(const DeltaState& state, const DeltaWindow& window, int stored_records, float* out,
                    const DeltaScratch& scratch) {
  const DeltaShape& shape = state.shape;
  const int K = shape.key_size, V = shape.value_size, ratio = shape.heads / shape.key_heads;
  const int history = window.history, count = history + window.tokens;
  const RingView ring = ring_view(state, window.slot, window.key_head);
  for (int j = 0; j < history; ++j) {
    const int position = ring_position(window.start, j, state.capacity);
    scale_vector(ring.k + static_cast<ptrdiff_t>(position) * K, ring.k_scale[position], K, scratch.k + j * K);
  }
  for (int t = 0; t < window.tokens; ++t) {
    const float* k = window.k(t);
    const float* q = window.q(t);
    scale_vector(k, inverse_norm(k, K), K, scratch.k + (history + t) * K);
    scale_vector(q, inverse_norm(q, K) / std::sqrt(static_cast<float>(K)), K, scratch.q + t * K);
  }
  for (int i = 0; i < ratio; ++i) {
    const int head = window.key_head * ratio + i;
    const HeadState state_out = checkpoint_of(state, window.checkpoint_out, head);
    for (int j = 0; j < count; ++j) fill_record(state, window, head, j, out, scratch);
    if (stored_records > 0) scratch.records[stored_records - 1].state_out = &state_out;
    update_head(scratch.records, count, K, V, checkpoint_of(state, window.checkpoint_in, head), scratch.state_rows);
  }
}

// Appends the window's keys to the ring, raw and with their norms, and leaves the normalised queries in scratch.q. With
// one gate a head, also the products with the older keys in view, and q_t . k_j (both normalised) in products_q[t][j].
void append_keys(const DeltaState& state, const DeltaWindow& window, const DeltaScratch& scratch) {
  const int K = state.shape.key_size, C = state.capacity;
  const RingView ring = ring_view(state, window.slot, window.key_head);
  for (int j = 0; j < window.history + window.tokens; ++j)
    scratch.rows[j] = ring.k + static_cast<ptrdiff_t>(ring_position(window.start, j, C)) * K;
  for (int t = 0; t < window.tokens; ++t) {
    const int n = window.history + t;
    const int position = ring_position(window.start, n, C);
    const float* k = window.k(t);
    const float* q = window.q(t);
    float* scaled_q = scratch.q + static_cast<ptrdiff_t>(t) * K;
    std::memcpy(ring.k + static_cast<ptrdiff_t>(position) * K, k, sizeof(float) * K);
    ring.k_scale[position] = inverse_norm(k, K);
    scale_vector(q, inverse_norm(q, K) / std::sqrt(static_cast<float>(K)), K, scaled_q);
    if (state.shape.gate_size > 1) continue;
    float* products_q = scratch.products_q + static_cast<ptrdiff_t>(t) * (C + kProductPadding);
    products_with_2(scratch.rows, n + 1, scaled_q, k, K, products_q, scratch.products_k);
    for (int j = 0; j <= n; ++j) {
      const int other = ring_position(window.start, j, C);
      products_q[j] *= ring.k_scale[other];
      ring.gram[static_cast<ptrdiff_t>(position) * C + other] =
          scratch.products_k[j] * ring.k_scale[other] * ring.k_scale[position];
    }
  }
}

// Appends the window's records to the ring.
void append_records(const DeltaState& state, const DeltaWindow& window, const DeltaScratch& scratch) {
  const DeltaShape& shape = state.shape;
  const int K = shape.key_size, V = shape.value_size, ratio = shape.heads / shape.key_heads;
  append_keys(state, window, scratch);
  for (int i = 0; i < ratio; ++i) {
    const int head = window.key_head * ratio + i;
    const HeadRing ring = head_ring_view(state, window.slot, head);
    for (int t = 0; t < window.tokens; ++t) {
      const int position = ring_position(window.start, window.history + t, state.capacity);
      std::memcpy(ring.v + static_cast<ptrdiff_t>(position) * V, window.v(t, head), sizeof(float) * V);
      channel_decays(window.g(t, head), shape.gate_size, K, scratch.channel_decays);
      std::memcpy(ring.decay + static_cast<ptrdiff_t>(position) * shape.gate_size, scratch.channel_decays,
                  sizeof(float) * shape.gate_size);
      ring.beta[position] = window.beta(t, head);
    }
  }
}

// The coefficients c_j of the query at window token t, by back substitution over the n records in view, for one gate a
// head: on return weights[j] = c_j and decays[j] = e^{s_n - s_j} in logical order; returns e^{s_n}.
float solve_coefficients(const DeltaState& state, const DeltaWindow& window, int t, int head,
                         const DeltaScratch& scratch) {
  const int C = state.capacity, n = window.history + t + 1;
  const RingView ring = ring_view(state, window.slot, window.key_head);
  const HeadRing head_ring = head_ring_view(state, window.slot, head);
  float* residuals = scratch.coefficients;  // by ring position, so that a row of products is one contiguous array
  const float* products_q = scratch.products_q + static_cast<ptrdiff_t>(t) * (C + kProductPadding);
  std::fill(residuals, residuals + C, 0.0f);
  for (int j = 0; j < n; ++j) residuals[ring_position(window.start, j, C)] = products_q[j];
  float decay = 1;  // e^{s_n - s_j}
  for (int j = n - 1; j >= 0; --j) {
    const int position = ring_position(window.start, j, C);
    const float coefficient = head_ring.beta[position] * residuals[position];
    const float* gram = ring.gram + static_cast<ptrdiff_t>(position) * C;
    for (int other = 0; other < C; ++other) residuals[other] -= coefficient * gram[other];
    scratch.weights[j] = coefficient;
    scratch.decays[j] = decay;
    decay *= head_ring.decay[position];
  }
  return decay;
}

// For one gate a head, the query of window token t: its pulled-back form to u[t], what the records add to its output to
// `out`. Returns what the product of the checkpoint with u[t] is multiplied by.
float pull_back_by_products(const DeltaState& state, const DeltaWindow& window, int t, int head, float* out,
                            const DeltaScratch& scratch) {
  const int K = state.shape.key_size, V = state.shape.value_size, C = state.capacity, n = window.history + t + 1;
  const RingView ring = ring_view(state, window.slot, window.key_head);
  const HeadRing head_ring = head_ring_view(state, window.slot, head);
  const float scale = solve_coefficients(state, window, t, head, scratch);
  for (int j = 0; j < n; ++j) {
    const int position = ring_position(window.start, j, C);
    scratch.rows[j] = head_ring.v + static_cast<ptrdiff_t>(position) * V;
    scratch.decays[j] *= scratch.weights[j];
    scratch.weights[j] *= -ring.k_scale[position];
  }
  weighted_sum(nullptr, scratch.rows, scratch.decays, n, V, out);
  for (int j = 0; j < n; ++j) scratch.rows[j] = ring.k + static_cast<ptrdiff_t>(ring_position(window.start, j, C)) * K;
  weighted_sum(scratch.q + static_cast<ptrdiff_t>(t) * K, scratch.rows, scratch.weights, n, K,
               scratch.u + static_cast<ptrdiff_t>(t) * K);
  return scale;
}

// The same with a gate a channel: the query is carried back record by record.
float pull_back_by_records(const DeltaState& state, const DeltaWindow& window, int t, int head, float* out,
                           const DeltaScratch& scratch) {
  const int K = state.shape.key_size, V = state.shape.value_size, C = state.capacity, n = window.history + t + 1;
  const RingView ring = ring_view(state, window.slot, window.key_head);
  const HeadRing head_ring = head_ring_view(state, window.slot, head);
  float* u = scratch.u + static_cast<ptrdiff_t>(t) * K;
  std::memcpy(u, scratch.q + static_cast<ptrdiff_t>(t) * K, sizeof(float) * K);
  const auto key = [&](int j) { return ring.k + static_cast<ptrdiff_t>(ring_position(window.start, j, C)) * K; };
  float product = product_with_key(u, key(n - 1), K);
  for (int j = n - 1; j >= 0; --j) {
    const ptrdiff_t position = ring_position(window.start, j, C);
    const float coefficient = head_ring.beta[position] * (ring.k_scale[position] * product);
    scratch.rows[j] = head_ring.v + position * V;
    scratch.weights[j] = coefficient;
    product = pull_back_query(key(j), -(coefficient * ring.k_scale[position]), head_ring.decay + position * K,
                              key(std::max(j - 1, 0)), K, u);
  }
  weighted_sum(nullptr, scratch.rows, scratch.weights, n, V, out);
  return 1.0f;
}

// The pulled-back readout of a window whose records are in the ring.
void read_pulled_back(const DeltaState& state, const DeltaWindow& window, float* out, const DeltaScratch& scratch) {
  const DeltaShape& shape = state.shape;
  const int K = shape.key_size, V = shape.value_size, ratio = shape.heads / shape.key_heads;
  for (int i = 0; i < ratio; ++i) {
    const int head = window.key_head * ratio + i;
    for (int t = 0; t < window.tokens; ++t) {
      scratch.outs[t] = out + (static_cast<ptrdiff_t>(t) * shape.heads + head) * V;
      scratch.queries[t] = scratch.u + static_cast<ptrdiff_t>(t) * K;
      scratch.scales[t] = shape.gate_size == 1 ? pull_back_by_products(state, window, t, head, scratch.outs[t], scratch)
                                               : pull_back_by_records(state, window, t, head, scratch.outs[t], scratch);
      float* u = scratch.u + static_cast<ptrdiff_t>(t) * K;
      order_query(state.form, u, K, u);
    }
    read_head(checkpoint_of(state, window.checkpoint_in, head), K, V, window.tokens, scratch.queries, scratch.scales,
              scratch.outs);
  }
}

void zero_outputs(const DeltaShape& shape, const DeltaWindow& window, float* out) {
  const int ratio = shape.heads / shape.key_heads;
  for (int t = 0; t < window.tokens; ++t)
    std::fill_n(out + (static_cast<ptrdiff_t>(t) * shape.heads + window.key_head * ratio) * shape.value_size,
                static_cast<size_t>(ratio) * shape.value_size, 0.0f);
}

// A kernel below does the units begin .. end-1; unit number row * G + key head is one key head of one row.

void delta_step_kernel(const DeltaStep& args, int64_t begin, int64_t end, std::span<std::byte> workspace, int thread) {
  const DeltaShape& shape = args.state.shape;
  const DeltaScratch scratch = thread_scratch(workspace, shape, args.state.capacity, thread);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int row = static_cast<int>(unit / shape.key_heads);
    const DeltaWindow window =
        window_of(args.state, args.rows, args.tokens, row, row, 1, static_cast<int>(unit % shape.key_heads));
    float* out = args.out + static_cast<ptrdiff_t>(row) * shape.heads * shape.value_size;
    if (window.slot == kPaddingSlot) {
      zero_outputs(shape, window, out);
      continue;
    }
    run_recurrence(args.state, window, window.history + 1, out, scratch);
  }
}

void delta_decode_kernel(const DeltaDecode& args, int64_t begin, int64_t end, std::span<std::byte> workspace,
                         int thread) {
  const DeltaShape& shape = args.state.shape;
  const int T = args.tokens_per_row;
  const DeltaScratch scratch = thread_scratch(workspace, shape, args.state.capacity, thread);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int row = static_cast<int>(unit / shape.key_heads);
    DeltaWindow window = window_of(args.state, args.rows, args.tokens, row, static_cast<int64_t>(row) * T, T,
                                   static_cast<int>(unit % shape.key_heads));
    float* out = args.out + static_cast<ptrdiff_t>(row) * T * shape.heads * shape.value_size;
    if (window.slot == kPaddingSlot) {
      zero_outputs(shape, window, out);
      continue;
    }
    const bool flushes = args.rows.will_flush(row, T, args.state.window);
    const bool is_recurrent = flushes || args.readout == Readout::kExact;
    if (is_recurrent) run_recurrence(args.state, window, flushes ? window.history : 0, out, scratch);
    if (flushes) {  // the older records leave the view
      window.start = ring_position(window.start, window.history, args.state.capacity);
      window.history = 0;
    }
    append_records(args.state, window, scratch);
    if (!is_recurrent) read_pulled_back(args.state, window, out, scratch);
  }
}

const DeltaTokens kNoTokens;

void delta_materialise_kernel(const DeltaMaterialise& args, int64_t begin, int64_t end, std::span<std::byte> workspace,
                              int thread) {
  const DeltaShape& shape = args.state.shape;
  const DeltaScratch scratch = thread_scratch(workspace, shape, args.state.capacity, thread);
  for (int64_t unit = begin; unit < end; ++unit) {
    const DeltaWindow window = window_of(args.state, args.rows, kNoTokens, static_cast<int>(unit / shape.key_heads), 0,
                                         0, static_cast<int>(unit % shape.key_heads));
    if (window.slot == kPaddingSlot) continue;
    if (window.history > 0) {
      run_recurrence(args.state, window, window.history, nullptr, scratch);
    } else if (window.checkpoint_in != window.checkpoint_out) {
      const int ratio = shape.heads / shape.key_heads;
      std::memcpy(checkpoint_of(args.state, window.checkpoint_out, window.key_head * ratio).memory,
                  checkpoint_of(args.state, window.checkpoint_in, window.key_head * ratio).memory,
                  sizeof(float) * ratio * shape.value_size * shape.key_size);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(delta_step_kernel);
HWY_EXPORT(delta_decode_kernel);
HWY_EXPORT(delta_materialise_kernel);
HWY_EXPORT(decode_scratch_bytes);

size_t delta_workspace_bytes(const DeltaShape& shape, int capacity, Device& device) {
  check_shape(shape);
  require(capacity >= 2, "delta: expected a ring capacity of at least 2 records, got {}", capacity);
  return std::max(HWY_DYNAMIC_DISPATCH(decode_scratch_bytes)(shape, capacity), delta_prefill_scratch_bytes(shape)) *
         device.threads().size();
}

// Calls kernel(begin, end, thread) for ranges of units: neighbours in memory where they can be, many for each thread,
// so that rows that flush even out.
template <typename Kernel>
void for_each_key_head(const StateRows& rows, const DeltaShape& shape, Device& device, const Kernel& kernel) {
  const int64_t units = static_cast<int64_t>(rows.count) * shape.key_heads;
  const int64_t ranges = int64_t{64} * device.threads().size();
  device.threads().parallel_for(units, (units + ranges - 1) / ranges, kernel);
}

void delta_step_cpu(const DeltaStep& args, Device& device, std::span<std::byte> workspace) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(delta_step_kernel);
  for_each_key_head(args.rows, args.state.shape, device,
                    [&](int64_t begin, int64_t end, int thread) { kernel(args, begin, end, workspace, thread); });
}

void delta_decode_cpu(const DeltaDecode& args, Device& device, std::span<std::byte> workspace) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(delta_decode_kernel);
  for_each_key_head(args.rows, args.state.shape, device,
                    [&](int64_t begin, int64_t end, int thread) { kernel(args, begin, end, workspace, thread); });
}

void delta_materialise_cpu(const DeltaMaterialise& args, Device& device, std::span<std::byte> workspace) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(delta_materialise_kernel);
  for_each_key_head(args.rows, args.state.shape, device,
                    [&](int64_t begin, int64_t end, int thread) { kernel(args, begin, end, workspace, thread); });
}

void delta_step(const DeltaStep& args, Device& device, std::span<std::byte> workspace) {
  check_call("delta_step", args.state, args.rows, device, workspace);
  check_tokens("delta_step", args.state.shape, args.tokens, args.out);
  delta_step_cpu(args, device, workspace);
}

void delta_decode(const DeltaDecode& args, Device& device, std::span<std::byte> workspace) {
  check_call("delta_decode", args.state, args.rows, device, workspace);
  check_tokens("delta_decode", args.state.shape, args.tokens, args.out);
  check_window("delta_decode", args.tokens_per_row, args.state.window, args.state.capacity);
  delta_decode_cpu(args, device, workspace);
}

void delta_materialise(const DeltaMaterialise& args, Device& device, std::span<std::byte> workspace) {
  check_call("delta_materialise", args.state, args.rows, device, workspace);
  delta_materialise_cpu(args, device, workspace);
}

}  // namespace replayssm
#endif  // HWY_ONCE
