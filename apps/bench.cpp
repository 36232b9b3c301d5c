// `replayssm bench`: times the ops on this machine.
#include <fmt/ranges.h>

#include <memory>

#include "apps/command.h"
#include "bench/ops.h"

namespace replayssm {

void add_bench(CLI::App& command) {
  auto options = std::make_shared<bench::OpsOptions>();
  CLI::App* bench = command.add_subcommand("bench", "Times the ops on this machine");
  bench->require_subcommand(1);
  CLI::App* ops = bench->add_subcommand("ops", "Times conventional, replay and exact decoding side by side");
  ops->add_option("--op", options->op, "The op")->capture_default_str();
  ops->add_option("--shape", options->shape, fmt::format("The layer: {}", fmt::join(bench::ops_shapes(), ", ")))
      ->capture_default_str();
  ops->add_option("--batch", options->batches, "Batch sizes, with commas between")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  ops->add_option("--window", options->window, "Records that replay keeps before it folds them")->capture_default_str();
  ops->add_option("--tokens", options->tokens, "Tokens of a decoding step")->capture_default_str();
  ops->add_option("--prefill", options->prefill_tokens, "Lengths of prompts to time as well, with commas between")
      ->delimiter(',')
      ->allow_extra_args(false);
  ops->add_option("--threads", options->threads, "Threads; 0: one per core")->capture_default_str();
  ops->add_option("--rounds", options->rounds, "Rounds to take the median of")->capture_default_str();
  ops->add_option("--csv", options->csv, "File to append the figures to");
  ops->callback([options] { bench::run_ops(*options); });
}

}  // namespace replayssm
