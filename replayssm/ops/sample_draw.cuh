// Internal to sampling on a GPU: the draw of one row's token, steps 3 to 6 of sample.h, by one block. Every function is
// called by the whole block unless it says otherwise, and what it returns is the same in each thread.
//
// The tokens that may stay are mostly few: a bound on how far they lie below the largest is found first, those within
// it are gathered and sorted, and the steps go through them in order. A row with more of them than the list holds is
// not sorted: the places where its cumulative sums pass a number are searched for.
#pragma once

#include <cfloat>
#include <cstdint>

#include "replayssm/ops/sample.cuh"

namespace replayssm {

inline constexpr int kDrawThreads = 512;
inline constexpr int kDrawWarps = kDrawThreads / 32;
inline constexpr int kListTokens = 4096;
inline constexpr int kDepthBins = 4096;
inline constexpr double kBinsPerUnit = 128.0;
inline constexpr int kSearchWays = 8;

// Of a block, in shared memory.
struct DrawMemory {
  uint64_t list[kListTokens];  // (entry_of) of tokens
  union {
    double through[kListTokens];  // the weights' sum up to and with the list's token
    uint32_t bins[kDepthBins];    // tokens by depth
  };
  double sums[kDrawWarps][kSearchWays];
  double results[kSearchWays];
  uint32_t words[kDrawWarps];
  uint32_t count;
  int section;
  double before;
};

// What a block knows of its row.
struct Draw {
  LogitRow row;
  SampleSettings settings;
  const SectionSum* sums;
  int sections;
  float largest;  // logit after the temperature
  int32_t best;   // the token that has it
  double uniform;
  double total;  // of all weights, if needs_total
};

// The sum over the lanes, the same bits in each. Every lane takes part.
__device__ inline double sum_warp(double value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = value + __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__device__ inline uint32_t max_of_block(uint32_t value, DrawMemory& memory) {
  value = __reduce_max_sync(kAllLanes, value);
  if (threadIdx.x % 32 == 0) memory.words[threadIdx.x / 32] = value;
  __syncthreads();
  value = __reduce_max_sync(kAllLanes, memory.words[threadIdx.x % kDrawWarps]);
  __syncthreads();
  return value;
}
__device__ inline uint32_t min_of_block(uint32_t value, DrawMemory& memory) {
  return ~max_of_block(~value, memory);
}

// A thread's place in the cumulative sum over the threads, which never falls: at(0) is the place before it, at(its own
// value) the one behind it and that of the next thread before it.
struct Prefix {
  double warps, lanes, total;
  __device__ double at(double part) const { return warps + (lanes + part); }
};

// The values of a warp's lower lanes, added in order, and the sum of all lanes. Every lane takes part.
__device__ inline void scan_warp(double value, double& lower, double& all) {
  lower = 0.0, all = 0.0;
#pragma unroll 4
  for (int lane = 0; lane < 32; ++lane) {
    if (lane == threadIdx.x % 32) lower = all;
    all = all + __shfl_sync(kAllLanes, value, lane);
  }
}

__device__ inline Prefix scan_block(double value, DrawMemory& memory) {
  Prefix prefix;
  double all;
  scan_warp(value, prefix.lanes, all);
  if (threadIdx.x % 32 == 0) memory.sums[threadIdx.x / 32][0] = all;
  __syncthreads();
  prefix.warps = 0.0, prefix.total = 0.0;
#pragma unroll
  for (int warp = 0; warp < kDrawWarps; ++warp) {
    if (warp == threadIdx.x / 32) prefix.warps = prefix.total;
    prefix.total = prefix.total + memory.sums[warp][0];
  }
  __syncthreads();
  return prefix;
}

// ---- unfiltered rows ----

// Thread t owns sections [first, end), neighbours.
struct SectionPrefix {
  int first, end;
  Prefix masses;
};

__device__ inline double section_mass(const Draw& draw, int section) {
  const SectionSum sum = draw.sums[section];
  return sum.sum * weight_of(sum.largest / draw.row.temperature, draw.largest);
}

__device__ inline SectionPrefix scan_sections(const Draw& draw, DrawMemory& memory) {
  const int per_thread = (draw.sections + kDrawThreads - 1) / kDrawThreads;
  SectionPrefix prefix;
  prefix.first = min(static_cast<int>(threadIdx.x) * per_thread, draw.sections);
  prefix.end = min(prefix.first + per_thread, draw.sections);
  double mass = 0.0;
  for (int section = prefix.first; section < prefix.end; ++section) mass = mass + section_mass(draw, section);
  prefix.masses = scan_block(mass, memory);
  return prefix;
}

// The first token of a section whose cumulative weight is above `target`, by one warp; `before` is that of the tokens
// before the section. Where the section's own sum, added in another order, stays below: its last token with a weight.
__device__ inline uint32_t draw_in_section(const Draw& draw, int section, double before, double target) {
  const int first = section * kSectionTokens + static_cast<int>(threadIdx.x % 32) * kLaneTokens;
  double weights[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) weights[i] = weight_of(read_scaled(draw.row, first + i), draw.largest);
  double mass = 0.0, lower, all;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) mass = mass + weights[i];
  scan_warp(mass, lower, all);
  uint32_t drawn = UINT32_MAX, last = 0;
  double part = 0.0;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    part = part + weights[i];
    if (drawn == UINT32_MAX && before + (lower + part) > target) drawn = first + i;
    if (weights[i] > 0.0) last = first + i;
  }
  drawn = __reduce_min_sync(kAllLanes, drawn);
  last = __reduce_max_sync(kAllLanes, last);
  return drawn == UINT32_MAX ? last : drawn;
}

