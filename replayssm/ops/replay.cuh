// Internal to the delta rule and Mamba-2 on GPUs: a replay step in one kernel whose blocks stay. It reads out exactly,
// by running the recurrence over the records, or directly, by one product with the checkpoint; rows that flush are
// walked and written either way. States and exact outputs have the bits of the kernels that run one slice a warp.
//
// A unit of work is some value rows of one head of one row of the batch. A block has warps that own its slices of 16
// rows and more beside them, and it stays: while the warps of the rows work on a unit, its successor's state is
// on its way to shared memory, and the others make the successor's records ready and fetch those after. So the
// arithmetic of a fold and the latencies of preparing a query hide behind the memory that they would otherwise leave
// idle.
#pragma once

#include <algorithm>

#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/replay_units.cuh"
#include "replayssm/ops/staged.cuh"
#include "replayssm/ops/updates.cuh"

namespace replayssm {

__device__ inline float dot(float4 x, float4 y) {
  return __fadd_rn(__fmaf_rn(x.z, y.z, __fmul_rn(x.x, y.x)), __fmaf_rn(x.w, y.w, __fmul_rn(x.y, y.y)));
}

// A block of the kernel: its shared memory and the steps of its loops.
template <Recurrence kRecurrence, int K, CheckpointForm kForm, typename T>
struct ReplayBlock {
  static_assert(kRecurrence != Recurrence::kDeltaPerChannel);
  static constexpr bool kIsDelta = kRecurrence == Recurrence::kDelta;
  using State = StagedSlice<K, kForm>;
  using Unit = ReplayUnit<T>;

  const ReplayArgs<T>& args;
  char* memory;

