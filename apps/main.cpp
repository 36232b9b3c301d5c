// The `replayssm` command: its flags.
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "apps/command.h"
#include "bench/attention.h"
#include "bench/decode.h"
#include "bench/ops.h"
#include "bench/roof.h"
#include "replayssm/core/version.h"

namespace replayssm {
namespace {

void add_demo(CLI::App& command, int& status) {
  auto flags = std::make_shared<DemoFlags>();
  CLI::App* demo = command.add_subcommand("demo", "Completes built-in prompts in the three ways and compares them");
  demo->add_option("MODEL", flags->models, "Model directories; several are shown in one table")->required();
  demo->add_option("-n,--new-tokens", flags->new_tokens, "Tokens to add to each prompt")->capture_default_str();
  demo->add_option("--window", flags->window, "Records kept unfolded by replay")->capture_default_str();
  demo->add_option("--threads", flags->threads, "Threads; 0: one per core")->capture_default_str();
  demo->callback([flags, &status] { status = run_demo(*flags); });
}

void add_generate(CLI::App& command, int& status) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* generate = command.add_subcommand("generate", "Continues a prompt; the text goes to standard output");
  generate->add_option("MODEL", flags->model, "Model directory in the Hugging Face layout")->required();
  generate->add_option("-p,--prompt", flags->prompts, "Text to continue; may be given several times")
      ->take_all()
      ->allow_extra_args(false);
  generate->add_option("--prompt-file", flags->prompt_files, "File whose text is continued; - is standard input")
      ->take_all()
      ->allow_extra_args(false);
  generate->add_option("-n,--new-tokens", flags->new_tokens,
                       "Most tokens to add to each prompt (default 128, or what the context leaves)");
  generate->add_option("--batch", flags->batch, "Continuations of each prompt, decoded together")
      ->capture_default_str();
  generate->add_flag("--echo", flags->is_echoing, "Print the prompt before its continuation");
  SampleSettings& sampling = flags->sampling;
  generate->add_option("--temperature", sampling.temperature, "0: always the likeliest token")->capture_default_str();
  generate->add_option("--top-k", sampling.top_k, "Draw from the k likeliest tokens; 0: from all")
      ->capture_default_str();
  generate->add_option("--top-p", sampling.top_p, "Draw from the likeliest tokens that sum to this probability")
      ->capture_default_str();
  generate->add_option("--min-p", sampling.min_p, "Drop tokens below this share of the likeliest one's probability")
      ->capture_default_str();
  generate->add_option("--repetition-penalty", sampling.repetition_penalty, "Above 1: avoid tokens that occurred")
      ->capture_default_str();
  generate->add_option("--seed", sampling.seed, "Seed of the draws; the same seed gives the same text")
      ->capture_default_str();
  generate->add_option("--decode", flags->decoder, "conventional, replay or exact (replay with conventional's bits)")
      ->capture_default_str();
  generate->add_option("--window", flags->window, "Records that replay keeps before it folds them into the state")
      ->capture_default_str();
  generate->add_option("--threads", flags->threads, "cpu: threads; 0: one per core")->capture_default_str();
  generate->add_option("--device", flags->device, "cpu, or cuda: a GPU")->capture_default_str();
  generate->add_option("--type", flags->type, "cuda: type of weights and activations, bf16 or fp32")
      ->capture_default_str();
  generate->callback([flags, &status] { status = run_generate(*flags); });
}

void add_info(CLI::App& command, int& status) {
  auto flags = std::make_shared<InfoFlags>();
  CLI::App* info = command.add_subcommand("info", "Says what a model is made of and what a sequence's state costs");
  info->add_option("MODEL", flags->model, "Model directory in the Hugging Face layout")->required();
  info->add_option("--window", flags->window, "Records that replay keeps before it folds them")->capture_default_str();
  info->add_option("--step-tokens", flags->step_tokens, "Most tokens of a decoding step")->capture_default_str();
  info->callback([flags, &status] { status = run_info(*flags); });
}

void add_eval(CLI::App& command, int& status) {
  auto flags = std::make_shared<PplFlags>();
  CLI::App* eval = command.add_subcommand("eval", "Measures a model");
  eval->require_subcommand(1);
  CLI::App* ppl = eval->add_subcommand("ppl", "Bits per byte of a text, by prefill and with each decoder");
  ppl->add_option("MODEL", flags->model, "Model directory in the Hugging Face layout")->required();
  ppl->add_option("--text", flags->text, "The text; the model's end token parts its documents")->required();
  ppl->add_option(
      "--context", flags->context,
      "Tokens read in one run; longer documents in runs that overlap by half (default 4096, or the context)");
  ppl->add_option("--window", flags->window, "Records that replay keeps before it folds them")->capture_default_str();
  ppl->add_option("--batch", flags->batch, "Documents decoded together")->capture_default_str();
  ppl->add_option("--threads", flags->threads, "Threads; 0: one per core")->capture_default_str();
  ppl->callback([flags, &status] { status = run_ppl(*flags); });
}

void add_bench_ops(CLI::App& bench) {
  auto options = std::make_shared<bench::OpsOptions>();
  CLI::App* ops = bench.add_subcommand("ops", "Times conventional, replay and exact decoding side by side");
  const auto add_list = [&](const char* name, auto& values, const std::string& text) {
    return ops->add_option(name, values, text)->delimiter(',')->allow_extra_args(false);
  };
  ops->add_option("--op", options->op, "The op: delta, kda or mamba2 (default: that of the layer)");
  ops->add_option("--shape", options->shape, fmt::format("The layer: {}", fmt::join(bench::ops_shapes(), ", ")))
      ->capture_default_str();
  ops->add_option("--device", options->device, "cpu, or cuda: a GPU")->capture_default_str();
  add_list("--batch", options->batches, "Batch sizes, with commas between")->capture_default_str();
  add_list("--window", options->windows, "Records that replay keeps before it folds them, with commas between")
      ->capture_default_str();
  add_list("--tokens", options->tokens, "Tokens of a decoding step, with commas between")->capture_default_str();
  add_list("--prefill", options->prompts,
           "Prompts to time as well, with commas between: TOKENS, or TOKENSxSEQUENCES for several at once");
  ops->add_option("--threads", options->threads, "Threads; 0: one per core")->capture_default_str();
  ops->add_option("--rounds", options->rounds, "Rounds to take the median of")->capture_default_str();
  ops->add_option("--csv", options->csv, "File to append the figures to");
  ops->add_option("--read", options->read, "fp32, or bf16: replay reads half of each word")->capture_default_str();
  add_list("--accepted", options->accepted,
           "cuda: tokens of a step that are accepted, 2.8 for example; on average "
           "(default: all)");
  add_list("--decode", options->decoders, "cuda: which of conventional, replay, exact (default: all)");
  ops->add_option("--type", options->type, "cuda: type of inputs and records: bf16, fp16 or fp32 (default: bf16)");
  ops->add_option("--out", options->out, "cuda: type of outputs: that of the inputs or fp32 (default: the former)");
  ops->add_flag("--layer", options->is_layer,
                "cuda: time the layer's step from projection to projection too, beside its op alone");
  ops->add_flag("--plan", options->is_plan, "cuda: say how each step and prefill is run");
  ops->callback([options] { bench::run_ops(*options); });
}

void add_bench_attention(CLI::App& bench) {
  auto options = std::make_shared<bench::AttentionOptions>();
  CLI::App* attention = bench.add_subcommand("attention", "Times attention over a paged cache on a GPU");
  const auto add_list = [&](const char* name, auto& values, const std::string& text) {
    attention->add_option(name, values, text)->delimiter(',')->allow_extra_args(false)->capture_default_str();
  };
  attention->add_option("--device", options->device, "cuda: a GPU")->capture_default_str();
  add_list("--batch", options->batches, "Batch sizes, with commas between");
  add_list("--context", options->contexts, "Positions of a row, its own tokens the last, with commas between");
  add_list("--tokens", options->tokens, "Tokens of a row in a step; more than 16 are a prompt; with commas between");
  add_list("--heads", options->heads,
           "Query heads:key/value heads:head size, of a latent cache :its size, with commas between");
  attention->add_option("--page", options->page_tokens, "Positions of a page")->capture_default_str();
  attention->add_option("--rounds", options->rounds, "Rounds to take the median of")->capture_default_str();
  attention->add_option("--csv", options->csv, "File to append the figures to");
  attention->callback([options] { bench::run_attention(*options); });
}

void add_bench_decode(CLI::App& bench) {
  auto options = std::make_shared<bench::DecodeOptions>();
  CLI::App* decode = bench.add_subcommand("decode", "Times decoding steps of whole models on a GPU");
  const auto add_list = [&](const char* name, auto& values, const std::string& text) {
    decode->add_option(name, values, text)->delimiter(',')->allow_extra_args(false)->capture_default_str();
  };
  decode
      ->add_option("--config", options->config,
                   fmt::format("The model: {} (with random weights), a model directory or a config.json",
                               fmt::join(bench::decode_configs(), ", ")))
      ->capture_default_str();
  decode->add_flag("--random-weights", options->has_random_weights,
                   "Make the weights up, on the GPU, where there is a config alone");
  add_list("--batch", options->batches, "Batch sizes, with commas between");
  decode->add_option("--context", options->context, "Tokens of each prompt")->capture_default_str();
  decode->add_option("--steps", options->steps, "Steps to time")->capture_default_str();
  decode->add_option("--window", options->window, "Records that replay keeps before it folds them")
      ->capture_default_str();
  add_list("--decode", options->decoders, "Which of conventional, replay, exact, with commas between");
  decode->add_option("--read", options->read, "fp32, or bf16: replay reads half of each word")->capture_default_str();
  decode->add_option("--layers", options->layers, "Above 0: the model's first layers alone")->capture_default_str();
  decode->add_flag("--lockstep", options->is_lockstep, "Let rows that start together flush together");
  decode->add_option("--csv", options->csv, "File to append the figures to");
  decode->callback([options] { bench::run_decode(*options); });
}

void add_bench_roof(CLI::App& bench) {
  auto options = std::make_shared<bench::RoofOptions>();
  CLI::App* roof = bench.add_subcommand("roof", "Measures how fast memory is read and updated");
  roof->add_option("--device", options->device, "cpu, or cuda: a GPU")->capture_default_str();
  roof->add_option("--threads", options->threads, "Threads; 0: one per core")->capture_default_str();
  roof->callback([options] { bench::run_roof(*options); });
}

void add_bench(CLI::App& command) {
  CLI::App* bench = command.add_subcommand("bench", "Times the ops on this machine");
  bench->require_subcommand(1);
  add_bench_ops(*bench);
  add_bench_attention(*bench);
  add_bench_decode(*bench);
  add_bench_roof(*bench);
}

int refuse(const std::string& text) {
  std::fprintf(stderr, "replayssm: %s\n", text.substr(0, text.find('\n')).c_str());
  return kRefusedStatus;
}

int run(int argc, char** argv) {
  int status = 0;
  CLI::App command("Decodes hybrid state-space language models with ReplaySSM.", "replayssm");
  command.set_version_flag("--version", "replayssm " REPLAYSSM_VERSION);
  command.require_subcommand(0, 1);
  add_demo(command, status);
  add_generate(command, status);
  add_info(command, status);
  add_eval(command, status);
  add_bench(command);
  try {
    command.parse(argc, argv);
    if (command.get_subcommands().empty()) return refuse("expected a subcommand; replayssm --help lists them");
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return command.exit(error);
    return refuse(error.what());
  } catch (const std::bad_alloc&) {
    return refuse("out of memory");
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
  return status;
}

}  // namespace
}  // namespace replayssm

int main(int argc, char** argv) {
  return replayssm::run(argc, argv);
}