// Step 6 alone, over tokens in order. Only the first warp gets the token.
__device__ inline int32_t draw_by_token(const Draw& draw, const SectionPrefix& prefix, DrawMemory& memory) {
  double mass = 0.0;
  for (int section = prefix.first; section < prefix.end; ++section) mass = mass + section_mass(draw, section);
  const double target = draw.uniform * prefix.masses.total;
  const uint32_t owner = min_of_block(prefix.masses.at(mass) > target ? threadIdx.x : UINT32_MAX, memory);
  if (threadIdx.x == owner) {
    double part = 0.0;
    for (int section = prefix.first; section < prefix.end; ++section) {
      memory.section = section;
      memory.before = prefix.masses.at(part);
      part = part + section_mass(draw, section);
      if (prefix.masses.at(part) > target) break;
    }
  }
  __syncthreads();
  if (threadIdx.x >= 32) return kNoToken;
  return static_cast<int32_t>(draw_in_section(draw, memory.section, memory.before, target));
}

// ---- passes over a row ----

// Visits the sections whose largest logit `is_wanted`, shared out among the warps: visit(section, the lane's logits).
template <typename IsWanted, typename Visit>
__device__ inline void for_sections(const Draw& draw, const IsWanted& is_wanted, const Visit& visit) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int begin = warp; begin < draw.sections; begin += kDrawThreads) {
    const int own = begin + lane * kDrawWarps;
    const bool wanted = own < draw.sections && is_wanted(draw.sums[own].largest / draw.row.temperature);
    for (uint32_t left = __ballot_sync(kAllLanes, wanted); left != 0; left &= left - 1) {
      const int section = begin + (__ffs(static_cast<int>(left)) - 1) * kDrawWarps;
      float logits[kLaneTokens];
      read_scaled_section(draw.row, section, logits);
      visit(section, logits);
    }
  }
}

// ---- rows with few candidates ----

// Entries rise as logits fall, those of equals with the token.
__device__ inline uint64_t entry_of(float logit, uint32_t token) {
  return static_cast<uint64_t>(~order_of(logit)) << 32 | token;
}
__device__ inline float logit_of_entry(uint64_t entry) {
  return logit_of(~static_cast<uint32_t>(entry >> 32));
}