  __device__ static int lane() { return fresh_thread() % 32; }
  __device__ static int warp() { return fresh_thread() / 32; }
  // A barrier of so many helpers alone.
  __device__ static void meet_helpers(int barrier, int helpers) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(32 * helpers) : "memory");
  }

  template <typename X>
  __device__ X* at(int offset) const {
    return reinterpret_cast<X*>(memory + offset);
  }
  __device__ ReplaySchedule<T>& schedule() const { return *at<ReplaySchedule<T>>(args.plan.shared.schedule); }
  __device__ const Unit& unit(int index) const { return schedule().unit[index % kUnits]; }
  __device__ char* slice(int index) const { return memory + index * kSliceBytes<K>; }
  __device__ int raw_place(int index) const { return args.plan.shared.raw_buffers == 2 ? index % 2 : 0; }
  __device__ T* raw_keys(int index) const {
    return at<T>(args.plan.shared.raw_keys) + raw_place(index) * args.plan.records * K;
  }
  __device__ T* raw_queries(int index) const {
    return at<T>(args.plan.shared.raw_queries) + raw_place(index) * args.tokens * K;
  }
  __device__ float* keys(int index) const {
    return at<float>(args.plan.shared.keys) +
           (args.plan.shared.key_buffers == 2 ? index % 2 * args.plan.records * K : 0);
  }
  __device__ float* queries(int index) const {
    return at<float>(args.plan.shared.queries) + index % 2 * args.tokens * K;
  }
  __device__ float* products(int index) const {
    return at<float>(args.plan.shared.products) + index % 2 * args.tokens * args.plan.records;
  }
  __device__ float* mutual(int group) const { return at<float>(args.plan.shared.mutual) + group * kMutual; }
  __device__ T* values(int index) const {
    return at<T>(args.plan.shared.values) + index % 3 * args.plan.records * args.plan.unit_values;
  }
  __device__ float* gates(int index) const {
    return at<float>(args.plan.shared.gates) + index % 3 * 3 * args.plan.records;
  }
  __device__ float* head_numbers(int index) const { return schedule().head_numbers[index % 3]; }

  __device__ static bool has_state(const Unit& u) { return u.kind >= UnitKind::kDirect; }
  __device__ int count(const Unit& u) const { return has_state(u) ? u.history + args.tokens : 0; }
  __device__ int position(const Unit& u, int j) const {
    const int at = u.start + j;
    return at < args.capacity ? at : at - args.capacity;
  }
  __device__ static int slice_rows(const Unit& u, int slice) { return min(kSliceRows, u.values - slice * kSliceRows); }
  __device__ HeadPlace place(const Unit& u, int64_t rows, int slice) const {
    return {rows, args.values, u.first_value + slice * kSliceRows, args.key_size};
  }

  // --- What is to come. ---

  // Begins to read the numbers of unit `index`'s row; for a warp.
  __device__ void copy_row(int index) const {
    const uint32_t number = schedule().number[index % kUnits];
    if (number >= args.plan.units) return;
    const int b = args.by_row.quotient(number);
    RowWords& row = schedule().row[index % kUnits];
    const auto copy = [&](int of_lane, void* to, const void* from) {
      if (lane() == of_lane) copy_word_async(to, from);
    };
    copy(0, &row.base, args.rows.base + b);
    copy(1, reinterpret_cast<int32_t*>(&row.base) + 1, reinterpret_cast<const int32_t*>(args.rows.base + b) + 1);
    copy(2, &row.slot, args.rows.slot + b);
    copy(3, &row.history, args.rows.history + b);
    copy(4, &row.checkpoint_in, args.rows.checkpoint_in + b);
    copy(5, &row.checkpoint_out, args.rows.checkpoint_out + b);
  }

  // Makes unit `index` of its row's numbers; for one thread.
  __device__ void derive(int index) const {
    Unit& u = schedule().unit[index % kUnits];
    const uint32_t number = schedule().number[index % kUnits];
    if (number >= args.plan.units) {
      u.kind = UnitKind::kNone;
      return;
    }
    const RowWords& row = schedule().row[index % kUnits];
    const int b = args.by_row.quotient(number), in_row = number - b * args.by_row.divisor;
    const int head = args.by_part.quotient(in_row), part = in_row - head * args.by_part.divisor;
    const int key_head = args.by_share.quotient(head);
    u.head = head;
    u.first_value = part * args.plan.unit_values;
    u.values = min(args.plan.unit_values, args.values - u.first_value);
    u.history = row.history;
    u.first_token = int64_t{b} * args.tokens;
    u.out = (u.first_token * args.heads + head) * args.values + u.first_value;
    const auto is_in = [](int at, int64_t count) { return at >= 0 && at < count; };
    if (row.slot == kPaddingSlot) {
      u.kind = UnitKind::kPadding;
      return;
    }
    if (!(is_in(row.slot, args.slots) && is_in(row.checkpoint_in, args.checkpoints) &&
          is_in(row.checkpoint_out, args.checkpoints) && is_in(row.history, args.window + 1ll) && row.base >= 0)) {
      u.kind = UnitKind::kOutside;
      if (in_row == 0) report_fault(args.fault, args.op, b, row.slot, row.checkpoint_in, row.checkpoint_out);
      return;
    }
    u.will_flush = row.history + args.tokens > args.window;
    u.kind = args.readout == Readout::kDirect && !u.will_flush ? UnitKind::kDirect : UnitKind::kWalk;
    u.appends_gates = part == 0;
    u.appends_key = part == 0 && head == key_head * static_cast<int>(args.by_share.divisor);
    u.start = ring_start(row.base, args.capacity);
    u.rows_in = (int64_t{row.checkpoint_in} * args.heads + head) * args.values;
    u.rows_out = (int64_t{row.checkpoint_out} * args.heads + head) * args.values;
    const int64_t of_head = (int64_t{row.slot} * args.heads + head) * args.capacity;
    const int64_t of_key_head = (int64_t{row.slot} * args.key_heads + key_head) * args.capacity;
    u.key_ring = args.ring_key + of_key_head * args.key_size;
    u.value_ring = args.ring_value + of_head * args.values + u.first_value;
    u.decay_ring = args.ring_decay + of_head;
    u.strength_ring = args.ring_strength + of_head;
    u.scale_ring = args.ring_scale + of_key_head;
    u.query = args.query + u.first_token * args.query_stride + key_head * args.key_size;
    u.key = args.key + u.first_token * args.key_stride + key_head * args.key_size;
    u.value = args.value + u.first_token * args.value_stride + head * args.values + u.first_value;
    u.log_decay = args.log_decay + u.first_token * args.heads + head;
    u.strength = args.strength + u.first_token * args.heads + head;
  }

  // For one thread: derives the unit after the next, and asks for the number of one more.
  __device__ void look_ahead(int index) const {
    uint32_t asked = 0;
    if (args.asked != nullptr) asked = atomicAdd(args.asked, 1u);
    derive(index + 2);
    if (args.asked != nullptr && asked == args.plan.units - 1)
      *args.asked = 0;  // the last to ask: the next call begins anew
    schedule().number[(index + kAhead) % kUnits] = args.asked != nullptr ? asked + kAhead * gridDim.x : args.plan.units;
  }

  // Begins to read the records of unit `index`, if it has a state, and the numbers of unit `ahead`'s row, if that is
  // not negative; for a warp.
  __device__ void copy_records(int index, int ahead) const {
    const Unit& u = unit(index);
    Arrival& arrival = schedule().records[index % 2];
    const int me = lane(), all = count(u), committed = all == 0 ? 0 : u.history;
    const int key_bytes = args.key_size * static_cast<int>(sizeof(T));
    const int value_bytes = u.values * static_cast<int>(sizeof(T));
    const bool has_even_values = value_bytes % 16 == 0 && args.values * sizeof(T) % 16 == 0;
    arrival.begin(all * (key_bytes + (has_even_values ? value_bytes : 0)) + (all - committed) * key_bytes);
    if (ahead >= 0) copy_row(ahead);
    // Records that follow one another in the ring and in shared memory are one piece; a token is one always.
    const bool has_runs =
        kHasCopyEngine && args.key_size == K && has_even_values && args.plan.unit_values == args.values;
    const int run = has_runs && committed > 0 ? min(committed, args.capacity - position(u, 0)) : 0;
    const int pieces = all == 0 ? 0 : has_runs ? 2 + args.tokens : all;
#pragma unroll 1
    for (int piece = me; piece < pieces; piece += 32) {
      const int j = !has_runs ? piece : piece == 0 ? 0 : piece == 1 ? run : committed + piece - 2;
      const int size = !has_runs || piece >= 2 ? 1 : piece == 0 ? run : committed - run;
      if (size <= 0) continue;
      const int from = position(u, j);
      const int64_t t = j - committed;
      const bool is_token = t >= 0;
      arrival.copy(raw_keys(index) + j * K, is_token ? u.key + t * args.key_stride : u.key_ring + from * args.key_size,
                   size * key_bytes);
      if (is_token) arrival.copy(raw_queries(index) + t * K, u.query + t * args.query_stride, key_bytes);
      T* to_values = values(index) + j * args.plan.unit_values;
      const T* from_values = is_token ? u.value + t * args.value_stride : u.value_ring + from * args.values;
      if (has_even_values)
        arrival.copy(to_values, from_values, size * value_bytes);
      else
        for (int word = 0; word < value_bytes / 4; ++word)
          copy_word_async(reinterpret_cast<uint32_t*>(to_values) + word,
                          reinterpret_cast<const uint32_t*>(from_values) + word);
    }
    float* to_gates = gates(index);
#pragma unroll 1
    for (int j = me; j < all; j += 32) {
      const int from = position(u, j);
      const int64_t t = j - committed;
      const bool is_token = t >= 0;
      if (kIsDelta || !is_token)
        copy_word_async(to_gates + j, is_token ? u.log_decay + t * args.heads : u.decay_ring + from);
      copy_word_async(to_gates + args.plan.records + j,
                      is_token ? u.strength + t * args.heads : u.strength_ring + from);
      if (kIsDelta && !is_token) copy_word_async(to_gates + 2 * args.plan.records + j, u.scale_ring + from);
    }
    if (!kIsDelta && all > 0) {
      if (me == 0) copy_word_async(head_numbers(index), args.a_log + u.head);
      if (me == 1 && args.skip != nullptr) copy_word_async(head_numbers(index) + 1, args.skip + u.head);
    }
    arrival.end();
  }

  // Begins a round of the warp's slices, those of a unit; copy_slice of each of them and end must follow.
  __device__ void begin_slices(const Unit& u) const {
    const int me = warp(), rows = min(u.values, (me + 1) * args.plan.warp_rows) - me * args.plan.warp_rows;
    schedule().slices[me].begin(
        has_state(u) && rows > 0 ? State::read_bytes(rows, args.key_size, u.kind == UnitKind::kDirect) : 0);
  }
  __device__ void copy_slice(const Unit& u, int index) const {
    const int rows = slice_rows(u, index);
    if (!has_state(u) || rows <= 0) return;
    State::read(schedule().slices[warp()], slice(index), place(u, u.rows_in, index), args.checkpoint, rows,
                args.key_size, u.kind == UnitKind::kDirect);
  }

  // --- The helpers: records that have arrived. ---

  // Makes of the records what the updates take, and keeps the tokens in the ring; for one of `converting` helpers.
  __device__ void convert(int index, int helper, int converting) const {
    const Unit& u = unit(index);
    const int me = lane(), quad = 4 * me;
    const bool has_channels = quad < args.key_size, has_quad = quad < K;
    float4* to_keys = reinterpret_cast<float4*>(keys(index)) + me;
    float* of_gates = gates(index);
    // A token's key and its query are tasks of two helpers: each is a chain of latencies.
#pragma unroll 1
    for (int task = helper; task < 2 * args.tokens; task += converting) {
      const int t = task / 2, j = u.history + t, to = position(u, j);
      const T* from = task % 2 == 0 ? raw_keys(index) + j * K : raw_queries(index) + t * K;
      Quad<T> raw = {};
      if (has_channels) raw = quad_at(from + quad);
      float4 x = to_numbers(raw);
      float scale = 1;
      if constexpr (kIsDelta) scale = key_scale(x);
      if (task % 2 == 0) {
        if constexpr (kIsDelta) {
          x = scaled(x, scale);
          if (u.appends_key && me == 0) u.scale_ring[to] = scale;
        }
        if (has_quad) to_keys[j * (K / 4)] = x;
        if (u.appends_key && has_channels) store_quad(u.key_ring + to * args.key_size + quad, raw);
      } else {
        if constexpr (kIsDelta) x = scaled(x, query_scale(scale, args.key_size));
        if (has_quad) reinterpret_cast<float4*>(queries(index) + t * K)[me] = x;
        if (quad < u.values)
          store_quad(u.value_ring + to * args.values + quad, quad_at(values(index) + j * args.plan.unit_values + quad));
      }
    }
    if (helper == converting - 1 && me < args.tokens) {
      const int j = u.history + me, to = position(u, j);
      const float strength = of_gates[args.plan.records + j];
      const float decay = kIsDelta ? expf(of_gates[j]) : expf(__fmul_rn(-expf(head_numbers(index)[0]), strength));
      of_gates[j] = decay;
      if (u.appends_gates) {
        u.decay_ring[to] = decay;
        u.strength_ring[to] = strength;
      }
    }
#pragma unroll 2
    for (int j = converting - 1 - helper; j < u.history; j += converting) {
      float4 k = make_float4(0, 0, 0, 0);
      if (has_channels) k = to_numbers(quad_at(raw_keys(index) + j * K + quad));
      if constexpr (kIsDelta) k = scaled(k, of_gates[2 * args.plan.records + j]);
      if (has_quad) to_keys[j * (K / 4)] = k;
    }
  }

  // --- The walk. ---

  __device__ void write_out(const Unit& u, int t, int row, float y) const {
    if (kRecurrence == Recurrence::kMamba2 && args.z != nullptr)
      y = gated(y, to_number(args.z[(u.first_token + t) * args.z_stride + u.head * args.values + u.first_value + row]));
    store_out(u, t, row, y);
  }
  __device__ void store_out(const Unit& u, int t, int row, float y) const {
    const int64_t at = u.out + int64_t{t} * args.heads * args.values + row;
    if (args.has_float_out)
      static_cast<float*>(args.out)[at] = y;
    else
      store_number(static_cast<T*>(args.out) + at, y);
  }
  // Runs the recurrence over a unit's records for a slice, and writes the slice where a flush does.
  __device__ void walk(int index, int of_slice, State& state) const {
    const Unit& u = unit(index);
    const int me = lane();
    const float *of_keys = keys(index), *of_gates = gates(index);
    const T* of_values = values(index) + of_slice * kSliceRows + me / 4;
    int j = 0, end = u.history;
#pragma unroll 1
    while (true) {
      // (The updates' loop apart from all else: a branch costs as much as ten of an update's numbers.)
#pragma unroll 1
      for (; j < end; ++j) {
        const float first = to_number(of_values[j * args.plan.unit_values]);
        const float second = to_number(of_values[j * args.plan.unit_values + 8]);
        const float decay = of_gates[j], strength = of_gates[args.plan.records + j];
        const VectorQuads key(of_keys + j * K, me);
        if constexpr (kIsDelta)
          delta_update<false>(state, key, key, decay, strength, first, second);
        else
          mamba2_update(state, key, decay, __fmul_rn(strength, first), __fmul_rn(strength, second));
      }
      const int t = j - u.history;
      if (t > 0)
        write_token(index, of_slice, state, t - 1);
      else if (u.will_flush)
        state.write(place(u, u.rows_out, of_slice), args.checkpoint, slice_rows(u, of_slice), args.key_size);
      if (t == args.tokens) return;
      end = j + 1;
    }
  }

  // Writes the outputs of token t from the state after it.
  __device__ void write_token(int index, int of_slice, const State& state, int t) const {
    const Unit& u = unit(index);
    float products[2];
    state.multiply(queries(index) + t * K, products[0], products[1]);
    const int me = lane(), row = output_row(me);
    if (!has_output(me) || row >= slice_rows(u, of_slice)) return;
    float y = me % 4 == 0 ? products[0] : products[1];
    if (kRecurrence == Recurrence::kMamba2 && args.skip != nullptr) {
      const T* of_token = values(index) + (u.history + t) * args.plan.unit_values;
      y = __fmaf_rn(head_numbers(index)[1], to_number(of_token[of_slice * kSliceRows + row]), y);
    }
    write_out(u, t, of_slice * kSliceRows + row, y);
  }

  // --- The direct readout. ---

  // The helpers make the tokens' queries and the records' coefficients, so that of a slice of the checkpoint
  //   out[t] = S0 query[t] + sum_j coefficient[t, j] value[j]
  // Records are taken kTogether at once, newest first. Their products with one another, which depend on no query, are
  // made by the helpers together; the one that fetches leaves it to the others, if there are others.
  static constexpr int kTogether = 4;
  static constexpr int kMutual = kTogether * (kTogether - 1) / 2;

  __device__ void prepare(int index, int helper, int preparing) const {
    const Unit& u = unit(index);
    if constexpr (kIsDelta) {
      for (int group = helper; group * kTogether < u.history; group += preparing)
        multiply_keys(index, u.history - 1 - group * kTogether, mutual(group));
      meet_helpers(2, preparing);
    }
#pragma unroll 1
    for (int t = helper; t < args.tokens; t += preparing) prepare_token(index, t);
  }

  // A lane's quad of record j's key; zeros before the first.
  __device__ float4 key_quad(int index, int j, int me) const {
    return j < 0 || 4 * me >= K ? make_float4(0, 0, 0, 0) : reinterpret_cast<const float4*>(keys(index) + j * K)[me];
  }

  // Products of the keys of records top, top - 1, ...: of 1 and 0, of 2 and 1, 2 and 0, ...
  __device__ void multiply_keys(int index, int top, float* to) const {
    const int me = lane();
    float4 x[kTogether];
    float sums[kMutual];
    int n = 0;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      x[i] = key_quad(index, top - i, me);
#pragma unroll
      for (int m = i - 1; m >= 0; --m) sums[n++] = dot(x[i], x[m]);
    }
