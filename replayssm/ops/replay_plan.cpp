#include "replayssm/ops/replay_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "replayssm/ops/tiles.h"

namespace replayssm {
namespace {

// The registers of a warp let a multiprocessor have so many.
constexpr int kMostWarps = 16;

// The blocks for which a multiprocessor has room.
int blocks_with_room(int bytes, int warps, const CudaProperties& gpu) {
  if (bytes > static_cast<int>(gpu.shared_bytes_per_block)) return 0;
  return std::min(static_cast<int>(gpu.shared_bytes_per_multiprocessor) / (bytes + kReservedBytes), kMostWarps / warps);
}

ReplayShared share_memory(const ReplaySizes& sizes, int unit_values, int places, int key_places) {
  ReplayShared shared;
  const auto take = [&](int64_t bytes) {
    const int at = shared.bytes;
    shared.bytes += static_cast<int>((bytes + 15) / 16 * 16);
    return at;
  };
  const int64_t element = sizes.element_bytes, number = sizeof(float);
  const int64_t keys = sizes.key_size <= 64 ? 64 : 128, tokens = sizes.tokens_per_row, records = sizes.window + tokens;
  take(number * keys * unit_values);
  shared.raw_keys = take(element * kLead * records * keys);
  shared.raw_queries = take(element * kLead * tokens * keys);
  shared.decays = take(sizes.gate_size > 1 ? number * places * records * keys : 0);
  shared.keys = take(number * key_places * records * keys);
  const int64_t query_places = tokens == 1 ? places : kLead;
  shared.queries = take((sizes.form == CheckpointForm::kWords ? 4 : 6) * query_places * tokens * keys);
  shared.weights = take(number * query_places * tokens * sizes.window);
  shared.values = take(element * places * records * unit_values);
  shared.gates = take(number * places * 3 * records);
  shared.schedule = take(kReplayScheduleBytes);
  shared.order = take(kRowOrderBytes);  // for any batch, so that whether the kernel has room does not depend on it
  return shared;
}

}  // namespace

ReplayPlan plan_replay(const ReplaySizes& sizes, const CudaProperties& gpu) {
  const int most =
      static_cast<int>(std::min<int64_t>(ceiling_quotient(sizes.values, kSliceRows) * kSliceRows, kMaxUnitValues));
  ReplayPlan best;
  for (int values = most;; values = (values / kSliceRows + 1) / 2 * kSliceRows) {
    ReplayPlan plan;
    plan.unit_values = values;
    plan.warps = values / kSliceRows;
    plan.records = sizes.window + sizes.tokens_per_row;
    plan.units = static_cast<uint32_t>(int64_t{sizes.rows} * sizes.heads * ceiling_quotient(sizes.values, values));
    // One place more than a lead needs, and keys' places for two walks, are not worth a block.
    for (const auto& [places, key_places] : {std::pair(kLead + 1, 1), {kLead + 2, 1}, {kLead + 2, 2}}) {
      const ReplayShared shared = share_memory(sizes, values, places, key_places);
      const int blocks = blocks_with_room(shared.bytes, plan.warps, gpu);
      if (blocks < plan.blocks) continue;
      plan.places = places;
      plan.key_places = key_places;
      plan.shared = shared;
      plan.blocks = blocks;
    }
    const int warps = plan.blocks * plan.warps, of_best = best.blocks * best.warps;
    const auto is_below = [&](int units_a_multiprocessor) {
      return best.units < static_cast<uint32_t>(units_a_multiprocessor * gpu.multiprocessors);
    };
    // Units of whole heads, unless smaller ones let a quarter more warps be there (an H200, 96 x 80 x 128 at L 4: 15 in
    // whole heads take 311 us, 16 in units of 32 rows 354), or cost none where there are few units (32 heads of 128 x
    // 128, batch 32, L 8: 34 us in whole heads, 32 in halves); and with very few so that all multiprocessors have work.
    // Where there are many, one block of eight warps is better than two of four (a gate a channel, batch 256, L 16: 254
    // and 279 us).
    const bool is_even = sizes.values % values == 0;
    if (best.blocks == 0 || 4 * warps >= 5 * of_best || is_below(2) ||
        (is_even && warps >= of_best && best.warps > 4 && is_below(32)))
      best = plan;
    if (values <= 2 * kSliceRows) return best;
  }
}

DecodePlan plan_decode(const DeltaShape& shape, int rows, int window, int tokens_per_row, int element_bytes,
                       CheckpointForm form, const CudaProperties& gpu) {
  const ReplayPlan replay = plan_replay({rows, shape.heads, shape.value_size, shape.key_size, window, tokens_per_row,
                                         element_bytes, shape.gate_size, form},
                                        gpu);
  return {replay.blocks > 0 ? DecodePath::kReplay : DecodePath::kRecurrence, replay};
}

DecodePlan plan_decode(const Mamba2Shape& shape, int rows, int window, int tokens_per_row, int element_bytes,
                       CheckpointForm form, const CudaProperties& gpu) {
  const ReplayPlan replay = plan_replay(
      {rows, shape.heads, shape.head_size, shape.state_size, window, tokens_per_row, element_bytes, 1, form}, gpu);
  return {replay.blocks > 0 ? DecodePath::kReplay : DecodePath::kRecurrence, replay};
}

std::string describe(const DecodePlan& plan) {
  if (plan.path == DecodePath::kRecurrence) return "a warp for each slice of 16 rows";
  const ReplayPlan& replay = plan.replay;
  return fmt::format(
      "{} units of up to {} rows; blocks that stay, of {} warps, {:.1f} KiB, up to {} a multiprocessor; "
      "places for {} units and the keys of {} walks",
      replay.units, replay.unit_values, replay.warps, replay.shared.bytes / 1024.0, replay.blocks, replay.places,
      replay.key_places);
}

}  // namespace replayssm
