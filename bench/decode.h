// Timed decoding steps of whole models on a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace replayssm::bench {

// Every combination of batch and decoder, the decoders of a batch side by side. As everywhere on a GPU, steps of very
// few rows are conventional whatever the decoder (their window is written as 0). Flushes are spread over the window
// unless is_lockstep.
struct DecodeOptions {
  std::string config = "qwen3.5-4b";  // a built-in model, a model directory or a config.json
  bool has_random_weights = false;
  std::vector<int> batches = {1, 32, 128, 256};
  int context = 1024;  // tokens of a prompt
  int steps = 512;
  int window = 16;
  std::vector<std::string> decoders = {"conventional", "replay", "exact"};
  std::string read = "fp32";  // or bf16: of replay's direct readout
  int layers = 0;             // above 0: the model's first layers alone
  bool is_lockstep = false;   // rows that start together flush together
  std::string csv;            // a file to append to, or empty
};

// The names of the built-in models.
std::vector<std::string> decode_configs();

// Runs and prints a table to stdout; appends to options.csv, with a header if it is new. Throws Error for a bad option,
// a model or batch that the GPU has no room for (saying what needs how much), and without a GPU.
void run_decode(const DecodeOptions& options);

}  // namespace replayssm::bench
