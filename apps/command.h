// The subcommands of `replayssm`: each adds its flags and what runs when it is chosen.
#pragma once

#include <CLI/CLI.hpp>

namespace replayssm {

// `status` is the exit status of the process, 0 unless the subcommand sets it.
void add_bench(CLI::App& command);
void add_demo(CLI::App& command, int& status);
void add_generate(CLI::App& command, int& status);
void add_info(CLI::App& command);

// Exit statuses besides 0.
inline constexpr int kRefusedStatus = 2;        // bad input: one line on standard error says what
inline constexpr int kInterruptedStatus = 130;  // Ctrl-C

}  // namespace replayssm
