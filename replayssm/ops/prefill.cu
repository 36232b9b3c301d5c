// Prefill of the delta rule and Mamba-2 on GPUs, in a kernel that arithmetic binds. Outputs and states have the bits of
// as many steps.
//
// A unit of work is some value rows of one head of one row of the batch, over the records of its ring and then its
// tokens. Its block takes these a chunk at a time: while warps run one chunk on the rows that they hold in registers,
// the next one's keys and queries are normalised and its gates made, once for all of these warps, and the vectors of
// the one after that are on their way to shared memory.
#include "replayssm/ops/prefill.h"

#include <algorithm>

#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/pack.cuh"
#include "replayssm/ops/staged.cuh"
#include "replayssm/ops/updates.cuh"

namespace replayssm {
namespace {

constexpr int kChunk = 16;  // records or tokens

// A unit as its block finds it in shared memory. Of tokens, pointers are to what token 0 has for the unit's head.
template <typename T>
struct PrefillUnit {
  Row row;
  int first_value, values, tokens;
  int64_t rows_in, rows_out;  // before the head's, in the checkpoints
  const T *key_ring, *value_ring;
  const float *decay_ring, *strength_ring, *scale_ring;
  const T *query, *key, *value, *z;
  const float *log_decay, *strength;
  float query_factor;      // delta: of a query's scale
  float decay_rate, skip;  // Mamba-2
  int64_t out;             // of value first_value of token 0

  __device__ int count() const { return row.history + tokens; }
};

// What of a record is one number, in shared memory.
struct PrefillGate {
  float decay, strength;  // decay: with one gate a head
};

// Where what lies in a block's shared memory, in bytes from its beginning. Of [2] chunks take turns: one is run, the
// other is made ready. A unit's state comes through all but the first.
template <int K, bool kPerChannel, typename T>
struct PrefillShared {
  static constexpr int kNumbers = kChunk * K;
  static constexpr int kUnit = 0;
  static constexpr int kRawGates =
      (sizeof(PrefillUnit<T>) + 15) / 16 * 16;                           // float [2, 3, chunk]: decay, strength, scale
  static constexpr int kRawKeys = kRawGates + 4 * 2 * 3 * kChunk;        // T [chunk, K]
  static constexpr int kRawQueries = kRawKeys + sizeof(T) * kNumbers;    // T [chunk, K]
  static constexpr int kRawDecays = kRawQueries + sizeof(T) * kNumbers;  // float [chunk, K]
  static constexpr int kGates = kRawDecays + (kPerChannel ? 4 * kNumbers : 0);     // PrefillGate [2, chunk]
  static constexpr int kKeys = kGates + 2 * sizeof(PrefillGate) * kChunk;          // float [2, chunk, K]
  static constexpr int kQueries = kKeys + 4 * 2 * kNumbers;                        // float [2, chunk, K]
  static constexpr int kDecays = kQueries + 4 * 2 * kNumbers;                      // float [2, chunk, K]
  static constexpr int kOutputs = kDecays + (kPerChannel ? 4 * 2 * kNumbers : 0);  // float [slices, chunk, 16]
  static constexpr int kValueBytes = static_cast<int>(sizeof(T)) * 2 * kChunk;     // T [2, chunk], and z like it
  __host__ __device__ static int values(int unit_values) { return kOutputs + 4 * kChunk * unit_values; }
  __host__ __device__ static int z(int unit_values) { return values(unit_values) + kValueBytes * unit_values; }

  static PrefillBytes bytes(bool has_z) { return {kOutputs, 4 * kChunk + kValueBytes * (has_z ? 2 : 1)}; }
  static int bytes(int unit_values, bool has_z) {
    return std::max(kOutputs + unit_values * bytes(has_z).value, kRawGates + unit_values * 4 * K);
  }
};

// The sums over the warp of four numbers a lane, in the order of sum_of_lanes: lane l gets that of number l / 8.
__device__ inline float sum_of_each(const float (&x)[4], int lane) {
  const auto halve = [&](float lower, float upper, int mask) {
    const bool is_upper = (lane & mask) != 0;
    const float given = __shfl_xor_sync(kWarp, is_upper ? lower : upper, mask);
    return __fadd_rn(is_upper ? upper : lower, given);
  };
  return sum_of_lanes<8>(halve(halve(x[0], x[2], 16), halve(x[1], x[3], 16), 8));
}

// A lane's quads of a vector of K in shared memory, read once.
template <int K>
struct HeldVector {
  float4 quads[K / 16];

