// Mamba-2 on GPUs. The kernel here has a warp for every slice and runs the recurrence: conventional step, materialise,
// and replay steps whose records have no room elsewhere; replay steps are replay.cuh's, prefill prefill.cu's.
#include "replayssm/ops/mamba2.h"

#include <algorithm>

#include "replayssm/ops/cuda_checks.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/prefill.h"
#include "replayssm/ops/replay.cuh"
#include "replayssm/ops/ring.h"
#include "replayssm/ops/slices.cuh"
#include "replayssm/ops/updates.cuh"

namespace replayssm {
namespace {

// As in delta.cu (128 heads of 64 x 128, batch 256, a step: 701 us with 20, 594 with 16).
constexpr int kBlocks = 16;

enum class Mamba2Use { kStep, kDecode, kMaterialise };

template <typename T>
struct Mamba2Args {
  BasicMamba2State<T> state;
  StateRows rows;
  Mamba2Heads heads;
  BasicMamba2Tokens<T> tokens;
  Mamba2Use use;
  int tokens_per_row;
  void* out;
  bool has_float_out;
  CudaFault* fault;
  const char* op;
};

// A head of a row of the batch.
template <typename T>
struct Mamba2Unit {
  const Mamba2Args<T>& args;
  Row row;
  int head, group;
  int64_t first_token;
  int tokens;
  int64_t head_records, group_records;  // records before the head's and the group's rings

  __device__ Mamba2Unit(const Mamba2Args<T>& a, int b, int of_head)
      : args(a),
        row(row_of(a.rows, b, a.state.slots, a.state.checkpoints, a.state.window, a.state.capacity)),
        head(of_head),
        group(of_head / (a.state.shape.heads / a.state.shape.groups)),
        first_token(static_cast<int64_t>(b) * a.tokens_per_row),
        tokens(a.tokens_per_row) {
    head_records = (static_cast<int64_t>(row.slot) * shape().heads + head) * args.state.capacity;
    group_records = (static_cast<int64_t>(row.slot) * shape().groups + group) * args.state.capacity;
  }

  __device__ const Mamba2Shape& shape() const { return args.state.shape; }
  // (The limit is read where it is needed: one kept from the start would take a register from the updates.)
  __device__ bool will_flush() const {
    return replayssm::will_flush(args.rows.flush_limit, blockIdx.z, row.history, tokens, args.state.window);
  }
  __device__ bool is_first_of_group() const { return head % (shape().heads / shape().groups) == 0; }
  __device__ int position(int record) const { return row.position(record, args.state.capacity); }
  __device__ int64_t token_head(int t) const { return (first_token + t) * shape().heads + head; }
  __device__ T* b_ring() const { return args.state.ring_b + group_records * shape().state_size; }
  __device__ T* x_ring() const { return args.state.ring_x + head_records * shape().head_size; }
  __device__ const T* token_x(int t) const {
    return args.tokens.x + (first_token + t) * args.tokens.x_stride + head * shape().head_size;
  }
  __device__ const T* token_b(int t) const {
    return args.tokens.b + (first_token + t) * args.tokens.b_stride + group * shape().state_size;
  }
  __device__ const T* token_c(int t) const {
    return args.tokens.c + (first_token + t) * args.tokens.c_stride + group * shape().state_size;
  }
  __device__ float decay_rate() const {
    return args.heads.a_log == nullptr ? 0.0f : -expf(__ldg(args.heads.a_log + head));
  }
  __device__ float skip() const { return args.heads.d == nullptr ? 0.0f : __ldg(args.heads.d + head); }
  __device__ HeadPlace place(int checkpoint, int first) const {
    return HeadPlace(checkpoint, shape().heads, head, shape().head_size, first, shape().state_size);
  }

  __device__ void write_out(int t, int value, float number) const {
    const int64_t index = token_head(t) * shape().head_size + value;
    if (args.has_float_out)
      static_cast<float*>(args.out)[index] = number;
    else
      store_number(static_cast<T*>(args.out) + index, number);
  }

