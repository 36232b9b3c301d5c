// Internal to the delta rule and Mamba-2 on GPUs: a replay step in one kernel whose blocks stay. It reads out exactly,
// by running the recurrence over the records, or directly, by one product with the checkpoint. Rows that flush are
// walked and written either way; of several tokens a direct readout then takes the state that was written. States and
// exact outputs have the bits of the kernels that run one slice a warp.
//
// A unit of work is some value rows of one head of one row of the batch. Each warp of a block owns one of its slices of
// 16 rows and goes from unit to unit at its own pace. What a unit needs beside the slices is made ahead: one warp asks
// for units, one derives what there is to know of them, one fetches their records, one for each token makes of the
// records what a direct readout takes, and all share the conversion of a walk's records. A slice is asked for as soon
// as another has left its place.
#pragma once

#include <algorithm>

#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/replay_ahead.cuh"
#include "replayssm/ops/replay_few.cuh"
#include "replayssm/ops/updates.cuh"

namespace replayssm {

__device__ inline float dot(float4 x, float4 y) {
  return __fadd_rn(__fmaf_rn(x.z, y.z, __fmul_rn(x.x, y.x)), __fmaf_rn(x.w, y.w, __fmul_rn(x.y, y.y)));
}

// A block of the kernel: the steps of its loop.
template <Recurrence kRecurrence, int K, CheckpointForm kForm, bool kAreWhole, int kTokens, typename T>
struct ReplayBlock : ReplayAhead<kRecurrence, K, kForm, kAreWhole, kTokens, T> {
  using Ahead = ReplayAhead<kRecurrence, K, kForm, kAreWhole, kTokens, T>;
  using Ahead::args, Ahead::begin, Ahead::look_at_rows, Ahead::lane, Ahead::warp, Ahead::schedule, Ahead::unit,
      Ahead::slice, Ahead::tokens, Ahead::key_size, Ahead::raw_keys, Ahead::raw_queries, Ahead::decays, Ahead::keys,
      Ahead::decays_from_keys, Ahead::query, Ahead::weights, Ahead::values, Ahead::gates, Ahead::head_numbers,
      Ahead::has_state, Ahead::position, Ahead::slice_rows, Ahead::token, Ahead::appends_gates, Ahead::appends_key,
      Ahead::derive_ahead, Ahead::ask_ahead, Ahead::asker, Ahead::deriver, Ahead::copy_records, Ahead::copy_next,
      Ahead::copy_first, Ahead::wait_for_slice, Ahead::is_fold, Ahead::is_walk, Ahead::is_read_directly,
      Ahead::first_record, Ahead::arrive, Ahead::wait_until_done, Ahead::wait_until_derived, Ahead::wait_for_records,
      Ahead::decay_of_token, Ahead::append_value;
  using Ahead::kIsDelta, Ahead::kPerChannel;
  using typename Ahead::State;

  // --- The walk. ---

