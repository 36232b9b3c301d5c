#include "replayssm/model/cuda_language_model.h"

#include <algorithm>
#include <type_traits>

#include "replayssm/core/error.h"
#include "replayssm/model/language_model.h"
#include "replayssm/ops/embed.h"
#include "replayssm/ops/norm.h"
#include "replayssm/ops/ring.h"
#include "replayssm/ops/rope.h"

namespace replayssm {
namespace {

constexpr size_t kAlignment = 256;

int rotary_size_of(const ModelConfig& config) {
  const AttentionConfig* attention = config.first<AttentionConfig>();
  return attention == nullptr ? 0 : attention->rotary_size;
}

// The arrays of a step.
template <typename T>
struct StepArrays {
  StepArrays(const ModelConfig& config, const CudaStepLimits& limits, std::byte* memory) {
    Carver carver(memory, kAlignment);
    const int64_t tokens = limits.tokens, size = config.hidden_size;
    hidden = carver.take<float>(tokens * size);
    wanted = carver.take<float>(tokens * size);
    parts = carver.take<float>(kResidualParts * std::min(tokens, kMostPartTokens) * size);
    normal = carver.take<T>(tokens * size);
    cosine = carver.take<float>(tokens * (rotary_size_of(config) / 2));
    sine = carver.take<float>(tokens * (rotary_size_of(config) / 2));
    token = carver.take<int32_t>(2 * tokens);
    size_t bytes_of_block = 0;
    for (const Block& block : config.blocks)
      bytes_of_block =
          std::max(bytes_of_block,
                   std::visit([&](const auto& one) { return block_bytes<T>(one, config, limits); }, block.config));
    workspace = {carver.take<std::byte>(bytes_of_block), bytes_of_block};
    bytes = carver.bytes();
  }

