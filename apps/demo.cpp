// `replayssm demo`: a batch of built-in prompts, decoded in the three ways.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "apps/command.h"
#include "apps/loading.h"
#include "apps/terminal.h"
#include "replayssm/core/error.h"
#include "replayssm/core/simd.h"
#include "replayssm/model/comparison.h"
#include "replayssm/model/model.h"

namespace replayssm {
namespace {

constexpr const char* kPrompts[] = {
    "The scheduler of the Linux kernel",
    "If you want to",
    "The return value of the function is",
    "Anarchists argue that",
    "Bread \\Bread\\, n.",
    "When the device is",
    "Returns the",
    "In general, the kernel",
};
constexpr float kRepetitionPenalty = 1.1f;

// A model's three runs.
struct Shown {
  std::string name;
  std::vector<DecoderRun> runs;
};

std::string completions(const Model& model, const DecoderRun& run, size_t count) {
  std::string text;
  for (size_t i = 0; i < std::min(count, run.tokens.size()); ++i)
    text += fmt::format("[{}] {} |{}\n\n", i + 1, kPrompts[i], model.tokenizer.decode(run.tokens[i]));
  return text;
}

std::string table(const std::vector<Shown>& all) {
  std::string text = fmt::format("{:<14}{:<14}{:>10}{:>14}{:>17}{:>9}{:>20}\n", "model", "decode", "tokens/s",
                                 "read B/token", "written B/token", "flushes", "largest logit diff");
  for (const Shown& shown : all)
    for (const DecoderRun& run : shown.runs) {
      const GenerationCounts& counts = run.counts;
      const double tokens = static_cast<double>(counts.decoded_tokens);
      text += fmt::format("{:<14}{:<14}{:>10.0f}{:>14.0f}{:>17.0f}{:>9}{:>20.2g}\n", shown.name,
                          decoder_name(run.decoder), static_cast<double>(counts.sampled_tokens) / counts.decode_seconds,
                          static_cast<double>(counts.traffic.read_bytes) / tokens,
                          static_cast<double>(counts.traffic.written_bytes) / tokens, counts.flushes,
                          run.largest_logit_difference);
    }
  return text;
}

std::vector<GenerationRequest> requests_for(const Model& model, int64_t new_tokens) {
  std::vector<GenerationRequest> requests;
  for (const char* prompt : kPrompts) {
    GenerationRequest& request = requests.emplace_back();
    request.prompt = model.tokenizer.encode(prompt);
    request.max_new_tokens = new_tokens;
    request.sampling.repetition_penalty = kRepetitionPenalty;
  }
  return requests;
}

std::string name_of(const std::string& directory) {
  const std::filesystem::path path = std::filesystem::path(directory).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename();
}

}  // namespace

int run_demo(const DemoFlags& flags) {
  Device device(flags.threads);
  catch_interrupts();
  const size_t shown_prompts = flags.models.size() == 1 ? std::size(kPrompts) : 2;
  std::vector<Shown> all;
  for (const std::string& directory : flags.models) {
    const Model model = load_shown(directory);
    Shown& shown = all.emplace_back(
        name_of(directory),
        compare_decoders(model, device, requests_for(model, flags.new_tokens), flags.window, is_interrupted));
    if (shown.runs.size() < 3) return kInterruptedStatus;
    const std::string heading = flags.models.size() == 1 ? "" : fmt::format("=== {} ===\n", shown.name);
    if (!write_out(heading + completions(model, shown.runs[0], shown_prompts))) return 0;
  }
  std::string text = fmt::format(
      "{} sequences in one batch, {} new tokens each, greedy (repetition penalty {}); window {}, {} threads, {}\n\n",
      std::size(kPrompts), flags.new_tokens, kRepetitionPenalty, flags.window, device.threads().size(), simd_target());
  text += table(all) + "\n";
  for (const Shown& shown : all)
    text += fmt::format("{}{}identical: {}\n", all.size() == 1 ? "" : shown.name, all.size() == 1 ? "" : " ",
                        shown.runs[1].is_identical && shown.runs[2].is_identical ? "yes" : "no");
  write_out(text);
  return 0;
}

}  // namespace replayssm
