// Internal to the CUDA replay kernel: what a block's warps make ready of the units to come, and where it lies.
#pragma once

#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/replay_units.cuh"
#include "replayssm/ops/staged.cuh"

namespace replayssm {

// A block's shared memory and the steps that are ahead of its units. kAreWhole: keys have K numbers, and all slices 16
// rows, on a GPU with a copy engine; kTokens: of a row, 0: any number. What is known here is shorter code, and the time
// of warps of which each does something of its own is to a large part that of fetching their code.
template <Recurrence kRecurrence, int K, CheckpointForm kForm, bool kAreWhole, int kTokens, typename T>
struct ReplayAhead {
  static constexpr bool kIsDelta = kRecurrence != Recurrence::kMamba2;
  static constexpr bool kPerChannel = kRecurrence == Recurrence::kDeltaPerChannel;
  static constexpr bool kIsWords = kForm == CheckpointForm::kWords;
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
  // The warp's place for a slice; from planes there are two for one half each, of which units have the first in turn.
  __device__ char* slice(int index) const {
    return memory + warp() * kSliceBytes<K> + (kIsWords ? 0 : index % 2 * (kSliceBytes<K> / 2));
  }
  __device__ int tokens() const { return kTokens > 0 ? kTokens : args.tokens; }
  __device__ int key_size() const { return kAreWhole ? K : args.key_size; }
  // Records as they come are there until they are prepared or converted, all else until the unit is done.
  __device__ T* raw_keys(const ReplayUnit& u) const {
    return at<T>(args.plan.shared.raw_keys) + u.raw_place * args.plan.records * K;
  }
  __device__ T* raw_queries(const ReplayUnit& u) const {
    return at<T>(args.plan.shared.raw_queries) + u.raw_place * tokens() * K;
  }
  __device__ float* decays(const ReplayUnit& u) const {
    return at<float>(args.plan.shared.decays) + u.place * args.plan.records * K;
  }
  __device__ float* keys(const ReplayUnit& u) const {
    return at<float>(args.plan.shared.keys) + u.key_place * args.plan.records * K;
  }
  // The numbers from a unit's keys to its decays.
  __device__ int decays_from_keys(const ReplayUnit& u) const {
    const int between = (args.plan.shared.decays - args.plan.shared.keys) / static_cast<int>(sizeof(float));
    return between + (u.place - u.key_place) * args.plan.records * K;
  }
  __device__ float* query(const ReplayUnit& u, int t) const {
    return at<float>(args.plan.shared.queries) + (query_place(u) * tokens() + t) * State::kQueryNumbers;
  }
  __device__ float* weights(const ReplayUnit& u, int t) const {
    return at<float>(args.plan.shared.weights) + (query_place(u) * tokens() + t) * args.window;
  }
  // With several tokens a unit's queries are made when all warps are done with the unit kLead before.
  __device__ static int query_place(const ReplayUnit& u) { return kTokens == 1 ? u.place : u.raw_place; }
  __device__ T* values(const ReplayUnit& u) const {
    return at<T>(args.plan.shared.values) + u.place * args.plan.records * args.plan.unit_values;
  }
  __device__ float* gates(const ReplayUnit& u) const {
    return at<float>(args.plan.shared.gates) + u.place * 3 * args.plan.records;
  }
  __device__ float* head_numbers(const ReplayUnit& u) const { return schedule().head_numbers[u.place]; }

  __device__ static bool has_state(const ReplayUnit& u) { return u.kind >= UnitKind::kDirect; }
  __device__ static bool is_fold(const ReplayUnit& u) { return kTokens != 1 && u.kind == UnitKind::kFold; }
  __device__ static bool is_walk(const ReplayUnit& u) { return u.kind == UnitKind::kWalk || is_fold(u); }
  __device__ static bool is_read_directly(const ReplayUnit& u) { return u.kind == UnitKind::kDirect || is_fold(u); }
  // The first of the records that a direct readout takes beside the state.
  __device__ static int first_record(const ReplayUnit& u) { return is_fold(u) ? u.history : 0; }
  __device__ int count(const ReplayUnit& u) const { return has_state(u) ? u.history + tokens() : 0; }
  __device__ int position(const ReplayUnit& u, int j) const {
    const int at = u.start + j;
    return at < args.capacity ? at : at - args.capacity;
  }
  __device__ static int slice_rows(const ReplayUnit& u) {
    return kAreWhole ? kSliceRows : min(kSliceRows, u.values - warp() * kSliceRows);
  }
  __device__ int64_t token(const ReplayUnit& u, int t) const { return int64_t{u.row} * tokens() + t; }
  __device__ bool appends_gates(const ReplayUnit& u) const { return u.first_value == 0; }
  __device__ bool appends_key(const ReplayUnit& u) const {
    return u.first_value == 0 && u.head == u.key_head * static_cast<int>(args.by_share.divisor);
  }