  float *hidden, *wanted, *parts;
  T* normal;
  float *cosine, *sine;
  int32_t* token;
  std::span<std::byte> workspace;
  size_t bytes;
};

// The tokens that a sequence's last page has room for.
int64_t whole_pages(const CudaStepLimits& limits) {
  require(limits.page_tokens >= 1 && limits.sequence_tokens >= 0,
          "model: expected pages of at least 1 token and sequences of at least 0, got {} and {}", limits.page_tokens,
          limits.sequence_tokens);
  return limits.sequence_pages() * limits.page_tokens;
}

template <typename T>
bool is_of(const CudaMatrix& matrix) {
  return data_of<T>(matrix) != nullptr;
}

}  // namespace

void StepTimer::begin(StepPart part) {
  if (!parts_.empty() && parts_.back() == part) return;
  timer_.mark();
  parts_.push_back(part);
}

void StepTimer::end() {
  timer_.mark();
}

std::vector<double> StepTimer::part_us() {
  const std::vector<double> intervals = timer_.intervals_us();
  std::vector<double> sums(kStepParts, 0.0);
  for (size_t i = 0; i < intervals.size(); ++i) sums[static_cast<int>(parts_[i])] += intervals[i];
  return sums;
}

template <typename T>
size_t CudaLanguageModel<T>::workspace_bytes(const ModelConfig& config, const CudaStepLimits& limits) {
  return StepArrays<T>(config, limits, nullptr).bytes;
}

template <typename T>
CudaLanguageModel<T>::CudaLanguageModel(const ModelConfig& config, const CudaWeights& weights,
                                        const CudaStepLimits& limits, CudaDevice& device)
    : config_(config),
      weights_(weights),
      limits_(limits),
      sequence_tokens_(whole_pages(limits)),
      device_(device),
      layers_(state_layout(config, {}, 1, 1, 1).layers),
      state_(state_indices(config)),
      products_(device),
      uploads_(static_cast<size_t>(std::max<int64_t>(limits.tokens, 0)) * 2 * sizeof(int32_t), device),
      pieces_(static_cast<size_t>(std::max<int64_t>(limits.tokens, 0))) {
  require(limits.tokens >= 1 && limits.rows >= 1 && limits.tokens >= limits.rows,
          "model: expected steps of at least 1 token and no more rows than tokens, got {} tokens and {} rows",
          limits.tokens, limits.rows);
  require(is_of<T>(weights.embedding), "model: its weights on the GPU are of another type than its activations");
  for (const Block& block : config.blocks) {
    const auto* delta = std::get_if<DeltaConfig>(&block.config);
    const auto* mamba = std::get_if<Mamba2Config>(&block.config);
    const int width = delta != nullptr ? delta->conv_width : mamba != nullptr ? mamba->conv_width : 4;
    require(width == 4, "model: on a GPU expected convolutions of width 4, got {}", width);
  }
  memory_ = DeviceBuffer<std::byte>(workspace_bytes(config, limits), device);
  const StepArrays<T> arrays(config, limits, memory_.data());
  hidden_ = arrays.hidden;
  parts_ = arrays.parts;
  wanted_ = arrays.wanted;
  normal_ = arrays.normal;
  cosine_ = arrays.cosine;
  sine_ = arrays.sine;
  token_ = arrays.token;
  workspace_ = arrays.workspace;
}

template <typename T>
void CudaLanguageModel<T>::check(const CudaModelStep& step, const CudaStatePool& pool) const {
  require(step.tokens >= 0 && step.tokens <= limits_.tokens && step.rows.count <= limits_.rows,
          "forward: expected a step of at most {} tokens in {} rows, got {} in {}", limits_.tokens, limits_.rows,
          step.tokens, step.rows.count);
  require(step.tokens_per_row >= 1, "forward: expected at least 1 token a row, got {}", step.tokens_per_row);
  require(step.kind == StepKind::kPrefill || step.tokens == int64_t{step.rows.count} * step.tokens_per_row,
          "forward: expected {} tokens in each of {} rows, got {} in all", step.tokens_per_row, step.rows.count,
          step.tokens);
  require(step.token != nullptr && step.logits != nullptr && (step.logit_tokens == 0 || step.logit_token != nullptr),
          "forward: token, logit_token and logits must not be null");
  require(step.logit_tokens >= 0 && step.logit_tokens <= limits_.tokens,
          "forward: expected at most {} logit tokens, got {}", limits_.tokens, step.logit_tokens);
  require(step.kind != StepKind::kConventional || step.tokens_per_row == 1,
          "forward: expected 1 token a row in a conventional step, got {}", step.tokens_per_row);
  require(step.kind != StepKind::kReplay || step.tokens_per_row <= pool.layout().max_step_tokens,
          "forward: expected at most {} tokens a row in a replay step, got {}", pool.layout().max_step_tokens,
          step.tokens_per_row);
  require(pool.layout().layers == layers_, "forward: the pool's layers are not those of the model");
  require(pool.storage().element == (std::is_same_v<T, float> ? Dtype::kF32 : Dtype::kBF16),
          "forward: the pool's activations are {}, the model's are not", dtype_name(pool.storage().element));
  require(pool.layout().page_tokens == limits_.page_tokens && pool.ledger().limits().context_tokens <= sequence_tokens_,
          "forward: expected sequences of at most {} tokens in pages of {}, the pool's may have {} in pages of {}",
          sequence_tokens_, limits_.page_tokens, pool.ledger().limits().context_tokens, pool.layout().page_tokens);
}

// hidden <- embedding; hidden <- hidden + block(norm(hidden)), block by block; logits.
template <typename T>
void CudaLanguageModel<T>::forward(const CudaModelStep& step, CudaStatePool& pool) {
  check(step, pool);
  if (step.tokens == 0) return;
  CudaForward<T> forward{config_, step, pool, products_, device_, hidden_, parts_, normal_, cosine_, sine_, workspace_};
  forward.begin(StepPart::kOther);
  embed(CudaEmbed<T>{.tokens = step.tokens,
                     .vocabulary = config_.vocabulary,
                     .size = config_.hidden_size,
                     .token = step.token,
                     .table = data_of<T>(weights_.embedding),
                     .y = hidden_},
        device_);
  if (const int rotary_size = rotary_size_of(config_); rotary_size > 0)
    rope_angles(RowRopeAngles{.tokens = step.tokens,
                              .rows = step.rows,
                              .token_begin = forward.token_begin(),
                              .rotary_size = rotary_size,
                              .theta = config_.first<AttentionConfig>()->rope_theta,
                              .cosine = cosine_,
                              .sine = sine_},
                device_);
  for (size_t index = 0; index < weights_.blocks.size(); ++index) {
    forward.norm = norm_of(step.tokens, hidden_, weights_.blocks[index].norm, forward.leaves_parts);
    forward.leaves_parts = may_leave_parts(step, index);
    run_block(forward, index);
  }
  project_logits(forward);
  if (step.timer != nullptr) step.timer->end();
}

// Whether a block's output may wait for the next norm: if it is a single product, which can be cut, and the norm's
// vectors are all of the stream's.
template <typename T>
bool CudaLanguageModel<T>::may_leave_parts(const CudaModelStep& step, size_t index) const {
  if (step.tokens <= kFewTokens || step.tokens > kMostPartTokens) return false;
  if (index + 1 == weights_.blocks.size() && step.logit_token != nullptr) return false;
  const int64_t inputs = std::visit(
      [](const auto& weights) -> int64_t {
        if constexpr (requires { weights.out_proj; })
          return weights.out_proj.inputs;
        else if constexpr (requires { weights.down; })
          return weights.down.inputs;
        else
          return 0;
      },
      weights_.blocks[index].body);
  return inputs > 0 && inputs % (8 * kResidualParts) == 0;
}

template <typename T>
void CudaLanguageModel<T>::run_block(const CudaForward<T>& forward, size_t index) {
  const BlockConfig& config = config_.blocks[index].config;
  const BasicBlockWeights<DeviceBuffer>& weights = weights_.blocks[index].body;
  if (const auto* delta = std::get_if<DeltaConfig>(&config))
    run_delta(forward, *delta, std::get<BasicDeltaWeights<DeviceBuffer>>(weights), state_[index]);
  else if (const auto* mamba = std::get_if<Mamba2Config>(&config))
    run_mamba2(forward, *mamba, std::get<BasicMamba2Weights<DeviceBuffer>>(weights), state_[index]);
  else if (const auto* attention = std::get_if<AttentionConfig>(&config))
    run_attention(forward, *attention, std::get<BasicAttentionWeights<DeviceBuffer>>(weights), state_[index]);
  else if (const auto* latent = std::get_if<LatentAttentionConfig>(&config))
    run_latent_attention(forward, *latent, std::get<BasicLatentAttentionWeights<DeviceBuffer>>(weights), state_[index]);
  else if (const auto* experts = std::get_if<ExpertsConfig>(&config))
    run_experts(forward, *experts, std::get<BasicExpertsWeights<DeviceBuffer>>(weights));
  else
    run_feed_forward(forward, std::get<FeedForwardConfig>(config),
                     std::get<BasicFeedForwardWeights<DeviceBuffer>>(weights));
}

template <typename T>
BasicRmsNorm<float, T> CudaLanguageModel<T>::norm_of(int64_t tokens, const float* x, const DeviceBuffer<float>& weight,
                                                     bool has_parts) const {
  const int64_t size = config_.hidden_size;
  return {.tokens = tokens,
          .size = size,
          .x = x,
          .x_stride = size,
          .weight = weight.data(),
          .is_zero_centred = config_.has_zero_centred_norms,
          .eps = static_cast<float>(config_.norm_epsilon),
          .y = normal_,
          .y_stride = size,
          .parts = parts_,
          .part_count = has_parts ? kResidualParts : 0,
          .sums = hidden_};
}

// logits = W_head norm(hidden), of the wanted tokens alone.
template <typename T>
void CudaLanguageModel<T>::project_logits(CudaForward<T>& forward) {
  const CudaModelStep& step = forward.step;
  const float* wanted = hidden_;
  int64_t count = step.tokens;
  if (step.logit_token != nullptr) {
    if (step.logit_tokens == 0) return;
    count = step.logit_tokens;
    wanted = wanted_;
    forward.begin(StepPart::kOther);
    // Rows of the residual stream, as of a table.
    embed(CudaEmbed<float>{.tokens = count,
                           .vocabulary = step.tokens,
                           .size = config_.hidden_size,
                           .token = step.logit_token,
                           .table = hidden_,
                           .y = wanted_},
          device_);
  }
  forward.norm = norm_of(count, wanted, weights_.norm, forward.leaves_parts);
  project_normal(forward, weights_.head(), step.logits, config_.vocabulary);
}

template <typename T>
void CudaLanguageModel<T>::prefill(std::span<const Handle> rows, std::span<const std::span<const int32_t>> prompts,
                                   float* logits, CudaStatePool& pool) {
  pieces_.start(rows, prompts, static_cast<size_t>(std::min(pool.ledger().limits().max_rows, limits_.rows)));
  while (pieces_.next()) {
    const StepPlan& plan = pool.begin_step(StepKind::kPrefill, pieces_.rows(), pieces_.tokens_per_row());
    try {
      auto* const block = static_cast<int32_t*>(uploads_.next());
      std::ranges::copy(pieces_.last_token(), std::ranges::copy(pieces_.token(), block).out);
      const size_t bytes = pieces_.token().size_bytes() + pieces_.last_token().size_bytes();
      uploads_.upload(token_, bytes, bytes, 1);
      forward({.kind = StepKind::kPrefill,
               .rows = pool.rows(plan.rows.count),
               .tokens = plan.tokens,
               .tokens_per_row = *std::ranges::max_element(pieces_.tokens_per_row()),
               .token = token_,
               .logit_token = token_ + plan.tokens,
               .logit_tokens = static_cast<int64_t>(pieces_.last_token().size()),
               .logits = logits + pieces_.first_done() * static_cast<size_t>(config_.vocabulary)},
              pool);
    } catch (...) {
      pool.abort_step();
      throw;
    }
    pool.commit();
  }
}

template class CudaLanguageModel<float>;
template class CudaLanguageModel<Bf16>;

}  // namespace replayssm