  // Padding rows give zeros; rows outside the pool give NaN and tell the host. True if the row is either; its outputs
  // of values first .. first + count - 1 are then written by this warp.
  __device__ bool is_refused(int b, int first, int count) const {
    if (!row.is_padding && !row.is_outside) return false;
    if (row.is_outside && first == 0 && head == 0 && threadIdx.x == 0 && !args.tokens.are_just_made)
      report_fault(args.fault, args.op, b, row.slot, row.checkpoint_in, row.checkpoint_out);
    if (args.use != Mamba2Use::kMaterialise)
      for (int t = 0; t < tokens; ++t)
        for (int i = threadIdx.x % 32; i < count; i += 32)
          write_out(t, first + i, row.is_padding ? 0.0f : __uint_as_float(0x7FC00000u));
    return true;
  }
};

// What of a record a head has for its own, in shared memory.
struct Mamba2Gate {
  float dt, decay;
};

// Record j's gate; that of a decode's token is kept in the ring if `is_keeping`.
template <typename T>
__device__ Mamba2Gate gate_of(const Mamba2Unit<T>& unit, int j, float decay_rate, bool is_keeping) {
  const BasicMamba2State<T>& state = unit.args.state;
  const int64_t at = unit.head_records + unit.position(j);
  if (j < unit.row.history) return {__ldg(state.ring_dt + at), __ldg(state.ring_decay + at)};
  const float dt = __ldg(unit.args.tokens.dt + unit.token_head(j - unit.row.history));
  const Mamba2Gate gate = {dt, expf(__fmul_rn(decay_rate, dt))};
  if (is_keeping) {
    state.ring_dt[at] = gate.dt;
    state.ring_decay[at] = gate.decay;
  }
  return gate;
}

// A lane's quad of a record's or token's B.
template <typename T>
__device__ Quad<T> b_quad(const Mamba2Unit<T>& unit, int j) {
  const int lane = threadIdx.x % 32;
  const T* from = j < unit.row.history ? unit.b_ring() + unit.position(j) * unit.shape().state_size
                                       : unit.token_b(j - unit.row.history);
  Quad<T> b = {};
  if (4 * lane < unit.shape().state_size) b = load_quad(from + 4 * lane);
  return b;
}

// The shared memory of a recurrence beside its slice: of up to kRecords records the gates and the slice's x.
constexpr int kRecords = 32;
template <typename T>
size_t record_bytes(int records) {
  return std::min(records, kRecords) * (sizeof(Mamba2Gate) + sizeof(Quad<T>) * kSliceRows / 4) + 16;
}

// Runs the recurrence over the records and then the tokens for the slice of a head that begins at value `first`: writes
// the state where the use says so, the tokens' outputs, and a decode's records.
template <int K, typename T>
__device__ void run_slice(const Mamba2Unit<T>& unit, int first, uint4* shared) {
  const Mamba2Args<T>& args = unit.args;
  const int lane = threadIdx.x, history = unit.row.history, count = history + unit.tokens;
  const int values = min(kSliceRows, unit.shape().head_size - first), state_size = unit.shape().state_size;
  const bool is_decode = args.use == Mamba2Use::kDecode;
  const int limit = min(kRecords, args.state.window + args.tokens_per_row);
  auto* record_values = reinterpret_cast<Quad<T>*>(shared + kSliceBytes<K> / 16);
  auto* gates = reinterpret_cast<Mamba2Gate*>(record_values + limit * (kSliceRows / 4));
  // The slice's shared memory, once the slice has left it, holds the vectors of two records in turn.
  auto* vectors = reinterpret_cast<float*>(shared);
  Slice<K>::begin_read(shared, unit.place(unit.row.checkpoint_in, first), args.state.checkpoint, values, state_size,
                       args.state.form);
  wait_for_previous();
  let_next_start();
  const auto write = [&](const Slice<K>& slice) {
    slice.write(unit.place(unit.row.checkpoint_out, first), args.state.checkpoint, values, state_size, args.state.form);
  };
  const float rate = unit.decay_rate(), skip = unit.skip();
  Slice<K> slice;
  Quad<T> next_b = {};
  if (count > 0) next_b = b_quad(unit, 0);
  int begin = 0;
#pragma unroll 1
  do {
    __syncwarp();  // the chunk before is read
    const int size = min(limit, count - begin);
    for (int i = lane; i < size; i += 32) gates[i] = gate_of(unit, begin + i, rate, is_decode && first == 0);
    for (int i = lane; i < size * (kSliceRows / 4); i += 32) {
      const int j = begin + i / (kSliceRows / 4), value = first + 4 * (i % (kSliceRows / 4));
      Quad<T> x = {};
      if (value < unit.shape().head_size) {
        T* in_ring = unit.x_ring() + unit.position(j) * unit.shape().head_size + value;
        x = load_quad(j < history ? in_ring : unit.token_x(j - history) + value);
        if (is_decode && j >= history) store_quad(in_ring, x);
      }
      record_values[i] = x;
    }
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
      float *b = vectors + (i & 1) * 2 * K, *c = b + K;
      if (is_token) {
        if (is_decode && first == 0 && unit.is_first_of_group() && 4 * lane < state_size)
          store_quad(unit.b_ring() + unit.position(j) * state_size + 4 * lane, next_b);
        float4 query = {};
        if (4 * lane < state_size) query = to_numbers(load_quad(unit.token_c(j - history) + 4 * lane));
        if (4 * lane < K) reinterpret_cast<float4*>(c)[lane] = query;
      }
      if (4 * lane < K) reinterpret_cast<float4*>(b)[lane] = to_numbers(next_b);
      __syncwarp();
      if (j + 1 < count) next_b = b_quad(unit, j + 1);
      const auto* x = reinterpret_cast<const T*>(record_values + i * (kSliceRows / 4)) + lane / 4;
      const Mamba2Gate gate = gates[i];
      const float x_first = to_number(x[0]), x_second = to_number(x[8]);
      mamba2_update(slice, VectorOfSlice(b), gate.decay, __fmul_rn(gate.dt, x_first), __fmul_rn(gate.dt, x_second));
      if (is_token) {
        float products[2];
        slice.multiply(c, products[0], products[1]);
        const int row = output_row(threadIdx.x % 32);
        if (has_output(threadIdx.x % 32) && row < values) {
          const bool is_first = lane % 4 == 0;
          float y = is_first ? products[0] : products[1];
          if (args.heads.d != nullptr) y = __fmaf_rn(skip, is_first ? x_first : x_second, y);
          if (args.tokens.z != nullptr)
            y = gated(y, to_number(args.tokens.z[(unit.first_token + j - history) * args.tokens.z_stride +
                                                 unit.head * unit.shape().head_size + first + row]));
          unit.write_out(j - history, first + row, y);
        }
      }
    }
    begin += size;
  } while (begin < count);
  if (!is_decode) write(slice);
}

// Grid (slices of a head, H, B), block of a warp. A warp owns 16 rows of a head's state, in registers.
template <int K, typename T>
__global__ void __launch_bounds__(32, kBlocks) mamba2_recurrence_kernel(const __grid_constant__ Mamba2Args<T> args) {
  extern __shared__ uint4 shared[];
  if (!args.tokens.are_just_made) wait_for_previous();
  const Mamba2Unit<T> unit(args, blockIdx.z, blockIdx.y);
  const int first = blockIdx.x * kSliceRows;
  if (unit.is_refused(blockIdx.z, first, min(kSliceRows, unit.shape().head_size - first))) return wait_for_previous();
  run_slice<K>(unit, first, shared);
}

template <int K, typename T>
void launch_padded(const Mamba2Args<T>& args, CudaDevice& device) {
  const Mamba2Shape& shape = args.state.shape;
  const int slices = (shape.head_size + kSliceRows - 1) / kSliceRows;
  launch(args.op, mamba2_recurrence_kernel<K, T>, dim3(slices, shape.heads, args.rows.count), 32,
         kSliceBytes<K> + record_bytes<T>(args.state.window + args.tokens_per_row), args, device, Launch::kOverlapping);
}

template <typename T>
void run(const Mamba2Args<T>& args, CudaDevice& device) {
  if (args.rows.count == 0) return;
  const int state_size = args.state.shape.state_size;
  if (state_size <= 32) return launch_padded<32>(args, device);
  if (state_size <= 64) return launch_padded<64>(args, device);
  launch_padded<128>(args, device);
}

// Gives a call's arrays the names that the kernels of both families have for them.
template <typename T>
void name_arrays(RecurrenceArgs<T>& args, const BasicMamba2State<T>& state, const BasicMamba2Tokens<T>& tokens,
                 const Mamba2Heads& heads) {
  args.heads = state.shape.heads;
  args.key_heads = state.shape.groups;
  args.key_size = state.shape.state_size;
  args.values = state.shape.head_size;
  args.ring_key = state.ring_b;
  args.ring_value = state.ring_x;
  args.ring_strength = state.ring_dt;
  args.query = tokens.c;
  args.key = tokens.b;
  args.value = tokens.x;
  args.z = tokens.z;
  args.query_stride = tokens.c_stride;
  args.key_stride = tokens.b_stride;
  args.value_stride = tokens.x_stride;
  args.z_stride = tokens.z_stride;
  args.strength = tokens.dt;
  args.a_log = heads.a_log;
  args.skip = heads.d;
}

template <typename T, typename Out>
ReplayArgs<T> replay_args(const BasicMamba2Decode<T, Out>& args, const ReplayPlan& plan, CudaDevice& device) {
  auto replay = recurrence_args<ReplayArgs<T>>("mamba2_decode", args, device);
  replay.readout = args.readout;
  replay.tokens = args.tokens_per_row;
  replay.plan = plan;
  name_arrays(replay, args.state, args.tokens, args.heads);
  return replay;
}

template <typename T>
void check_state(const char* op, const BasicMamba2State<T>& state, const StateRows& rows) {
  check_shape(state.shape);
  check_ring(op, state.window, state.capacity);
  check_cuda_sizes(op, "state_size", state.shape.state_size, rows.count);
  check_pointers(op, {{"checkpoint", state.checkpoint},
                      {"ring_x", state.ring_x},
                      {"ring_b", state.ring_b},
                      {"ring_dt", state.ring_dt},
                      {"ring_decay", state.ring_decay}});
}

template <typename T>
void check_tokens(const char* op, const Mamba2Shape& shape, const BasicMamba2Tokens<T>& tokens,
                  const Mamba2Heads& heads, const void* out) {
  check_not_null(op, "a_log", heads.a_log);
  check_not_null(op, "dt", tokens.dt);
  check_pointers(op, {{"x", tokens.x}, {"b", tokens.b}, {"c", tokens.c}, {"out", out}});
  const int64_t inner = int64_t{shape.heads} * shape.head_size, keys = int64_t{shape.groups} * shape.state_size;
  check_strides(
      op, sizeof(T),
      {{"x_stride", tokens.x_stride, inner}, {"b_stride", tokens.b_stride, keys}, {"c_stride", tokens.c_stride, keys}});
  if (tokens.z == nullptr) return;
  check_pointers(op, {{"z", tokens.z}});
  check_strides(op, sizeof(T), {{"z_stride", tokens.z_stride, inner}});
}

}  // namespace

