#include "replayssm/model/prompt_pieces.h"

#include <algorithm>

#include "replayssm/core/error.h"

namespace replayssm {

PromptPieces::PromptPieces(size_t max_tokens) : max_tokens_(max_tokens) {
  piece_rows_.reserve(max_tokens);
  piece_tokens_.reserve(max_tokens);
  token_.reserve(max_tokens);
  last_token_.reserve(max_tokens);
}

void PromptPieces::start(std::span<const Handle> rows, std::span<const std::span<const int32_t>> prompts,
                         size_t max_rows) {
  require(rows.size() == prompts.size(), "prefill: expected a prompt for each of {} rows, got {}", rows.size(),
          prompts.size());
  for (size_t b = 0; b < prompts.size(); ++b) require(!prompts[b].empty(), "prefill: the prompt of row {} is empty", b);
  rows_ = rows;
  prompts_ = prompts;
  max_rows_ = max_rows;
  prompt_ = taken_ = 0;
}

bool PromptPieces::next() {
  first_done_ = prompt_;
  piece_rows_.clear();
  piece_tokens_.clear();
  token_.clear();
  last_token_.clear();
  while (prompt_ < rows_.size() && piece_rows_.size() < max_rows_ && token_.size() < max_tokens_) {
    const std::span<const int32_t> prompt = prompts_[prompt_];
    const size_t count = std::min(prompt.size() - taken_, max_tokens_ - token_.size());
    const auto piece = prompt.subspan(taken_, count);
    piece_rows_.push_back(rows_[prompt_]);
    piece_tokens_.push_back(static_cast<int>(count));
    token_.insert(token_.end(), piece.begin(), piece.end());
    taken_ += count;
    if (taken_ < prompt.size()) break;
    last_token_.push_back(static_cast<int32_t>(token_.size()) - 1);
    ++prompt_;
    taken_ = 0;
  }
  return !piece_rows_.empty();
}

}  // namespace replayssm
