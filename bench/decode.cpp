#include "bench/decode.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "bench/model_configs.h"
#include "replayssm/core/error.h"
#include "replayssm/core/mapped_file.h"
#include "replayssm/model/config.h"
#include "replayssm/model/generation.h"

namespace replayssm::bench {

std::vector<std::string> decode_configs() {
  std::vector<std::string> names;
  for (const auto& [name, text] : model_configs()) names.push_back(name);
  return names;
}

namespace {

struct NamedConfig {
  std::string name;
  ModelConfig config;
  std::string checkpoint;  // a directory, or empty: random weights
};

bool has_weights(const std::string& directory) {
  std::error_code error;
  return std::filesystem::exists(directory + "/model.safetensors", error) ||
         std::filesystem::exists(directory + "/model.safetensors.index.json", error);
}

NamedConfig read_named_config(const DecodeOptions& options) {
  NamedConfig named;
  named.name = options.config;
  std::error_code error;
  if (const auto known = model_configs().find(options.config); known != model_configs().end()) {
    named.config = parse_config(known->second, {}, options.config + "/");
  } else if (std::filesystem::is_directory(options.config, error)) {
    named.config = read_config(options.config);
    named.name = std::filesystem::path(options.config).lexically_normal().filename();
    if (!options.has_random_weights) {
      require(has_weights(options.config),
              "--config: {} has no weights; --random-weights times the model with made-up ones", options.config);
      named.checkpoint = options.config;
    }
  } else {
    require(std::filesystem::is_regular_file(options.config, error),
            "--config: expected {}, a model directory or a config.json, got '{}'", fmt::join(decode_configs(), ", "),
            options.config);
    require(options.has_random_weights,
            "--config: {} has no weights; --random-weights times the model with made-up ones", options.config);
    named.config = parse_config(MappedFile(options.config).text(), {}, "");
  }
  if (options.layers > 0) {
    require(options.layers <= named.config.layers, "--layers: expected at most {}, the model's, got {}",
            named.config.layers, options.layers);
    require(named.checkpoint.empty(), "--layers: a checkpoint cannot be cut; use --random-weights");
    std::erase_if(named.config.blocks, [&](const Block& block) { return block.layer >= options.layers; });
    named.config.layers = options.layers;
    named.name += fmt::format("-{}layers", options.layers);
  }
  return named;
}

void check_options(const DecodeOptions& options) {
  for (const int batch : options.batches)
    require(batch >= 1 && batch <= 4096, "--batch: expected 1 to 4096, got {}", batch);
  require(options.context >= 1 && options.context <= 1 << 20, "--context: expected 1 to {}, got {}", 1 << 20,
          options.context);
  require(options.steps >= 2 && options.steps <= 1 << 16, "--steps: expected 2 to {}, got {}", 1 << 16, options.steps);
  require(options.window >= 1 && options.window <= 63, "--window: expected 1 to 63, got {}", options.window);
  require(options.read == "fp32" || options.read == "bf16", "--read: expected fp32 or bf16, got '{}'", options.read);
  require(options.layers >= 0, "--layers: expected 0 or more, got {}", options.layers);
  for (const std::string& decoder : options.decoders) parse_decoder(decoder);
  require(options.csv.empty() || std::ofstream(options.csv, std::ios::app).good(), "--csv: cannot write '{}'",
          options.csv);
}

}  // namespace

}  // namespace replayssm::bench

#ifdef REPLAYSSM_HAS_CUDA

#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>

#include "bench/csv.h"
#include "bench/cuda_roof.h"
#include "bench/machine.h"
#include "replayssm/model/cuda_language_model.h"
#include "replayssm/model/cuda_runner.h"
#include "replayssm/model/language_model.h"
#include "replayssm/model/model.h"
#include "replayssm/model/random_weights.h"
#include "replayssm/ops/linear.h"
#include "replayssm/ops/random_fill.h"
#include "replayssm/ops/sample.h"
#include "replayssm/state/cuda_pool.h"
#include "replayssm/state/traffic.h"

