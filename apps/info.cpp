// `replayssm info`: what a model is made of and what a sequence's state costs.
#include <filesystem>
#include <string>

#include "apps/command.h"
#include "apps/loading.h"
#include "apps/terminal.h"
#include "replayssm/core/error.h"
#include "replayssm/model/checkpoint.h"
#include "replayssm/model/language_model.h"
#include "replayssm/model/model.h"

namespace replayssm {
namespace {

// A kind of block: its letter in the pattern, its name, and its sizes in words.
struct BlockText {
  char letter;
  std::string name;
  std::string sizes;
};

std::string_view name_of(Activation activation) {
  return activation == Activation::kSwiGlu ? "SwiGLU" : "relu^2";
}

BlockText describe(const DeltaConfig& delta) {
  const DeltaShape& shape = delta.shape;
  return {'D', "delta rule",
          fmt::format("{} value heads of {}, {} key heads of {}, convolution of width {} over {} channels{}{}",
                      shape.heads, shape.value_size, shape.key_heads, shape.key_size, delta.conv_width,
                      delta.conv_channels(), shape.gate_size > 1 ? ", a gate a key channel" : "",
                      delta.lower_bound < 0 ? fmt::format(" of {} or more", delta.lower_bound) : "")};
}

BlockText describe(const Mamba2Config& mamba) {
  const Mamba2Shape& shape = mamba.shape;
  return {
      'M', "Mamba-2",
      fmt::format("{} heads of {} in {} groups, states of {}, convolution of width {} over {} channels", shape.heads,
                  shape.head_size, shape.groups, shape.state_size, mamba.conv_width, mamba.conv_channels())};
}

BlockText describe(const AttentionConfig& attention) {
  return {'A', "attention",
          fmt::format("{} query heads and {} key/value heads of {}, {} dimensions rotate", attention.query_heads,
                      attention.kv_heads, attention.head_size, attention.rotary_size)};
}

BlockText describe(const LatentAttentionConfig& attention) {
  return {'L', "latent attention",
          fmt::format("{} heads of {} + {}, values of {}, a latent of {}, none rotate", attention.heads,
                      attention.nope_size, attention.rope_size, attention.value_size, attention.latent_size)};
}

BlockText describe(const FeedForwardConfig& feed_forward) {
  return {'F', "feed-forward", fmt::format("{} of {}", name_of(feed_forward.activation), feed_forward.size)};
}

BlockText describe(const ExpertsConfig& experts) {
  return {'E', "experts",
          fmt::format("{} of {} experts, {} of {}{}{}", experts.top_k, experts.experts, name_of(experts.activation),
                      experts.size,
                      experts.latent_size > 0 ? fmt::format(" on a projection to {}", experts.latent_size) : "",
                      experts.shared_size > 0 ? fmt::format(", and a shared one of {}", experts.shared_size) : "")};
}

std::string line(std::string_view name, const std::string& value) {
  return fmt::format("{:<22}{}\n", name, value);
}

// The pattern of all blocks, and a line for each different one.
std::string describe_blocks(const ModelConfig& config) {
  std::string pattern, lines;
  for (const Block& block : config.blocks) {
    const BlockText text = std::visit([](const auto& sizes) { return describe(sizes); }, block.config);
    pattern += text.letter;
    const std::string own = line(fmt::format("{} {}", text.letter, text.name), text.sizes);
    if (lines.find(own) == std::string::npos) lines += own;
  }
  return line("layers", fmt::format("{}, of blocks {}", config.layers, pattern)) + lines;
}

std::string describe_model(const ModelConfig& config, const std::string& parameters) {
  return line("model", config.model_type) + line("parameters", parameters) +
         line("vocabulary",
              fmt::format("{}{}", config.vocabulary, config.has_tied_embeddings ? ", tied embeddings" : "")) +
         line("context", fmt::format("{} tokens", config.context_tokens)) +
         line("hidden size", fmt::format("{}", config.hidden_size)) + describe_blocks(config);
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

bool has_weights(const std::string& directory) {
  std::error_code error;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"})
    if (std::filesystem::exists(std::filesystem::path(directory) / name, error)) return true;
  return false;
}

}  // namespace

int run_info(const InfoFlags& flags) {
  ModelConfig config = read_config(flags.model);
  std::string parameters = "no weights here, the config alone";
  if (has_weights(flags.model)) {
    const Model model = load_shown(flags.model);
    parameters =
        fmt::format("{} ({} bytes of weights loaded)", count_parameters(Checkpoint(flags.model)), model.weights.bytes);
  }
  const StateLayout layout = state_layout(config, "", flags.window, flags.step_tokens, 16);
  write_out(describe_model(config, parameters) + describe_state(layout));
  return 0;
}

}  // namespace replayssm
