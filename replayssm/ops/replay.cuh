// Internal to the delta rule and Mamba-2 on GPUs: a replay step in one kernel whose blocks stay. It reads out exactly,
// by running the recurrence over the records, or directly, by one product with the checkpoint; rows that flush are
// walked and written either way. States and exact outputs have the bits of the kernels that run one slice a warp.
//
// A unit of work is some value rows of one head of one row of the batch. Each warp of a block owns one of its slices of
// 16 rows. While a unit is read out or walked, the copy engine brings the records of the one after the next, and each
// slice of the next as soon as its predecessor has left shared memory; and the first warps, a token each, make of the
// next one's records what a direct readout takes.
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

// A block of the kernel: its shared memory and the steps of its loop.
template <Recurrence kRecurrence, int K, CheckpointForm kForm, typename T>
struct ReplayBlock {
  static constexpr bool kIsDelta = kRecurrence != Recurrence::kMamba2;
  static constexpr bool kPerChannel = kRecurrence == Recurrence::kDeltaPerChannel;
  using State = StagedSlice<K, kForm>;

  const ReplayArgs<T>& args;
  char* memory;

  __device__ static int lane() { return fresh_thread() % 32; }
  __device__ static int warp() { return fresh_thread() / 32; }

  template <typename X>
  __device__ X* at(int offset) const {
    return reinterpret_cast<X*>(memory + offset);
  }
  __device__ ReplaySchedule& schedule() const { return *at<ReplaySchedule>(args.plan.shared.schedule); }
  __device__ const ReplayUnit& unit(int index) const { return schedule().unit[index % kUnits]; }
  __device__ char* slice() const { return memory + warp() * kSliceBytes<K>; }
  __device__ int raw_place(int index) const { return args.plan.shared.raw_places == 3 ? index % 3 : index % 2; }
  __device__ T* raw_keys(int index) const {
    return at<T>(args.plan.shared.raw_keys) + raw_place(index) * args.plan.records * K;
  }
  __device__ T* raw_queries(int index) const {
    return at<T>(args.plan.shared.raw_queries) + raw_place(index) * args.tokens * K;
  }
  __device__ float* decays(int index) const {
    return at<float>(args.plan.shared.decays) + index % 3 * args.plan.records * K;
  }
  __device__ float* keys() const { return at<float>(args.plan.shared.keys); }
  __device__ float* queries(int index) const {
    return at<float>(args.plan.shared.queries) + index % 2 * args.tokens * K;
  }
  __device__ float* weights(int index) const {
    return at<float>(args.plan.shared.weights) + index % 2 * args.tokens * args.plan.records;
  }
  __device__ T* values(int index) const {
    return at<T>(args.plan.shared.values) + index % 3 * args.plan.records * args.plan.unit_values;
  }
  __device__ float* gates(int index) const {
    return at<float>(args.plan.shared.gates) + index % 3 * 3 * args.plan.records;
  }
  __device__ float* head_numbers(int index) const { return schedule().head_numbers[index % 3]; }

  __device__ static bool has_state(const ReplayUnit& u) { return u.kind >= UnitKind::kDirect; }
  __device__ int count(const ReplayUnit& u) const { return has_state(u) ? u.history + args.tokens : 0; }
  __device__ int position(const ReplayUnit& u, int j) const {
    const int at = u.start + j;
    return at < args.capacity ? at : at - args.capacity;
  }
  __device__ static int slice_rows(const ReplayUnit& u) { return min(kSliceRows, u.values - warp() * kSliceRows); }
  __device__ HeadPlace place(const ReplayUnit& u, UnitOffset rows) const {
    return {u.offset[rows], args.values, u.first_value + warp() * kSliceRows, args.key_size};
  }
  __device__ int64_t token(const ReplayUnit& u, int t) const { return int64_t{u.row} * args.tokens + t; }
  __device__ bool appends_gates(const ReplayUnit& u) const { return u.first_value == 0; }
  __device__ bool appends_key(const ReplayUnit& u) const {
    return u.first_value == 0 && u.head == u.key_head * static_cast<int>(args.by_share.divisor);
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
    if (args.rows.flush_limit != nullptr) copy(6, &schedule().flush_limit[index % kUnits], args.rows.flush_limit + b);
  }