namespace replayssm::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPrefillTokens = 8192;
constexpr uint64_t kSeed = 1;
// What cuBLASLt, graphs and the driver take beside what is counted here.
constexpr size_t kReservedBytes = size_t{2} << 30;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What a step multiplies: parameters in matrices that every token meets, and those of experts, of which it meets some.
struct ModelSizes {
  double dense = 0;           // parameters, the head too
  double experts = 0;         // of all experts
  double chosen_experts = 0;  // that one token meets
};

// Counts the matrices of a model by making none of them.
ModelSizes sizes_of(const ModelConfig& config) {
  ModelSizes sizes;
  const double hidden = config.hidden_size;
  sizes.dense = hidden * static_cast<double>(config.vocabulary);
  for (const Block& block : config.blocks) {
    if (const auto* delta = std::get_if<DeltaConfig>(&block.config)) {
      sizes.dense += hidden * static_cast<double>(DeltaRows(*delta).count + delta->value_channels()) +
                     static_cast<double>(delta->gates()) * delta->gate_rank +
                     static_cast<double>(delta->value_channels()) * delta->output_gate_rank;
    } else if (const auto* mamba = std::get_if<Mamba2Config>(&block.config)) {
      sizes.dense += hidden * (2.0 * mamba->inner_channels() + mamba->conv_channels() + mamba->shape.heads);
    } else if (const auto* attention = std::get_if<AttentionConfig>(&block.config)) {
      const double queries = static_cast<double>(attention->query_heads) * attention->head_size;
      sizes.dense += hidden * ((attention->has_output_gate ? 3.0 : 2.0) * queries +
                               2.0 * attention->kv_heads * attention->head_size);
    } else if (const auto* latent = std::get_if<LatentAttentionConfig>(&block.config)) {
      const double query = latent->nope_size + latent->rope_size, heads = latent->heads;
      sizes.dense += hidden * ((latent->query_rank > 0 ? latent->query_rank : heads * query) + latent->key_size() +
                               heads * latent->value_size) +
                     heads * query * latent->query_rank + heads * latent->key_size() * query +
                     heads * latent->value_size * latent->latent_size;
    } else if (const auto* feed_forward = std::get_if<FeedForwardConfig>(&block.config)) {
      sizes.dense += hidden * feed_forward->size * (feed_forward->activation == Activation::kSwiGlu ? 3.0 : 2.0);
    } else {
      const auto& experts = std::get<ExpertsConfig>(block.config);
      const double width = experts.latent_size > 0 ? experts.latent_size : hidden;
      const double matrices = experts.activation == Activation::kSwiGlu ? 3.0 : 2.0;
      sizes.dense +=
          hidden * experts.experts + matrices * hidden * experts.shared_size + 2.0 * hidden * experts.latent_size;
      sizes.experts += matrices * width * experts.size * experts.experts;
      sizes.chosen_experts += matrices * width * experts.size * experts.top_k;
    }
  }
  return sizes;
}

// The bytes of experts' weights that `tokens` random choices meet.
double met_expert_bytes(const ModelConfig& config, const ModelSizes& sizes, int tokens) {
  const auto* experts = config.first<ExpertsConfig>();
  if (experts == nullptr) return 0;
  const double missed = std::pow(1.0 - static_cast<double>(experts->top_k) / experts->experts, tokens);
  return 2.0 * sizes.experts * (1.0 - missed);
}

// BF16 operations a second of a large product, by the library that the model's products use.
double measure_product_rate(CudaDevice& device) {
  constexpr int64_t kSize = 8192;
  constexpr int kRounds = 10;
  MatrixProducts products(device);
  const DeviceBuffer<Bf16> weight(kSize * kSize, device), x(kSize * kSize, device), y(kSize * kSize, device);
  random_fill(RandomFill<Bf16>{.count = weight.size(), .seed = 1, .y = weight.data()}, device);
  random_fill(RandomFill<Bf16>{.count = x.size(), .seed = 2, .y = x.data()}, device);
  CudaTimer timer(device);
  for (int round = 0; round <= kRounds; ++round) {
    timer.mark();
    linear(BasicLinear<Bf16, Bf16>{.tokens = kSize,
                                   .inputs = kSize,
                                   .outputs = kSize,
                                   .weight = weight.data(),
                                   .x = x.data(),
                                   .x_stride = kSize,
                                   .y = y.data(),
                                   .y_stride = kSize},
           products);
  }
  std::vector<double> us = timer.intervals_us();
  std::ranges::sort(us);
  return 2.0 * kSize * kSize * kSize / (us[us.size() / 2] * 1e-6);
}