  // Makes of the records what the updates take, and keeps the tokens in the ring; each warp its part.
  __device__ void convert(int index) const {
    wait_until_derived(index);
    const ReplayUnit& u = unit(index);
    if (!is_walk(u)) return;
    wait_for_records(index);
    wait_until_done(index - args.plan.key_places);
    convert_records(index);
    arrive(schedule().converted[u.walks % kConverted]);
  }
  __device__ void convert_records(int index) const {
    const ReplayUnit& u = unit(index);
    const int me = lane(), quad = 4 * me, warps = blockDim.x / 32;
    const bool has_channels = quad < key_size(), has_quad = quad < K;
    float4* to_keys = reinterpret_cast<float4*>(keys(u)) + me;
    float* of_gates = gates(u);
    const int64_t of_head = u.offset[kHeadRecords], of_key_head = u.offset[kKeyHeadRecords];
    // A token's key and its query are tasks of two warps: each is a chain of latencies.
    const int walked = is_fold(u) ? 0 : tokens();
#pragma unroll 1
    for (int task = warp(); task < 2 * walked; task += warps) {
      const int t = task / 2, j = u.history + t, to = position(u, j);
      const bool is_key = task % 2 == 0;
      const T* from = is_key ? raw_keys(u) + j * K : raw_queries(u) + t * K;
      Quad<T> raw = {};
      if (has_channels) raw = quad_at(from + quad);
      float4 x = to_numbers(raw);
      float scale = 1;
      if constexpr (kIsDelta) {
        scale = key_scale(x);
        x = scaled(x, is_key ? scale : __fmul_rn(scale, args.query_factor));
      }
      if (has_quad) (is_key ? to_keys + j * (K / 4) : reinterpret_cast<float4*>(query(u, t)) + me)[0] = x;
      if (!is_key) continue;
      append_value(u, j, to);
      if (appends_key(u)) {
        if (kIsDelta && me == 0) args.ring_scale[of_key_head + to] = scale;
        if (has_channels) store_quad(args.ring_key + (of_key_head + to) * key_size() + quad, raw);
      }
      if constexpr (kPerChannel) {
        float4* decay = reinterpret_cast<float4*>(decays(u) + j * K) + me;
        if (has_channels) {
          *decay = exponentials(*decay);
          if (appends_gates(u)) reinterpret_cast<float4*>(args.ring_decay + (of_head + to) * key_size())[me] = *decay;
        }
      }
    }
    if (warp() == warps - 1 && me < walked) {
      const int j = u.history + me, to = position(u, j);
      const float strength = of_gates[args.plan.records + j];
      if (!kPerChannel) {
        const float decay = decay_of_token(u, j);
        of_gates[j] = decay;
        if (appends_gates(u)) args.ring_decay[of_head + to] = decay;
      }
      if (appends_gates(u)) args.ring_strength[of_head + to] = strength;
    }
#pragma unroll 2
    for (int j = warps - 1 - warp(); j < u.history; j += warps) {
      float4 k = make_float4(0, 0, 0, 0);
      if (has_channels) k = to_numbers(quad_at(raw_keys(u) + j * K + quad));
      if constexpr (kIsDelta) k = scaled(k, of_gates[2 * args.plan.records + j]);
      if (has_quad) to_keys[j * (K / 4)] = k;
    }
    if constexpr (kPerChannel) let_engine_see();  // which writes decays of a unit to come
  }

  __device__ void write_out(const ReplayUnit& u, int t, int row, float y) const {
    if (kRecurrence == Recurrence::kMamba2 && args.z != nullptr)
      y = gated(y, to_number(args.z[token(u, t) * args.z_stride + u.head * args.values + u.first_value + row]));
    store_out(u, t, row, y);
  }
  __device__ void store_out(const ReplayUnit& u, int t, int row, float y) const {
    const int64_t at = u.offset[kFirstOut] + t * args.heads * args.values + row;
    if (args.has_float_out)
      static_cast<float*>(args.out)[at] = y;
    else
      store_number(static_cast<T*>(args.out) + at, y);
  }

  // Runs the recurrence over a unit's records for the warp's slice, and writes the slice where a flush does.
  __device__ void walk(int index, State& state) const {
    const ReplayUnit& u = unit(index);
    // (A pointer for each array and none for what follows from it: a slice leaves few registers.)
    const int me = lane();
    VectorQuads key(keys(u), me);
    const int to_decays = decays_from_keys(u);
    const float* gate = gates(u);
    const T* value = values(u) + warp() * kSliceRows + me / 4;
    int records = u.history;
#pragma unroll 1
    for (int t = 0;; ++t, records = 1) {
      // (The updates' loop apart from all else: a branch costs as much as ten of an update's numbers.)
#pragma unroll 1
      for (; records > 0; --records, key = key + K, value += args.plan.unit_values, ++gate) {
        const float first = to_number(value[0]), second = to_number(value[8]);
        const float decay = gate[0], strength = gate[args.plan.records];
        // Shared memory gives a multiprocessor 128 bytes a cycle: a key read twice a record would bound the walk.
        if constexpr (kPerChannel)
          delta_update<true, /*kKeeps=*/true>(state, key, key + to_decays, decay, strength, first, second);
        else if constexpr (kIsDelta)
          delta_update<false, /*kKeeps=*/true>(state, key, key, decay, strength, first, second);
        else
          mamba2_update(state, key, decay, __fmul_rn(strength, first), __fmul_rn(strength, second));
      }
      if (t > 0)
        write_token(index, state, t - 1);
      else if (u.will_flush)
        state.write({u.offset[kRowsOut], args.values, u.first_value + warp() * kSliceRows, key_size()}, args.checkpoint,
                    slice_rows(u), key_size());
      if (is_fold(u)) return read_kept(index, state);
      if (t == tokens()) return;
    }
  }