// Sorts the first `count` entries of the list.
__device__ inline void sort_list(uint32_t count, DrawMemory& memory) {
  uint32_t size = 2;
  while (size < count) size *= 2;
  for (uint32_t i = count + threadIdx.x; i < size; i += kDrawThreads) memory.list[i] = UINT64_MAX;
  __syncthreads();
  for (uint32_t run = 2; run <= size; run *= 2) {
    for (uint32_t stride = run / 2; stride > 0; stride /= 2) {
      for (uint32_t pair = threadIdx.x; pair < size / 2; pair += kDrawThreads) {
        const uint32_t low = 2 * pair - (pair & (stride - 1)), high = low + stride;
        const uint64_t a = memory.list[low], b = memory.list[high];
        if ((a > b) == ((low & run) == 0)) {
          memory.list[low] = b;
          memory.list[high] = a;
        }
      }
      // The pairs of a warp lie within 64 entries of their own while strides are at most 32.
      if (stride > 32 || (stride == 1 && run > 32)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

// Gathers the tokens whose depth is at most `depth`, in no order. Returns how many there are; beyond kListTokens the
// list is of no use.
__device__ inline uint32_t gather(const Draw& draw, double depth, DrawMemory& memory) {
  if (threadIdx.x == 0) memory.count = 0;
  __syncthreads();
  for_sections(
      draw, [&](float largest) { return depth_of(largest, draw.largest) <= depth; },
      [&](int section, const float(&logits)[kLaneTokens]) {
        uint32_t kept = 0;
#pragma unroll
        for (int i = 0; i < kLaneTokens; ++i)
          if (section_token(section, i) < draw.row.vocabulary && depth_of(logits[i], draw.largest) <= depth)
            kept |= 1u << i;
        const uint32_t count = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(__popc(kept)));
        if (count == 0) return;
        uint32_t place = 0;
        if (threadIdx.x % 32 == 0) place = atomicAdd(&memory.count, count);
        place = __shfl_sync(kAllLanes, place, 0);
#pragma unroll
        for (int i = 0; i < kLaneTokens; ++i) {
          const uint32_t lanes = __ballot_sync(kAllLanes, (kept >> i & 1u) != 0);
          const uint32_t own = place + __popc(lanes & ((1u << threadIdx.x % 32) - 1));
          if ((kept >> i & 1u) != 0 && own < kListTokens)
            memory.list[own] = entry_of(logits[i], static_cast<uint32_t>(section_token(section, i)));
          place += __popc(lanes);
        }
      });
  __syncthreads();
  const uint32_t count = memory.count;
  __syncthreads();
  return count;
}

// The depth of the k-th largest of the sections' largest logits, for sections that the list holds: at least k tokens
// lie within it.
__device__ inline double depth_of_sections(const Draw& draw, int k, DrawMemory& memory) {
  for (int section = static_cast<int>(threadIdx.x); section < draw.sections; section += kDrawThreads)
    memory.list[section] = entry_of(draw.sums[section].largest / draw.row.temperature, section);
  sort_list(draw.sections, memory);
  return depth_of(logit_of_entry(memory.list[k - 1]), draw.largest);
}

// From a count by bins of depth of the tokens within `depth`, which are too many for the list: a depth that holds what
// top-k or, without it, top-p leaves, or where the list cannot take so many one that fills the list; below 0 if nothing
// fits.
__device__ inline double depth_by_bins(const Draw& draw, double depth, DrawMemory& memory) {
  for (int bin = static_cast<int>(threadIdx.x); bin < kDepthBins; bin += kDrawThreads) memory.bins[bin] = 0;
  __syncthreads();
  for_sections(
      draw, [&](float largest) { return depth_of(largest, draw.largest) <= depth; },
      [&](int section, const float(&logits)[kLaneTokens]) {
#pragma unroll
        for (int i = 0; i < kLaneTokens; ++i) {
          const double own = depth_of(logits[i], draw.largest);
          if (section_token(section, i) < draw.row.vocabulary && own <= depth)
            atomicAdd(&memory.bins[static_cast<int>(fmin(own * kBinsPerUnit, kDepthBins - 1.0))], 1u);
        }
      });
  __syncthreads();
  constexpr int kOwnBins = kDepthBins / kDrawThreads;
  const int first = static_cast<int>(threadIdx.x) * kOwnBins;
  const bool is_counted = has_top_k(draw.settings, draw.row.vocabulary);
  // A bin's tokens have at least the weight of its end, the last bin's none.
  const auto amount = [&](int bin) {
    if (is_counted) return static_cast<double>(memory.bins[bin]);
    return bin == kDepthBins - 1 ? 0.0 : memory.bins[bin] * exp(-(bin + 1) / kBinsPerUnit);
  };
  double tokens = 0.0, sum = 0.0;
  for (int bin = first; bin < first + kOwnBins; ++bin) {
    tokens = tokens + memory.bins[bin];
    sum = sum + amount(bin);
  }
  const Prefix counts = scan_block(tokens, memory), sums = scan_block(sum, memory);
  const double goal =
      is_counted ? static_cast<double>(draw.settings.top_k) : static_cast<double>(draw.settings.top_p) * draw.total;
  uint32_t enough = kDepthBins, room = 0;
  tokens = 0.0, sum = 0.0;
  for (int bin = first; bin < first + kOwnBins; ++bin) {
    tokens = tokens + memory.bins[bin];
    sum = sum + amount(bin);
    if (enough == kDepthBins && sums.at(sum) >= goal) enough = bin + 1;
    if (counts.at(tokens) <= kListTokens) room = bin + 1;
  }
  const uint32_t bins = min(min_of_block(enough, memory), max_of_block(room, memory));
  return bins == 0 ? -1.0 : fmin(depth, bins / kBinsPerUnit);
}

// Steps 3 to 6 on the list, sorted. `most` is the depth beyond which step 5 drops tokens; `is_whole`: the list has all
// that lie within it. kNoToken if the list does not have all that stay.
__device__ inline int32_t draw_from_list(const Draw& draw, uint32_t count, double most, bool is_whole,
                                         DrawMemory& memory) {
  const SampleSettings& settings = draw.settings;
  if (count == 0) return kNoToken;
  uint32_t left = count;
  const bool is_counted = has_top_k(settings, draw.row.vocabulary);
  if (is_counted) {
    const auto k = static_cast<uint32_t>(settings.top_k);
    if (count < k) return kNoToken;
    const auto smallest = static_cast<uint32_t>(memory.list[k - 1] >> 32);
    for (uint32_t i = k + threadIdx.x; i < left; i += kDrawThreads)
      if (static_cast<uint32_t>(memory.list[i] >> 32) != smallest) left = i;
    left = min_of_block(left, memory);
  }
  const auto weight = [&](uint32_t i) { return weight_of(logit_of_entry(memory.list[i]), draw.largest); };
  const uint32_t per_thread = (left + kDrawThreads - 1) / kDrawThreads;
  const uint32_t first = min(threadIdx.x * per_thread, left), end = min(first + per_thread, left);
  double sum = 0.0;
  for (uint32_t i = first; i < end; ++i) sum = sum + weight(i);
  const Prefix prefix = scan_block(sum, memory);
  sum = 0.0;
  for (uint32_t i = first; i < end; ++i) {
    sum = sum + weight(i);
    memory.through[i] = prefix.at(sum);
  }
  __syncthreads();

  double enough = INFINITY;
  if (settings.top_p < 1.0f) {
    enough = static_cast<double>(settings.top_p) * (is_counted ? prefix.total : draw.total);
    if (!is_counted && !is_whole && prefix.total < enough) return kNoToken;
  }
  uint32_t kept = left;
  for (uint32_t i = max(first, 1u); i < end && kept == left; ++i)
    if (memory.through[i - 1] >= enough || depth_of(logit_of_entry(memory.list[i]), draw.largest) > most) kept = i;
  kept = min_of_block(kept, memory);
  const double target = draw.uniform * memory.through[kept - 1];
  uint32_t drawn = kept - 1;
  for (uint32_t i = first; i < min(end, kept) && drawn == kept - 1; ++i)
    if (memory.through[i] > target) drawn = i;
  drawn = min_of_block(drawn, memory);
  return static_cast<int32_t>(static_cast<uint32_t>(memory.list[drawn]));
}

// ---- rows with many candidates ----

// What a search adds up over tokens whose depth is at most `depth`: ones or weights, by order_of their logits; or ones
// over the tokens of one order, by token.
enum class Measure { kCount, kWeight, kPlace };
struct Measured {
  Measure measure;
  double depth;
  uint32_t order;  // kPlace's
};

// Leaves in memory.results[i] the sum over the tokens from least + i * step to `last`, of what they are measured by.
__device__ __noinline__ void sum_from(const Draw& draw, const Measured& measured, uint32_t least, uint32_t step,
                                      uint32_t last, DrawMemory& memory) {
  const bool is_place = measured.measure == Measure::kPlace;
  double sums[kSearchWays] = {};
  for_sections(
      draw, [&](float largest) { return order_of(largest) >= (is_place ? measured.order : least); },
      [&](int section, const float(&logits)[kLaneTokens]) {
#pragma unroll
        for (int i = 0; i < kLaneTokens; ++i) {
          const uint32_t order = order_of(logits[i]);
          const uint32_t place = is_place ? static_cast<uint32_t>(section_token(section, i)) : order;
          if (place < least || place > last || (is_place && order != measured.order)) continue;
          if (depth_of(logits[i], draw.largest) > measured.depth) continue;
          const double amount = measured.measure == Measure::kWeight ? weight_of(logits[i], draw.largest) : 1.0;
#pragma unroll
          for (int way = 0; way < kSearchWays; ++way)
            if (place >= least + way * step) sums[way] = sums[way] + amount;
        }
      });
#pragma unroll
  for (int way = 0; way < kSearchWays; ++way) {
    const double sum = sum_warp(sums[way]);
    if (threadIdx.x % 32 == 0) memory.sums[threadIdx.x / 32][way] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kSearchWays) {
    double sum = 0.0;
    for (int warp = 0; warp < kDrawWarps; ++warp) sum = sum + memory.sums[warp][threadIdx.x];
    memory.results[threadIdx.x] = sum;
  }
  __syncthreads();
}

// The largest place from which on the sum reaches `goal`, `least` if no other does; and the sum behind that place.
struct Found {
  uint32_t place;
  double above;
};
// No token lies behind `last`; goal > 0.
__device__ __noinline__ Found search(const Draw& draw, const Measured& measured, uint32_t least, uint32_t last,
                                     double goal, DrawMemory& memory) {
  double above = 0.0;  // the sum behind `last`, below the goal
  while (least < last) {
    const uint32_t step = (last - least) / (kSearchWays + 1) + 1;
    sum_from(draw, measured, least + step, step, last, memory);
    int way = kSearchWays - 1;
    while (way >= 0 && !(above + memory.results[way] >= goal)) --way;
    if (way + 1 < kSearchWays) above = above + memory.results[way + 1];
    least += (way + 1) * step;
    last = min(last, least + step - 1);
  }
  return {least, above};
}

// The sum over all places from `least` to `last`.
__device__ inline double sum_of(const Draw& draw, const Measured& measured, uint32_t least, uint32_t last,
                                DrawMemory& memory) {
  sum_from(draw, measured, least, 0, last, memory);
  return memory.results[0];
}

// Steps 3 to 6 for any row. Tokens of one logit have one weight, so that of them only the number that stays and the
// number before the drawn one count.
__device__ __noinline__ int32_t draw_from_row(const Draw& draw, double most, DrawMemory& memory) {
  const SampleSettings& settings = draw.settings;
  const uint32_t top = order_of(draw.largest), last_token = static_cast<uint32_t>(draw.row.vocabulary) - 1;
  const bool is_counted = has_top_k(settings, draw.row.vocabulary);
  const auto equals_of = [&](uint32_t order) {
    return sum_of(draw, {Measure::kPlace, INFINITY, order}, 0, last_token, memory);
  };
  uint32_t least = order_of(-FLT_MAX);
  if (is_counted) least = search(draw, {Measure::kCount, INFINITY, 0}, least, top, settings.top_k, memory).place;

  const Measured weights = {Measure::kWeight, most, 0};
  const auto weight = [&](uint32_t order) { return weight_of(logit_of(order), draw.largest); };
  // Of the tokens of an order those that stay, if step 4 leaves so many of them.
  const auto kept_of = [&](uint32_t order, double left) {
    return depth_of(logit_of(order), draw.largest) <= most ? fmin(left, equals_of(order)) : 0.0;
  };
  double left = INFINITY, kept_sum;  // `left`: tokens of the order `least`
  if (settings.top_p < 1.0f) {
    const double total = is_counted ? sum_of(draw, {Measure::kWeight, INFINITY, 0}, least, top, memory) : draw.total;
    const double enough = fmax(static_cast<double>(settings.top_p) * total, DBL_MIN);
    const Found found = search(draw, weights, least, top, enough, memory);
    least = found.place;
    left = fmax(ceil((enough - found.above) / weight(least)), 1.0);
    kept_sum = found.above + kept_of(least, left) * weight(least);
  } else {
    kept_sum = sum_of(draw, weights, least, top, memory);
  }

  const double target = draw.uniform * kept_sum;
  const Found found = search(draw, weights, least, top, nextafter(target, 2.0 * target + 1.0), memory);
  const double kept = kept_of(found.place, found.place == least ? left : INFINITY);
  if (kept == 0.0) return draw.best;  // only where rounding keeps the sum over all from passing the target
  const double number = fmin(floor((target - found.above) / weight(found.place)), kept - 1.0);
  const double from_it = equals_of(found.place) - fmax(number, 0.0);
  return static_cast<int32_t>(
      search(draw, {Measure::kPlace, INFINITY, found.place}, 0, last_token, from_it, memory).place);
}

// ---- filtered rows ----

__device__ inline int32_t draw_filtered(const Draw& draw, DrawMemory& memory) {
  const SampleSettings& settings = draw.settings;
  const bool is_counted = has_top_k(settings, draw.row.vocabulary);
  const double most = settings.min_p > 0.0f ? -log(static_cast<double>(settings.min_p)) : INFINITY;
  // With top-k, top-p is of what that leaves, so that step 5 may not go before.
  const double whole = is_counted ? INFINITY : most;
  double depth = whole;
  if (is_counted && settings.top_k <= draw.sections && draw.sections <= kListTokens)
    depth = depth_of_sections(draw, settings.top_k, memory);
  uint32_t count = UINT32_MAX;
  if (draw.row.vocabulary <= kListTokens || depth < INFINITY) count = gather(draw, depth, memory);
  if (count > kListTokens && (is_counted || settings.top_p < 1.0f)) {
    depth = depth_by_bins(draw, depth, memory);
    count = gather(draw, depth, memory);
  }
  if (count <= kListTokens) {
    sort_list(count, memory);
    const int32_t token = draw_from_list(draw, count, most, depth == whole, memory);
    if (token != kNoToken) return token;
  }
  return draw_from_row(draw, most, memory);
}

}  // namespace replayssm