  // Makes unit `index` of its row's numbers; for a warp.
  __device__ void derive(int index) const {
    ReplayUnit& u = schedule().unit[index % kUnits];
    const uint32_t number = schedule().number[index % kUnits];
    if (number >= args.plan.units) {
      u.kind = UnitKind::kNone;
      return;
    }
    const RowWords row = schedule().row[index % kUnits];
    const int b = args.by_row.quotient(number), in_row = number - b * args.by_row.divisor;
    const int head = args.by_part.quotient(in_row), part = in_row - head * args.by_part.divisor;
    const int key_head = args.by_share.quotient(head), me = lane();
    if (me < kOffsets) {
      const bool are_records = me == kHeadRecords || me == kKeyHeadRecords;
      const int of = me == kRowsIn     ? row.checkpoint_in
                     : me == kRowsOut  ? row.checkpoint_out
                     : me == kFirstOut ? b * args.tokens
                                       : row.slot;
      const int heads = me == kKeyHeadRecords ? args.key_heads : args.heads;
      u.offset[me] = (int64_t{of} * heads + (me == kKeyHeadRecords ? key_head : head)) *
                     (are_records ? args.capacity : args.values);
    }
    if (me > 0) return;
    u.row = b;
    u.head = head;
    u.key_head = key_head;
    u.first_value = part * args.plan.unit_values;
    u.values = min(args.plan.unit_values, args.values - u.first_value);
    u.history = row.history;
    const int limit = args.rows.flush_limit != nullptr ? schedule().flush_limit[index % kUnits] : args.window;
    u.will_flush = row.history + args.tokens > args.window || row.history >= limit;
    const auto is_in = [](int at, int64_t count) { return at >= 0 && at < count; };
    if (row.slot == kPaddingSlot) {
      u.kind = UnitKind::kPadding;
    } else if (!(is_in(row.slot, args.slots) && is_in(row.checkpoint_in, args.checkpoints) &&
                 is_in(row.checkpoint_out, args.checkpoints) && is_in(row.history, args.window + 1ll) &&
                 row.base >= 0)) {
      u.kind = UnitKind::kOutside;
      if (in_row == 0 && !args.are_tokens_just_made)
        report_fault(args.fault, args.op, b, row.slot, row.checkpoint_in, row.checkpoint_out);
    } else {
      u.kind = args.readout == Readout::kDirect && !u.will_flush ? UnitKind::kDirect : UnitKind::kWalk;
      u.start = ring_start(row.base, args.capacity);
    }
  }

  // Derives the third unit from here, takes the counter's answer to the question asked a unit ago as the number of one
  // more, begins to read the numbers of that one's row, and asks again; for a warp, whose first lane has the answer.
  __device__ void look_ahead(int index, uint32_t& answer) const {
    wait_for_copies();
    __syncwarp();
    derive(index + 3);
    if (lane() == 0) {
      schedule().number[(index + kAhead) % kUnits] =
          args.asked != nullptr ? answer + kAhead * gridDim.x : args.plan.units;
      if (args.asked != nullptr) answer = atomicAdd(args.asked, 1u);
    }
    __syncwarp();
    copy_row(index + kAhead);
  }

