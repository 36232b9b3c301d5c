// `replayssm demo`: a batch of built-in prompts, decoded in the three ways.
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

std::string completions(const Model& model, const DecoderRun& run) {
  std::string text;
  for (size_t i = 0; i < run.tokens.size(); ++i)
    text += fmt::format("[{}] {} |{}\n\n", i + 1, kPrompts[i], model.tokenizer.decode(run.tokens[i]));
  return text;
}

std::string table(const std::vector<DecoderRun>& runs) {
  std::string text = fmt::format("{:<14}{:>10}{:>14}{:>17}{:>9}{:>20}\n", "decode", "tokens/s", "read B/token",
                                 "written B/token", "flushes", "largest logit diff");
  for (const DecoderRun& run : runs) {
    const GenerationCounts& counts = run.counts;
    const double tokens = static_cast<double>(counts.decoded_tokens);
    text += fmt::format("{:<14}{:>10.0f}{:>14.0f}{:>17.0f}{:>9}{:>20.2g}\n", decoder_name(run.decoder),
                        static_cast<double>(counts.sampled_tokens) / counts.decode_seconds,
                        static_cast<double>(counts.traffic.read_bytes) / tokens,
                        static_cast<double>(counts.traffic.written_bytes) / tokens, counts.flushes,
                        run.largest_logit_difference);
  }
  return text;
}

}  // namespace

int run_demo(const DemoFlags& flags) {
  Device device(flags.threads);
  const Model model = load_shown(flags.model);
  std::vector<GenerationRequest> requests;
  for (const char* prompt : kPrompts) {
    GenerationRequest& request = requests.emplace_back();
    request.prompt = model.tokenizer.encode(prompt);
    request.max_new_tokens = flags.new_tokens;
    request.sampling.repetition_penalty = kRepetitionPenalty;
  }
  catch_interrupts();
  const std::vector<DecoderRun> runs = compare_decoders(model, device, requests, flags.window, is_interrupted);
  if (runs.size() < 3) return kInterruptedStatus;
  const DecoderRun& replay = runs[1];
  std::string text = completions(model, runs[0]);
  text += fmt::format(
      "{} sequences in one batch, {} new tokens each, greedy (repetition penalty {}); window {}, {} threads, {}\n\n",
      requests.size(), flags.new_tokens, kRepetitionPenalty, flags.window, device.threads().size(), simd_target());
  text += table(runs);
  text += fmt::format("\nidentical: {}\n", replay.is_identical ? "yes" : "no");
  write_out(text);
  return 0;
}

}  // namespace replayssm