struct Roofs {
  double read = 0;      // bytes a second
  double products = 0;  // operations a second
};

// A decoder's figures at one batch.
struct StepFigures {
  double us_median = 0, us_p95 = 0, wall_us = 0, capture_s = 0;
  std::vector<double> part_us;  // kStepParts
  double bytes = 0, floor_us = 0;
  bool replays = false;  // else the steps were conventional

  double us_of(StepPart part) const { return part_us[static_cast<int>(part)]; }
};

// One batch of sequences, prefilled once; every decoder continues forks of them.
class DecodeRig {
 public:
  DecodeRig(const NamedConfig& named, const CudaWeights& weights, const DecodeOptions& options, int batch,
            CudaDevice& device)
      : config_(named.config),
        options_(options),
        batch_(batch),
        device_(device),
        sizes_(sizes_of(config_)),
        pool_(layout_of(config_, options), pool_size_of(config_, options, batch), device, pool_options(options, batch)),
        model_(config_, weights, limits_of(options, batch), device),
        logits_(static_cast<size_t>(batch) * config_.vocabulary, device),
        token_(batch, device),
        settings_(batch, device),
        position_(batch, device),
        sample_memory_(sample_workspace_bytes(batch, config_.vocabulary, device), device) {
    const std::vector<SampleSettings> greedy(batch);
    settings_.upload(greedy, device);
    device.fill_words(position_.data(), 0, position_.size() * sizeof(int64_t) / sizeof(uint32_t));
    prefill();
  }

  static int sequence_tokens(const DecodeOptions& options) {
    return options.context + options.steps + warm_ups(options);
  }
  static StateLayout layout_of(const ModelConfig& config, const DecodeOptions& options) {
    StateLayout layout = state_layout(config, {}, options.window, 1, kCudaPageTokens);
    if (options.read == "bf16") layout.form = CheckpointForm::kPlanes;
    return layout;
  }
  static CudaPoolOptions pool_options(const DecodeOptions& options, int batch) {
    return {.max_rows = batch,
            .element = Dtype::kBF16,
            .max_sequence_tokens = sequence_tokens(options),
            .staggers_flushes = !options.is_lockstep};
  }
  // The sequences and their forks, which share the prompts' full pages.
  static PoolSize pool_size_of(const ModelConfig& config, const DecodeOptions& options, int batch) {
    const StateLayout layout = layout_of(config, options);
    const int64_t all = layout.pages_for(sequence_tokens(options)), prompt = layout.pages_for(options.context);
    return {2 * batch, batch * (prompt + all)};
  }
  static CudaStepLimits limits_of(const DecodeOptions& options, int batch) {
    return {.tokens = std::max<int64_t>(kPrefillTokens, batch),
            .rows = batch,
            .sequence_tokens = sequence_tokens(options),
            .page_tokens = kCudaPageTokens};
  }
  static int warm_ups(const DecodeOptions& options) { return 2 * options.window; }

  double prefill_seconds() const { return prefill_seconds_; }
  StepFigures time(Decoder decoder, const Roofs& roofs);

 private:
  void prefill();
  void run_step(StepKind kind, Readout readout, StepTimer* timer);
  void count_step(const StepPlan& plan, Readout readout, StepFigures& figures, const Roofs& roofs) const;

  const ModelConfig& config_;
  const DecodeOptions& options_;
  int batch_;
  CudaDevice& device_;
  ModelSizes sizes_;
  CudaStatePool pool_;
  CudaLanguageModel<Bf16> model_;
  DeviceBuffer<float> logits_;
  DeviceBuffer<int32_t> token_;
  DeviceBuffer<SampleSettings> settings_;
  DeviceBuffer<int64_t> position_;
  DeviceBuffer<std::byte> sample_memory_;
  std::vector<Handle> prompts_;
  double prefill_seconds_ = 0;
};

