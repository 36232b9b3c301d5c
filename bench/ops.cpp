#include "bench/ops.h"

#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <variant>

#include "bench/memory_roof.h"
#include "bench/op_memory.h"
#include "bench/ops_delta.h"
#include "bench/ops_mamba2.h"
#include "replayssm/core/buffer.h"
#include "replayssm/core/error.h"
#include "replayssm/core/simd.h"
#include "replayssm/ops/delta.h"

namespace replayssm::bench {
namespace {

// A layer of a model: which op it is, and its sizes.
struct Layer {
  std::string op;
  std::variant<DeltaShape, Mamba2Shape> shape;
};

const std::map<std::string, Layer>& layers() {
  static const std::map<std::string, Layer> by_name = {
      {"qwen3.5-4b", {"delta", DeltaShape{32, 16, 128, 128, 1}}},
      {"qwen3.5-122b", {"delta", DeltaShape{64, 16, 128, 128, 1}}},
      {"qwen3.6-27b", {"delta", DeltaShape{48, 16, 128, 128, 1}}},
      {"kimi-linear", {"kda", DeltaShape{32, 32, 128, 128, 128}}},
      {"kimi-k3", {"kda", DeltaShape{96, 96, 128, 128, 128}}},
      {"nemotron-3-nano-4b", {"mamba2", Mamba2Shape{96, 8, 80, 128}}},
      {"nemotron-3-super", {"mamba2", Mamba2Shape{128, 8, 64, 128}}},
      {"mamba2-48x64x128", {"mamba2", Mamba2Shape{48, 8, 64, 128}}},
  };
  return by_name;
}

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

  OpsResult result(const std::string& op, const std::string& decode, int batch, int tokens) const {
    std::vector<double> sorted = us;
    std::ranges::sort(sorted);
    return {op,
            decode,
            batch,
            tokens,
            median(us),
            sorted.front(),
            sorted[sorted.size() * 95 / 100],
            median(bytes),
            median(roof) * 1e-9,
            median(share)};
  }
};

template <typename Bench>
void add_results(const OpsOptions& options, int batch, Bench& bench, Device& device, std::vector<OpsResult>& results) {
  Samples conventional, replay, exact;
  // A call at a small batch takes microseconds: several cycles make a sample that a timer sees well.
  const int calls = bench.cycle() * std::max(1, 8 / batch);
  for (int round = 0; round < options.rounds; ++round) {
    const double read = read_roof(bench.memory(), bench.memory_floats(), device);
    const double update = update_roof(bench.memory(), bench.memory_floats(), device);
    if (options.tokens == 1) {
      bench.clear_history();
      conventional.add(bench, calls, update, [&] { bench.step(); });
    }
    bench.spread_cursors();
    replay.add(bench, calls, read, [&] { bench.decode(Readout::kDirect); });
    exact.add(bench, calls, read, [&] { bench.decode(Readout::kExact); });
  }
  if (options.tokens == 1) results.push_back(conventional.result(options.op, "conventional", batch, 1));
  results.push_back(replay.result(options.op, "replay", batch, options.tokens));
  results.push_back(exact.result(options.op, "exact", batch, options.tokens));
}

template <typename Bench>
void add_prefill_results(const OpsOptions& options, Bench& bench, Device& device, std::vector<OpsResult>& results) {
  for (int tokens : options.prefill_tokens) {
    Samples samples;
    for (int round = 0; round < options.rounds; ++round) {
      const double update = update_roof(bench.memory(), bench.memory_floats(), device);
      bench.prefill(tokens);  // brings back what the roof has driven out of the caches
      samples.add(bench, 4, update, [&] { bench.prefill(tokens); });
    }
    results.push_back(samples.result(options.op + "_prefill", "conventional", 1, tokens));
  }
}

template <typename Bench, typename Shape>
void add_all_results(const OpsOptions& options, const Shape& shape, Device& device, std::vector<OpsResult>& results) {
  for (int batch : options.batches) {
    Bench bench(shape, batch, options.window, options.tokens, device);
    add_results(options, batch, bench, device, results);
  }
  if (options.prefill_tokens.empty()) return;
  Bench bench(shape, 1, options.window, options.tokens, device);
  add_prefill_results(options, bench, device, results);
}

std::string machine_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) {
      std::string name = line.substr(line.find(':') + 2);
      std::ranges::replace(name, ',', ' ');
      return name;
    }
  return "unknown";
}

