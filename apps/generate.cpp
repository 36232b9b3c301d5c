// `replayssm generate`: continues prompts and prints what the model writes.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/command.h"
#include "apps/loading.h"
#include "apps/terminal.h"
#include "replayssm/core/error.h"
#include "replayssm/model/generation.h"
#include "replayssm/model/model.h"

namespace replayssm {
namespace {

constexpr int64_t kDefaultNewTokens = 128;
constexpr int kMaxBatch = 4096;
constexpr size_t kMaxPromptBytes = size_t{64} << 20;

std::string read_prompt(const std::string& path) {
  errno = 0;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      path == "-" ? fdopen(dup(STDIN_FILENO), "rb") : std::fopen(path.c_str(), "rb"), std::fclose);
  require(file != nullptr, "prompt file {}: {}", path, std::strerror(errno));
  std::string text;
  char piece[1 << 16];
  while (const size_t count = std::fread(piece, 1, sizeof(piece), file.get())) {
    text.append(piece, count);
    require(text.size() <= kMaxPromptBytes, "prompt file {}: expected at most {} bytes, got more", path,
            kMaxPromptBytes);
  }
  require(!std::ferror(file.get()), "prompt file {}: {}", path, std::strerror(errno));
  return text;
}

std::vector<std::string> read_prompts(const GenerateFlags& flags) {
  std::vector<std::string> prompts = flags.prompts;
  for (const std::string& path : flags.prompt_files) prompts.push_back(read_prompt(path));
  require(!prompts.empty(), "generate: expected a prompt, --prompt TEXT or --prompt-file FILE");
  return prompts;
}

template <typename AnyModel>
std::vector<GenerationRequest> requests_of(const GenerateFlags& flags, const std::vector<std::string>& prompts,
                                           const AnyModel& model) {
  std::vector<GenerationRequest> requests;
  for (const std::string& prompt : prompts) {
    GenerationRequest request;
    request.prompt = model.tokenizer.encode(prompt);
    request.sampling = flags.sampling;
    const int64_t room = model.config.context_tokens - static_cast<int64_t>(request.prompt.size());
    request.max_new_tokens = flags.new_tokens.value_or(std::clamp(room, int64_t{0}, kDefaultNewTokens));
    for (int copy = 0; copy < flags.batch; ++copy) {
      request.sequence = requests.size();
      requests.push_back(request);
    }
  }
  return requests;
}

// Prints one sequence as it grows, or several, each with a heading, as they end.
class Printer {
 public:
  Printer(const Tokenizer& tokenizer, const Generation& generation, const std::vector<GenerationRequest>& requests,
          bool is_echoing)
      : generation_(generation) {
    for (const GenerationRequest& request : requests) {
      sequences_.emplace_back(tokenizer);
      if (!is_echoing) continue;
      for (const int32_t token : request.prompt) sequences_.back().text += sequences_.back().stream.push(token);
    }
  }

  // What came since the last call; false if nobody reads it any more.
  bool update() {
    for (int index = 0; index < generation_.sequences(); ++index) {
      const bool is_ended = generation_.ending(index) != Ending::kNone;
      collect(index);
      if (sequences_[index].is_printed || (sequences_.size() > 1 && !is_ended)) continue;
      if (!print(index, is_ended)) return false;
    }
    return true;
  }

  // What is left of sequences that were cut off.
  bool finish() {
    for (int index = 0; index < generation_.sequences(); ++index)
      if (!sequences_[index].is_printed && !print(index, true)) return false;
    return true;
  }

 private:
  struct Sequence {
    explicit Sequence(const Tokenizer& tokenizer) : stream(tokenizer) {}

    TextStream stream;
    std::string text;  // not printed yet
    size_t tokens = 0;
    bool is_printed = false;
  };

  void collect(int index) {
    Sequence& sequence = sequences_[index];
    for (const int32_t token : generation_.tokens(index).subspan(sequence.tokens)) {
      sequence.text += sequence.stream.push(token);
      ++sequence.tokens;
    }
  }