#pragma unroll
    for (int i = 0; i < kMutual; ++i) sums[i] = sum_of_lanes<32>(sums[i]);
    if (me == 0) {
#pragma unroll
      for (int i = 0; i < kMutual; ++i) to[i] = sums[i];
    }
  }

  // For a warp. (Braces around a pragma: under an if alone it would be all that the if governs.)
  __device__ void prepare_token(int index, int t) const {
    const Unit& u = unit(index);
    const int me = lane(), history = u.history;
    float4* query = reinterpret_cast<float4*>(queries(index) + t * K) + me;
    float* coefficients = products(index) + t * args.plan.records;
    const float *decay_of = gates(index), *strength_of = decay_of + args.plan.records;
    float4 w = 4 * me < K ? *query : make_float4(0, 0, 0, 0);
    float decay = 1;  // of the records after j
#pragma unroll 1
    for (int j = history + t; j >= history; --j) {
      const float4 x = key_quad(index, j, me);
      const float c = __fmul_rn(strength_of[j], sum_of_lanes<32>(dot(x, w)));
      float coefficient = __fmul_rn(c, decay);
      if (kRecurrence == Recurrence::kMamba2 && args.skip != nullptr && j == history + t)
        coefficient = __fadd_rn(coefficient, head_numbers(index)[1]);
      if (me == 0) coefficients[j] = coefficient;
      if constexpr (kIsDelta) w = multiply_added(x, -c, w);
      decay = __fmul_rn(decay, decay_of[j]);
    }
    int group = 0;
#pragma unroll 1
    for (int top = history - 1; top >= 0; top -= kTogether, ++group) {
      float4 x[kTogether];
      float sums[kTogether], c[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        x[i] = key_quad(index, top - i, me);
        sums[i] = dot(x[i], w);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sums[i] = sum_of_lanes<32>(sums[i]);
      const float* of_group = mutual(group);
      int n = 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if constexpr (kIsDelta) {
#pragma unroll
          for (int m = i - 1; m >= 0; --m) sums[i] = __fmaf_rn(-c[m], of_group[n++], sums[i]);
        }
        const int j = top - i;
        c[i] = j >= 0 ? __fmul_rn(strength_of[j], sums[i]) : 0.0f;
        if (j >= 0 && me == i) coefficients[j] = __fmul_rn(c[i], decay);
        decay = j >= 0 ? __fmul_rn(decay, decay_of[j]) : decay;
      }
      if constexpr (kIsDelta) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) w = multiply_added(x[i], -c[i], w);
      }
    }
    if (4 * me < K) *query = scaled(w, decay);
  }

  // Outputs of kCount tokens from `first` on, of kSlices slices from `of_slice` on.
  template <int kCount, int kSlices>
  __device__ void read_tokens(int index, int of_slice, int first) const {
    const Unit& u = unit(index);
    const int me = lane(), c = me % 4;
    RowSums sums[kSlices][kCount][2];
    State::template add_shared<kCount, kSlices>(sums, slice(of_slice), kSliceBytes<K>, queries(index) + first * K);
    if (first + kCount == args.tokens) {  // the slices have left shared memory
      __syncwarp();
#pragma unroll
      for (int s = 0; s < kSlices; ++s) copy_slice(unit(index + 1), of_slice + s);
    }
    const T* of_values = values(index) + of_slice * kSliceRows + me / 4;
    const float* coefficients = products(index) + first * args.plan.records;
    const int end = u.history + first + kCount;
#pragma unroll 2
    for (int j = c; j < end; j += 4) {
      float v[kSlices][2];
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          v[s][half] = to_number(of_values[j * args.plan.unit_values + s * kSliceRows + half * 8]);
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        if (kCount > 1 && j > u.history + first + t) continue;
        const float weight = coefficients[t * args.plan.records + j];
#pragma unroll
        for (int s = 0; s < kSlices; ++s)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            sums[s][t][half].of[0] = __fmaf_rn(weight, v[s][half], sums[s][t][half].of[0]);
      }
    }
    const int row = output_row(me);
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        const float y[2] = {sums[s][t][0].total(), sums[s][t][1].total()};
        if (has_output(me) && row < slice_rows(u, of_slice + s))
          write_out(u, first + t, (of_slice + s) * kSliceRows + row, c == 0 ? y[0] : y[1]);
      }
  }

  __device__ void read(int index, int of_slice) const {
    int t = 0;
#pragma unroll 1
    for (; t + 4 <= args.tokens; t += 4) read_tokens<4, 1>(index, of_slice, t);
    if (t + 2 <= args.tokens) {
      read_tokens<2, 1>(index, of_slice, t);
      t += 2;
    }
    if (t < args.tokens) read_tokens<1, 1>(index, of_slice, t);
  }

  // Padding rows give zeros; rows outside the pool give NaN.
  __device__ void refuse(const Unit& u) const {
    const float y = u.kind == UnitKind::kPadding ? 0.0f : __uint_as_float(0x7FC00000u);
    for (int t = warp(); t < args.tokens; t += args.plan.row_warps)
      for (int row = lane(); row < u.values; row += 32) store_out(u, t, row, y);
  }

  // --- The block's loops. ---

  __device__ void run() const {
    if (threadIdx.x < kAhead) schedule().number[threadIdx.x] = blockIdx.x + threadIdx.x * gridDim.x;
    if (threadIdx.x < 2) schedule().records[threadIdx.x].initialise();
    if (threadIdx.x < args.plan.row_warps) schedule().slices[threadIdx.x].initialise();
    // What lies past a row's channels stays as it is now.
    if (args.key_size < K)
      for (int i = threadIdx.x; i < args.plan.unit_values * K; i += blockDim.x) at<float>(0)[i] = 0;
    let_engine_see();
    __syncthreads();
    const int helper = warp() - args.plan.row_warps;
    if (helper == 0) {
      for (int index = 0; index < kAhead - 1; ++index) copy_row(index);
      wait_for_copies();
      __syncwarp();
      if (lane() < 2) derive(lane());
    }
    __syncthreads();
    if (helper >= 0)
      run_helpers(helper);
    else
      run_rows();
  }

  // A unit at a time, beside the other warps' work on the one before. The last helper fetches what is to come, the last
  // but one looks ahead; of two one does both. The one that fetches makes no records ready if it need not wait for
  // that.
  __device__ void run_helpers(int helper) const {
    const int last = args.plan.helpers - 1;
    const bool is_fetching = helper == last, fetches_first = args.plan.shared.raw_buffers == 2;
    const int converting = fetches_first ? last : args.plan.helpers;
    if (is_fetching) copy_records(0, -1);
    int index = 0;
#pragma unroll 1
    for (; unit(index).kind != UnitKind::kNone; ++index) {
      if (is_fetching && fetches_first) copy_records(index + 1, index + kAhead - 1);
      schedule().records[index % 2].wait(index / 2);
      let_walk_end(index - 1);
      if (helper < converting) {
        if (has_state(unit(index))) convert(index, helper, converting);
        meet_helpers(1, converting);
      }
      if (is_fetching && !fetches_first) copy_records(index + 1, index + kAhead - 1);
      if (helper == max(1, last - 1)) {
        if (lane() == 0) look_ahead(index);
        __syncwarp();
      }
      if (helper < last && unit(index).kind == UnitKind::kDirect) prepare(index, helper, last);
      __syncthreads();
    }
    let_walk_end(index - 1);
    __syncthreads();
  }
  // Where records have one place, those of a unit that is walked stay there until all of its slices have been.
  __device__ void let_walk_end(int index) const {
    if (args.plan.shared.key_buffers == 1 && index >= 0 && unit(index).kind == UnitKind::kWalk) __syncthreads();
  }

  __device__ void run_rows() const {
    const int slices = args.plan.warp_rows / kSliceRows, first = warp() * slices;
    begin_slices(unit(0));
    for (int i = 0; i < slices; ++i) copy_slice(unit(0), first + i);
    schedule().slices[warp()].end();
#pragma unroll 1
    for (int index = 0;; ++index) {
      __syncthreads();
      const Unit& u = unit(index);
      if (u.kind == UnitKind::kNone) return;
      if (!has_state(u)) refuse(u);
      schedule().slices[warp()].wait(index);
      begin_slices(unit(index + 1));
      const int of_slice = warp() * (args.plan.warp_rows / kSliceRows);
      if (u.kind == UnitKind::kDirect && args.tokens == 1 && args.plan.warp_rows == 2 * kSliceRows &&
          slice_rows(u, of_slice + 1) > 0) {
        read_tokens<1, 2>(index, of_slice, 0);
      } else {
#pragma unroll 1
        for (int i = 0; i < args.plan.warp_rows / kSliceRows; ++i)
          run_slice(index, warp() * (args.plan.warp_rows / kSliceRows) + i);
      }
      schedule().slices[warp()].end();
      let_walk_end(index);
    }
  }

  // One slice of a unit, and its successor's on its way as soon as it has left shared memory.
  __device__ void run_slice(int index, int of_slice) const {
    const Unit& u = unit(index);
    const bool has_rows = has_state(u) && slice_rows(u, of_slice) > 0;
    if (has_rows && u.kind == UnitKind::kWalk) {
      State state;
      state.take(slice(of_slice));
      __syncwarp();
      copy_slice(unit(index + 1), of_slice);
      walk(index, of_slice, state);
      return;
    }
    if (has_rows) return read(index, of_slice);
    copy_slice(unit(index + 1), of_slice);
  }
};

