// Timed runs of the state-space ops: conventional, replay and exact side by side, through the cursor's whole cycle.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "replayssm/ops/rows.h"

namespace replayssm::bench {

// Every window with every number of tokens that it holds.
struct OpsOptions {
  std::string op;  // delta, kda or mamba2; empty: that of the shape
  std::string shape = "qwen3.5-4b";
  std::string device = "cpu";  // or cuda
  std::vector<int> batches = {1, 8, 32};
  std::vector<int> windows = {16};
  std::vector<int> tokens = {1};     // of a decoding step
  std::vector<std::string> prompts;  // prompts to time as well: TOKENS or TOKENSxSEQUENCES
  int threads = 0;                   // 0: one per core
  int rounds = 15;
  std::string csv;            // a file to append to, or empty
  std::string read = "fp32";  // or bf16: replay reads the upper halves of the state's words
  // On a GPU alone:
  std::vector<double> accepted;       // tokens of a step, on average; empty: all
  std::vector<std::string> decoders;  // of conventional, replay, exact; empty: all
  std::string type;                   // of inputs and records: bf16, fp16 or fp32; empty: bf16
  std::string out;                    // of outputs: type or fp32; empty: type
  bool is_layer = false;              // beside each op the layer's whole step
  bool is_plan = false;               // before each row how it is run
};

// How the options want checkpoints to lie in memory.
inline CheckpointForm form_of(const OpsOptions& options) {
  return options.read == "bf16" ? CheckpointForm::kPlanes : CheckpointForm::kWords;
}

struct Prompt {
  int tokens = 0;
  int sequences = 1;
};

// One line of the CSV: medians over rounds; a round's time is the mean over whole cycles of the cursor.
struct OpsResult {
  std::string op, decode;
  int batch = 0, window = 0, tokens = 0;
  double accepted = 0;        // of `tokens`, on average
  std::string read = "fp32";  // what a step without a flush reads of the state: fp32-planes are both halves of words
  double us_median = 0, us_min = 0, us_p95 = 0;
  double bytes = 0;      // moved between memory and the op by one call, by count; of a layer's step what its launches
                         // hand on to each other too
  double roof_gb_s = 0;  // of the same run: in-place update (conventional) or read (replay, exact)
  double roof_share = 0;
  std::optional<double> us_above_op = {};  // of a layer's step: its median less that of the op alone
  std::string plan = {};                   // how it is run, or empty
};

// Where results were measured, and what is to be said of it.
struct OpsMachine {
  std::string name, device, note;
};

// Called for each result when it is there.
using ShowResult = std::function<void(const OpsMachine&, const OpsResult&)>;

// Names that OpsOptions::shape may have.
std::vector<std::string> ops_shapes();

// Runs and prints a table to stdout; appends to options.csv, with a header if it is new. Throws Error for a bad option.
void run_ops(const OpsOptions& options);

}  // namespace replayssm::bench
