// Prompts cut into prefill steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "replayssm/state/step.h"

namespace replayssm {

// Whole prompts in as many steps as the most tokens and rows of a step ask for: a step takes what is left of a prompt
// and those behind it, and the last only in part.
class PromptPieces {
 public:
  // Takes all its memory here.
  explicit PromptPieces(size_t max_tokens);

  // Throws Error unless there is a prompt for each row and none is empty. Both must stay until next has returned false.
  // A step has at most max_rows rows.
  void start(std::span<const Handle> rows, std::span<const std::span<const int32_t>> prompts, size_t max_rows);
  // Makes the next step's pieces; false if there is none.
  bool next();

  std::span<const Handle> rows() const { return piece_rows_; }
  std::span<const int> tokens_per_row() const { return piece_tokens_; }
  std::span<const int32_t> token() const { return token_; }
  // The last tokens of those prompts that end in this step, prompts first_done() and on.
  std::span<const int32_t> last_token() const { return last_token_; }
  size_t first_done() const { return first_done_; }

 private:
  size_t max_tokens_, max_rows_ = 0;
  std::span<const Handle> rows_;
  std::span<const std::span<const int32_t>> prompts_;
  size_t prompt_ = 0, taken_ = 0;  // tokens taken of that prompt
  size_t first_done_ = 0;
  std::vector<Handle> piece_rows_;
  std::vector<int> piece_tokens_;
  std::vector<int32_t> token_, last_token_;
};

}  // namespace replayssm
