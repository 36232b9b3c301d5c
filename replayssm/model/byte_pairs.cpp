#include "replayssm/model/byte_pairs.h"

#include <algorithm>
#include <bit>

namespace replayssm {
namespace {

constexpr uint64_t kNoPair = UINT64_MAX;
constexpr int32_t kGone = -2;  // in Symbol::next: merged into the symbol before it

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

bool is_later(const BytePairs::Scratch::Candidate& a, const BytePairs::Scratch::Candidate& b) {
  return a.order > b.order;
}

}  // namespace

BytePairs::BytePairs(size_t merges) : table_(std::bit_ceil(2 * merges + 2), Merge{kNoPair, 0, 0}) {}

size_t BytePairs::place_of(uint64_t pair) const {
  const uint64_t mixed = (pair ^ pair >> 29) * 0x9E3779B97F4A7C15u;
  size_t place = static_cast<size_t>(mixed ^ mixed >> 32) & (table_.size() - 1);
  while (table_[place].pair != pair && table_[place].pair != kNoPair) place = (place + 1) & (table_.size() - 1);
  return place;
}

void BytePairs::add(int32_t left, int32_t right, int32_t merged) {
  const uint64_t pair = pair_of(left, right);
  table_[place_of(pair)] = {pair, next_rank_++, merged};
}

const BytePairs::Merge* BytePairs::find(int32_t left, int32_t right) const {
  const Merge& merge = table_[place_of(pair_of(left, right))];
  return merge.pair == kNoPair ? nullptr : &merge;
}

// Puts the merge of the symbol at `place` with the next one, if there is such a merge, among the candidates.
void BytePairs::offer(Scratch& scratch, int32_t place) const {
  const Scratch::Symbol& symbol = scratch.symbols[static_cast<size_t>(place)];
  if (symbol.next < 0) return;
  const Merge* merge = find(symbol.token, scratch.symbols[static_cast<size_t>(symbol.next)].token);
  if (merge == nullptr) return;
  scratch.candidates.push_back({uint64_t{merge->rank} << 32 | static_cast<uint32_t>(place), merge->merged});
}

void BytePairs::encode(std::string_view word, const int32_t* byte_tokens, Scratch& scratch,
                       std::vector<int32_t>& tokens) const {
  std::vector<Scratch::Symbol>& symbols = scratch.symbols;
  std::vector<Scratch::Candidate>& candidates = scratch.candidates;
  const int32_t count = static_cast<int32_t>(word.size());
  symbols.clear();
  candidates.clear();
  for (int32_t i = 0; i < count; ++i)
    symbols.push_back(
        {byte_tokens[static_cast<unsigned char>(word[static_cast<size_t>(i)])], i - 1, i + 1 < count ? i + 1 : -1});
  for (int32_t i = 0; i + 1 < count; ++i) offer(scratch, i);
  std::make_heap(candidates.begin(), candidates.end(), is_later);
  while (!candidates.empty()) {
    std::pop_heap(candidates.begin(), candidates.end(), is_later);
    const Scratch::Candidate candidate = candidates.back();
    candidates.pop_back();
    const int32_t place = static_cast<int32_t>(candidate.order & 0xFFFFFFFFu);
    Scratch::Symbol& left = symbols[static_cast<size_t>(place)];
    if (left.next < 0) continue;
    Scratch::Symbol& right = symbols[static_cast<size_t>(left.next)];
    // Either symbol may have become another one since.
    const Merge* merge = find(left.token, right.token);
    if (merge == nullptr || merge->merged != candidate.merged) continue;
    left = {candidate.merged, left.previous, right.next};
    right.next = kGone;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = place;
    for (const int32_t changed : {left.previous, place}) {
      const size_t before = candidates.size();
      if (changed >= 0) offer(scratch, changed);
      if (candidates.size() > before) std::push_heap(candidates.begin(), candidates.end(), is_later);
    }
  }
  for (const Scratch::Symbol& symbol : symbols)
    if (symbol.next != kGone) tokens.push_back(symbol.token);
}

}  // namespace replayssm
