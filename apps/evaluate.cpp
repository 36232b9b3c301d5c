// `replayssm eval ppl`: bits per byte of a text, by prefill and with the three decoders, which must agree.
#include <cmath>
#include <string>
#include <vector>

#include "apps/command.h"
#include "apps/loading.h"
#include "apps/terminal.h"
#include "replayssm/core/error.h"
#include "replayssm/core/mapped_file.h"
#include "replayssm/model/perplexity.h"

namespace replayssm {
namespace {

constexpr int64_t kDefaultWindow = 4096;
constexpr double kAgreementBits = 1e-4;
constexpr size_t kMaxTextBytes = size_t{1} << 30;

struct Line {
  std::string name;
  TextScore score;
};

std::string table(const std::vector<Line>& lines, const ScoredText& text) {
  std::string result =
      fmt::format("{:<14}{:>15}{:>13}{:>11}{:>12}\n", "read by", "bits per byte", "perplexity", "seconds", "tokens/s");
  for (const Line& line : lines)
    result += fmt::format("{:<14}{:>15.6f}{:>13.4f}{:>11.1f}{:>12.0f}\n", line.name,
                          line.score.bits / static_cast<double>(text.bytes),
                          std::exp2(line.score.bits / static_cast<double>(text.scored_tokens)), line.score.seconds,
                          static_cast<double>(text.tokens) / line.score.seconds);
  return result;
}

}  // namespace

int run_ppl(const PplFlags& flags) {
  require(flags.batch >= 1 && flags.batch <= 4096, "--batch: expected 1 to 4096, got {}", flags.batch);
  require(flags.window >= 1, "--window: expected 1 or more, got {}", flags.window);
  const MappedFile file(flags.text);
  require(file.text().size() <= kMaxTextBytes, "{}: expected at most {} bytes, got {}", flags.text, kMaxTextBytes,
          file.text().size());
  Device device(flags.threads);
  const Model model = load_shown(flags.model);
  const int64_t context = flags.context.value_or(std::min(kDefaultWindow, model.config.context_tokens));
  const ScoredText text = cut_text(model, file.text(), context);
  catch_interrupts();
  std::vector<Line> lines;
  const auto run = [&](const std::string& name, const auto& score) {
    Progress progress("reading by " + name);
    lines.push_back({name, score([&](int64_t done) {
                       progress.update(done, text.tokens);
                       return !is_interrupted();
                     })});
    return !is_interrupted();
  };
  bool goes_on =
      run("prefill", [&](const KeepsScoring& keeps_on) { return score_by_prefill(model, device, text, keeps_on); });
  for (const Decoder decoder : {Decoder::kConventional, Decoder::kReplay, Decoder::kExact})
    goes_on = goes_on && run(std::string(decoder_name(decoder)), [&](const KeepsScoring& keeps_on) {
                return score_by_decoding(model, device, text, decoder, flags.window, flags.batch, keeps_on);
              });
  if (!goes_on) return kInterruptedStatus;
  for (const Line& line : lines)
    require(std::isfinite(line.score.bits), "eval ppl: the model's logits are not finite when read by {}", line.name);
  double largest = 0;
  for (const Line& line : lines)
    largest = std::max(largest, std::fabs(line.score.bits - lines[0].score.bits) / static_cast<double>(text.bytes));
  const bool is_same = lines[3].score.bits == lines[1].score.bits;
  write_out(fmt::format("{} bytes, {} tokens predicted, in {} pieces of up to {} tokens\n\n", text.bytes,
                        text.scored_tokens, text.pieces.size(), context) +
            table(lines, text) +
            fmt::format("\nlargest difference from prefill: {:.1e} bits per byte\n"
                        "exact has conventional's bits: {}\n",
                        largest, is_same ? "yes" : "no"));
  require(largest <= kAgreementBits, "eval ppl: expected scores that agree to {:g} bits per byte, got {:g}",
          kAgreementBits, largest);
  require(is_same, "eval ppl: the exact decoder's score differs from the conventional one's");
  return 0;
}

}  // namespace replayssm
