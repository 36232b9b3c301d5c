#include "bench/attention.h"

#include "replayssm/core/error.h"

#ifdef REPLAYSSM_HAS_CUDA

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <random>
#include <span>

#include "bench/csv.h"
#include "bench/cuda_roof.h"
#include "bench/cuda_timing.h"
#include "bench/machine.h"
#include "replayssm/ops/attention.h"

namespace replayssm::bench {
namespace {

struct HeadSizes {
  int query = 0, kv = 0, size = 0, latent = 0;

  int value_size() const { return latent > 0 ? latent : size; }
};

HeadSizes parse_heads(const std::string& text) {
  HeadSizes heads;
  int read = 0, read_latent = 0;
  int count = std::sscanf(text.c_str(), "%d:%d:%d%n:%d%n", &heads.query, &heads.kv, &heads.size, &read, &heads.latent,
                          &read_latent);
  require((count == 3 && static_cast<size_t>(read) == text.size()) ||
              (count == 4 && static_cast<size_t>(read_latent) == text.size()),
          "--heads: expected QUERY:KV:SIZE or, of a latent cache, QUERY:KV:SIZE:LATENT, for example 32:8:128, got '{}'",
          text);
  const auto is_in = [](int value, int most) { return value >= 1 && value <= most; };
  require(is_in(heads.query, 1024) && is_in(heads.kv, 1024) && is_in(heads.size, 1024) && heads.query % heads.kv == 0 &&
              (count == 3 || is_in(heads.latent, heads.size)),
          "--heads: expected 1 to 1024 each, query heads a multiple of the key/value heads and latents at most as wide "
          "as their heads, got '{}'",
          text);
  return heads;
}

// One line of the table.
struct AttentionCase {
  std::string name;
  HeadSizes heads;
  int batch, context, tokens, page_tokens;

  int64_t row_pages() const { return (context + page_tokens - 1) / page_tokens; }
  int64_t page_elements() const { return int64_t{heads.kv} * page_tokens * heads.size; }
  int64_t input_width() const { return int64_t{heads.query + 2 * heads.kv} * heads.size; }
  int64_t output_width() const { return int64_t{heads.query} * heads.value_size(); }
  // Keys and values of the whole context read once, those of the tokens written, inputs and outputs.
  double bytes() const {
    const double position = (heads.latent > 0 ? 1.0 : 2.0) * heads.kv * heads.size;
    const double token = static_cast<double>(input_width() + output_width()) + position;
    return sizeof(Bf16) * batch * (context * position + tokens * token);
  }
  double operations() const {
    const double seen = 1.0 * tokens * (context - tokens) + 0.5 * tokens * (tokens + 1.0);
    return 2.0 * batch * heads.query * (heads.size + heads.value_size()) * seen;
  }
};

// Sets of rows whose pages are dealt out at random; calls take the sets in turn.
class AttentionRig {
 public:
  AttentionRig(const AttentionCase& timed, CudaDevice& device)
      : timed_(timed),
        sets_(std::max(1, static_cast<int>(std::ceil(rotation_bytes(device) / timed.bytes())))),
        pages_(int64_t{sets_} * timed.batch * timed.row_pages()),
        tokens_(int64_t{timed.batch} * timed.tokens),
        k_(pages_ * timed.page_elements(), device),
        v_(timed.heads.latent > 0 ? 0 : pages_ * timed.page_elements(), device),
        input_(tokens_ * timed.input_width(), device),
        out_(tokens_ * timed.output_width(), device) {
    fill_uniform(k_.data(), k_.size(), -1, 1, 1, device);
    if (v_.size() > 0) fill_uniform(v_.data(), v_.size(), -1, 1, 2, device);
    fill_uniform(input_.data(), input_.size(), -1, 1, 3, device);
    std::vector<int32_t> pages(pages_), slots(timed.batch), histories(timed.batch, 0), begin(timed.batch + 1);
    std::iota(pages.begin(), pages.end(), 0);
    std::iota(slots.begin(), slots.end(), 0);
    for (int row = 0; row <= timed.batch; ++row) begin[row] = row * timed.tokens;
    std::ranges::shuffle(pages, std::minstd_rand(1));
    const std::vector<int64_t> bases(timed.batch, timed.context - timed.tokens);
    table_ = DeviceBuffer<int32_t>(std::span<const int32_t>(pages), device);
    slots_ = DeviceBuffer<int32_t>(std::span<const int32_t>(slots), device);
    histories_ = DeviceBuffer<int32_t>(std::span<const int32_t>(histories), device);
    begin_ = DeviceBuffer<int32_t>(std::span<const int32_t>(begin), device);
    bases_ = DeviceBuffer<int64_t>(std::span<const int64_t>(bases), device);
    workspace_ = DeviceBuffer<std::byte>(attention_workspace_bytes(args(0)), device);
  }

  int sets() const { return sets_; }
  Bf16* out() const { return out_.data(); }
  size_t out_count() const { return out_.size(); }

  void call(int index, CudaDevice& device) const {
    attention(args(index), device, {workspace_.data(), workspace_.size()});
  }