  // --- What is to come. ---

  // Makes the units whose numbers the block knows, a warp each, and asks for the others; the block together.
  __device__ void begin(uint32_t& answer) const {
    const int warps = blockDim.x / 32;
    schedule().initialise(threadIdx.x, warps, tokens());
    // What lies past a row's channels stays as it is now.
    if (key_size() < K) {
      for (int i = threadIdx.x; i < args.plan.unit_values * K; i += blockDim.x) at<float>(0)[i] = 0;
      if constexpr (kPerChannel)
        for (int i = threadIdx.x; i < args.plan.places * args.plan.records * K; i += blockDim.x)
          at<float>(args.plan.shared.decays)[i] = 0;
    }
    let_engine_see();
    if (warp() == asker() && lane() == 0) ask(answer);
    for (int index = warp(); index <= kLead; index += warps) {
      copy_row(index, known_number(index));
      wait_for_copies();
      __syncwarp();
      make_unit(index);
    }
    __syncthreads();
    if (warp() == asker()) ask_for_row(kLead + 1, known_number(kLead + 1));
    if (warp() == deriver())
      for (int index = 0; index <= kLead; ++index) count_walks(index);
  }

  // Gives unit `index` its number and begins to read the numbers of its row; for a warp.
  __device__ void copy_row(int index, uint32_t number) const {
    const int me = lane();
    if (me == 0) schedule().number[index % kRowTurns] = number;
    if (number < args.plan.units && me < kRowWords && args.row_words[me] != nullptr) {
      const int64_t b = args.by_row.quotient(number);
      copy_word_async(schedule().row[index % kRowTurns].words + me, args.row_words[me] + (me < kSlotWord ? 2 * b : b));
    }
  }
  __device__ void ask_for_row(int index, uint32_t number) const {
    copy_row(index, number);
    schedule().rows_there[index % kRowTurns].arrive_after_copies();
    arrive(schedule().rows_there[index % kRowTurns]);
  }
  __device__ static uint32_t known_number(int index) { return blockIdx.x + index * gridDim.x; }

