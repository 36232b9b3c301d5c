// `replayssm info`: what a model is made of and what a sequence's state costs.
#include <string>

#include "apps/command.h"
#include "apps/loading.h"
#include "apps/terminal.h"
#include "replayssm/core/error.h"
#include "replayssm/model/checkpoint.h"
#include "replayssm/model/model.h"
#include "replayssm/model/qwen.h"

namespace replayssm {
namespace {

std::string describe_model(const Model& model, int64_t parameters) {
  const ModelConfig& config = model.config;
  const DeltaShape& delta = config.delta.shape;
  const AttentionConfig& attention = config.attention;
  std::string text;
  auto line = [&text](std::string_view name, const std::string& value) {
    text += fmt::format("{:<22}{}\n", name, value);
  };
  line("model", config.model_type);
  line("parameters", fmt::format("{} ({} bytes of weights loaded)", parameters, model.weights.bytes));
  line("vocabulary", fmt::format("{}{}", config.vocabulary, config.has_tied_embeddings ? ", tied embeddings" : ""));
  line("context", fmt::format("{} tokens", config.context_tokens));
  line("hidden size", fmt::format("{}, feed-forward {}", config.hidden_size, config.intermediate_size));
  std::string pattern;
  for (const LayerKind kind : config.layers) pattern += kind == LayerKind::kDelta ? 'D' : 'A';
  line("layers", fmt::format("{} ({}; D delta rule, A attention)", config.layers.size(), pattern));
  if (config.count(LayerKind::kDelta) > 0)
    line("delta rule", fmt::format("{} value heads of {}, {} key heads of {}, convolution of width {} over {} channels",
                                   delta.heads, delta.value_size, delta.key_heads, delta.key_size,
                                   config.delta.conv_width, config.delta.conv_channels()));
  if (config.count(LayerKind::kAttention) > 0)
    line("attention",
         fmt::format("{} query heads and {} key/value heads of {}, {} dimensions rotate", attention.query_heads,
                     attention.kv_heads, attention.head_size, attention.rotary_size));
  return text;
}

std::string describe_state(const StateLayout& layout) {
  const SlotBytes slot = slot_bytes(layout);
  return fmt::format(
      "\nstate of a sequence, window {}, steps of up to {} tokens\n"
      "  checkpoint          {:>14} bytes\n"
      "  ring                {:>14} bytes\n"
      "  convolution         {:>14} bytes\n"
      "  slot                {:>14} bytes\n"
      "  keys and values     {:>14} bytes per token\n",
      layout.window, layout.max_step_tokens, slot.checkpoint, slot.ring, slot.convolution, slot.total(),
      kv_token_bytes(layout));
}

int64_t count_parameters(const Checkpoint& checkpoint) {
  int64_t parameters = 0;
  for (const std::string& name : checkpoint.names()) parameters += checkpoint.find(name)->elements();
  return parameters;
}

}  // namespace

int run_info(const InfoFlags& flags) {
  const Model model = load_shown(flags.model);
  const StateLayout layout = qwen_state_layout(model.config, model.weights, flags.window, flags.step_tokens, 16);
  const std::string text = describe_model(model, count_parameters(Checkpoint(flags.model))) + describe_state(layout);
  write_out(text);
  return 0;
}

}  // namespace replayssm