  // Begins to read the records of unit `index`, if it has a state; for a warp.
  __device__ void copy_records(int index) const {
    const ReplayUnit& u = unit(index);
    Arrival<true>& arrival = schedule().records[index % 2];
    const int me = lane(), all = count(u), committed = all == 0 ? 0 : u.history;
    const int key_bytes = args.key_size * static_cast<int>(sizeof(T)), decay_bytes = args.key_size * 4;
    const int value_bytes = u.values * static_cast<int>(sizeof(T));
    const bool has_even_values = value_bytes % 16 == 0 && args.values * sizeof(T) % 16 == 0;
    arrival.begin(all * (key_bytes + (kPerChannel ? decay_bytes : 0) + (has_even_values ? value_bytes : 0)) +
                  (all - committed) * key_bytes);
    const int64_t of_head = u.offset[kHeadRecords], of_key_head = u.offset[kKeyHeadRecords];
    // Records that follow one another in the ring and in shared memory are one piece; a token is one always.
    const bool has_runs =
        kHasCopyEngine && args.key_size == K && has_even_values && args.plan.unit_values == args.values;
    const int run = has_runs && committed > 0 ? min(committed, args.capacity - position(u, 0)) : 0;
    const int pieces = all == 0 ? 0 : has_runs ? 2 + args.tokens : all;
    // Of keys, values, queries and decays so many each, in one loop: the engine takes them from a warp's lanes in turn.
    constexpr int kStrands = kPerChannel ? 4 : 3;
#pragma unroll 1
    for (int i = me; i < kStrands * pieces; i += 32) {
      const int strand = (i >= pieces) + (i >= 2 * pieces) + (i >= 3 * pieces), piece = i - strand * pieces;
      const int j = !has_runs ? piece : piece == 0 ? 0 : piece == 1 ? run : committed + piece - 2;
      const int size = !has_runs || piece >= 2 ? 1 : piece == 0 ? run : committed - run;
      const int t = j - committed;
      const bool is_token = t >= 0 && (!has_runs || piece >= 2);
      if (size <= 0 || (strand == 2 && !is_token)) continue;
      const int64_t from = position(u, j), of_token = token(u, t);
      const int in_token = u.key_head * args.key_size, of_values = u.head * args.values + u.first_value;
      const void* source;
      void* to;
      int bytes;
      if (strand == 1) {
        source = is_token ? args.value + of_token * args.value_stride + of_values
                          : args.ring_value + (of_head + from) * args.values + u.first_value;
        to = values(index) + j * args.plan.unit_values;
        bytes = value_bytes;
      } else if (strand == 3) {
        source = is_token ? args.log_decay + (of_token * args.heads + u.head) * args.key_size
                          : args.ring_decay + (of_head + from) * args.key_size;
        to = decays(index) + j * K;
        bytes = decay_bytes;
      } else {
        source = strand == 2 ? args.query + of_token * args.query_stride + in_token
                 : is_token  ? args.key + of_token * args.key_stride + in_token
                             : args.ring_key + (of_key_head + from) * args.key_size;
        to = strand == 2 ? raw_queries(index) + t * K : raw_keys(index) + j * K;
        bytes = key_bytes;
      }
      if (strand == 1 && !has_even_values) {
        for (int word = 0; word < bytes / 4; ++word)
          copy_word_async(static_cast<uint32_t*>(to) + word, static_cast<const uint32_t*>(source) + word);
        continue;
      }
      arrival.copy(to, source, size * bytes);
    }
    float* to_gates = gates(index);
#pragma unroll 1
    for (int j = me; j < all; j += 32) {
      const int from = position(u, j), t = j - committed;
      const int64_t token_head = token(u, t) * args.heads + u.head;
      const bool is_token = t >= 0;
      if (!kPerChannel && (kIsDelta || !is_token))
        copy_word_async(to_gates + j, is_token ? args.log_decay + token_head : args.ring_decay + of_head + from);
      copy_word_async(to_gates + args.plan.records + j,
                      is_token ? args.strength + token_head : args.ring_strength + of_head + from);
      if (kIsDelta && !is_token)
        copy_word_async(to_gates + 2 * args.plan.records + j, args.ring_scale + of_key_head + from);
    }
    if (!kIsDelta && all > 0) {
      if (me == 0) copy_word_async(head_numbers(index), args.a_log + u.head);
      if (me == 1 && args.skip != nullptr) copy_word_async(head_numbers(index) + 1, args.skip + u.head);
    }
    arrival.end();
  }