// Distinct random prompts.
void DecodeRig::prefill() {
  std::mt19937_64 random(kSeed);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(config_.vocabulary) - 1);
  std::vector<std::vector<int32_t>> texts(batch_, std::vector<int32_t>(options_.context));
  for (std::vector<int32_t>& text : texts)
    for (int32_t& one : text) one = token(random);
  const std::vector<std::span<const int32_t>> prompts(texts.begin(), texts.end());
  for (int row = 0; row < batch_; ++row) prompts_.push_back(pool_.allocate(options_.context));
  device_.synchronize();
  const Clock::time_point start = Clock::now();
  model_.prefill(prompts_, prompts, logits_.data(), pool_);
  device_.synchronize();
  prefill_seconds_ = seconds_since(start);
}

void DecodeRig::run_step(StepKind kind, Readout readout, StepTimer* timer) {
  model_.forward({.kind = kind,
                  .rows = pool_.rows(batch_),
                  .tokens = batch_,
                  .readout = readout,
                  .token = token_.data(),
                  .logits = logits_.data(),
                  .timer = timer},
                 pool_);
  sample({.rows = batch_,
          .vocabulary = config_.vocabulary,
          .logits = logits_.data(),
          .logits_stride = config_.vocabulary,
          .settings = settings_.data(),
          .position = position_.data(),
          .token = token_.data()},
         device_, {sample_memory_.data(), sample_memory_.size()});
}

// The bytes of a step, each once: weights (of experts those that as many random choices meet), state, keys and values,
// logits written and read; and the time that they and the products take at the measured roofs.
void DecodeRig::count_step(const StepPlan& plan, Readout readout, StepFigures& figures, const Roofs& roofs) const {
  const StateTraffic traffic = step_traffic(pool_.layout(), plan, readout, pool_.storage());
  const double state = static_cast<double>(traffic.read_bytes + traffic.written_bytes);
  double positions = 0;
  for (int n = 0; n < plan.tokens; ++n) positions += static_cast<double>(plan.position[n]) + 1;
  const double kv = positions * static_cast<double>(kv_token_bytes(pool_.layout(), pool_.storage()));
  const double logits = 2.0 * sizeof(float) * batch_ * static_cast<double>(config_.vocabulary);
  const double weights = 2.0 * sizes_.dense + met_expert_bytes(config_, sizes_, batch_);
  const double operations = 2.0 * batch_ * (sizes_.dense + sizes_.chosen_experts);
  figures.bytes += state + kv + logits + weights;
  figures.floor_us +=
      1e6 * ((state + kv + logits) / roofs.read + std::max(weights / roofs.read, operations / roofs.products));
}

StepFigures DecodeRig::time(Decoder decoder, const Roofs& roofs) {
  const bool is_replay = decoder != Decoder::kConventional && batch_ >= kLeastReplayRows;
  const StepKind kind = is_replay ? StepKind::kReplay : StepKind::kConventional;
  const Readout readout = decoder == Decoder::kExact ? Readout::kExact : Readout::kDirect;
  std::vector<Handle> rows;
  for (const Handle& prompt : prompts_) rows.push_back(pool_.fork(prompt, sequence_tokens(options_)));
  const std::vector<int> ones(batch_, 1);
  std::vector<int32_t> first(batch_);
  for (int row = 0; row < batch_; ++row) first[row] = static_cast<int32_t>(row * 7919 % config_.vocabulary);
  token_.upload(first, device_);

  StepFigures figures;
  figures.replays = is_replay;
  Clock::time_point start = Clock::now();
  CudaGraph graph(device_, [&] { run_step(kind, readout, nullptr); });
  figures.capture_s = seconds_since(start);
  StepTimer parts(device_);
  CudaGraph timed_graph(device_, [&] { run_step(kind, readout, &parts); });

  const int warm = warm_ups(options_), timed = options_.steps;
  CudaTimer timer(device_);
  std::vector<double> part_sums(kStepParts, 0.0);
  const int part_steps = std::min(options_.window, timed / 2);
  for (int step = 0; step < warm + timed; ++step) {
    const bool is_split = step >= warm - part_steps && step < warm;  // the warm-up's last cycle
    if (step == warm) {
      device_.synchronize();
      start = Clock::now();
      timer.mark();
    }
    const StepPlan& plan = pool_.begin_step(kind, rows, ones);
    (is_split ? timed_graph : graph).launch();
    if (step >= warm) {
      timer.mark();
      count_step(plan, readout, figures, roofs);
    }
    pool_.commit();
    if (is_split) {
      const std::vector<double> us = parts.part_us();
      for (int part = 0; part < kStepParts; ++part) part_sums[part] += us[part] / part_steps;
    }
  }
  device_.synchronize();
  figures.wall_us = 1e6 * seconds_since(start) / timed;
  std::vector<double> us = timer.intervals_us();
  std::ranges::sort(us);
  figures.us_median = us[us.size() / 2];
  figures.us_p95 = us[us.size() * 95 / 100];
  figures.bytes /= timed;
  figures.floor_us /= timed;
  figures.part_us = part_sums;

  const std::vector<int32_t> last = token_.download(device_);
  for (int row = 0; row < batch_; ++row)
    require(last[row] >= 0, "bench decode: the logits of row {} are not finite", row);
  for (const Handle& row : rows) pool_.free(row);
  return figures;
}

