// Causal softmax attention with grouped queries over a paged key/value cache (FP32).
//
//   o[t, i] = sum_{s <= t} softmax_s(scale q[t, i] . k[s, i / (Q / M)]) v[s, i / (Q / M)]
//
// Q query heads, M key/value heads (Q % M == 0), D head size; the token at position p attends to positions 0 .. p.
// Values have E = D elements of their own, or, in a latent cache, they are the first E elements of their keys: what
// multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) leaves to do once its key and value projections are
// absorbed into the query and the output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/core/device.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// One layer's keys and values for all slots, in pages of page_tokens positions. Position p of row b lies in page
// page_table[b * table_stride + p / page_tokens] at p % page_tokens.
struct KvCache {
  int kv_heads = 0;     // M
  int head_size = 0;    // D
  int latent_size = 0;  // 0: values are kept, E = D; else a latent cache, E = latent_size <= D
  int64_t pages = 0;
  int page_tokens = 0;
  float* k = nullptr;  // [pages, M, page_tokens, D]
  float* v = nullptr;  // [pages, M, page_tokens, D]; null in a latent cache

  int value_size() const { return latent_size > 0 ? latent_size : head_size; }  // E
};

struct KvPages {
  const int32_t* page_table = nullptr;  // [B, table_stride]
  int table_stride = 0;
};

// Row b holds tokens token_begin[b] .. token_begin[b+1]-1 at positions base + history, base + history + 1, ...: their
// k and v are written to the cache, then their queries attend. A token's output bits depend on nothing but its own
// query and the keys and values up to its position; pages that no position of the step reaches are not read. `out` may
// not overlap an input. No two rows may share a page that this step writes. Outputs of padding rows are zeros.
// Throws Error for sizes < 1, query_heads % kv_heads != 0, latent_size outside 0 .. head_size, a falling token_begin, a
// negative position, a position past the page table or a page past the pool, null pointers, and values given to a
// latent cache. rows.checkpoint_in and _out are not used.
struct Attention {
  KvCache cache;
  KvPages pages;
  StateRows rows;
  const int32_t* token_begin = nullptr;  // [B + 1], non-decreasing from 0
  int query_heads = 0;                   // Q
  float scale = 0;
  const float* q = nullptr;  // [N, Q, D], q_stride
  const float* k = nullptr;  // [N, M, D], k_stride
  const float* v = nullptr;  // [N, M, D], v_stride; null with a latent cache
  int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  float* out = nullptr;  // [N, Q, E]
};
void attention(const Attention& args, Device& device, std::span<std::byte> workspace);

// The bytes of `workspace` that any call with these heads needs. Contents are scratch; it starts at a multiple of
// kAlignmentBytes.
size_t attention_workspace_bytes(int query_heads, int kv_heads, int head_size, Device& device);

}  // namespace replayssm