  // Counts the walks before unit `index`, of which all else has been made; for a warp.
  __device__ void count_walks(int index) const {
    if (lane() == 0) {
      ReplayUnit& u = schedule().unit[index % kUnits];
      u.walks = u.key_place = 0;
      if (index > 0) {
        const ReplayUnit& before = unit(index - 1);
        const bool was_walk = is_walk(before);
        u.walks = before.walks + was_walk;
        const int key_place = before.key_place + was_walk;
        u.key_place = key_place < args.plan.key_places ? key_place : 0;
      }
    }
    arrive(schedule().derived[index % kUnits]);
  }
  // Makes unit `index` of its row's numbers; for a warp.
  __device__ void make_unit(int index) const {
    ReplayUnit& u = schedule().unit[index % kUnits];
    const uint32_t number = schedule().number[index % kRowTurns];
    if (number >= args.plan.units) {
      u.kind = UnitKind::kNone;
      return;
    }
    const int32_t* row = schedule().row[index % kRowTurns].words;
    const int b = args.by_row.quotient(number), in_row = number - b * args.by_row.divisor;
    const int head = args.by_part.quotient(in_row), part = in_row - head * args.by_part.divisor;
    const int key_head = args.by_share.quotient(head), me = lane();
    if (me < kOffsets) {
      const bool are_records = me == kHeadRecords || me == kKeyHeadRecords;
      const int of = me == kFirstOut ? b * tokens()
                                     : row[me == kSliceIn   ? kInWord
                                           : me == kRowsOut ? kOutWord
                                                            : kSlotWord];
      const int heads = me == kKeyHeadRecords ? args.key_heads : args.heads;
      int64_t offset = (int64_t{of} * heads + (me == kKeyHeadRecords ? key_head : head)) *
                       (are_records ? args.capacity : args.values);
      const int first = part * args.plan.unit_values;
      if (me == kFirstOut) offset += first;
      if (me == kSliceIn) offset = kIsWords ? (offset + first) * key_size() * 4 : (2 * offset + first) * key_size() * 2;
      u.offset[me] = offset;
    }
    if (me > 0) return;
    u.place = args.plan.places == kLead + 2 ? index % (kLead + 2) : index % (kLead + 1);
    u.raw_place = index % kLead;
    u.row = b;
    u.head = head;
    u.key_head = key_head;
    u.first_value = part * args.plan.unit_values;
    u.values = min(args.plan.unit_values, args.values - u.first_value);
    const int history = row[kHistoryWord], slot = row[kSlotWord], in = row[kInWord], out = row[kOutWord];
    const int limit = args.rows.flush_limit != nullptr ? row[kLimitWord] : args.window;
    const int64_t base = int64_t{row[kBaseWord + 1]} << 32 | static_cast<uint32_t>(row[kBaseWord]);
    const bool will_flush = history + tokens() > args.window || history >= limit;
    u.history = history;
    u.will_flush = will_flush;
    if (slot == kPaddingSlot) {
      u.kind = UnitKind::kPadding;
    } else if (!is_in_pool(slot, in, out, history, base, args.slots, args.checkpoints, args.window)) {
      u.kind = UnitKind::kOutside;
      if (in_row == 0 && !args.are_tokens_just_made) report_fault(args.fault, args.op, b, slot, in, out);
    } else {
      u.kind = args.readout == Readout::kExact ? UnitKind::kWalk
               : !will_flush                   ? UnitKind::kDirect
               : tokens() == 1                 ? UnitKind::kWalk
                                               : UnitKind::kFold;
      u.start = ring_start(base, args.capacity);
    }
  }

  // Derives the unit after those whose records are asked for; for a warp.
  __device__ void derive_ahead(int index) const {
    const int next = index + kLead + 1;
    wait_until_done(next - kUnits);
    schedule().rows_there[next % kRowTurns].wait((next - kLead - 1) / kRowTurns);
    make_unit(next);
    __syncwarp();
    count_walks(next);
  }
  // Takes the counter's answer to the question asked a unit ago as the number of the unit after that one, begins to
  // read the numbers of its row, and asks again; for a warp, whose first lane has the answer.
  __device__ void ask_ahead(int index, uint32_t& answer) const {
    const int next = index + kLead + 2;
    wait_until_derived(index);  // whose turn at the row's place it was
    const uint32_t number =
        args.asked != nullptr ? arranged(__shfl_sync(kWarp, answer, 0) + (kLead + 2) * gridDim.x) : args.plan.units;
    if (lane() == 0) ask(answer);
    ask_for_row(next, number);
  }
  // The unit to take for unit `number` (replay_order.cuh).
  __device__ uint32_t arranged(uint32_t number) const {
    const int row = args.by_row.quotient(number), place = row - args.first_arranged_row;
    if (args.first_arranged_row < 0 || place < 0 || number >= args.plan.units) return number;
    return number + (order().row_at(place, arranged_rows()) - place) * args.by_row.divisor;
  }
  // (An H200, GDN of 32 heads, batch 256, L 16: with none of 256 direct rows left to the end 159 us, with 64 151, 96
  // 149, 128 150; planes by now 134 with 150, 131 with 176, 127 with 220, 122 with all, which leaves the flushing ones
  // to the beginning; four tokens 321 with none, 296 with 96, 281 with 160 and with all.)
  __device__ void look_at_rows() const {
    const int tail = tokens() == 1 && kIsWords ? 96 : 256;
    if (args.first_arranged_row >= 0) order().look_at(args.rows, args.first_arranged_row, tokens(), args.window, tail);
  }
  __device__ RowOrder& order() const { return *at<RowOrder>(args.plan.shared.order); }
  __device__ int arranged_rows() const { return args.rows.count - args.first_arranged_row; }
  __device__ static int asker() { return blockDim.x / 32 == 8 ? 3 : blockDim.x / 32 >= 4 ? 1 : deriver(); }
  __device__ static int deriver() { return blockDim.x / 32 - 1; }
  // (As atomicAdd it would be waited for at once.)
  __device__ void ask(uint32_t& answer) const {
    if (args.asked != nullptr)
      asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(answer) : "l"(args.asked) : "memory");
  }