void write_csv(const OpsOptions& options, const std::vector<OpsResult>& results) {
  struct stat existing;
  const bool is_new = stat(options.csv.c_str(), &existing) != 0 || existing.st_size == 0;
  std::ofstream file(options.csv, std::ios::app);
  if (is_new)
    file << "date,machine,op,shape,device,batch,tokens,accepted,window,read,recurrence,decode,us_median,us_min,us_p95,"
            "bytes,roof_gb_s,roof_share\n";
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%d", std::localtime(&now));
  for (const OpsResult& r : results)
    file << fmt::format("{},{},{},{},cpu-{}x{},{},{},{},{},fp32,fp32,{},{:.2f},{:.2f},{:.2f},{:.0f},{:.2f},{:.3f}\n",
                        date, machine_name(), r.op, options.shape, options.threads, simd_target(), r.batch, r.tokens,
                        r.tokens, options.window, r.decode, r.us_median, r.us_min, r.us_p95, r.bytes, r.roof_gb_s,
                        r.roof_share);
  file.flush();
  require(file.good(), "csv: cannot write '{}'", options.csv);
}

void check(const OpsOptions& options) {
  require(layers().contains(options.shape), "--shape: expected one of {}, got '{}'", fmt::join(ops_shapes(), ", "),
          options.shape);
  const std::string& op = layers().at(options.shape).op;
  require(options.op.empty() || options.op == op, "--op: expected {}, the op of {}, got '{}'", op, options.shape,
          options.op);
  require(options.window >= 1 && options.window <= 1024, "--window: expected 1 to 1024, got {}", options.window);
  require(options.tokens >= 1 && options.tokens <= options.window, "--tokens: expected 1 to {} (the window), got {}",
          options.window, options.tokens);
  require(options.rounds >= 1, "--rounds: expected at least 1, got {}", options.rounds);
  for (int batch : options.batches) require(batch >= 1 && batch <= 1024, "--batch: expected 1 to 1024, got {}", batch);
  for (int tokens : options.prefill_tokens)
    require(tokens >= 1 && tokens <= 65536, "--prefill: expected 1 to 65536 tokens, got {}", tokens);
  require(options.csv.empty() || std::ofstream(options.csv, std::ios::app).good(), "--csv: cannot write '{}'",
          options.csv);
}

}  // namespace

std::vector<std::string> ops_shapes() {
  std::vector<std::string> names;
  for (const auto& [name, layer] : layers()) names.push_back(name);
  return names;
}

void run_ops(const OpsOptions& given) {
  check(given);
  Device device(given.threads, /*pin=*/true);
  OpsOptions options = given;
  options.threads = device.threads().size();
  std::vector<OpsResult> results;
  const Layer& layer = layers().at(options.shape);
  options.op = layer.op;
  if (const auto* mamba2 = std::get_if<Mamba2Shape>(&layer.shape))
    add_all_results<Mamba2Bench>(options, *mamba2, device, results);
  else
    add_all_results<DeltaBench>(options, std::get<DeltaShape>(layer.shape), device, results);
  fmt::print("{} on {}, {} threads, {}; FMA roof {:.0f} GFLOP/s\n", options.shape, machine_name(), options.threads,
             simd_target(), multiply_add_roof(device) * 1e-9);
  fmt::print("{:14} {:12} {:>5} {:>6} {:>11} {:>11} {:>11} {:>9} {:>9} {:>6}\n", "op", "decode", "batch", "tokens",
             "us median", "us min", "us p95", "MB", "roof GB/s", "share");
  for (const OpsResult& r : results)
    fmt::print("{:14} {:12} {:5} {:6} {:11.2f} {:11.2f} {:11.2f} {:9.2f} {:9.2f} {:5.0f}%\n", r.op, r.decode, r.batch,
               r.tokens, r.us_median, r.us_min, r.us_p95, r.bytes * 1e-6, r.roof_gb_s, 100 * r.roof_share);
  if (!options.csv.empty()) write_csv(options, results);
}

}  // namespace replayssm::bench
