#include "bench/ops.h"

#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>

#include "bench/memory_roof.h"
#include "bench/op_memory.h"
#include "bench/ops_mamba2.h"
#include "replayssm/core/buffer.h"
#include "replayssm/core/error.h"
#include "replayssm/core/simd.h"
#include "replayssm/ops/delta.h"

namespace replayssm::bench {
namespace {

const std::map<std::string, DeltaShape>& shapes() {
  static const std::map<std::string, DeltaShape> by_name = {
      {"qwen3.5-4b", {32, 16, 128, 128, 1}},
      {"qwen3.5-122b", {64, 16, 128, 128, 1}},
      {"qwen3.6-27b", {48, 16, 128, 128, 1}},
      {"kimi-linear-48b", {32, 32, 128, 128, 128}},
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

// A layer's state for `sets` batches, larger together than the caches, and their cursors spread evenly over the cycle.
class DeltaBench {
 public:
  DeltaBench(const DeltaShape& shape, int batch, int window, int tokens, Device& device)
      : shape_(shape), batch_(batch), tokens_(tokens), device_(device) {
    const int64_t state_floats = int64_t{shape.heads} * shape.value_size * shape.key_size;
    sets_ = rotating_sets(batch * state_floats);
    const int64_t slots = int64_t{sets_} * batch;
    const int64_t C = window + tokens;
    state_.shape = shape;
    state_.slots = state_.checkpoints = slots;
    state_.window = window;
    state_.capacity = static_cast<int>(C);
    const auto place = [&](Buffer<float>& buffer, int64_t per_slot, float low, float high) {
      buffer = Buffer<float>(slots * per_slot);
      fill_random(buffer, low, high, static_cast<uint32_t>(per_slot));
      return buffer.data();
    };
    state_.checkpoint = place(checkpoint_, state_floats, -1, 1);
    state_.ring_k = place(k_, shape.key_heads * C * shape.key_size, -1, 1);
    state_.ring_k_scale = place(k_scale_, shape.key_heads * C, 0.05f, 0.1f);
    state_.ring_gram = place(gram_, ring_gram_size(shape, state_.capacity), -0.1f, 0.1f);
    state_.ring_v = place(v_, shape.heads * C * shape.value_size, -1, 1);
    state_.ring_decay = place(decay_, shape.heads * C * shape.gate_size, 0.9f, 1);
    state_.ring_beta = place(beta_, shape.heads * C, 0, 1);
    cycle_ = std::max(1, window / tokens);
    base_.assign(slots, 0);
    history_.assign(slots, 0);
    for (int64_t slot = 0; slot < slots; ++slot) slot_.push_back(static_cast<int32_t>(slot));
    workspace_ = Buffer<std::byte>(delta_workspace_bytes(shape, state_.capacity, device));
    reserve_tokens(int64_t{batch} * tokens);
  }

  float* memory() { return checkpoint_.data(); }
  size_t memory_floats() const { return checkpoint_.size(); }
  int cycle() const { return cycle_; }
  // Bytes of state and ring that the calls since the last take_bytes() had to move, and their tokens' inputs and
  // outputs.
  double take_bytes() { return std::exchange(bytes_, 0.0); }

  void spread_cursors() {
    for (size_t slot = 0; slot < slot_.size(); ++slot)
      history_[slot] = static_cast<int32_t>(slot % cycle_ + 1) * tokens_;
  }
  void clear_history() { std::ranges::fill(history_, 0); }

  void step() {
    delta_step({state_, next_rows(), inputs(), out_.data()}, device_, workspace());
    bytes_ += batch_ * (2 * state_bytes() + token_bytes());
  }

  void decode(Readout readout) {
    const StateRows rows = next_rows();
    delta_decode({state_, rows, tokens_, inputs(), readout, out_.data()}, device_, workspace());
    for (int b = 0; b < batch_; ++b) {
      int32_t& history = history_[set_ * batch_ + b];
      bytes_ += state_bytes() + history * record_bytes() + tokens_ * (record_bytes() + token_bytes());
      if (history + tokens_ > state_.window) {
        bytes_ += state_bytes();
        base_[set_ * batch_ + b] += history;
        history = 0;
      }
      history += tokens_;
    }
  }

  void prefill(int prompt_tokens) {
    reserve_tokens(int64_t{batch_} * prompt_tokens);
    std::vector<int32_t> begin;
    for (int b = 0; b <= batch_; ++b) begin.push_back(b * prompt_tokens);
    set_ = sets_ - 1;  // always the first set: a prompt's state has just been cleared, so it is in the cache
    delta_prefill({state_, next_rows(), begin.data(), inputs(), out_.data()}, device_, workspace());
    bytes_ += batch_ * (2 * state_bytes() + prompt_tokens * token_bytes());
  }

 private:
  double state_bytes() const { return 4.0 * shape_.heads * shape_.value_size * shape_.key_size; }
  double record_bytes() const {
    return 4.0 * (shape_.key_heads * (shape_.key_size + 1) + shape_.heads * (shape_.value_size + 1 + shape_.gate_size));
  }
  double token_bytes() const {
    return 4.0 * (2 * shape_.key_heads * shape_.key_size + 2 * shape_.heads * shape_.value_size +
                  shape_.heads * (1 + shape_.gate_size));
  }

  void reserve_tokens(int64_t tokens) {
    if (q_in_.size() >= static_cast<size_t>(tokens * shape_.key_heads * shape_.key_size)) return;
    const auto place = [&](Buffer<float>& buffer, int64_t per_token, float low, float high) {
      buffer = Buffer<float>(tokens * per_token);
      fill_random(buffer, low, high, static_cast<uint32_t>(per_token) + 1);
    };
    place(q_in_, shape_.key_heads * shape_.key_size, -1, 1);
    place(k_in_, shape_.key_heads * shape_.key_size, -1, 1);
    place(v_in_, shape_.heads * shape_.value_size, -1, 1);
    place(g_in_, shape_.heads * shape_.gate_size, -0.1f, 0);
    place(beta_in_, shape_.heads, 0, 1);
    place(out_, shape_.heads * shape_.value_size, 0, 0);
  }

  DeltaTokens inputs() const {
    const int64_t keys = int64_t{shape_.key_heads} * shape_.key_size;
    return {q_in_.data(),    k_in_.data(), v_in_.data(), g_in_.data(),
            beta_in_.data(), keys,         keys,         int64_t{shape_.heads} * shape_.value_size};
  }

  std::span<std::byte> workspace() { return {workspace_.data(), workspace_.size()}; }

  StateRows next_rows() {
    set_ = (set_ + 1) % sets_;
    const int64_t first = int64_t{set_} * batch_;
    return {batch_, &slot_[first], &base_[first], &history_[first], &slot_[first], &slot_[first]};
  }

  DeltaShape shape_;
  int batch_, tokens_, sets_ = 0, set_ = 0, cycle_ = 1;
  Device& device_;
  DeltaState state_;
  double bytes_ = 0;
  Buffer<float> checkpoint_, k_, k_scale_, gram_, v_, decay_, beta_;
  Buffer<float> q_in_, k_in_, v_in_, g_in_, beta_in_, out_;
  Buffer<std::byte> workspace_;
  std::vector<int32_t> slot_, history_;
  std::vector<int64_t> base_;
};

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
  require(options.op == "delta" || options.op == "mamba2", "--op: expected delta or mamba2, got '{}'", options.op);
  require(options.op == "mamba2" ? mamba2_shapes().contains(options.shape) : shapes().contains(options.shape),
          "--shape: expected one of {}, got '{}'", fmt::join(ops_shapes(), ", "), options.shape);
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
  for (const auto& [name, shape] : shapes()) names.push_back(name);
  for (const auto& [name, shape] : mamba2_shapes()) names.push_back(name);
  return names;
}

void run_ops(const OpsOptions& given) {
  check(given);
  Device device(given.threads, /*pin=*/true);
  OpsOptions options = given;
  options.threads = device.threads().size();
  std::vector<OpsResult> results;
  if (options.op == "mamba2")
    add_all_results<Mamba2Bench>(options, mamba2_shapes().at(options.shape), device, results);
  else
    add_all_results<DeltaBench>(options, shapes().at(options.shape), device, results);
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
