#include "replayssm/ops/replay_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "replayssm/ops/tiles.h"

namespace replayssm {
namespace {

// The blocks for whose shared memory a multiprocessor has room.
int blocks_with_room(int bytes, const CudaProperties& gpu) {
  if (bytes > static_cast<int>(gpu.shared_bytes_per_block)) return 0;
  return static_cast<int>(gpu.shared_bytes_per_multiprocessor) / (bytes + kReservedBytes);
}

ReplayShared share_memory(const ReplaySizes& sizes, int unit_values, int raw_buffers) {
  ReplayShared shared;
  const auto take = [&](int64_t bytes) {
    const int at = shared.bytes;
    shared.bytes += static_cast<int>((bytes + 15) / 16 * 16);
    return at;
  };
  const int64_t element = sizes.element_bytes, number = sizeof(float);
  const int64_t keys = sizes.key_size <= 64 ? 64 : 128, tokens = sizes.tokens_per_row, records = sizes.window + tokens;
  take(number * keys * unit_values);
  shared.raw_buffers = raw_buffers;
  shared.raw_keys = take(element * raw_buffers * records * keys);
  shared.raw_queries = take(element * raw_buffers * tokens * keys);
  shared.key_buffers = records <= 20 ? 2 : 1;
  shared.keys = take(number * shared.key_buffers * records * keys);
  shared.queries = take(number * 2 * tokens * keys);
  shared.products = take(number * 2 * tokens * records);
  shared.mutual = take(number * ((records + 3) / 4) * 6);
  shared.values = take(element * 3 * records * unit_values);
  shared.gates = take(number * 3 * 3 * records);
  shared.schedule = take(kReplayScheduleBytes);
  return shared;
}

// A unit of whole heads, or of as many rows as it may have.
int most_rows(int values) {
  const int64_t rows = ceiling_quotient(values, kSliceRows) * kSliceRows;
  return static_cast<int>(std::min<int64_t>(rows, kMaxUnitValues));
}

}  // namespace

// The figures are of an H200, GDN of 32 heads at batch 256 where no other is named.
ReplayPlan plan_replay(const ReplaySizes& sizes, const CudaProperties& gpu) {
  const auto units_of = [&](int rows) {
    return int64_t{sizes.rows} * sizes.heads * ceiling_quotient(sizes.values, rows);
  };
  const auto blocks_of = [&](int rows, int raw_buffers) {
    return blocks_with_room(share_memory(sizes, rows, raw_buffers).bytes, gpu);
  };
  ReplayPlan plan;
  plan.records = sizes.window + sizes.tokens_per_row;
  plan.unit_values = most_rows(sizes.values);
  // Fewer rows a unit where two blocks would not fit a multiprocessor, for one waits while the other works; or where
  // there are few units, down to 32 rows (batch 1, L 16: 7.8 us).
  while (plan.unit_values > kSliceRows) {
    const bool are_many = units_of(plan.unit_values) >= 2 * gpu.multiprocessors;
    if (blocks_of(plan.unit_values, 1) >= 2 && (are_many || plan.unit_values <= 2 * kSliceRows)) break;
    plan.unit_values = (plan.unit_values / kSliceRows + 1) / 2 * kSliceRows;
  }
  plan.units = static_cast<uint32_t>(units_of(plan.unit_values));
  // A warp has two slices (with one, and twice the warps for the rows, a kernel of this kind took 204 us instead of
  // 181), or one where there are few units: that is the shorter way.
  const int slices = plan.unit_values / kSliceRows;
  const bool are_few = slices <= 2 && units_of(plan.unit_values) <= 4 * gpu.multiprocessors;
  plan.row_warps = are_few ? slices : (slices + 1) / 2;
  plan.warp_rows = (slices + plan.row_warps - 1) / plan.row_warps * kSliceRows;
  plan.helpers = std::max(2, slices / 2);
  // A second place for records as they come lets the next ones be fetched a unit earlier (194 to 170 us). It is not
  // worth a block (Mamba-2, 96 x 80 x 128: 382 us instead of 304), and of two helpers the one that fetches is missed
  // where records are made ready (there at L 8: 306 instead of 296 us).
  const bool has_second = plan.helpers > 2 && blocks_of(plan.unit_values, 2) == blocks_of(plan.unit_values, 1);
  plan.shared = share_memory(sizes, plan.unit_values, has_second ? 2 : 1);
  plan.blocks = blocks_with_room(plan.shared.bytes, gpu);
  return plan;
}

DecodePlan plan_decode(const DeltaShape& shape, int rows, int window, int tokens_per_row, int element_bytes,
                       CheckpointForm form, Readout readout, const CudaProperties& gpu) {
  const bool is_direct = readout == Readout::kDirect;
  if (shape.gate_size > 1) return {is_direct ? DecodePath::kPass : DecodePath::kRecurrence, {}};
  const ReplaySizes sizes = {rows,   shape.heads,    shape.value_size, shape.key_size,
                             window, tokens_per_row, element_bytes};
  // A direct readout of planes, or of a window so wide that two blocks of whole heads have no room, is faster by a pass
  // over the checkpoints (planes, L 16, 159 us instead of 169; L 32, T = 4, 396 instead of 762).
  const bool has_room = blocks_with_room(share_memory(sizes, most_rows(shape.value_size), 1).bytes, gpu) >= 2;
  if (is_direct && (form == CheckpointForm::kPlanes || !has_room)) return {DecodePath::kPass, {}};
  const ReplayPlan replay = plan_replay(sizes, gpu);
  if (replay.blocks > 0) return {DecodePath::kReplay, replay};
  return {is_direct ? DecodePath::kPass : DecodePath::kRecurrence, {}};
}

DecodePlan plan_decode(const Mamba2Shape& shape, int rows, int window, int tokens_per_row, int element_bytes,
                       const CudaProperties& gpu) {
  const ReplayPlan replay =
      plan_replay({rows, shape.heads, shape.head_size, shape.state_size, window, tokens_per_row, element_bytes}, gpu);
  return {replay.blocks > 0 ? DecodePath::kReplay : DecodePath::kRecurrence, replay};
}

std::string describe(const DecodePlan& plan) {
  switch (plan.path) {
    case DecodePath::kPass:
      return "queries pulled back, a pass over the checkpoints, flushes beside it";
    case DecodePath::kRecurrence:
      return "a warp for each slice of 16 rows";
    case DecodePath::kReplay:
      break;
  }
  const ReplayPlan& replay = plan.replay;
  return fmt::format(
      "{} units of up to {} rows; blocks that stay, of {} warps with {} rows each and {} helpers, {:.1f} KiB, up to {} "
      "a "
      "multiprocessor; records as they come in {} of their places, keys in {}",
      replay.units, replay.unit_values, replay.row_warps, replay.warp_rows, replay.helpers,
      replay.shared.bytes / 1024.0, replay.blocks, replay.shared.raw_buffers, replay.shared.key_buffers);
}

}  // namespace replayssm