template <typename T, typename Out>
void mamba2_step(const BasicMamba2Step<T, Out>& args, CudaDevice& device, std::span<std::byte>) {
  check_state("mamba2_step", args.state, args.rows);
  check_tokens("mamba2_step", args.state.shape, args.tokens, args.heads, args.out);
  run<T>({args.state, args.rows, args.heads, args.tokens, Mamba2Use::kStep, 1, args.out, std::is_same_v<Out, float>,
          device.fault(), "mamba2_step"},
         device);
}

template <typename T, typename Out>
void mamba2_decode(const BasicMamba2Decode<T, Out>& args, CudaDevice& device, std::span<std::byte>) {
  check_state("mamba2_decode", args.state, args.rows);
  check_window("mamba2_decode", args.tokens_per_row, args.state.window, args.state.capacity);
  check_cuda_window("mamba2_decode", args.state.window, args.tokens_per_row);
  check_tokens("mamba2_decode", args.state.shape, args.tokens, args.heads, args.out);
  const DecodePlan plan = plan_decode(args.state.shape, args.rows.count, args.state.window, args.tokens_per_row,
                                      sizeof(T), args.state.form, device.properties());
  if (plan.path == DecodePath::kReplay)
    return launch_replay<Recurrence::kMamba2>(replay_args(args, plan.replay, device), device);
  // What has no room there is read out exactly, whatever was asked for.
  run<T>({args.state, args.rows, args.heads, args.tokens, Mamba2Use::kDecode, args.tokens_per_row, args.out,
          std::is_same_v<Out, float>, device.fault(), "mamba2_decode"},
         device);
}