  // Writes the outputs of token t from the state after it.
  __device__ void write_token(int index, const State& state, int t) const {
    const ReplayUnit& u = unit(index);
    RowSums sums[2];
    state.add_products(sums, query(u, t));
    const float products[2] = {sums[0].total(), sums[1].total()};
    const int me = lane(), row = output_row(me);
    if (!has_output(me) || row >= slice_rows(u)) return;
    float y = me % 4 == 0 ? products[0] : products[1];
    if (kRecurrence == Recurrence::kMamba2 && args.skip != nullptr) {
      const T* of_token = values(u) + (u.history + t) * args.plan.unit_values;
      y = __fmaf_rn(head_numbers(u)[1], to_number(of_token[warp() * kSliceRows + row]), y);
    }
    write_out(u, t, warp() * kSliceRows + row, y);
  }

  // Writes the outputs of all tokens from the state before them.
  __device__ void read_kept(int index, const State& state) const {
    const ReplayUnit& u = unit(index);
#pragma unroll 1
    for (int t = 0; t < tokens(); ++t) {
      RowSums sums[1][2];
      state.add_products(sums[0], query(u, t));
      add_values<1>(u, t, sums);
      write_sums<1>(u, t, sums);
    }
  }

  // --- The direct readout. ---

  // Makes the query of token t and the records' weights, such that of a slice of the checkpoint
  //   out[t] = S0 query[t] + sum_j weight[t, j] value[j]
  // by pulling the token's query back through the records, newest first; keeps the token in the ring. For a warp.
  __device__ void prepare_token(int index, int t) const {
    const ReplayUnit& u = unit(index);
    const int me = lane(), quad = 4 * me, newest = u.history + t, at = position(u, newest);
    const int first = first_record(u);
    // (All that decides is the row's own and the call's, so that an output's bits do not depend on the batch. Planes
    // are read by tensor cores anyway; with words, where nothing else is, an H200 at 1.75 GHz for 1.90 loses what they
    // save.)
    if constexpr (kRecurrence == Recurrence::kDelta && sizeof(T) == 2 && K == 128 && kForm == CheckpointForm::kPlanes)
      if (key_size() == K && newest - first < kFewRecords) return prepare_few(u, t, first);
    const bool has_channels = quad < key_size();
    const int64_t of_head = u.offset[kHeadRecords], of_key_head = u.offset[kKeyHeadRecords];
    const float* strengths = gates(u) + args.plan.records;
    float* of_token = weights(u, t) - first;
    const auto key_of = [&](int j) {
      Quad<T> k = {};
      if (has_channels) k = quad_at(raw_keys(u) + j * K + quad);
      return k;
    };
    append_value(u, newest, at);
    Quad<T> raw = {};
    if (has_channels) raw = quad_at(raw_queries(u) + t * K + quad);
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
    if (appends_key(u) && has_channels) store_quad(args.ring_key + (of_key_head + at) * key_size() + quad, own);
    if (appends_gates(u) && me == 0) args.ring_strength[of_head + at] = strengths[newest];
    float decay = 1;  // of the records after j
#pragma unroll 1
    for (int j = newest;;) {
      const float c = __fmul_rn(strengths[j], product);
      float weight = kPerChannel ? c : __fmul_rn(c, decay);
      if (kRecurrence == Recurrence::kMamba2 && args.skip != nullptr && j == newest)
        weight = __fadd_rn(weight, head_numbers(u)[1]);
      if (me == 0) of_token[j] = weight;
      if constexpr (kIsDelta) w = multiply_added(key, -c, w);
      if constexpr (kPerChannel) {
        float4 of_channels = make_float4(0, 0, 0, 0);
        if (has_channels) of_channels = exponentials(reinterpret_cast<const float4*>(decays(u) + j * K)[me]);
        w = multiplied(w, of_channels);
        if (j == newest && appends_gates(u) && has_channels)
          reinterpret_cast<float4*>(args.ring_decay + (of_head + at) * key_size())[me] = of_channels;
      } else {
        const float of_record = decay_of_token(u, j);
        decay = __fmul_rn(decay, of_record);
        if (j == newest && appends_gates(u) && me == 0) args.ring_decay[of_head + at] = of_record;
      }
      if (--j < u.history) break;
      key = to_numbers(key_of(j));
      if constexpr (kIsDelta) key = scaled(key, key_scale(key));
      product = sum_of_lanes<32>(dot(key, w));
    }
#pragma unroll 1
    for (int top = u.history - 1; top >= first; top -= kTogether) pull_group(u, top, w, decay, of_token);
    if (quad < K) keep_query(u, t, kPerChannel ? w : scaled(w, decay));
  }

