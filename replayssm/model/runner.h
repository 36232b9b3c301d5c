// A model on one device with the sequences that it decodes: what Generation needs of either side.
#pragma once

#include <cstdint>
#include <span>

#include "replayssm/model/config.h"
#include "replayssm/ops/rows.h"
#include "replayssm/ops/sample.h"
#include "replayssm/state/sequences.h"
#include "replayssm/state/step.h"

namespace replayssm {

// Logits are kept in rows 0 .. max_rows-1, on the device; everything else is the host's.
class Runner {
 public:
  virtual ~Runner() = default;

  virtual const ModelConfig& config() const = 0;
  virtual SequencePool& pool() = 0;

  // Whether replay steps of so many rows are worth their while here; if not, conventional steps take their place.
  virtual bool replays(int rows) const = 0;

  // Begins, runs and commits a prefill step of one sequence; its last token's logits go to row `row`.
  virtual void prefill(Handle handle, std::span<const int32_t> tokens, int row) = 0;

  // Runs a conventional or replay step of a token a row that the caller has begun, and commits or, after an Error,
  // aborts. The logits of row b of the step go to row b.
  virtual void decode(const StepPlan& plan, Readout readout, std::span<const int32_t> tokens) = 0;

  // As ops/sample.h says, from logits rows 0 .. args.rows-1; args.logits, logits_stride and vocabulary are not used.
  virtual void sample(Sample args) = 0;

  // [vocabulary], valid until the next call.
  virtual std::span<const float> logits(int row) = 0;
};

}  // namespace replayssm
