// Timed runs of attention over a paged cache, on a GPU.
#pragma once

#include <string>
#include <vector>

namespace replayssm::bench {

// Every combination.
struct AttentionOptions {
  std::string device = "cuda";
  std::vector<int> batches = {1, 32, 256};
  std::vector<int> contexts = {1024, 8192, 32768};
  std::vector<int> tokens = {1, 4};               // of a row
  std::vector<std::string> heads = {"32:8:128"};  // query heads : key/value heads : head size (: latent size)
  int page_tokens = 16;
  int rounds = 15;
  std::string csv;  // a file to append to, or empty
};

// Runs and prints a table to stdout; appends to options.csv, with a header if it is new. Throws Error for a bad option
// and without a GPU.
void run_attention(const AttentionOptions& options);

}  // namespace replayssm::bench