  // Begins to read the warp's slice of a unit: when all of its lanes have seen the one before arrive, and read it.
  __device__ void copy_slice(const ReplayUnit& u) const {
    __syncwarp();
    const int rows = has_state(u) ? slice_rows(u) : 0;
    const bool hi_alone = u.kind == UnitKind::kDirect;
    Arrival<false>& arrival = schedule().slices[warp()];
    arrival.begin(rows > 0 ? State::read_bytes(rows, args.key_size, hi_alone) : 0);
    if (rows > 0) State::read(arrival, slice(), place(u, kRowsIn), args.checkpoint, rows, args.key_size, hi_alone);
    arrival.end();
  }

  __device__ static int converting_warps() {
    const int warps = blockDim.x / 32;
    return warps > 3 ? warps - 2 : warps;
  }

  // The decay of a token, record j, with one gate a head.
  __device__ float decay_of_token(int index, int j) const {
    const float* of_gates = gates(index);
    return kIsDelta ? expf(of_gates[j])
                    : expf(__fmul_rn(-expf(head_numbers(index)[0]), of_gates[args.plan.records + j]));
  }

  // Keeps record j's values in the ring.
  __device__ void append_value(int index, int j, int position) const {
    const ReplayUnit& u = unit(index);
    const int quad = 4 * lane();
    if (quad < u.values)
      store_quad(args.ring_value + (u.offset[kHeadRecords] + position) * args.values + u.first_value + quad,
                 quad_at(values(index) + j * args.plan.unit_values + quad));
  }

  // --- The walk. ---

  // Makes of the records what the updates take, and keeps the tokens in the ring; for all warps, or of more than three
  // for those that have no other work.
  __device__ void convert(int index) const {
    const ReplayUnit& u = unit(index);
    const int me = lane(), quad = 4 * me, warps = converting_warps();
    if (warp() >= warps) return;
    const bool has_channels = quad < args.key_size, has_quad = quad < K;
    float4* to_keys = reinterpret_cast<float4*>(keys()) + me;
    float* of_gates = gates(index);
    const int64_t of_head = u.offset[kHeadRecords], of_key_head = u.offset[kKeyHeadRecords];
    // A token's key and its query are tasks of two warps: each is a chain of latencies.
#pragma unroll 1
    for (int task = warp(); task < 2 * args.tokens; task += warps) {
      const int t = task / 2, j = u.history + t, to = position(u, j);
      const bool is_key = task % 2 == 0;
      const T* from = is_key ? raw_keys(index) + j * K : raw_queries(index) + t * K;
      Quad<T> raw = {};
      if (has_channels) raw = quad_at(from + quad);
      float4 x = to_numbers(raw);
      float scale = 1;
      if constexpr (kIsDelta) {
        scale = key_scale(x);
        x = scaled(x, is_key ? scale : __fmul_rn(scale, args.query_factor));
      }
      if (has_quad) (is_key ? to_keys + j * (K / 4) : reinterpret_cast<float4*>(queries(index) + t * K) + me)[0] = x;
      if (!is_key) continue;
      append_value(index, j, to);
      if (appends_key(u)) {
        if (kIsDelta && me == 0) args.ring_scale[of_key_head + to] = scale;
        if (has_channels) store_quad(args.ring_key + (of_key_head + to) * args.key_size + quad, raw);
      }
      if constexpr (kPerChannel) {
        float4* decay = reinterpret_cast<float4*>(decays(index) + j * K) + me;
        if (has_channels) {
          *decay = exponentials(*decay);
          if (appends_gates(u))
            reinterpret_cast<float4*>(args.ring_decay + (of_head + to) * args.key_size)[me] = *decay;
        }
      }
    }
    if (warp() == warps - 1 && me < args.tokens) {
      const int j = u.history + me, to = position(u, j);
      const float strength = of_gates[args.plan.records + j];
      if (!kPerChannel) {
        const float decay = decay_of_token(index, j);
        of_gates[j] = decay;
        if (appends_gates(u)) args.ring_decay[of_head + to] = decay;
      }
      if (appends_gates(u)) args.ring_strength[of_head + to] = strength;
    }
#pragma unroll 2
    for (int j = warps - 1 - warp(); j < u.history; j += warps) {
      float4 k = make_float4(0, 0, 0, 0);
      if (has_channels) k = to_numbers(quad_at(raw_keys(index) + j * K + quad));
      if constexpr (kIsDelta) k = scaled(k, of_gates[2 * args.plan.records + j]);
      if (has_quad) to_keys[j * (K / 4)] = k;
    }
    let_engine_see();  // which writes decays of a unit to come
  }

