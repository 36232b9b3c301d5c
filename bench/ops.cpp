#include "bench/ops.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <optional>
#include <variant>

#include "bench/csv.h"
#include "bench/cuda_ops.h"
#include "bench/cursor_cycle.h"
#include "bench/layers.h"
#include "bench/machine.h"
#include "bench/memory_roof.h"
#include "bench/op_memory.h"
#include "bench/ops_delta.h"
#include "bench/ops_mamba2.h"
#include "replayssm/core/buffer.h"
#include "replayssm/core/error.h"
#include "replayssm/core/simd.h"

namespace replayssm::bench {
namespace {

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

double us_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

// Samples of one way to decode: per round the mean time of a call over a cycle, its bytes, and that round's roof.
struct Samples {
  std::vector<double> us, bytes, roof, share;

  template <typename Bench, typename Call>
  void add(Bench& bench, int calls, double round_roof, const Call& call) {
    bench.take_bytes();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    us.push_back(us_since(start) / calls);
    bytes.push_back(bench.take_bytes() / calls);
    roof.push_back(round_roof);
    share.push_back(bytes.back() / (us.back() * 1e-6) / round_roof);
  }

  OpsResult result(const std::string& op, const std::string& decode, int batch, int window, int tokens) const {
    OpsResult result{op, decode, batch, window, tokens, 1.0 * tokens};
    std::vector<double> sorted = us;
    std::ranges::sort(sorted);
    result.us_median = median(us);
    result.us_min = sorted.front();
    result.us_p95 = sorted[sorted.size() * 95 / 100];
    result.bytes = median(bytes);
    result.roof_gb_s = median(roof) * 1e-9;
    result.roof_share = median(share);
    return result;
  }
};

// A decoding step's shape, whatever the layer's.
struct Step {
  int batch, window, tokens;
};

template <typename Bench>
void add_results(const OpsOptions& options, const Step& step, Bench& bench, Device& device,
                 std::vector<OpsResult>& results) {
  Samples conventional, replay, exact;
  // A call at a small batch takes microseconds: several cycles make a sample that a timer sees well.
  const int calls = bench.cycle() * std::max(1, 8 / step.batch);
  for (int round = 0; round < options.rounds; ++round) {
    const double read = read_roof(bench.memory(), bench.memory_floats(), device);
    const double update = update_roof(bench.memory(), bench.memory_floats(), device);
    if (step.tokens == 1) {
      bench.clear_history();
      conventional.add(bench, calls, update, [&] { bench.step(); });
    }
    bench.spread_cursors();
    replay.add(bench, calls, read, [&] { bench.decode(Readout::kDirect); });
    exact.add(bench, calls, read, [&] { bench.decode(Readout::kExact); });
  }
  const auto add = [&](const Samples& samples, const std::string& decode) {
    results.push_back(samples.result(options.op, decode, step.batch, step.window, step.tokens));
    if (form_of(options) == CheckpointForm::kPlanes) results.back().read = decode == "replay" ? "bf16" : "fp32-planes";
  };
  if (step.tokens == 1) add(conventional, "conventional");
  add(replay, "replay");
  add(exact, "exact");
}

template <typename Bench>
OpsResult prefill_result(const OpsOptions& options, const Prompt& prompt, Bench& bench, Device& device) {
  Samples samples;
  for (int round = 0; round < options.rounds; ++round) {
    const double update = update_roof(bench.memory(), bench.memory_floats(), device);
    bench.prefill(prompt.tokens);  // brings back what the roof has driven out of the caches
    samples.add(bench, 4, update, [&] { bench.prefill(prompt.tokens); });
  }
  OpsResult result =
      samples.result(options.op + "_prefill", "conventional", prompt.sequences, options.windows.front(), prompt.tokens);
  if (form_of(options) == CheckpointForm::kPlanes) result.read = "fp32-planes";
  return result;
}

template <typename Bench, typename Shape>
std::vector<OpsResult> measure_all(const OpsOptions& options, const Shape& shape, const std::vector<Prompt>& prompts,
                                   Device& device) {
  std::vector<OpsResult> results;
  for (int window : options.windows)
    for (int tokens : options.tokens)
      for (int batch : options.batches) {
        if (tokens > window) continue;
        Bench bench(shape, batch, window, tokens, form_of(options), device);
        add_results(options, {batch, window, tokens}, bench, device, results);
      }
  std::optional<Bench> bench;
  int sequences = 0;
  for (const Prompt& prompt : prompts) {
    if (prompt.sequences != sequences)
      bench.emplace(shape, prompt.sequences, options.windows.front(), 1, form_of(options), device);
    sequences = prompt.sequences;
    results.push_back(prefill_result(options, prompt, *bench, device));
  }
  return results;
}

void run_cpu_ops(const OpsOptions& options, const Layer& layer, const std::vector<Prompt>& prompts,
                 const ShowResult& show) {
  Device device(options.threads, /*pin=*/true);
  const auto* mamba2 = std::get_if<Mamba2Shape>(&layer.shape);
  const std::vector<OpsResult> results =
      mamba2 != nullptr ? measure_all<Mamba2Bench>(options, *mamba2, prompts, device)
                        : measure_all<DeltaBench>(options, std::get<DeltaShape>(layer.shape), prompts, device);
  const int threads = device.threads().size();
  const OpsMachine machine{
      processor_name(), fmt::format("cpu-{}x{}", threads, simd_target()),
      fmt::format("{} threads, {}; FMA roof {:.0f} GFLOP/s", threads, simd_target(), multiply_add_roof(device) * 1e-9)};
  for (const OpsResult& result : results) show(machine, result);
}

void append_figures(const OpsOptions& options, const OpsMachine& machine, const OpsResult& r) {
  append_csv(options.csv,
             "machine,op,shape,device,batch,tokens,accepted,window,read,recurrence,decode,us_median,us_min,us_p95,"
             "bytes,roof_gb_s,roof_share",
             fmt::format("{},{},{},{},{},{},{:g},{},{},fp32,{},{:.2f},{:.2f},{:.2f},{:.0f},{:.2f},{:.3f}", machine.name,
                         r.op, options.shape, machine.device, r.batch, r.tokens, r.accepted, r.window, r.read, r.decode,
                         r.us_median, r.us_min, r.us_p95, r.bytes, r.roof_gb_s, r.roof_share));
}

void print_heading(const OpsOptions& options, const OpsMachine& machine) {
  fmt::print("{} on {}, {}\n", options.shape, machine.name, machine.note);
  fmt::print("{:14} {:12} {:>5} {:>6} {:>6} {:>8} {:>11} {:>11} {:>11} {:>11} {:>9} {:>9} {:>6}{}\n", "op", "decode",
             "batch", "window", "tokens", "accepted", "read", "us median", "us min", "us p95", "MB", "roof GB/s",
             "share", options.is_layer ? " us above op" : "");
}

void print_result(const OpsResult& r) {
  if (!r.plan.empty()) fmt::print("plan: {}\n", r.plan);
  fmt::print("{:14} {:12} {:5} {:6} {:6} {:8g} {:>11} {:11.2f} {:11.2f} {:11.2f} {:9.2f} {:9.2f} {:5.0f}%{}\n", r.op,
             r.decode, r.batch, r.window, r.tokens, r.accepted, r.read, r.us_median, r.us_min, r.us_p95, r.bytes * 1e-6,
             r.roof_gb_s, 100 * r.roof_share, r.us_above_op ? fmt::format(" {:11.2f}", *r.us_above_op) : "");
  std::fflush(stdout);
}

// TOKENS or TOKENSxSEQUENCES.
Prompt parse_prompt(const std::string& text) {
  Prompt prompt;
  const char* const end = text.data() + text.size();
  std::from_chars_result read = std::from_chars(text.data(), end, prompt.tokens);
  if (read.ec == std::errc() && read.ptr != end && *read.ptr == 'x')
    read = std::from_chars(read.ptr + 1, end, prompt.sequences);
  require(read.ec == std::errc() && read.ptr == end, "--prefill: expected TOKENS or TOKENSxSEQUENCES, got '{}'", text);
  require(prompt.tokens >= 1 && prompt.tokens <= 65536, "--prefill: expected 1 to 65536 tokens, got {}", prompt.tokens);
  require(prompt.sequences >= 1 && prompt.sequences <= 1024, "--prefill: expected 1 to 1024 sequences, got {}",
          prompt.sequences);
  return prompt;
}

void check_sizes(const OpsOptions& options) {
  for (const auto& [flag, values] : {std::pair{"--batch", &options.batches}, {"--window", &options.windows}})
    for (int value : *values) require(value >= 1 && value <= 1024, "{}: expected 1 to 1024, got {}", flag, value);
  const int window = *std::ranges::max_element(options.windows);
  for (int tokens : options.tokens)
    require(tokens >= 1 && tokens <= window, "--tokens: expected 1 to {} (the window), got {}", window, tokens);
  require(options.rounds >= 1, "--rounds: expected at least 1, got {}", options.rounds);
}

void check_layer_step(const OpsOptions& options) {
  require(std::ranges::count(options.decoders, "conventional") == 0,
          "--layer: the layer step decodes replay and exact, got conventional");
  require(options.out == options.type, "--layer: the layer step's outputs are of its inputs' type, {}, got {}",
          options.type, options.out);
  require(options.prompts.empty(), "--layer: the layer step decodes, got --prefill");
}

void check_cuda(const OpsOptions& options) {
  const int tokens = *std::ranges::max_element(options.tokens);
  for (double accepted : options.accepted) {
    require(accepted > 0 && accepted <= tokens, "--accepted: expected more than 0, at most {} (the tokens), got {}",
            tokens, accepted);
    const double steps = accepted * kAcceptanceSteps;
    require(std::abs(steps - std::round(steps)) < 1e-6, "--accepted: expected a multiple of {}, got {}",
            1.0 / kAcceptanceSteps, accepted);
  }
  for (const std::string& decoder : options.decoders) {
    require(decoder == "conventional" || decoder == "replay" || decoder == "exact",
            "--decode: expected conventional, replay or exact, got '{}'", decoder);
    require(decoder != "conventional" || std::ranges::count(options.tokens, 1) > 0,
            "--decode: conventional decodes 1 token a step, got --tokens {}", fmt::join(options.tokens, ","));
  }
  const std::string& type = options.type;
  require(type == "bf16" || type == "fp16" || type == "fp32", "--type: expected bf16, fp16 or fp32, got '{}'", type);
  require(options.out == type || options.out == "fp32", "--out: expected {} (the type) or fp32, got '{}'", type,
          options.out);
  require(options.csv.empty() || (type == "bf16" && options.out == "bf16"),
          "--csv: its rows are of bf16 inputs and outputs, got {} and {}", type, options.out);
  if (options.is_layer) check_layer_step(options);
}

void check_cpu(const OpsOptions& options) {
  const std::pair<const char*, bool> given[] = {{"--accepted", !options.accepted.empty()},
                                                {"--decode", !options.decoders.empty()},
                                                {"--type", !options.type.empty()},
                                                {"--out", !options.out.empty()},
                                                {"--layer", options.is_layer},
                                                {"--plan", options.is_plan}};
  for (const auto& [flag, is_given] : given) require(!is_given, "{}: expected with --device cuda alone", flag);
}

// The options with what was left out, once they are checked.
OpsOptions complete(OpsOptions options) {
  require(layers().contains(options.shape), "--shape: expected one of {}, got '{}'", fmt::join(ops_shapes(), ", "),
          options.shape);
  const std::string& op = layers().at(options.shape).op;
  require(options.op.empty() || options.op == op, "--op: expected {}, the op of {}, got '{}'", op, options.shape,
          options.op);
  options.op = op;
  check_device(options.device, options.threads);
  check_sizes(options);
  require(options.read == "fp32" || options.read == "bf16", "--read: expected fp32 or bf16, got '{}'", options.read);
  if (options.device == "cuda") {
    if (options.type.empty()) options.type = "bf16";
    if (options.out.empty()) options.out = options.type;
    if (options.is_layer && options.decoders.empty()) options.decoders = {"replay", "exact"};
    check_cuda(options);
  } else {
    check_cpu(options);
  }
  require(options.csv.empty() || std::ofstream(options.csv, std::ios::app).good(), "--csv: cannot write '{}'",
          options.csv);
  return options;
}

}  // namespace

std::vector<std::string> ops_shapes() {
  std::vector<std::string> names;
  for (const auto& [name, layer] : layers()) names.push_back(name);
  return names;
}

void run_ops(const OpsOptions& given) {
  const OpsOptions options = complete(given);
  std::vector<Prompt> prompts;
  for (const std::string& text : options.prompts) prompts.push_back(parse_prompt(text));
  bool is_first = true;
  const auto show = [&](const OpsMachine& machine, const OpsResult& result) {
    if (std::exchange(is_first, false)) print_heading(options, machine);
    print_result(result);
    if (!options.csv.empty()) append_figures(options, machine, result);
  };
  (options.device == "cuda" ? run_cuda_ops : run_cpu_ops)(options, layers().at(options.shape), prompts, show);
}

}  // namespace replayssm::bench
