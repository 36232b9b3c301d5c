// Choosing the next token on a GPU: a kernel that reads every logit once and leaves a few numbers a section, and one
// with a block a row that makes the token of them; before these, where rows have histories, one that marks their
// tokens.
#include "replayssm/ops/sample.h"

#include "replayssm/core/buffer.h"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/sample_draw.cuh"
#include "replayssm/ops/tiles.h"
#include "replayssm/ops/uniform.h"

namespace replayssm {
namespace {

constexpr char kOp[] = "sample";
constexpr int kMarkThreads = 512;
constexpr int kSectionWarps = 4;
constexpr int kSectionThreads = 32 * kSectionWarps;
constexpr int64_t kLargestVocabulary = int64_t{1} << 30;

// Grid: one dimension over rows. The block of a row with a penalty clears the row's bits and sets those of its history.
__global__ __launch_bounds__(kMarkThreads) void sample_marks_kernel(const __grid_constant__ SampleArgs args) {
  wait_for_previous();
  let_next_start();
  const Sample& sample = args.sample;
  const int64_t row = blockIdx.x;
  if (!has_penalty(sample, sample.settings[row])) return;
  const int words = args.sections * kSectionMarks;
  uint32_t* marks = args.marks + row * words;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < words; i += kMarkThreads * 4)
    *reinterpret_cast<uint4*>(marks + i) = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const int64_t end = sample.history_begin[row + 1];
  constexpr int kTogether = 4;  // so that their loads overlap
  for (int64_t begin = sample.history_begin[row] + threadIdx.x; begin < end; begin += kTogether * kMarkThreads) {
    int32_t tokens[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      tokens[i] = begin + i * kMarkThreads < end ? sample.history[begin + i * kMarkThreads] : -1;
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (tokens[i] >= 0 && tokens[i] < sample.vocabulary) atomicOr(marks + tokens[i] / 32, 1u << (tokens[i] % 32));
  }
}

// Grid: one dimension over the rows' groups of kSectionWarps sections. A warp owns a section.
__global__ __launch_bounds__(kSectionThreads, 10) void sample_sections_kernel(const __grid_constant__ SampleArgs args) {
  wait_for_previous();
  let_next_start();
  const int groups = (args.sections + kSectionWarps - 1) / kSectionWarps;
  const int64_t row = blockIdx.x / groups;
  const int section = static_cast<int>(blockIdx.x % groups) * kSectionWarps + static_cast<int>(threadIdx.x / 32);
  if (section >= args.sections) return;
  const SampleSettings settings = load_settings(args.sample.settings + row);
  LogitRow source = logit_row(args, row);
  float logits[kLaneTokens];
  read_section(source, section, logits);
  set_settings(args, row, settings, source);
  const int behind = places_behind(source, section);
  const bool is_bad = __any_sync(kAllLanes, count_bad(logits) > behind);
  penalise_section(source, section, logits);

  // The first token stands for the lane even where the penalty made all minus infinity.
  float best = logits[0];
  int place = 0;
#pragma unroll
  for (int i = 1; i < kLaneTokens; ++i) {
    if (logits[i] > best) {
      best = logits[i];
      place = i;
    }
  }
  const uint32_t order = __reduce_max_sync(kAllLanes, order_of(best));
  const bool has_best = order_of(best) == order && behind < kLaneTokens;
  const int token = __reduce_min_sync(kAllLanes, has_best ? section_token(section, place) : INT32_MAX);
  best = logit_of(order);

  double sum = 0.0;
  if (settings.temperature != 0.0f) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) logits[i] = logits[i] / settings.temperature;
    if (__any_sync(kAllLanes, count_bad(logits) > behind)) {
      sum = INFINITY;
    } else if (needs_total(settings, source.vocabulary)) {
      const float largest = best / settings.temperature;
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) sum = sum + weight_of(logits[i], largest);
      sum = sum_warp(sum);
    }
  }
  if (threadIdx.x % 32 == 0) args.sums[row * args.sections + section] = {best, is_bad ? kNoToken : token, sum};
}