  __device__ HeldVector(const float* vector, int lane) {
#pragma unroll
    for (int i = 0; i < K / 16; ++i) quads[i] = reinterpret_cast<const float4*>(vector)[lane % 4 + 4 * i];
  }
  __device__ float4 operator[](int i) const {
    return quads[i];
  }
};

template <typename T>
__device__ Quad<T> rounded(float4 x) {
  if constexpr (std::is_same_v<T, float>)
    return {make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w))};
  else
    return {make_uint2(two_of(x.x, x.y, T()), two_of(x.z, x.w, T()))};
}

// A block of the kernel: its shared memory and the steps of its loop. A warp that owns rows has kSlices slices.
template <Recurrence kRecurrence, int K, int kSlices, typename T>
struct PrefillBlock {
  static constexpr bool kIsDelta = kRecurrence != Recurrence::kMamba2;
  static constexpr bool kPerChannel = kRecurrence == Recurrence::kDeltaPerChannel;
  using Shared = PrefillShared<K, kPerChannel, T>;
  using Unit = PrefillUnit<T>;

  const PrefillArgs<T>& args;
  char* memory;

  __device__ static int lane() { return fresh_thread() % 32; }
  __device__ static int warp() { return fresh_thread() / 32; }
  __device__ int row_warps() const { return blockDim.x / 32 - args.helpers; }
  // The warps that fetch a chunk and make it ready: the helpers, or those of the rows.
  __device__ int fetchers() const { return args.helpers > 0 ? args.helpers : row_warps(); }
  __device__ int fetcher() const { return args.helpers > 0 ? warp() - row_warps() : warp(); }  // negative: none

  template <typename X>
  __device__ X* at(int offset) const {
    return reinterpret_cast<X*>(memory + offset);
  }
  __device__ Unit& unit() const { return *at<Unit>(Shared::kUnit); }
  __device__ float* raw_gates(int chunk) const { return at<float>(Shared::kRawGates) + chunk % 2 * 3 * kChunk; }
  __device__ T* raw_keys() const { return at<T>(Shared::kRawKeys); }
  __device__ T* raw_queries() const { return at<T>(Shared::kRawQueries); }
  __device__ float* raw_decays() const { return at<float>(Shared::kRawDecays); }
  __device__ PrefillGate* gates(int chunk) const { return at<PrefillGate>(Shared::kGates) + chunk % 2 * kChunk; }
  __device__ float* keys(int chunk) const { return at<float>(Shared::kKeys) + chunk % 2 * Shared::kNumbers; }
  __device__ float* queries(int chunk) const { return at<float>(Shared::kQueries) + chunk % 2 * Shared::kNumbers; }
  __device__ float* decays(int chunk) const { return at<float>(Shared::kDecays) + chunk % 2 * Shared::kNumbers; }
  __device__ float* outputs(int slice) const { return at<float>(Shared::kOutputs) + slice * kChunk * kSliceRows; }
  __device__ T* values(int chunk) const {
    return at<T>(Shared::values(args.unit_values)) + chunk % 2 * kChunk * args.unit_values;
  }
  __device__ T* z(int chunk) const {
    return at<T>(Shared::z(args.unit_values)) + chunk % 2 * kChunk * args.unit_values;
  }

  // Records of a chunk; negative past the last chunk.
  __device__ int size(int chunk) const { return min(kChunk, unit().count() - chunk * kChunk); }
  __device__ int slice_rows(int slice) const { return min(kSliceRows, unit().values - slice * kSliceRows); }
  __device__ HeadPlace place(int64_t rows, int slice) const {
    return {rows, args.values, unit().first_value + slice * kSliceRows, args.key_size};
  }

