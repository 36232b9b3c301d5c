// The delta rule on GPUs. The kernel here has a warp for every slice and runs the recurrence: conventional step,
// materialise, and replay steps whose records have no room elsewhere; replay steps are replay.cuh's, prefill
// prefill.cu's.
#include "replayssm/ops/delta.h"

#include <algorithm>
#include <cmath>

#include "replayssm/ops/cuda_checks.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/prefill.h"
#include "replayssm/ops/replay.cuh"
#include "replayssm/ops/ring.h"
#include "replayssm/ops/tiles.h"
#include "replayssm/ops/updates.cuh"

namespace replayssm {
namespace {

// The warps of a multiprocessor: 8 KiB of shared memory each, and 64 words of state in a lane's registers. With 20 of
// them the record that is loaded ahead spills, so that it is waited for (H200, 32 heads, batch 256, a step: 406 us
// against 313).
constexpr int kBlocks = 16;

enum class DeltaUse { kStep, kDecode, kMaterialise };

template <typename T>
struct DeltaArgs {
  BasicDeltaState<T> state;
  StateRows rows;
  BasicDeltaTokens<T> tokens;
  DeltaUse use;
  int tokens_per_row;
  void* out;
  bool has_float_out;
  CudaFault* fault;
  const char* op;
};

// What a warp works on: some value rows of one head of one row of the batch.
template <typename T>
struct DeltaUnit {
  const DeltaArgs<T>& args;
  Row row;
  int head, key_head, first_value, values;
  int64_t first_token;
  int tokens;
  int64_t head_records, key_head_records;  // records before the head's and the key head's rings

  // Slice `index` of head `of_head` of row b.
  __device__ DeltaUnit(const DeltaArgs<T>& a, int b, int of_head, int index)
      : args(a),
        row(row_of(a.rows, b, a.state.slots, a.state.checkpoints, a.state.window, a.state.capacity)),
        head(of_head),
        key_head(of_head / (a.state.shape.heads / a.state.shape.key_heads)),
        first_value(index * kSliceRows),
        values(min(kSliceRows, a.state.shape.value_size - first_value)),
        first_token(static_cast<int64_t>(b) * a.tokens_per_row),
        tokens(a.tokens_per_row) {
    head_records = (static_cast<int64_t>(row.slot) * shape().heads + head) * args.state.capacity;
    key_head_records = (static_cast<int64_t>(row.slot) * shape().key_heads + key_head) * args.state.capacity;
  }

  __device__ const DeltaShape& shape() const { return args.state.shape; }
  // (The limit is read where it is needed: one kept from the start would take a register from the updates.)
  __device__ bool will_flush() const {
    return replayssm::will_flush(args.rows.flush_limit, blockIdx.z, row.history, tokens, args.state.window);
  }
  __device__ bool is_first_of_head() const { return first_value == 0; }
  __device__ bool is_first_of_key_head() const {
    return first_value == 0 && head % (shape().heads / shape().key_heads) == 0;
  }
  // Where record `record` of the ring lies, in records.
  __device__ int64_t of_head(int record) const { return head_records + position(record); }
  __device__ int64_t of_key_head(int record) const { return key_head_records + position(record); }
  __device__ int64_t token_head(int t) const { return (first_token + t) * shape().heads + head; }

  __device__ const T* q(int t) const {
    return args.tokens.q + (first_token + t) * args.tokens.q_stride + key_head * shape().key_size;
  }
  __device__ const T* token_k(int t) const {
    return args.tokens.k + (first_token + t) * args.tokens.k_stride + key_head * shape().key_size;
  }
  __device__ const T* token_v(int t) const {
    return args.tokens.v + (first_token + t) * args.tokens.v_stride + head * shape().value_size;
  }
  // The rings of the key head's keys and of the head's values; record j lies position(j) records on.
  __device__ T* key_ring() const { return args.state.ring_k + key_head_records * shape().key_size; }
  __device__ T* value_ring() const { return args.state.ring_v + head_records * shape().value_size; }
  __device__ int position(int record) const { return row.position(record, args.state.capacity); }

  __device__ void write_out(int t, int value, float number) const {
    const int64_t index = token_head(t) * shape().value_size + value;
    if (args.has_float_out)
      static_cast<float*>(args.out)[index] = number;
    else
      store_number(static_cast<T*>(args.out) + index, number);
  }