size_t rig_bytes(const ModelConfig& config, const DecodeOptions& options, int batch) {
  return pool_bytes(DecodeRig::layout_of(config, options), DecodeRig::pool_size_of(config, options, batch),
                    {.element = Dtype::kBF16, .has_squares = false});
}

size_t workspace_bytes(const ModelConfig& config, const DecodeOptions& options, int batch) {
  return CudaLanguageModel<Bf16>::workspace_bytes(config, DecodeRig::limits_of(options, batch)) +
         static_cast<size_t>(batch) * config.vocabulary * sizeof(float);
}

// Throws Error if the largest batch has no room beside the weights.
void check_memory(const NamedConfig& named, const DecodeOptions& options, size_t weight_bytes, size_t free) {
  const int batch = *std::ranges::max_element(options.batches);
  const auto needed = [&](int rows) {
    return weight_bytes + rig_bytes(named.config, options, rows) + workspace_bytes(named.config, options, rows) +
           kReservedBytes;
  };
  if (needed(batch) <= free) return;
  int fits = 0;
  for (int rows = 1; rows < batch && needed(rows) <= free; ++rows) fits = rows;
  fail(
      "bench decode: {} at batch {} needs {} bytes of GPU memory ({} for weights, {} for the states, keys "
      "and values of sequences and their forks, {} for a step's arrays, {} kept free), {} are free, {}",
      named.name, batch, needed(batch), weight_bytes, rig_bytes(named.config, options, batch),
      workspace_bytes(named.config, options, batch), kReservedBytes, free,
      fits > 0 ? fmt::format("which a batch of {} fits into", fits) : "which not even a batch of 1 fits into");
}

void append_figures(const DecodeOptions& options, const NamedConfig& named, const CudaDevice& device, int batch,
                    const std::string& decoder, const StepFigures& figures, size_t peak_bytes) {
  append_csv(
      options.csv,
      "machine,config,device,batch,context,tokens,accepted,window,read,recurrence,decode,draft,step_us_median,"
      "step_us_p95,wall_us,tokens_s,ssm_us,attention_us,matmul_us,other_us,bytes,peak_bytes,floor_share",
      fmt::format("{},{},{},{},{},1,1,{},{},fp32,{},none,{:.1f},{:.1f},{:.1f},{:.0f},{:.1f},{:.1f},{:.1f},"
                  "{:.1f},{:.0f},{},{:.3f}",
                  device.properties().name, named.name, cuda_device_label(device), batch, options.context,
                  figures.replays ? options.window : 0, figures.replays && decoder == "replay" ? options.read : "fp32",
                  decoder, figures.us_median, figures.us_p95, figures.wall_us, 1e6 * batch / figures.us_median,
                  figures.us_of(StepPart::kStateSpace), figures.us_of(StepPart::kAttention),
                  figures.us_of(StepPart::kProducts), figures.us_of(StepPart::kOther), figures.bytes, peak_bytes,
                  figures.floor_us / figures.us_median));
}

}  // namespace