  // Begins to read the records of unit `index`, if it has a state; for a warp.
  __device__ void copy_records(int index) const {
    const ReplayUnit& u = unit(index);
    if (u.kind == UnitKind::kNone) return;
    Arrival<true>& arrival = schedule().records[index % kUnits];
    const int me = lane(), all = count(u), committed = all == 0 ? 0 : u.history;
    const int key_bytes = key_size() * static_cast<int>(sizeof(T)), decay_bytes = key_size() * 4;
    const int value_bytes = u.values * static_cast<int>(sizeof(T));
    const bool has_even_values = kAreWhole || (value_bytes % 16 == 0 && args.values * sizeof(T) % 16 == 0);
    arrival.begin(all * (key_bytes + (kPerChannel ? decay_bytes : 0) + (has_even_values ? value_bytes : 0)) +
                  (all - committed) * key_bytes);
    const int64_t of_head = u.offset[kHeadRecords], of_key_head = u.offset[kKeyHeadRecords];
    // Records that follow one another in the ring and in shared memory are one piece; a token is one always. Pieces of
    // keys, queries, values and decays, in one loop: the engine takes them from a warp's lanes in turn.
    const bool has_key_runs = kAreWhole || (kHasCopyEngine && key_size() == K);
    const bool has_value_runs = kHasCopyEngine && has_even_values && args.plan.unit_values == args.values;
    const int run = committed > 0 ? min(committed, args.capacity - position(u, 0)) : 0;
    const int key_pieces = has_key_runs ? 2 + tokens() : all, value_pieces = has_value_runs ? 2 + tokens() : all;
    const int values_end = key_pieces + tokens() + value_pieces;
    const int pieces = all == 0 ? 0 : values_end + (kPerChannel ? key_pieces : 0);
#pragma unroll 1
    for (int i = me; i < pieces; i += 32) {
      const bool is_query = i >= key_pieces && i < key_pieces + tokens();
      const bool is_value = i >= key_pieces + tokens() && i < values_end;
      const bool has_runs = is_value ? has_value_runs : has_key_runs;
      const int piece = i - (is_value ? key_pieces + tokens() : i >= values_end ? values_end : 0);
      const int j = is_query                  ? committed + i - key_pieces
                    : !has_runs || piece == 0 ? piece
                    : piece == 1              ? run
                                              : committed + piece - 2;
      const int size = is_query || !has_runs || piece >= 2 ? 1 : piece == 0 ? run : committed - run;
      if (size <= 0) continue;
      const int t = j - committed;
      const bool is_token = is_query || (t >= 0 && (!has_runs || piece >= 2));
      const int64_t from = position(u, j), of_token = token(u, t);
      const int in_token = u.key_head * key_size();
      const void* source;
      void* to;
      int bytes = key_bytes;
      if (is_query) {
        source = args.query + of_token * args.query_stride + in_token;
        to = raw_queries(u) + t * K;
      } else if (is_value) {
        source = is_token ? args.value + of_token * args.value_stride + u.head * args.values + u.first_value
                          : args.ring_value + (of_head + from) * args.values + u.first_value;
        to = values(u) + j * args.plan.unit_values;
        bytes = value_bytes;
      } else if (kPerChannel && i >= values_end) {
        source = is_token ? args.log_decay + (of_token * args.heads + u.head) * key_size()
                          : args.ring_decay + (of_head + from) * key_size();
        to = decays(u) + j * K;
        bytes = decay_bytes;
      } else {
        source = is_token ? args.key + of_token * args.key_stride + in_token
                          : args.ring_key + (of_key_head + from) * key_size();
        to = raw_keys(u) + j * K;
      }
      if (!kAreWhole && is_value && !has_even_values) {
        for (int word = 0; word < bytes / 4; ++word)
          copy_word_async(static_cast<uint32_t*>(to) + word, static_cast<const uint32_t*>(source) + word);
        continue;
      }
      arrival.copy(to, source, size * bytes);
    }
    float* to_gates = gates(u);
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
      if (me == 0) copy_word_async(head_numbers(u), args.a_log + u.head);
      if (me == 1 && args.skip != nullptr) copy_word_async(head_numbers(u) + 1, args.skip + u.head);
    }
    arrival.end();
  }

  // Begins to read the slices that can follow when all lanes of the warp have read the one of a unit.
  __device__ void copy_next(int index) const {
    const int last = index + (kIsWords ? 1 : 2);
    wait_until_derived(last);
    __syncwarp();
    if constexpr (kIsWords) {
      copy_slice(index + 1, index + 1, kHi);
    } else {
      // The lower halves of a walk take the place of the next unit's upper ones, which then follow them.
      if (is_walk(unit(index))) copy_slice(index + 1, index + 1, kHi);
      if (is_walk(unit(index + 1)))
        copy_slice(index + 1, index, kLo);
      else
        copy_slice(index + 2, index, kHi);
    }
  }
  __device__ void copy_first() const {
    copy_slice(0, 0, kHi);
    if (kIsWords) return;
    if (is_walk(unit(0)))
      copy_slice(0, 1, kLo);
    else
      copy_slice(1, 1, kHi);
  }
  // Begins to read the warp's slice of unit `index`, words or one of its halves, to the place of unit `to`.
  enum Half { kHi, kLo };
  __device__ void copy_slice(int index, int to, Half half) const {
    const ReplayUnit& u = unit(index);
    const int row_bytes = key_size() * (kIsWords ? 4 : 2);
    const int row = warp() * kSliceRows + (half == kLo ? args.values : 0);
    const char* from = reinterpret_cast<const char*>(args.checkpoint) + u.offset[kSliceIn] + row * row_bytes;
    State::read(half == kHi ? hi_slice(index) : schedule().lo_slices[warp()], slice(to), from,
                has_state(u) ? max(0, slice_rows(u)) : 0, row_bytes);
  }
  __device__ Arrival<false>& hi_slice(int index) const {
    return schedule().slices[warp()][kIsWords ? 0 : index % 2];
  }
  __device__ void wait_for_slice(int index) const {
    const ReplayUnit& u = unit(index);
    hi_slice(index).wait(kIsWords ? index : index / 2);
    if (!kIsWords && is_walk(u)) schedule().lo_slices[warp()].wait(u.walks);
  }

  // A warp's part of a barrier's phase, after all that its lanes have done.
  __device__ static void arrive(PhaseBarrier& barrier) {
    __syncwarp();
    if (lane() == 0) barrier.arrive();
  }
  // Until no warp needs what is there for unit `index` any more.
  __device__ void wait_until_done(int index) const {
    if (index >= 0) schedule().done[index % kUnits].wait(index / kUnits);
  }
  __device__ void wait_until_derived(int index) const {
    schedule().derived[index % kUnits].wait(index / kUnits);
  }
  __device__ void wait_for_records(int index) const {
    schedule().records[index % kUnits].wait(index / kUnits);
  }

  // The decay of a token, record j, with one gate a head.
  __device__ float decay_of_token(const ReplayUnit& u, int j) const {
    const float* of_gates = gates(u);
    return kIsDelta ? expf(of_gates[j]) : expf(__fmul_rn(-expf(head_numbers(u)[0]), of_gates[args.plan.records + j]));
  }

  // Keeps record j's values in the ring.
  __device__ void append_value(const ReplayUnit& u, int j, int position) const {
    const int quad = 4 * lane();
    if (quad < u.values)
      store_quad(args.ring_value + (u.offset[kHeadRecords] + position) * args.values + u.first_value + quad,
                 quad_at(values(u) + j * args.plan.unit_values + quad));
  }
};

}  // namespace replayssm