  __device__ void write_out(const ReplayUnit& u, int t, int row, float y) const {
    if (kRecurrence == Recurrence::kMamba2 && args.z != nullptr)
      y = gated(y, to_number(args.z[token(u, t) * args.z_stride + u.head * args.values + u.first_value + row]));
    store_out(u, t, row, y);
  }
  __device__ void store_out(const ReplayUnit& u, int t, int row, float y) const {
    const int64_t at = u.offset[kFirstOut] + t * args.heads * args.values + u.first_value + row;
    if (args.has_float_out)
      static_cast<float*>(args.out)[at] = y;
    else
      store_number(static_cast<T*>(args.out) + at, y);
  }

  // Runs the recurrence over a unit's records for the warp's slice, and writes the slice where a flush does.
  __device__ void walk(int index, State& state) const {
    const ReplayUnit& u = unit(index);
    const int me = lane();
    const float *of_keys = keys(), *of_gates = gates(index), *of_decays = decays(index);
    const T* of_values = values(index) + warp() * kSliceRows + me / 4;
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
        // Shared memory gives a multiprocessor 128 bytes a cycle: a key read twice a record would bound the walk.
        if constexpr (kPerChannel)
          delta_update<true>(state, KeptVector<State::kQuads>(key), VectorQuads(of_decays + j * K, me), decay, strength,
                             first, second);
        else if constexpr (kIsDelta)
          delta_update<false>(state, KeptVector<State::kQuads>(key), key, decay, strength, first, second);
        else
          mamba2_update(state, key, decay, __fmul_rn(strength, first), __fmul_rn(strength, second));
      }
      const int t = j - u.history;
      if (t > 0)
        write_token(index, state, t - 1);
      else if (u.will_flush)
        state.write(place(u, kRowsOut), args.checkpoint, slice_rows(u), args.key_size);
      if (t == args.tokens) return;
      end = j + 1;
    }
  }

  // Writes the outputs of token t from the state after it.
  __device__ void write_token(int index, const State& state, int t) const {
    const ReplayUnit& u = unit(index);
    float products[2];
    state.multiply(queries(index) + t * K, products[0], products[1]);
    const int me = lane(), row = output_row(me);
    if (!has_output(me) || row >= slice_rows(u)) return;
    float y = me % 4 == 0 ? products[0] : products[1];
    if (kRecurrence == Recurrence::kMamba2 && args.skip != nullptr) {
      const T* of_token = values(index) + (u.history + t) * args.plan.unit_values;
      y = __fmaf_rn(head_numbers(index)[1], to_number(of_token[warp() * kSliceRows + row]), y);
    }
    write_out(u, t, warp() * kSliceRows + row, y);
  }

  // --- The direct readout. ---

  // Makes the query of token t and the records' weights, such that of a slice of the checkpoint
  //   out[t] = S0 query[t] + sum_j weight[t, j] value[j]
  // by pulling the token's query back through the records, newest first; keeps the token in the ring. For a warp.
  __device__ void prepare_token(int index, int t) const {
    const ReplayUnit& u = unit(index);
    const int me = lane(), quad = 4 * me, newest = u.history + t, at = position(u, newest);
    const bool has_channels = quad < args.key_size;
    const int64_t of_head = u.offset[kHeadRecords], of_key_head = u.offset[kKeyHeadRecords];
    const float* strengths = gates(index) + args.plan.records;
    float* of_token = weights(index) + t * args.plan.records;
    const auto key_of = [&](int j) {
      Quad<T> k = {};
      if (has_channels) k = quad_at(raw_keys(index) + j * K + quad);
      return k;
    };
    append_value(index, newest, at);
    Quad<T> raw = {};
    if (has_channels) raw = quad_at(raw_queries(index) + t * K + quad);
    const Quad<T> own = key_of(newest);
    float4 w = to_numbers(raw), key = to_numbers(own);
    // The norms of the query and the token's key, and their product, all at once.
    float sums[3] = {kIsDelta ? squares_of(w) : 0.0f, kIsDelta ? squares_of(key) : 0.0f, dot(key, w)};
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
      for (int i = kIsDelta ? 0 : 2; i < 3; ++i)
        sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(kWarp, sums[i], distance));
    float product = sums[2];
    if constexpr (kIsDelta) {
      const float of_query = __fmul_rn(scale_of(sums[0]), args.query_factor), scale = scale_of(sums[1]);
      // A vector whose squares overflow is normalised to zero.
      product = scale == 0 || of_query == 0 ? 0.0f : __fmul_rn(__fmul_rn(product, scale), of_query);
      w = scaled(w, of_query);
      key = scaled(key, scale);
      if (appends_key(u) && me == 0) args.ring_scale[of_key_head + at] = scale;
    }
    if (appends_key(u) && has_channels) store_quad(args.ring_key + (of_key_head + at) * args.key_size + quad, own);
    if (appends_gates(u) && me == 0) args.ring_strength[of_head + at] = strengths[newest];
    float decay = 1;  // of the records after j