  // Makes the unit, for one thread.
  __device__ void derive() const {
    Unit u;
    const int b = blockIdx.z, head = blockIdx.y, key_head = head / (args.heads / args.key_heads);
    u.row = row_of(args.rows, b, args.slots, args.checkpoints, args.window, args.capacity);
    u.first_value = blockIdx.x * args.unit_values;
    u.values = min(args.unit_values, args.values - u.first_value);
    const int64_t first_token = __ldg(args.token_begin + b);
    u.tokens = __ldg(args.token_begin + b + 1) - static_cast<int>(first_token);
    u.rows_in = (int64_t{u.row.checkpoint_in} * args.heads + head) * args.values;
    u.rows_out = (int64_t{u.row.checkpoint_out} * args.heads + head) * args.values;
    const int64_t of_head = (int64_t{u.row.slot} * args.heads + head) * args.capacity;
    const int64_t of_key_head = (int64_t{u.row.slot} * args.key_heads + key_head) * args.capacity;
    const int gate_size = kPerChannel ? args.key_size : 1;
    u.key_ring = args.ring_key + of_key_head * args.key_size;
    u.value_ring = args.ring_value + of_head * args.values + u.first_value;
    u.decay_ring = args.ring_decay + of_head * gate_size;
    u.strength_ring = args.ring_strength + of_head;
    u.scale_ring = args.ring_scale + of_key_head;
    const int64_t first_head = first_token * args.heads + head;
    const int value = head * args.values + u.first_value;
    u.query = args.query + first_token * args.query_stride + key_head * args.key_size;
    u.key = args.key + first_token * args.key_stride + key_head * args.key_size;
    u.value = args.value + first_token * args.value_stride + value;
    u.z = args.z + first_token * args.z_stride + value;
    u.log_decay = args.log_decay + first_head * gate_size;
    u.strength = args.strength + first_head;
    u.query_factor = query_scale(1.0f, args.key_size);
    u.decay_rate = args.a_log == nullptr ? 0.0f : -expf(__ldg(args.a_log + head));
    u.skip = args.skip == nullptr ? 0.0f : __ldg(args.skip + head);
    u.out = first_head * args.values + u.first_value;
    unit() = u;
    if (u.row.is_outside && blockIdx.x == 0 && head == 0)
      report_fault(args.fault, args.op, b, u.row.slot, u.row.checkpoint_in, u.row.checkpoint_out);
  }

  // --- What is to come. A fetching warp has every so many-th record of a chunk, from its copy to its use. ---

  // Calls record(i, ring position) and then token(i, t) for the records and tokens of a chunk that are this warp's.
  template <typename OfRecord, typename OfToken>
  __device__ void for_each(int chunk, const OfRecord& record, const OfToken& token) const {
    const Row& row = unit().row;
    const int end = size(chunk), begin = chunk * kChunk, step = fetchers(), tokens = row.history - begin;
    int i = fetcher();
#pragma unroll 1
    for (; i < min(end, tokens); i += step) record(i, row.position(begin + i, args.capacity));
#pragma unroll 1
    for (; i < end; i += step) token(i, i - tokens);
  }

  // Begins to read keys and queries, and the gates of channels.
  __device__ void copy_vectors(int chunk) const {
    const Unit& u = unit();
    const int quad = 4 * lane();
    if (quad >= args.key_size) return;
    const T *key = u.key + quad, *query = u.query + quad;
    const float* decay = u.log_decay + quad;
    for_each(
        chunk,
        [&](int i, int from) {
          copy_quad(raw_keys() + i * K + quad, u.key_ring + from * args.key_size + quad);
          if constexpr (kPerChannel) copy_quad(raw_decays() + i * K + quad, u.decay_ring + from * args.key_size + quad);
        },
        [&](int i, int64_t t) {
          copy_quad(raw_keys() + i * K + quad, key + t * args.key_stride);
          copy_quad(raw_queries() + i * K + quad, query + t * args.query_stride);
          if constexpr (kPerChannel) copy_quad(raw_decays() + i * K + quad, decay + t * args.heads * args.key_size);
        });
  }

  // Begins to read what of a chunk's records is one number; for one warp, a record a lane.
  __device__ void copy_gates(int chunk) const {
    const Unit& u = unit();
    const int i = lane(), t = chunk * kChunk + i - u.row.history;
    if (i >= size(chunk)) return;
    float* to = raw_gates(chunk) + i;
    if (t >= 0) {
      const int64_t at = int64_t{t} * args.heads;
      if constexpr (kRecurrence == Recurrence::kDelta) copy_word_async(to, u.log_decay + at);
      copy_word_async(to + kChunk, u.strength + at);
    } else {
      const int from = u.row.position(chunk * kChunk + i, args.capacity);
      if constexpr (!kPerChannel) copy_word_async(to, u.decay_ring + from);
      copy_word_async(to + kChunk, u.strength_ring + from);
      if constexpr (kIsDelta) copy_word_async(to + 2 * kChunk, u.scale_ring + from);
    }
  }