  bool print(int index, bool is_last) {
    Sequence& sequence = sequences_[index];
    if (is_last) sequence.text += sequence.stream.finish() + "\n";
    if (sequences_.size() > 1) sequence.text = fmt::format("=== {} ===\n", index + 1) + sequence.text;
    sequence.is_printed = is_last;
    return write_out(std::exchange(sequence.text, ""));
  }

  const Generation& generation_;
  std::vector<Sequence> sequences_;
};

void print_statistics(const GenerationCounts& counts, const GenerateFlags& flags) {
  fmt::print(stderr, "replayssm: {} tokens in {:.2f} s ({:.1f} tokens/s), {} of prompt in {:.2f} s, {} decoding",
             counts.sampled_tokens, counts.decode_seconds,
             counts.decode_seconds > 0 ? static_cast<double>(counts.sampled_tokens) / counts.decode_seconds : 0.0,
             counts.prompt_tokens, counts.prefill_seconds, flags.decoder);
  if (flags.decoder != decoder_name(Decoder::kConventional))
    fmt::print(stderr, " with window {}, {} flushes", flags.window, counts.flushes);
  fmt::print(stderr, "\n");
}

void check_flags(const GenerateFlags& flags) {
  require(flags.new_tokens.value_or(0) >= 0, "--new-tokens: expected 0 or more, got {}", flags.new_tokens.value_or(0));
  require(flags.batch >= 1 && flags.batch <= kMaxBatch, "--batch: expected 1 to {}, got {}", kMaxBatch, flags.batch);
  require(flags.window >= 1, "--window: expected 1 or more, got {}", flags.window);
  require(flags.device == "cpu" || flags.device == "cuda", "--device: expected cpu or cuda, got '{}'", flags.device);
  require(flags.device == "cpu" || flags.threads == 0, "--threads: expected with --device cpu alone, got {}",
          flags.threads);
  require(flags.type == "bf16" || flags.type == "fp32", "--type: expected bf16 or fp32, got '{}'", flags.type);
  require(flags.device == "cuda" || flags.type == "bf16", "--type: expected with --device cuda alone, got {}",
          flags.type);
  parse_decoder(flags.decoder);
  check_settings(flags.sampling);
}

// Model and device are those of one side.
template <typename AnyModel, typename AnyDevice>
int generate(const GenerateFlags& flags, const std::vector<std::string>& prompts, const AnyModel& model,
             AnyDevice& device) {
  const GenerationOptions options{.decoder = parse_decoder(flags.decoder), .window = flags.window};
  const std::vector<GenerationRequest> requests = requests_of(flags, prompts, model);
  Generation generation(model, device, requests, options);
  catch_interrupts();
  {
    Progress progress("reading the prompt");
    while (!is_interrupted() && generation.prefill())
      progress.update(generation.counts().prompt_tokens, generation.prompt_tokens());
  }
  Printer printer(model.tokenizer, generation, requests, flags.is_echoing);
  bool is_read = printer.update();
  while (is_read && !is_interrupted() && generation.step()) is_read = printer.update();
  if (is_read && is_interrupted()) is_read = printer.finish();
  if (!is_read) return 0;
  print_statistics(generation.counts(), flags);
  for (int index = 0; index < generation.sequences(); ++index)
    require(generation.ending(index) != Ending::kBadNumber, "sequence {}: the model's logits are not finite",
            index + 1);
  return is_interrupted() ? kInterruptedStatus : 0;
}

int generate_on_gpu([[maybe_unused]] const GenerateFlags& flags,
                    [[maybe_unused]] const std::vector<std::string>& prompts) {
#ifdef REPLAYSSM_HAS_CUDA
  CudaDevice device;
  const CudaModel model = load_shown(flags.model, flags.type == "fp32" ? Dtype::kF32 : Dtype::kBF16, device);
  return generate(flags, prompts, model, device);
#else
  fail("--device: this build has no CUDA");
#endif
}

}  // namespace

int run_generate(const GenerateFlags& flags) {
  check_flags(flags);
  const std::vector<std::string> prompts = read_prompts(flags);
  if (flags.device == "cuda") return generate_on_gpu(flags, prompts);
  Device device(flags.threads);
  const Model model = load_shown(flags.model);
  return generate(flags, prompts, model, device);
}

}  // namespace replayssm