template <Recurrence kRecurrence, int K, CheckpointForm kForm, typename T>
__global__ void __launch_bounds__(256, 2) replay_kernel(const __grid_constant__ ReplayArgs<T> args) {
  extern __shared__ uint4 memory[];
  ReplayBlock<kRecurrence, K, kForm, T>{args, reinterpret_cast<char*>(memory)}.run();
}

template <Recurrence kRecurrence, int K, CheckpointForm kForm, typename T>
void launch_formed(ReplayArgs<T> args, CudaDevice& device) {
  const ReplayPlan& plan = args.plan;
  const uint32_t parts = (args.values + plan.unit_values - 1) / plan.unit_values;
  args.by_row = Divisor(args.heads * parts);
  args.by_part = Divisor(parts);
  args.by_share = Divisor(args.heads / args.key_heads);
  const auto kernel = replay_kernel<kRecurrence, K, kForm, T>;
  const int resident = resident_blocks(args.op, kernel, plan.threads(), plan.shared.bytes);
  const uint32_t blocks = std::min<uint32_t>(args.plan.units, device.properties().multiprocessors * resident);
  if (args.plan.units > kAhead * blocks) args.asked = device.counter();
  launch(args.op, kernel, dim3(blocks), plan.threads(), plan.shared.bytes, args, device);
}

template <Recurrence kRecurrence, typename T>
void launch_replay(ReplayArgs<T> args, const ReplayPlan& plan, CudaDevice& device) {
  if (args.rows.count == 0) return;
  args.plan = plan;
  const auto launch_padded = [&]<CheckpointForm kForm>() {
    if (args.key_size <= 64) return launch_formed<kRecurrence, 64, kForm>(args, device);
    launch_formed<kRecurrence, 128, kForm>(args, device);
  };
  if (args.form == CheckpointForm::kWords) return launch_padded.template operator()<CheckpointForm::kWords>();
  launch_padded.template operator()<CheckpointForm::kPlanes>();
}

}  // namespace replayssm