  // The same for few records, from `first` on.
  __device__ void prepare_few(const ReplayUnit& u, int t, int first) const {
    const int me = lane(), newest = u.history + t, at = position(u, newest);
    const float *decays = gates(u), *strengths = decays + args.plan.records;
    const int64_t of_head = u.offset[kHeadRecords] + at, of_key_head = u.offset[kKeyHeadRecords] + at;
    append_value(u, newest, at);
    const float decay = decay_of_token(u, newest);
    const FewRecords<T> records = {raw_keys(u) + first * K,
                                   raw_queries(u) + t * K,
                                   decays + first,
                                   strengths + first,
                                   strengths + args.plan.records + first,
                                   u.history - first,
                                   newest - first};
    float scale;
    const float4 w = pull_through_few<K, kTokens != 1>(records, decay, args.query_factor, scale, weights(u, t));
    if (appends_key(u)) {
      store_quad(args.ring_key + of_key_head * K + 4 * me, quad_at(raw_keys(u) + newest * K + 4 * me));
      if (me == 0) args.ring_scale[of_key_head] = scale;
    }
    if (appends_gates(u) && me == 0) {
      args.ring_strength[of_head] = strengths[newest];
      args.ring_decay[of_head] = decay;
    }
    keep_query(u, t, w);
  }

  // The lane's quad of a token's query, as what reads it out takes it.
  __device__ void keep_query(const ReplayUnit& u, int t, float4 x) const {
    if (is_fold(u))
      reinterpret_cast<float4*>(query(u, t))[lane()] = x;
    else
      State::keep_query(query(u, t), lane(), x);
  }
  // Records top, top - 1, ... at once: all their products are made before the first is pulled through, of each with the
  // query as it is and with the newer ones of the group.
  static constexpr int kTogether = 4;
  __device__ void pull_group(const ReplayUnit& u, int top, float4& w, float& decay, float* weight_of) const {
    const int me = lane(), quad = 4 * me;
    const bool has_channels = quad < key_size();
    const float *of_gates = gates(u), *strengths = of_gates + args.plan.records;
    const float* scales = strengths + args.plan.records;
    float4 x[kTogether], of_channels[kPerChannel ? kTogether : 1];
    float sums[kTogether], mutual[kTogether][kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int j = max(top - i, 0);
      Quad<T> k = {};
      if (has_channels) k = quad_at(raw_keys(u) + j * K + quad);
      x[i] = kIsDelta ? scaled(to_numbers(k), scales[j]) : to_numbers(k);
      if constexpr (kPerChannel) {
        of_channels[i] = make_float4(0, 0, 0, 0);
        if (has_channels) of_channels[i] = reinterpret_cast<const float4*>(decays(u) + j * K)[me];
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
    RowSums sums[kCount][2];
    State::template add_shared<kCount>(sums, slice(index), query(u, first));
    if (first + kCount == tokens()) copy_next(index);
    add_values<kCount>(u, first, sums);
    write_sums<kCount>(u, first, sums);
  }

  // Adds the weighted values of the records that tokens from `first` on are read out with.
  template <int kCount>
  __device__ void add_values(const ReplayUnit& u, int first, RowSums (&sums)[kCount][2]) const {
    const int me = lane(), oldest = first_record(u), newest = u.history - oldest + first, end = newest + kCount;
    const T* of_values = values(u) + oldest * args.plan.unit_values + warp() * kSliceRows + me / 4;
    const float* of_weights = weights(u, first);
#pragma unroll 2
    for (int j = me % 4; j < end; j += 4) {
      float v[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) v[half] = to_number(of_values[j * args.plan.unit_values + half * 8]);
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        if (kCount > 1 && j > newest + t) continue;
        const float weight = of_weights[t * args.window + j];
#pragma unroll
        for (int half = 0; half < 2; ++half) sums[t][half].of[0] = __fmaf_rn(weight, v[half], sums[t][half].of[0]);
      }
    }
  }

  template <int kCount>
  __device__ void write_sums(const ReplayUnit& u, int first, const RowSums (&sums)[kCount][2]) const {
    const int me = lane(), row = output_row(me);
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      const float y[2] = {sums[t][0].total(), sums[t][1].total()};
      if (has_output(me) && row < slice_rows(u))
        write_out(u, first + t, warp() * kSliceRows + row, me % 4 == 0 ? y[0] : y[1]);
    }
  }

