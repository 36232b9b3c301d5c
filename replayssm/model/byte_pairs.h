// Byte-pair encoding: a word's bytes merged into tokens.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace replayssm {

// The merges of a vocabulary and the tokens of single bytes.
class BytePairs {
 public:
  // Memory for `merges` merges.
  explicit BytePairs(size_t merges);

  // Merges come in order of rank, the first is done first; one named again takes the later rank and result.
  void add(int32_t left, int32_t right, int32_t merged);

  // Appends the tokens of a word of at most 2^31 - 1 bytes. It starts out as one token a byte, byte_tokens [256]; the
  // pair of lowest rank, the leftmost of equals, becomes one token until no neighbours merge. n bytes take n log n
  // steps. `scratch` is working memory, kept for the next word.
  struct Scratch {
    struct Symbol {
      int32_t token;
      int32_t previous;
      int32_t next;
    };
    struct Candidate {
      uint64_t order;  // rank, then place
      int32_t merged;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> candidates;
  };
  void encode(std::string_view word, const int32_t* byte_tokens, Scratch& scratch, std::vector<int32_t>& tokens) const;

 private:
  struct Merge {
    uint64_t pair;
    uint32_t rank;
    int32_t merged;
  };

  const Merge* find(int32_t left, int32_t right) const;
  size_t place_of(uint64_t pair) const;
  void offer(Scratch& scratch, int32_t place) const;

  // Open addressing; a power of two in size, at most half full.
  std::vector<Merge> table_;
  uint32_t next_rank_ = 0;
};

}  // namespace replayssm