void run_decode(const DecodeOptions& options) {
  check_options(options);
  const NamedConfig named = read_named_config(options);
  const ModelConfig& config = named.config;
  require(DecodeRig::sequence_tokens(options) <= config.context_tokens,
          "--context: expected a prompt, warm-up and steps within the model's {} tokens, got {}", config.context_tokens,
          DecodeRig::sequence_tokens(options));
  CudaDevice device;
  const size_t free = device.available_bytes();
  const ModelSizes sizes = sizes_of(config);
  const double table_bytes =
      config.has_tied_embeddings ? 0 : 2.0 * static_cast<double>(config.vocabulary) * config.hidden_size;
  check_memory(named, options, static_cast<size_t>(2.0 * (sizes.dense + sizes.experts) + table_bytes), free);

  const Roofs roofs = {measure_roofs(device).read, measure_product_rate(device)};
  Clock::time_point start = Clock::now();
  WeightStore<DeviceBuffer> store(device, Dtype::kBF16);
  const CudaWeights weights = named.checkpoint.empty() ? random_weights(config, kSeed, true, store)
                                                       : load_weights(Checkpoint(named.checkpoint), config, store);
  device.synchronize();
  fmt::print(
      "{} on {}, {}: {} weights of {:.2f} GB in BF16 ({:.1f} s), prompts of {} tokens, {} steps, window {}, {} reads, "
      "{}; roofs: read {:.0f} GB/s, products {:.0f} TFLOP/s\n",
      named.name, device.properties().name, cuda_device_label(device), named.checkpoint.empty() ? "random" : "loaded",
      static_cast<double>(weights.bytes) * 1e-9, seconds_since(start), options.context, options.steps, options.window,
      options.read, options.is_lockstep ? "rows flush together" : "flushes spread over the window", roofs.read * 1e-9,
      roofs.products * 1e-12);
  fmt::print("{:>6} {:<13} {:>10} {:>10} {:>10} {:>10} {:>9} {:>10} {:>10} {:>9} {:>7} {:>7} {:>8}\n", "batch",
             "decode", "us median", "us p95", "us wall", "tokens/s", "state us", "attn us", "matmul us", "other us",
             "GB", "floor", "capture");
  for (const int batch : options.batches) {
    DecodeRig rig(named, weights, options, batch, device);
    const size_t peak_bytes = free - device.available_bytes();
    for (const std::string& name : options.decoders) {
      const StepFigures figures = rig.time(parse_decoder(name), roofs);
      fmt::print(
          "{:6} {:<13} {:10.1f} {:10.1f} {:10.1f} {:10.0f} {:9.1f} {:10.1f} {:10.1f} {:9.1f} {:7.2f} {:6.0f}% "
          "{:7.2f}s\n",
          batch, name, figures.us_median, figures.us_p95, figures.wall_us, 1e6 * batch / figures.us_median,
          figures.us_of(StepPart::kStateSpace), figures.us_of(StepPart::kAttention), figures.us_of(StepPart::kProducts),
          figures.us_of(StepPart::kOther), figures.bytes * 1e-9, 100 * figures.floor_us / figures.us_median,
          figures.capture_s);
      std::fflush(stdout);
      if (!options.csv.empty()) append_figures(options, named, device, batch, name, figures, peak_bytes);
    }
    if (batch < kLeastReplayRows)
      fmt::print("{:6} steps of fewer than {} rows are conventional, whatever was asked for\n", batch,
                 kLeastReplayRows);
    fmt::print("{:6} prefill: {:.2f} s, {:.0f} tokens/s; {:.1f} GB of memory in use\n", batch, rig.prefill_seconds(),
               static_cast<double>(batch) * options.context / rig.prefill_seconds(),
               static_cast<double>(peak_bytes) * 1e-9);
  }
}

}  // namespace replayssm::bench

#else

namespace replayssm::bench {

void run_decode(const DecodeOptions& options) {
  check_options(options);
  read_named_config(options);
  fail("bench decode: this build has no CUDA");
}

}  // namespace replayssm::bench

#endif