  // Begins to read values, and z where there is one.
  __device__ void copy_values(int chunk) const {
    const Unit& u = unit();
    const int quad = 4 * lane();
    if (quad >= u.values) return;
    const T *value = u.value + quad, *ring = u.value_ring + quad;
    T* to = values(chunk) + quad;
    for_each(
        chunk, [&](int i, int from) { copy_quad(to + i * args.unit_values, ring + from * args.values); },
        [&](int i, int64_t t) {
          copy_quad(to + i * args.unit_values, value + t * args.value_stride);
          if (!kIsDelta && args.z != nullptr)
            copy_quad(z(chunk) + i * args.unit_values + quad, u.z + t * args.z_stride + quad);
        });
  }

  template <typename X>
  __device__ static void copy_quad(X* shared, const X* global) {
    copy_async<sizeof(Quad<X>)>(shared, global);
  }

  // Makes of a chunk's vectors, which have arrived, what the updates take: of two records at a time.
  __device__ void convert_vectors(int chunk) const {
    const int me = lane(), quad = 4 * me, end = size(chunk), step = fetchers();
    const int first_token = unit().row.history - chunk * kChunk;
#pragma unroll 1
    for (int i = fetcher(); i < end; i += 2 * step) {
      float4 x[4] = {};  // key and query of the first, of the second
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = i + e * step;
        if (at >= end || quad >= args.key_size) continue;
        x[2 * e] = to_numbers(quad_at(raw_keys() + at * K + quad));
        if (at >= first_token) x[2 * e + 1] = to_numbers(quad_at(raw_queries() + at * K + quad));
      }
      if constexpr (kIsDelta) {
        const float squares[4] = {squares_of(x[0]), squares_of(x[1]), squares_of(x[2]), squares_of(x[3])};
        float scale = scale_of(sum_of_each(squares, me));
        if (me / 8 % 2 == 1) scale = __fmul_rn(scale, unit().query_factor);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int at = i + n / 2 * step;
          float of_vector = __shfl_sync(kWarp, scale, 8 * n);
          if (n % 2 == 0 && at < min(first_token, end)) of_vector = raw_gates(chunk)[2 * kChunk + at];
          x[n] = scaled(x[n], of_vector);
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = i + e * step;
        if (at >= end || quad >= K) continue;
        reinterpret_cast<float4*>(keys(chunk) + at * K)[me] = x[2 * e];
        reinterpret_cast<float4*>(queries(chunk) + at * K)[me] = x[2 * e + 1];
        if constexpr (kPerChannel) {
          float4 decay = make_float4(0, 0, 0, 0);
          if (quad < args.key_size) decay = reinterpret_cast<const float4*>(raw_decays() + at * K)[me];
          if (at >= first_token) decay = exponentials(decay);
          reinterpret_cast<float4*>(decays(chunk) + at * K)[me] = decay;
        }
      }
    }
  }

  // The same of a chunk's gates, for one warp.
  __device__ void convert_gates(int chunk) const {
    const Unit& u = unit();
    const int i = lane();
    if (i >= size(chunk)) return;
    const float strength = raw_gates(chunk)[kChunk + i];
    float decay = kPerChannel ? 0.0f : raw_gates(chunk)[i];
    if (!kPerChannel && chunk * kChunk + i >= u.row.history)
      decay = expf(kIsDelta ? decay : __fmul_rn(u.decay_rate, strength));
    gates(chunk)[i] = {decay, strength};
  }

  // --- What is run. ---

  // Runs a chunk for a warp's slices. nvcc moves state from register to register between tokens: less of it with two
  // tokens of Mamba-2 a turn (of the delta rule they spill), and with a branch around the outputs (without it a fifth,
  // and of one slice a warp it spills some).
  static constexpr int kUnroll = kIsDelta ? 1 : 2;
  __device__ void walk(int chunk, Slice<K> (&slices)[kSlices]) const {
    const int me = lane(), end = size(chunk), first_token = unit().row.history - chunk * kChunk;
    const int first_slice = warp() * kSlices, stride = args.unit_values;
    const T* value = values(chunk) + first_slice * kSliceRows + me / 4;
    const float* key = keys(chunk);
    float* output = outputs(first_slice) + output_row(me);
#pragma unroll kUnroll
    for (int i = 0; i < end; ++i) {
      const PrefillGate gate = gates(chunk)[i];
      const HeldVector<K> of_key(key, me);
      const VectorOfSlice decay(key + (Shared::kDecays - Shared::kKeys) / 4);
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        const float first = to_number(value[s * kSliceRows]), second = to_number(value[s * kSliceRows + 8]);
        if constexpr (kIsDelta)
          delta_update<kPerChannel, /*kKeeps=*/false>(slices[s], of_key, decay, gate.decay, gate.strength, first,
                                                      second);
        else
          mamba2_update(slices[s], of_key, gate.decay, __fmul_rn(gate.strength, first),
                        __fmul_rn(gate.strength, second));
      }
      if (i >= first_token) {
        const HeldVector<K> query(key + (Shared::kQueries - Shared::kKeys) / 4, me);
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          float products[2];
          slices[s].multiply_with(query, products[0], products[1]);
          if (has_output(me)) output[s * kChunk * kSliceRows] = me % 4 == 0 ? products[0] : products[1];
        }
      }
      key += K;
      value += stride;
      output += kSliceRows;
    }
    __syncwarp();