#pragma unroll 1
    for (int j = newest;;) {
      const float c = __fmul_rn(strengths[j], product);
      float weight = kPerChannel ? c : __fmul_rn(c, decay);
      if (kRecurrence == Recurrence::kMamba2 && args.skip != nullptr && j == newest)
        weight = __fadd_rn(weight, head_numbers(index)[1]);
      if (me == 0) of_token[j] = weight;
      if constexpr (kIsDelta) w = multiply_added(key, -c, w);
      if constexpr (kPerChannel) {
        float4 of_channels = make_float4(0, 0, 0, 0);
        if (has_channels) of_channels = exponentials(reinterpret_cast<const float4*>(decays(index) + j * K)[me]);
        w = multiplied(w, of_channels);
        if (j == newest && appends_gates(u) && has_channels)
          reinterpret_cast<float4*>(args.ring_decay + (of_head + at) * args.key_size)[me] = of_channels;
      } else {
        const float of_record = decay_of_token(index, j);
        decay = __fmul_rn(decay, of_record);
        if (j == newest && appends_gates(u) && me == 0) args.ring_decay[of_head + at] = of_record;
      }
      if (--j < u.history) break;
      key = to_numbers(key_of(j));
      if constexpr (kIsDelta) key = scaled(key, key_scale(key));
      product = sum_of_lanes<32>(dot(key, w));
    }