  // Padding rows give zeros; rows outside the pool give NaN and tell the host. True if the row is either.
  __device__ bool is_refused(int b) const {
    if (!row.is_padding && !row.is_outside) return false;
    if (row.is_outside && first_value == 0 && head == 0 && threadIdx.x == 0 && !args.tokens.are_just_made)
      report_fault(args.fault, args.op, b, row.slot, row.checkpoint_in, row.checkpoint_out);
    if (args.use != DeltaUse::kMaterialise)
      for (int t = 0; t < tokens; ++t)
        for (int i = threadIdx.x; i < values; i += 32)
          write_out(t, first_value + i, row.is_padding ? 0.0f : __uint_as_float(0x7FC00000u));
    return true;
  }
};

template <typename T>
__device__ HeadPlace place_of(const DeltaUnit<T>& unit, int checkpoint, int first) {
  const DeltaShape& shape = unit.shape();
  return HeadPlace(checkpoint, shape.heads, unit.head, shape.value_size, first, shape.key_size);
}

// What of a record is one number, in shared memory.
struct DeltaGate {
  float scale, decay, beta;  // decay: with one gate a head
  float unused;
};

// Gathers the gates of records begin .. begin + count - 1, with tokens' scales still to come, and keeps those of a
// decode's tokens in the ring.
template <bool kPerChannel, typename T>
__device__ void gather_gates(const DeltaUnit<T>& unit, DeltaGate* gates, int begin, int count) {
  const DeltaArgs<T>& args = unit.args;
  for (int i = threadIdx.x; i < count; i += 32) {
    const int j = begin + i, t = j - unit.row.history;
    DeltaGate gate = {0, 0, 0, 0};
    if (t < 0) {
      const int64_t at = unit.of_head(j);
      if constexpr (!kPerChannel) gate.decay = __ldg(args.state.ring_decay + at);
      gate.beta = __ldg(args.state.ring_beta + at);
      gate.scale = __ldg(args.state.ring_k_scale + unit.of_key_head(j));
    } else {
      const int64_t at = unit.token_head(t);
      if constexpr (!kPerChannel) gate.decay = expf(__ldg(args.tokens.g + at));
      gate.beta = __ldg(args.tokens.beta + at);
      if (args.use == DeltaUse::kDecode && unit.is_first_of_head()) {
        const int64_t to = unit.of_head(j);
        if constexpr (!kPerChannel) args.state.ring_decay[to] = gate.decay;
        args.state.ring_beta[to] = gate.beta;
      }
    }
    gates[i] = gate;
  }
}

// Keeps a decode's token, record j, in the ring: its key, where the unit is the first of the key head.
template <typename T>
__device__ void append_key(const DeltaUnit<T>& unit, int j, Quad<T> k, float scale) {
  if (!unit.is_first_of_key_head()) return;
  const BasicDeltaState<T>& state = unit.args.state;
  const int64_t at = unit.of_key_head(j);
  if (threadIdx.x == 0) state.ring_k_scale[at] = scale;
  if (4 * threadIdx.x < unit.shape().key_size)
    store_quad(state.ring_k + at * unit.shape().key_size + 4 * threadIdx.x, k);
}

// A lane's quad of a record's or token's key. (Within a slot's ring 32 bits count elements.)
template <typename T>
__device__ Quad<T> key_quad(const DeltaUnit<T>& unit, int j) {
  const T* from = j < unit.row.history ? unit.key_ring() + unit.position(j) * unit.shape().key_size
                                       : unit.token_k(j - unit.row.history);
  Quad<T> k = {};
  if (4 * threadIdx.x < unit.shape().key_size) k = load_quad(from + 4 * threadIdx.x);
  return k;
}

// A lane's quad of a record's decays or a token's log-decays.
template <typename T>
__device__ float4 gate_quad(const DeltaUnit<T>& unit, int j) {
  const int key_size = unit.shape().key_size;
  const float* from = j < unit.row.history
                          ? unit.args.state.ring_decay + unit.head_records * key_size + unit.position(j) * key_size
                          : unit.args.tokens.g + unit.token_head(j - unit.row.history) * key_size;
  return 4 * threadIdx.x < key_size ? __ldg(reinterpret_cast<const float4*>(from) + threadIdx.x)
                                    : make_float4(0, 0, 0, 0);
}

// The shared memory of a recurrence beside its slice: of up to kRecords records the gates and the slice's values.
constexpr int kRecords = 32;
template <typename T>
size_t record_bytes(int records) {
  return std::min(records, kRecords) * (sizeof(DeltaGate) + sizeof(Quad<T>) * kSliceRows / 4);
}

// Gathers the values of records for the slice that begins at value `first`, and keeps those of a decode's tokens.
template <typename T>
__device__ void gather_values(const DeltaUnit<T>& unit, Quad<T>* values, int first, int begin, int count) {
  constexpr int kQuads = kSliceRows / 4;
  for (int i = threadIdx.x; i < count * kQuads; i += 32) {
    const int j = begin + i / kQuads, value = first + 4 * (i % kQuads);
    Quad<T> v = {};
    if (value < unit.first_value + unit.values) {
      T* in_ring = unit.value_ring() + unit.position(j) * unit.shape().value_size + value;
      const bool is_token = j >= unit.row.history;
      v = load_quad(is_token ? unit.token_v(j - unit.row.history) + value : in_ring);
      if (unit.args.use == DeltaUse::kDecode && is_token) store_quad(in_ring, v);
    }
    values[i] = v;
  }
}

// Runs the recurrence over the records and then the tokens for the slice of a unit that begins at value `first`, which
// is on its way to `shared`: writes the state where the use says so, the tokens' outputs, and a decode's records.
template <int K, bool kPerChannel, typename T>
__device__ void run_recurrence(const DeltaUnit<T>& unit, int first, uint4* shared) {
  const DeltaArgs<T>& args = unit.args;
  const int lane = threadIdx.x, history = unit.row.history, count = history + unit.tokens;
  const int values = min(kSliceRows, unit.first_value + unit.values - first);
  const bool is_decode = args.use == DeltaUse::kDecode;
  const int limit = min(kRecords, args.state.window + args.tokens_per_row);
  auto* gates = reinterpret_cast<DeltaGate*>(shared + kSliceBytes<K> / 16);
  auto* record_values = reinterpret_cast<Quad<T>*>(gates + limit);
  // The slice's shared memory, once the slice has left it, holds the vectors of two records in turn.
  auto* vectors = reinterpret_cast<float*>(shared);
  const auto write = [&](const Slice<K>& slice) {
    slice.write(place_of(unit, unit.row.checkpoint_out, first), args.state.checkpoint, values, unit.shape().key_size,
                args.state.form);
  };
  Slice<K> slice;
  Quad<T> next_k = {};
  float4 next_gates = {};
  const auto load = [&](int j) {
    next_k = key_quad(unit, j);
    if constexpr (kPerChannel) next_gates = gate_quad(unit, j);
  };
  if (count > 0) load(0);
  int begin = 0;
#pragma unroll 1
  do {
    __syncwarp();  // the chunk before is read
    const int size = min(limit, count - begin);
    gather_gates<kPerChannel>(unit, gates, begin, size);
    gather_values(unit, record_values, first, begin, size);
    if (begin == 0) {
      wait_for_copies();
      __syncwarp();
      slice.take(shared, args.state.form);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < size; ++i) {
      const int j = begin + i;
      const bool is_token = j >= history;
      if (is_decode && j == history && unit.will_flush()) write(slice);
      float* k = vectors + (i & 1) * 3 * K;
      float *decays = k + K, *q = k + 2 * K;
      float scale;
      if (is_token) {
        scale = key_scale(to_numbers(next_k));
        if (is_decode) append_key(unit, j, next_k, scale);
        if constexpr (kPerChannel) {
          next_gates = exponentials(next_gates);
          if (is_decode && unit.is_first_of_head() && 4 * lane < unit.shape().key_size)
            reinterpret_cast<float4*>(args.state.ring_decay + unit.of_head(j) * unit.shape().key_size)[lane] =
                next_gates;
        }
        float4 raw = {};
        if (4 * lane < unit.shape().key_size) raw = to_numbers(load_quad(unit.q(j - history) + 4 * lane));
        raw = scaled(raw, query_scale(key_scale(raw), unit.shape().key_size));
        if (4 * lane < K) reinterpret_cast<float4*>(q)[lane] = raw;
      } else {
        scale = gates[i].scale;
      }
      if (4 * lane < K) {
        reinterpret_cast<float4*>(k)[lane] = scaled(to_numbers(next_k), scale);
        if constexpr (kPerChannel) reinterpret_cast<float4*>(decays)[lane] = next_gates;
      }
      __syncwarp();
      if (j + 1 < count) load(j + 1);
      const auto* v = reinterpret_cast<const T*>(record_values + i * (kSliceRows / 4)) + lane / 4;
      delta_update<kPerChannel, /*kKeeps=*/false>(slice, VectorOfSlice(k), VectorOfSlice(decays), gates[i].decay,
                                                  gates[i].beta, to_number(v[0]), to_number(v[8]));
      if (is_token) {
        float out[2];
        slice.multiply(q, out[0], out[1]);
        if (has_output(threadIdx.x % 32) && output_row(threadIdx.x % 32) < values)
          unit.write_out(j - history, first + output_row(threadIdx.x % 32), lane % 4 == 0 ? out[0] : out[1]);
      }
    }
    begin += size;
  } while (begin < count);
  if (!is_decode) write(slice);
}

// Runs one slice from memory to memory.
template <int K, bool kPerChannel, typename T>
__device__ void run_slice(const DeltaUnit<T>& unit, uint4* shared) {
  Slice<K>::begin_read(shared, place_of(unit, unit.row.checkpoint_in, unit.first_value), unit.args.state.checkpoint,
                       unit.values, unit.shape().key_size, unit.args.state.form);
  wait_for_previous();
  let_next_start();
  run_recurrence<K, kPerChannel>(unit, unit.first_value, shared);
}

// Grid (slices of a head, H, B), block of a warp. A warp owns 16 rows of a head's state, in registers.
template <int K, bool kPerChannel, typename T>
__global__ void __launch_bounds__(32, kBlocks) delta_recurrence_kernel(const __grid_constant__ DeltaArgs<T> args) {
  extern __shared__ uint4 shared[];
  if (!args.tokens.are_just_made) wait_for_previous();
  const DeltaUnit<T> unit(args, blockIdx.z, blockIdx.y, blockIdx.x);
  if (unit.is_refused(blockIdx.z)) return wait_for_previous();
  run_slice<K, kPerChannel>(unit, shared);
}

template <int K, bool kPerChannel, typename T>
void launch_padded(const DeltaArgs<T>& args, CudaDevice& device) {
  const DeltaShape& shape = args.state.shape;
  const int slices = (shape.value_size + kSliceRows - 1) / kSliceRows;
  launch(args.op, delta_recurrence_kernel<K, kPerChannel, T>, dim3(slices, shape.heads, args.rows.count), 32,
         kSliceBytes<K> + record_bytes<T>(args.state.window + args.tokens_per_row), args, device, Launch::kOverlapping);
}

template <typename T>
void run(const DeltaArgs<T>& args, CudaDevice& device) {
  if (args.rows.count == 0) return;
  const int key_size = args.state.shape.key_size;
  const auto run_padded = [&]<int K>() {
    if (args.state.shape.gate_size > 1)
      launch_padded<K, true>(args, device);
    else
      launch_padded<K, false>(args, device);
  };
  if (key_size <= 32) return run_padded.template operator()<32>();
  if (key_size <= 64) return run_padded.template operator()<64>();
  run_padded.template operator()<128>();
}

// Gives a call's arrays the names that the kernels of both families have for them.
template <typename T>
void name_arrays(RecurrenceArgs<T>& args, const BasicDeltaState<T>& state, const BasicDeltaTokens<T>& tokens) {
  args.heads = state.shape.heads;
  args.key_heads = state.shape.key_heads;
  args.key_size = state.shape.key_size;
  args.values = state.shape.value_size;
  args.ring_key = state.ring_k;
  args.ring_value = state.ring_v;
  args.ring_strength = state.ring_beta;
  args.ring_scale = state.ring_k_scale;
  args.query = tokens.q;
  args.key = tokens.k;
  args.value = tokens.v;
  args.query_stride = tokens.q_stride;
  args.key_stride = tokens.k_stride;
  args.value_stride = tokens.v_stride;
  args.log_decay = tokens.g;
  args.query_factor = 1.0f / std::sqrt(static_cast<float>(state.shape.key_size));
  args.strength = tokens.beta;
}

template <typename T, typename Out>
ReplayArgs<T> replay_args(const BasicDeltaDecode<T, Out>& args, const ReplayPlan& plan, CudaDevice& device) {
  auto replay = recurrence_args<ReplayArgs<T>>("delta_decode", args, device);
  replay.readout = args.readout;
  replay.tokens = args.tokens_per_row;
  replay.plan = plan;
  name_arrays(replay, args.state, args.tokens);
  return replay;
}

template <typename T>
void check_state(const char* op, const BasicDeltaState<T>& state, const StateRows& rows) {
  check_shape(state.shape);
  check_ring(op, state.window, state.capacity);
  check_cuda_sizes(op, "key_size", state.shape.key_size, rows.count);
  check_pointers(op, {{"checkpoint", state.checkpoint},
                      {"ring_k", state.ring_k},
                      {"ring_k_scale", state.ring_k_scale},
                      {"ring_v", state.ring_v},
                      {"ring_decay", state.ring_decay},
                      {"ring_beta", state.ring_beta}});
}

template <typename T>
void check_tokens(const char* op, const DeltaShape& shape, const BasicDeltaTokens<T>& tokens, const void* out) {
  check_pointers(op, {{"q", tokens.q}, {"k", tokens.k}, {"v", tokens.v}, {"out", out}});
  check_not_null(op, "beta", tokens.beta);
  check_not_null(op, "g", tokens.g);
  if (shape.gate_size > 1) check_pointers(op, {{"g", tokens.g}});
  const int64_t keys = int64_t{shape.key_heads} * shape.key_size, values = int64_t{shape.heads} * shape.value_size;
  check_strides(op, sizeof(T),
                {{"q_stride", tokens.q_stride, keys},
                 {"k_stride", tokens.k_stride, keys},
                 {"v_stride", tokens.v_stride, values}});
}

}  // namespace

template <typename T, typename Out>
void delta_step(const BasicDeltaStep<T, Out>& args, CudaDevice& device, std::span<std::byte>) {
  check_state("delta_step", args.state, args.rows);
  check_tokens("delta_step", args.state.shape, args.tokens, args.out);
  run<T>({args.state, args.rows, args.tokens, DeltaUse::kStep, 1, args.out, std::is_same_v<Out, float>, device.fault(),
          "delta_step"},
         device);
}

template <typename T, typename Out>
void delta_decode(const BasicDeltaDecode<T, Out>& args, CudaDevice& device, std::span<std::byte>) {
  check_state("delta_decode", args.state, args.rows);
  check_window("delta_decode", args.tokens_per_row, args.state.window, args.state.capacity);
  check_cuda_window("delta_decode", args.state.window, args.tokens_per_row);
  check_tokens("delta_decode", args.state.shape, args.tokens, args.out);
  const DecodePlan plan = plan_decode(args.state.shape, args.rows.count, args.state.window, args.tokens_per_row,
                                      sizeof(T), args.state.form, device.properties());
  if (plan.path == DecodePath::kReplay) {
    const ReplayArgs<T> replay = replay_args(args, plan.replay, device);
    if (args.state.shape.gate_size > 1) return launch_replay<Recurrence::kDeltaPerChannel>(replay, device);
    return launch_replay<Recurrence::kDelta>(replay, device);
  }
  // What has no room there is read out exactly, whatever was asked for.
  run<T>({args.state, args.rows, args.tokens, DeltaUse::kDecode, args.tokens_per_row, args.out,
          std::is_same_v<Out, float>, device.fault(), "delta_decode"},
         device);
}

template <typename T, typename Out>
void delta_prefill(const BasicDeltaPrefill<T, Out>& args, CudaDevice& device, std::span<std::byte>) {
  check_state("delta_prefill", args.state, args.rows);
  check_tokens("delta_prefill", args.state.shape, args.tokens, args.out);
  require(args.token_begin != nullptr, "delta_prefill: token_begin is null");
  auto prefill = recurrence_args<PrefillArgs<T>>("delta_prefill", args, device);
  prefill.token_begin = args.token_begin;
  name_arrays(prefill, args.state, args.tokens);
  if (args.state.shape.gate_size > 1) return launch_prefill<Recurrence::kDeltaPerChannel>(prefill, device);
  launch_prefill<Recurrence::kDelta>(prefill, device);
}

template <typename T>
void delta_materialise(const BasicDeltaMaterialise<T>& args, CudaDevice& device, std::span<std::byte>) {
  check_state("delta_materialise", args.state, args.rows);
  run<T>({args.state, args.rows, {}, DeltaUse::kMaterialise, 0, nullptr, true, device.fault(), "delta_materialise"},
         device);
}

#define REPLAYSSM_DELTA(T, Out)                                                                   \
  template void delta_step(const BasicDeltaStep<T, Out>&, CudaDevice&, std::span<std::byte>);     \
  template void delta_decode(const BasicDeltaDecode<T, Out>&, CudaDevice&, std::span<std::byte>); \
  template void delta_prefill(const BasicDeltaPrefill<T, Out>&, CudaDevice&, std::span<std::byte>);
REPLAYSSM_DELTA(float, float)
REPLAYSSM_DELTA(Bf16, Bf16)
REPLAYSSM_DELTA(Bf16, float)
REPLAYSSM_DELTA(Fp16, Fp16)
REPLAYSSM_DELTA(Fp16, float)
#undef REPLAYSSM_DELTA
template void delta_materialise(const BasicDeltaMaterialise<float>&, CudaDevice&, std::span<std::byte>);
template void delta_materialise(const BasicDeltaMaterialise<Bf16>&, CudaDevice&, std::span<std::byte>);
template void delta_materialise(const BasicDeltaMaterialise<Fp16>&, CudaDevice&, std::span<std::byte>);

}  // namespace replayssm