#pragma unroll 1
    for (int s = 0; s < kSlices; ++s) write_outputs(chunk, first_slice + s);
    __syncwarp();
  }

  // Writes the outputs of a chunk's tokens for a slice, four rows a lane at a time.
  __device__ void write_outputs(int chunk, int slice) const {
    const Unit& u = unit();
    const int end = size(chunk);
#pragma unroll 1
    for (int n = lane(); n < end * (kSliceRows / 4); n += 32) {
      const int i = n / (kSliceRows / 4), value = slice * kSliceRows + 4 * (n % (kSliceRows / 4));
      const int t = chunk * kChunk + i - u.row.history;
      if (t < 0 || value >= u.values) continue;
      float4 y = reinterpret_cast<const float4*>(outputs(slice))[n];
      if constexpr (!kIsDelta) {
        if (args.skip != nullptr)
          y = multiply_added(to_numbers(quad_at(values(chunk) + i * args.unit_values + value)), u.skip, y);
        if (args.z != nullptr) {
          const float4 gate = to_numbers(quad_at(z(chunk) + i * args.unit_values + value));
          y = make_float4(gated(y.x, gate.x), gated(y.y, gate.y), gated(y.z, gate.z), gated(y.w, gate.w));
        }
      }
      store_outputs(u, t, value, y);
    }
  }

  // Four rows of the unit from `value` on.
  __device__ void store_outputs(const Unit& u, int t, int value, float4 y) const {
    const int64_t to = u.out + int64_t{t} * args.heads * args.values + value;
    if (args.has_float_out)
      *reinterpret_cast<float4*>(static_cast<float*>(args.out) + to) = y;
    else
      store_quad(static_cast<T*>(args.out) + to, rounded<T>(y));
  }

  // Padding rows give zeros; rows outside the pool give NaN.
  __device__ void refuse() const {
    const Unit& u = unit();
    const float y = u.row.is_padding ? 0.0f : __uint_as_float(0x7FC00000u);
    if (4 * lane() >= u.values) return;
    for (int t = warp(); t < u.tokens; t += blockDim.x / 32) store_outputs(u, t, 4 * lane(), make_float4(y, y, y, y));
  }

  __device__ void run() const {
    if (threadIdx.x == 0) derive();
    __syncthreads();
    if (unit().row.is_padding || unit().row.is_outside) return refuse();
    const int first_slice = warp() * kSlices;
    const bool has_rows = warp() < row_warps() && slice_rows(first_slice) > 0;
    Slice<K> slices[kSlices];
    if (has_rows) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
        Slice<K>::begin_read(slice_memory(first_slice + s), place(unit().rows_in, first_slice + s), args.checkpoint,
                             slice_rows(first_slice + s), args.key_size, args.form);
      wait_for_copies();
      __syncwarp();
#pragma unroll
      for (int s = 0; s < kSlices; ++s) slices[s].take(slice_memory(first_slice + s), args.form);
    }
    __syncthreads();
    const bool is_fetching = fetcher() >= 0;
    if (is_fetching) copy_vectors(0);
    if (fetcher() == 0) copy_gates(0);
    wait_for_copies();
    __syncthreads();
    // In a round chunk c is run, c + 1 is made ready and c + 2 begins to come.