  __device__ void read(int index) const {
    int t = 0;
#pragma unroll 1
    for (; t + 4 <= tokens(); t += 4) read_tokens<4>(index, t);
    if (t + 2 <= tokens()) {
      read_tokens<2>(index, t);
      t += 2;
    }
    if (t < tokens()) read_tokens<1>(index, t);
  }

  // Padding rows give zeros; rows outside the pool give NaN.
  __device__ void refuse(const ReplayUnit& u) const {
    const float y = u.kind == UnitKind::kPadding ? 0.0f : __uint_as_float(0x7FC00000u);
    for (int t = 0; t < tokens(); ++t)
      for (int row = fresh_thread(); row < u.values; row += blockDim.x) store_out(u, t, row, y);
  }

  // --- The block's loop. ---

  // A unit at a time.
  __device__ void run() const {
    // With places for the keys of several walks records are converted while the unit before is worked on.
    const int converts_ahead = args.plan.key_places > 1;
    uint32_t answer = 0;
    begin(answer);
    // Slices on their way would delay the records, so that they are first; unless they wait for the kernel before.
    if (args.are_tokens_just_made) copy_first();
    wait_for_previous();  // again, if the tokens are not just made
    let_next_start();
    for (int index = warp(); index < kLead; index += blockDim.x / 32) copy_records(index);
    if (!args.are_tokens_just_made) copy_first();
    if (warp() == asker()) look_at_rows();
    prepare(0);
    if (converts_ahead) convert(0);
#pragma unroll 1
    for (int index = 0; unit(index).kind != UnitKind::kNone; ++index) {
      if (warp() == deriver()) derive_ahead(index);
      if (warp() == asker()) ask_ahead(index, answer);
      prepare(index + 1);
      schedule().ready[index % kUnits].wait(index / kUnits);
      convert(index + converts_ahead);
      const ReplayUnit& u = unit(index);
      if (is_walk(u)) schedule().converted[u.walks % kConverted].wait(u.walks / kConverted);
      if (warp() == fetcher(index + kLead)) {
        wait_until_done(index + kLead - args.plan.places);
        wait_until_derived(index + kLead);
        copy_records(index + kLead);
      }
      run_unit(index);
      arrive(schedule().done[index % kUnits]);
    }
    // Each block asks once more than it has units; the last to ask lets the next call begin anew.
    if (warp() == asker() && args.asked != nullptr && lane() == 0 && answer == args.plan.units + gridDim.x - 1)
      *args.asked = 0;
  }