#pragma unroll 1
    for (int top = u.history - 1; top >= 0; top -= kTogether) pull_group(index, top, w, decay, of_token);
    if (quad < K) reinterpret_cast<float4*>(queries(index) + t * K)[me] = kPerChannel ? w : scaled(w, decay);
  }

  // Records top, top - 1, ... at once: all their products are made before the first is pulled through, of each with the
  // query as it is and with the newer ones of the group.
  static constexpr int kTogether = 4;
  __device__ void pull_group(int index, int top, float4& w, float& decay, float* weight_of) const {
    const int me = lane(), quad = 4 * me;
    const bool has_channels = quad < args.key_size;
    const float *of_gates = gates(index), *strengths = of_gates + args.plan.records;
    const float* scales = strengths + args.plan.records;
    float4 x[kTogether], of_channels[kPerChannel ? kTogether : 1];
    float sums[kTogether], mutual[kTogether][kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int j = max(top - i, 0);
      Quad<T> k = {};
      if (has_channels) k = quad_at(raw_keys(index) + j * K + quad);
      x[i] = kIsDelta ? scaled(to_numbers(k), scales[j]) : to_numbers(k);
      if constexpr (kPerChannel) {
        of_channels[i] = make_float4(0, 0, 0, 0);
        if (has_channels) of_channels[i] = reinterpret_cast<const float4*>(decays(index) + j * K)[me];
      }
      float4 pulled = x[i];
#pragma unroll
      for (int m = i - 1; m >= 0; --m) {
        if constexpr (kPerChannel) pulled = multiplied(pulled, of_channels[m]);
        if constexpr (kIsDelta) mutual[i][m] = dot(pulled, x[m]);
      }
      sums[i] = dot(pulled, w);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(kWarp, sums[i], distance));
        if constexpr (kIsDelta) {
#pragma unroll
          for (int m = 0; m < i; ++m)
            mutual[i][m] = __fadd_rn(mutual[i][m], __shfl_xor_sync(kWarp, mutual[i][m], distance));
        }
      }
    float c[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int j = top - i;
      if constexpr (kIsDelta) {
#pragma unroll
        for (int m = 0; m < i; ++m) sums[i] = __fmaf_rn(-c[m], mutual[i][m], sums[i]);
      }
      c[i] = j >= 0 ? __fmul_rn(strengths[j], sums[i]) : 0.0f;
      if (j >= 0 && me == i) weight_of[j] = kPerChannel ? c[i] : __fmul_rn(c[i], decay);
      if (!kPerChannel && j >= 0) decay = __fmul_rn(decay, of_gates[j]);
      if constexpr (kIsDelta) w = multiply_added(x[i], -c[i], w);
      if (kPerChannel && j >= 0) w = multiplied(w, of_channels[kPerChannel ? i : 0]);
    }
  }

  // Outputs of kCount tokens from `first` on, of the warp's slice.
  template <int kCount>
  __device__ void read_tokens(int index, int first) const {
    const ReplayUnit& u = unit(index);
    const int me = lane(), c = me % 4, stride = args.plan.records;
    RowSums sums[kCount][2];
    State::template add_shared<kCount>(sums, slice(), queries(index) + first * K);
    if (first + kCount == args.tokens) copy_slice(unit(index + 1));  // the slice has left shared memory
    const T* of_values = values(index) + warp() * kSliceRows + me / 4;
    const float* of_weights = weights(index) + first * stride;
    const int end = u.history + first + kCount;
#pragma unroll 2
    for (int j = c; j < end; j += 4) {
      float v[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) v[half] = to_number(of_values[j * args.plan.unit_values + half * 8]);
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        if (kCount > 1 && j > u.history + first + t) continue;
        const float weight = of_weights[t * stride + j];
#pragma unroll
        for (int half = 0; half < 2; ++half) sums[t][half].of[0] = __fmaf_rn(weight, v[half], sums[t][half].of[0]);
      }
    }
    const int row = output_row(me);
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      const float y[2] = {sums[t][0].total(), sums[t][1].total()};
      if (has_output(me) && row < slice_rows(u))
        write_out(u, first + t, warp() * kSliceRows + row, c == 0 ? y[0] : y[1]);
    }
  }

  __device__ void read(int index) const {
    int t = 0;
#pragma unroll 1
    for (; t + 4 <= args.tokens; t += 4) read_tokens<4>(index, t);
    if (t + 2 <= args.tokens) {
      read_tokens<2>(index, t);
      t += 2;
    }
    if (t < args.tokens) read_tokens<1>(index, t);
  }

  // Padding rows give zeros; rows outside the pool give NaN.
  __device__ void refuse(const ReplayUnit& u) const {
    const float y = u.kind == UnitKind::kPadding ? 0.0f : __uint_as_float(0x7FC00000u);
    for (int t = 0; t < args.tokens; ++t)
      for (int row = fresh_thread(); row < u.values; row += blockDim.x) store_out(u, t, row, y);
  }

  // --- The block's loop. ---

  // A unit at a time. The last warp looks ahead, the last but one fetches.
  __device__ void run() const {
    const int warps = blockDim.x / 32, fetcher = max(0, warps - 2);
    if (threadIdx.x < kAhead) schedule().number[threadIdx.x] = blockIdx.x + threadIdx.x * gridDim.x;
    if (threadIdx.x < 2) schedule().records[threadIdx.x].initialise();
    if (threadIdx.x < warps) schedule().slices[threadIdx.x].initialise();
    // What lies past a row's channels stays as it is now.
    if (args.key_size < K) {
      for (int i = threadIdx.x; i < args.plan.unit_values * K; i += blockDim.x) at<float>(0)[i] = 0;
      if constexpr (kPerChannel)
        for (int i = threadIdx.x; i < 3 * args.plan.records * K; i += blockDim.x) decays(0)[i] = 0;
    }
    let_engine_see();
    __syncthreads();
    const bool is_looking = warp() == warps - 1;
    uint32_t answer = 0;
    if (is_looking) {
      if (args.asked != nullptr && lane() == 0) answer = atomicAdd(args.asked, 1u);
      for (int index = 0; index < kAhead; ++index) copy_row(index);
      wait_for_copies();
      __syncwarp();
      for (int index = 0; index < kAhead - 1; ++index) derive(index);
    }
    __syncthreads();
    copy_slice(unit(0));
    wait_for_previous();  // again, if the tokens are not just made
    let_next_start();
    if (warp() == fetcher)
      for (int index = 0; index < 2; ++index) copy_records(index);
    prepare(0);
    schedule().records[0].wait(0);
    __syncthreads();
#pragma unroll 1
    for (int index = 0; unit(index).kind != UnitKind::kNone; ++index) {
      const bool is_fetching = warp() == fetcher, fetches_first = args.plan.shared.raw_places == 3;
      if (is_looking) look_ahead(index, answer);
      if (is_fetching && fetches_first) copy_records(index + 2);
      if (unit(index).kind == UnitKind::kWalk) {
        convert(index);
        __syncthreads();
      }
      if (is_fetching && !fetches_first) copy_records(index + 2);
      prepare(index + 1);
      run_unit(index);
      // All have seen that they are there before the ones after them are asked for.
      schedule().records[(index + 1) % 2].wait((index + 1) / 2);
      __syncthreads();
    }
    // Each block asks once more than it has units; the last to ask lets the next call begin anew.
    if (is_looking && args.asked != nullptr && lane() == 0 && answer == args.plan.units + gridDim.x - 1)
      *args.asked = 0;
  }

  // Makes a unit's tokens ready, if it is to be read out directly; for all warps, which have tokens in turn.
  __device__ void prepare(int index) const {
    if (unit(index).kind != UnitKind::kDirect || warp() >= args.tokens) return;
    schedule().records[index % 2].wait(index / 2);
#pragma unroll 1
    for (int t = warp(); t < args.tokens; t += blockDim.x / 32) prepare_token(index, t);
  }

  __device__ void run_unit(int index) const {
    const ReplayUnit& u = unit(index);
    schedule().slices[warp()].wait(index);
    const bool has_rows = has_state(u) && slice_rows(u) > 0;
    if (has_rows && u.kind == UnitKind::kDirect) return read(index);
    if (has_rows) {
      State state;
      state.take(slice());
      copy_slice(unit(index + 1));
      return walk(index, state);
    }
    copy_slice(unit(index + 1));
    if (!has_state(u)) refuse(u);
  }
};

template <Recurrence kRecurrence, int K, CheckpointForm kForm, typename T>
__global__ void __launch_bounds__(256, 2) replay_kernel(const __grid_constant__ ReplayArgs<T> args) {
  extern __shared__ uint4 memory[];
  if (!args.are_tokens_just_made) wait_for_previous();
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
  launch(args.op, kernel, dim3(blocks), plan.threads(), plan.shared.bytes, args, device, Launch::kOverlapping);
}

template <Recurrence kRecurrence, typename T>
void launch_replay(const ReplayArgs<T>& args, CudaDevice& device) {
  if (args.rows.count == 0) return;
  const auto launch_padded = [&]<CheckpointForm kForm>() {
    if (args.key_size <= 64) return launch_formed<kRecurrence, 64, kForm>(args, device);
    launch_formed<kRecurrence, 128, kForm>(args, device);
  };
  if (args.form == CheckpointForm::kWords) return launch_padded.template operator()<CheckpointForm::kWords>();
  launch_padded.template operator()<CheckpointForm::kPlanes>();
}

}  // namespace replayssm
