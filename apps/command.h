// The subcommands of `replayssm` and their flags. apps/main.cpp parses, the others run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "replayssm/ops/sample.h"

namespace replayssm {

// Exit statuses besides 0.
inline constexpr int kRefusedStatus = 2;        // bad input: one line on standard error says what
inline constexpr int kInterruptedStatus = 130;  // Ctrl-C

struct DemoFlags {
  std::vector<std::string> models;
  int64_t new_tokens = 48;
  int window = 16;
  int threads = 0;
};

struct GenerateFlags {
  std::string model;
  std::vector<std::string> prompts;
  std::vector<std::string> prompt_files;
  std::optional<int64_t> new_tokens;
  int batch = 1;
  bool is_echoing = false;
  SampleSettings sampling;
  std::string decoder = "replay";
  int window = 16;
  int threads = 0;
  std::string device = "cpu";
  std::string type = "bf16";  // of cuda
};

struct InfoFlags {
  std::string model;
  int window = 16;
  int step_tokens = 1;
};

struct PplFlags {
  std::string model;
  std::string text;
  std::optional<int64_t> context;
  int window = 16;
  int batch = 16;
  int threads = 0;
};

// Each returns the exit status; what is refused is thrown as Error.
int run_demo(const DemoFlags& flags);
int run_generate(const GenerateFlags& flags);
int run_info(const InfoFlags& flags);
int run_ppl(const PplFlags& flags);

}  // namespace replayssm