 private:
  BasicAttention<Bf16> args(int index) const {
    const HeadSizes& heads = timed_.heads;
    const auto stride = static_cast<int>(timed_.row_pages());
    const Bf16* k = input_.data() + int64_t{heads.query} * heads.size;
    return {.cache = {.kv_heads = heads.kv,
                      .head_size = heads.size,
                      .latent_size = heads.latent,
                      .pages = pages_,
                      .page_tokens = timed_.page_tokens,
                      .k = k_.data(),
                      .v = v_.data()},
            .pages = {table_.data() + int64_t{index % sets_} * timed_.batch * stride, stride},
            .rows = {timed_.batch, slots_.data(), bases_.data(), histories_.data()},
            .token_begin = begin_.data(),
            .query_heads = heads.query,
            .scale = 1.0f / std::sqrt(static_cast<float>(heads.size)),
            .q = input_.data(),
            .k = k,
            .v = heads.latent > 0 ? nullptr : k + int64_t{heads.kv} * heads.size,
            .q_stride = timed_.input_width(),
            .k_stride = timed_.input_width(),
            .v_stride = timed_.input_width(),
            .out = out_.data(),
            .tokens = tokens_,
            .max_tokens_per_row = timed_.tokens};
  }

  AttentionCase timed_;
  int sets_;
  int64_t pages_, tokens_;
  DeviceBuffer<Bf16> k_, v_, input_, out_;
  DeviceBuffer<int32_t> table_, slots_, histories_, begin_;
  DeviceBuffer<int64_t> bases_;
  DeviceBuffer<std::byte> workspace_;
};

void append_figures(const std::string& csv, const CudaDevice& device, const AttentionCase& timed,
                    const CudaTimes& times, double roof) {
  const double seconds = times.us_median * 1e-6;
  append_csv(
      csv,
      "machine,op,heads,device,batch,tokens,context,page,us_median,us_min,us_p95,bytes,roof_gb_s,roof_share,tflops",
      fmt::format("{},attention,{},{},{},{},{},{},{:.2f},{:.2f},{:.2f},{:.0f},{:.2f},{:.3f},{:.2f}",
                  device.properties().name, timed.name, cuda_device_label(device), timed.batch, timed.tokens,
                  timed.context, timed.page_tokens, times.us_median, times.us_min, times.us_p95, timed.bytes(),
                  roof * 1e-9, timed.bytes() / seconds / roof, timed.operations() / seconds * 1e-12));
}

CudaTimes time_case(const AttentionCase& timed, int rounds, bool is_first, CudaDevice& device) {
  const AttentionRig rig(timed, device);
  const int calls = std::max(rig.sets(), static_cast<int>(kGraphBytes / timed.bytes()));
  const auto call = [&](int index) { rig.call(index, device); };
  const auto check = [&] {
    const OutputCounts found = counts_of_calls(rig.sets(), call, rig.out(), rig.out_count(), device);
    const uint64_t total = uint64_t{rig.out_count()} * rig.sets();
    require(found.not_finite == 0 && found.zero < total / 2,
            "bench attention: {}, batch {}, context {}, {} tokens: of {} outputs {} are not finite, {} are zero",
            timed.name, timed.batch, timed.context, timed.tokens, total, found.not_finite, found.zero);
  };
  check();
  const CudaTimes times = time_calls(calls, call, rounds, is_first, device);
  check();
  return times;
}

void check_options(const AttentionOptions& options) {
  require(options.device == "cuda", "--device: attention is timed on a GPU: expected cuda, got '{}'", options.device);
  for (int batch : options.batches) require(batch >= 1 && batch <= 4096, "--batch: expected 1 to 4096, got {}", batch);
  for (int context : options.contexts)
    require(context >= 1 && context <= 1 << 20, "--context: expected 1 to {}, got {}", 1 << 20, context);
  const int least = *std::ranges::min_element(options.contexts);
  for (int tokens : options.tokens)
    require(tokens >= 1 && tokens <= least, "--tokens: expected 1 to {} (the context), got {}", least, tokens);
  require(options.page_tokens >= 1 && options.page_tokens <= 4096, "--page: expected 1 to 4096, got {}",
          options.page_tokens);
  require(options.rounds >= 1, "--rounds: expected at least 1, got {}", options.rounds);
  require(options.csv.empty() || std::ofstream(options.csv, std::ios::app).good(), "--csv: cannot write '{}'",
          options.csv);
}

}  // namespace

void run_attention(const AttentionOptions& options) {
  check_options(options);
  std::vector<AttentionCase> cases;
  for (const std::string& name : options.heads)
    for (int context : options.contexts)
      for (int batch : options.batches)
        for (int tokens : options.tokens)
          cases.push_back({name, parse_heads(name), batch, context, tokens, options.page_tokens});
  CudaDevice device;
  const double roof = measure_roofs(device).read;
  fmt::print("attention on {}, {}, bf16, pages of {}; roof: read {:.0f} GB/s\n", device.properties().name,
             cuda_device_label(device), options.page_tokens, roof * 1e-9);
  fmt::print("{:>12} {:>6} {:>8} {:>6} {:>11} {:>11} {:>11} {:>11} {:>6} {:>8}\n", "heads", "batch", "context",
             "tokens", "us median", "us min", "us p95", "MB", "share", "TFLOP/s");
  bool is_first = true;
  for (const AttentionCase& timed : cases) {
    const CudaTimes times = time_case(timed, options.rounds, is_first, device);
    is_first = false;
    const double seconds = times.us_median * 1e-6;
    fmt::print("{:>12} {:6} {:8} {:6} {:11.2f} {:11.2f} {:11.2f} {:11.2f} {:5.0f}% {:8.2f}\n", timed.name, timed.batch,
               timed.context, timed.tokens, times.us_median, times.us_min, times.us_p95, timed.bytes() * 1e-6,
               100 * timed.bytes() / seconds / roof, timed.operations() / seconds * 1e-12);
    std::fflush(stdout);
    if (!options.csv.empty()) append_figures(options.csv, device, timed, times, roof);
  }
}

}  // namespace replayssm::bench

#else

namespace replayssm::bench {

void run_attention(const AttentionOptions&) {
  fail("bench attention: this build has no CUDA");
}

}  // namespace replayssm::bench

#endif