  // The warp that fetches a unit's records. Of eight, two that share a scheduler, and so the code at hand, have units
  // in turn; as do those that make tokens ready.
  __device__ static int fetcher(int index) {
    const int warps = blockDim.x / 32;
    return warps == 8 ? 2 + index % 2 * 4 : max(0, warps - 2);
  }
  // Makes a unit's tokens ready if it is to be read out directly: the warp's, of which it has every so many-th.
  __device__ void prepare(int index) const {
    const int warps = blockDim.x / 32;
#pragma unroll 1
    for (int t = warps == 8 ? warp() ^ index % 2 * 4 : warp(); t < tokens(); t += warps) {
      wait_until_derived(index);
      if (kTokens != 1) wait_until_done(index - kLead);  // with the place for the query
      const ReplayUnit& u = unit(index);
      if (u.kind != UnitKind::kNone && u.kind != UnitKind::kWalk) wait_for_records(index);
      if (is_read_directly(u)) prepare_token(index, t);
      arrive(schedule().ready[index % kUnits]);
    }
  }

  __device__ void run_unit(int index) const {
    const ReplayUnit& u = unit(index);
    wait_for_slice(index);
    const bool has_rows = has_state(u) && slice_rows(u) > 0;
    if (has_rows && u.kind == UnitKind::kDirect) return read(index);
    if (has_rows) {
      State state;
      state.take(slice(index), slice(index + 1));
      copy_next(index);
      return walk(index, state);
    }
    copy_next(index);
    if (!has_state(u)) refuse(u);
  }
};

template <Recurrence kRecurrence, int K, CheckpointForm kForm, bool kAreWhole, int kTokens, typename T>
__global__ void __launch_bounds__(256, 2) replay_kernel(const __grid_constant__ ReplayArgs<T> args) {
  extern __shared__ __align__(128) uint4 memory[];
  if (!args.are_tokens_just_made) wait_for_previous();
  ReplayBlock<kRecurrence, K, kForm, kAreWhole, kTokens, T>{args, reinterpret_cast<char*>(memory)}.run();
}

template <Recurrence kRecurrence, int K, CheckpointForm kForm, bool kAreWhole, int kTokens, typename T>
void launch_cut(ReplayArgs<T> args, CudaDevice& device) {
  const ReplayPlan& plan = args.plan;
  const uint32_t parts = static_cast<uint32_t>(ceiling_quotient(args.values, plan.unit_values));
  args.by_row = Divisor(args.heads * parts);
  args.by_part = Divisor(parts);
  args.by_share = Divisor(args.heads / args.key_heads);
  const int32_t* row_words[] = {reinterpret_cast<const int32_t*>(args.rows.base),
                                reinterpret_cast<const int32_t*>(args.rows.base) + 1,
                                args.rows.slot,
                                args.rows.history,
                                args.rows.checkpoint_in,
                                args.rows.checkpoint_out,
                                args.rows.flush_limit};
  std::copy(std::begin(row_words), std::end(row_words), args.row_words);
  const auto kernel = replay_kernel<kRecurrence, K, kForm, kAreWhole, kTokens, T>;
  const int resident = resident_blocks(args.op, kernel, plan.threads(), plan.shared.bytes);
  const uint32_t blocks = std::min<uint32_t>(args.plan.units, device.properties().multiprocessors * resident);
  const uint32_t known = (kLead + 2) * blocks;
  if (args.plan.units > known) {
    args.asked = device.counter();
    const int first = static_cast<int>(ceiling_quotient(known, args.by_row.divisor));
    const bool is_arranged =
        args.readout == Readout::kDirect && args.rows.count > first && args.rows.count <= 32 * kArrangedWords;
    args.first_arranged_row = is_arranged ? first : -1;
  }
  launch(args.op, kernel, dim3(blocks), plan.threads(), plan.shared.bytes, args, device, Launch::kOverlapping);
}

template <Recurrence kRecurrence, int K, CheckpointForm kForm, typename T>
void launch_formed(const ReplayArgs<T>& args, CudaDevice& device) {
  const bool are_whole = args.key_size == K && args.plan.unit_values % kSliceRows == 0 &&
                         args.values % args.plan.unit_values == 0 && device.properties().compute_major >= 9;
  if (!are_whole) return launch_cut<kRecurrence, K, kForm, false, 0>(args, device);
  if (args.tokens == 1) return launch_cut<kRecurrence, K, kForm, true, 1>(args, device);
  if (args.tokens == 4) return launch_cut<kRecurrence, K, kForm, true, 4>(args, device);
  launch_cut<kRecurrence, K, kForm, true, 0>(args, device);
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