// Grid: one dimension over rows. A block of kDrawThreads owns a row; its threads share out the row's sections and,
// where a row is filtered, the candidates.
__global__ __launch_bounds__(kDrawThreads, 2) void sample_tokens_kernel(const __grid_constant__ SampleArgs args) {
  extern __shared__ uint4 draw_shared[];
  DrawMemory& memory = *reinterpret_cast<DrawMemory*>(draw_shared);
  wait_for_previous();
  let_next_start();
  const Sample& sample = args.sample;
  const int64_t row = blockIdx.x;
  const SectionSum* sums = args.sums + row * args.sections;
  uint32_t order = 0;
  int token = INT32_MAX;
  bool is_bad = false, has_overflow = false;
  for (int section = static_cast<int>(threadIdx.x); section < args.sections; section += kDrawThreads) {
    const SectionSum sum = sums[section];
    is_bad |= sum.token == kNoToken;
    has_overflow |= isinf(sum.sum);
    // Of equals the first stays: its tokens are lower.
    if (order_of(sum.largest) > order) {
      order = order_of(sum.largest);
      token = sum.token;
    }
  }
  const uint32_t largest = max_of_block(order, memory);
  token = static_cast<int>(min_of_block(order == largest ? static_cast<uint32_t>(token) : UINT32_MAX, memory));
  is_bad = __syncthreads_or(is_bad);
  has_overflow = __syncthreads_or(has_overflow);

  const SampleSettings settings = sample.settings[row];
  if (is_bad) {
    token = kNoToken;
  } else if (settings.temperature != 0.0f && !has_overflow) {
    Draw draw;
    draw.row = logit_row(args, row);
    set_settings(args, row, settings, draw.row);
    draw.settings = settings;
    draw.sums = sums;
    draw.sections = args.sections;
    draw.largest = logit_of(largest) / settings.temperature;
    draw.best = token;
    draw.uniform =
        uniform_number(settings.seed, sample.sequence == nullptr ? 0 : sample.sequence[row], sample.position[row]);
    draw.total = 0.0;
    SectionPrefix prefix;
    if (needs_total(settings, sample.vocabulary)) {
      prefix = scan_sections(draw, memory);
      draw.total = prefix.masses.total;
    }
    token = is_filtered(settings) ? draw_filtered(draw, memory) : draw_by_token(draw, prefix, memory);
  }
  if (threadIdx.x == 0) sample.token[row] = token;
}

int sections_of(int64_t vocabulary) {
  return static_cast<int>(ceiling_quotient(vocabulary, kSectionTokens));
}

void check_on_gpu(const Sample& args, std::span<std::byte> workspace, CudaDevice& device) {
  check_sample_arrays(args);
  check_alignment(kOp, sizeof(float), {{"logits", args.logits}, {"history", args.history}, {"token", args.token}});
  check_alignment(kOp, sizeof(int64_t),
                  {{"settings", args.settings},
                   {"sequence", args.sequence},
                   {"position", args.position},
                   {"history_begin", args.history_begin}});
  const size_t needed = sample_workspace_bytes(args.rows, args.vocabulary, device);
  require(workspace.size() >= needed, "sample: expected a workspace of {} bytes, got {}", needed, workspace.size());
  require(reinterpret_cast<uintptr_t>(workspace.data()) % kAlignmentBytes == 0,
          "sample: expected a workspace aligned to {} bytes", kAlignmentBytes);
}

}  // namespace

void sample(const Sample& args, CudaDevice& device, std::span<std::byte> workspace) {
  check_sample_sizes(args);
  require(args.vocabulary <= kLargestVocabulary, "sample: on a GPU expected a vocabulary of at most 2^30, got {}",
          args.vocabulary);
  if (args.rows == 0) return;
  check_on_gpu(args, workspace, device);
  SampleArgs launched;
  launched.sample = args;
  launched.sections = sections_of(args.vocabulary);
  launched.sums = reinterpret_cast<SectionSum*>(workspace.data());
  launched.marks = reinterpret_cast<uint32_t*>(launched.sums + args.rows * launched.sections);
  const unsigned groups = check_blocks(kOp, args.rows * ceiling_quotient(launched.sections, kSectionWarps));
  const auto rows = static_cast<unsigned>(args.rows);
  if (args.history != nullptr && args.history_begin != nullptr)
    launch(kOp, sample_marks_kernel, dim3(rows), kMarkThreads, 0, launched, device, Launch::kOverlapping);
  launch(kOp, sample_sections_kernel, dim3(groups), kSectionThreads, 0, launched, device, Launch::kOverlapping);
  launch(kOp, sample_tokens_kernel, dim3(rows), kDrawThreads, sizeof(DrawMemory), launched, device,
         Launch::kOverlapping);
}

size_t sample_workspace_bytes(int64_t rows, int64_t vocabulary, CudaDevice&) {
  const size_t sections = static_cast<size_t>(rows) * sections_of(vocabulary);
  return sections * (sizeof(SectionSum) + kSectionMarks * sizeof(uint32_t));
}

}  // namespace replayssm