#pragma unroll 1
    for (int chunk = -1; chunk < 0 || size(chunk) > 0; ++chunk) {
      if (is_fetching) {
        convert_vectors(chunk + 1);
        copy_values(chunk + 1);
        copy_vectors(chunk + 2);
        if (fetcher() == 0) {
          convert_gates(chunk + 1);
          copy_gates(chunk + 2);
        }
      }
      if (has_rows && chunk >= 0) walk(chunk, slices);
      wait_for_copies();
      __syncthreads();
    }
    if (has_rows) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
        slices[s].write(place(unit().rows_out, first_slice + s), args.checkpoint, slice_rows(first_slice + s),
                        args.key_size, args.form);
    }
  }

  // Where a slice comes through.
  __device__ uint4* slice_memory(int slice) const {
    return at<uint4>(Shared::kRawGates + slice * kSliceBytes<K>);
  }
};

// Grid (units of a head, H, B), block of the rows' warps and the helpers. A warp of the rows owns kSlices slices of a
// unit, in registers, from the first record to the last token.
template <Recurrence kRecurrence, int K, int kSlices, typename T>
__global__ void __launch_bounds__(kSlices == 1 ? 256 : 128, 2)
    prefill_kernel(const __grid_constant__ PrefillArgs<T> args) {
  extern __shared__ uint4 memory[];
  PrefillBlock<kRecurrence, K, kSlices, T>{args, reinterpret_cast<char*>(memory)}.run();
}

}  // namespace

template <Recurrence kRecurrence, typename T>
PrefillPlan plan_prefill(int rows, int heads, int values, int key_size, bool has_z, const CudaProperties& gpu) {
  constexpr bool kPerChannel = kRecurrence == Recurrence::kDeltaPerChannel;
  const PrefillBytes bytes = key_size <= 64 ? PrefillShared<64, kPerChannel, T>::bytes(has_z)
                                            : PrefillShared<128, kPerChannel, T>::bytes(has_z);
  return plan_prefill(rows, heads, values, bytes, gpu);
}

template <Recurrence kRecurrence, typename T>
void launch_prefill(PrefillArgs<T> args, CudaDevice& device) {
  if (args.rows.count == 0) return;
  const bool has_z = args.z != nullptr;
  const PrefillPlan plan =
      plan_prefill<kRecurrence, T>(args.rows.count, args.heads, args.values, args.key_size, has_z, device.properties());
  const auto run = [&]<int K>() {
    using Shared = PrefillShared<K, kRecurrence == Recurrence::kDeltaPerChannel, T>;
    args.unit_values = plan.unit_slices * kSliceRows;
    args.helpers = plan.helpers;
    const auto kernel =
        plan.warp_slices == 1 ? prefill_kernel<kRecurrence, K, 1, T> : prefill_kernel<kRecurrence, K, 2, T>;
    const dim3 grid((args.values + args.unit_values - 1) / args.unit_values, args.heads, args.rows.count);
    launch(args.op, kernel, grid, plan.threads(), Shared::bytes(args.unit_values, has_z), args, device);
  };
  if (args.key_size <= 64) return run.template operator()<64>();
  run.template operator()<128>();
}

#define REPLAYSSM_PREFILL(recurrence, T)                                                                         \
  template PrefillPlan plan_prefill<Recurrence::recurrence, T>(int, int, int, int, bool, const CudaProperties&); \
  template void launch_prefill<Recurrence::recurrence>(PrefillArgs<T>, CudaDevice&);
#define REPLAYSSM_PREFILLS(T)            \
  REPLAYSSM_PREFILL(kDelta, T)           \
  REPLAYSSM_PREFILL(kDeltaPerChannel, T) \
  REPLAYSSM_PREFILL(kMamba2, T)
REPLAYSSM_PREFILLS(float)
REPLAYSSM_PREFILLS(Bf16)
REPLAYSSM_PREFILLS(Fp16)
#undef REPLAYSSM_PREFILLS
#undef REPLAYSSM_PREFILL

}  // namespace replayssm
