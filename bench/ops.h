// Timed runs of the state-space ops: conventional, replay and exact side by side, through the cursor's whole cycle.
#pragma once

#include <string>
#include <vector>

namespace replayssm::bench {

struct OpsOptions {
  std::string op;  // delta, kda or mamba2; empty: that of the shape
  std::string shape = "qwen3.5-4b";
  std::vector<int> batches = {1, 8, 32};
  int window = 16;
  int tokens = 1;                   // of a window, all accepted
  std::vector<int> prefill_tokens;  // prompts to time as well
  int threads = 0;                  // 0: one per core
  int rounds = 15;
  std::string csv;  // a file to append to, or empty
};

// One line of the CSV: medians over rounds; a round's time is the mean over one whole cycle of the cursor.
struct OpsResult {
  std::string op, decode;
  int batch, tokens;
  double us_median, us_min, us_p95;
  double bytes;      // moved between memory and the op by one call, by count
  double roof_gb_s;  // of the same round: in-place update (conventional) or read (replay, exact)
  double roof_share;
};

// Names that OpsOptions::shape may have.
std::vector<std::string> ops_shapes();

// Runs and prints a table to stdout; appends to options.csv, with a header if it is new. Throws Error for a bad option.
void run_ops(const OpsOptions& options);

}  // namespace replayssm::bench