template <typename T, typename Out>
void mamba2_prefill(const BasicMamba2Prefill<T, Out>& args, CudaDevice& device, std::span<std::byte>) {
  check_state("mamba2_prefill", args.state, args.rows);
  check_tokens("mamba2_prefill", args.state.shape, args.tokens, args.heads, args.out);
  require(args.token_begin != nullptr, "mamba2_prefill: token_begin is null");
  auto prefill = recurrence_args<PrefillArgs<T>>("mamba2_prefill", args, device);
  prefill.token_begin = args.token_begin;
  name_arrays(prefill, args.state, args.tokens, args.heads);
  launch_prefill<Recurrence::kMamba2>(prefill, device);
}

template <typename T>
void mamba2_materialise(const BasicMamba2Materialise<T>& args, CudaDevice& device, std::span<std::byte>) {
  check_state("mamba2_materialise", args.state, args.rows);
  // No token is read, and of the heads' weights none.
  run<T>(
      {args.state, args.rows, {}, {}, Mamba2Use::kMaterialise, 0, nullptr, true, device.fault(), "mamba2_materialise"},
      device);
}

#define REPLAYSSM_MAMBA2(T, Out)                                                                    \
  template void mamba2_step(const BasicMamba2Step<T, Out>&, CudaDevice&, std::span<std::byte>);     \
  template void mamba2_decode(const BasicMamba2Decode<T, Out>&, CudaDevice&, std::span<std::byte>); \
  template void mamba2_prefill(const BasicMamba2Prefill<T, Out>&, CudaDevice&, std::span<std::byte>);
REPLAYSSM_MAMBA2(float, float)
REPLAYSSM_MAMBA2(Bf16, Bf16)
REPLAYSSM_MAMBA2(Bf16, float)
REPLAYSSM_MAMBA2(Fp16, Fp16)
REPLAYSSM_MAMBA2(Fp16, float)
#undef REPLAYSSM_MAMBA2
template void mamba2_materialise(const BasicMamba2Materialise<float>&, CudaDevice&, std::span<std::byte>);
template void mamba2_materialise(const BasicMamba2Materialise<Bf16>&, CudaDevice&, std::span<std::byte>);
template void mamba2_materialise(const BasicMamba2Materialise<Fp16>&, CudaDevice&, std::span<std::byte>);

}  // namespace replayssm
