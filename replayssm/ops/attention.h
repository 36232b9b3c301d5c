// Causal softmax attention with grouped queries over a paged key/value cache (FP32 arithmetic).
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

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"
#include "replayssm/ops/rows.h"

namespace replayssm {

// One layer's keys and values for all slots, in pages of page_tokens positions. Position p of row b lies in page
// page_table[b * table_stride + p / page_tokens] at p % page_tokens. T is the type of the layer's activations: float on
// the CPU; float, Bf16 or Fp16 on a GPU.
template <typename T>
struct BasicKvCache {
  int kv_heads = 0;     // M
  int head_size = 0;    // D
  int latent_size = 0;  // 0: values are kept, E = D; else a latent cache, E = latent_size <= D
  int64_t pages = 0;
  int page_tokens = 0;
  T* k = nullptr;  // [pages, M, page_tokens, D]
  T* v = nullptr;  // [pages, M, page_tokens, D]; null in a latent cache

  int value_size() const { return latent_size > 0 ? latent_size : head_size; }  // E
};
using KvCache = BasicKvCache<float>;

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
template <typename T>
struct BasicAttention {
  BasicKvCache<T> cache;
  KvPages pages;
  StateRows rows;
  const int32_t* token_begin = nullptr;  // [B + 1], non-decreasing from 0
  int query_heads = 0;                   // Q
  float scale = 0;
  const T* q = nullptr;  // [N, Q, D], q_stride
  const T* k = nullptr;  // [N, M, D], k_stride
  const T* v = nullptr;  // [N, M, D], v_stride; null with a latent cache
  int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  T* out = nullptr;  // [N, Q, E]
  // On a GPU, where token_begin cannot be looked at: N, and the most tokens that a row may have.
  int64_t tokens = -1;
  int max_tokens_per_row = 0;
};
using Attention = BasicAttention<float>;
void attention(const Attention& args, Device& device, std::span<std::byte> workspace);

// The bytes of `workspace` that any call with these heads needs. Contents are scratch; it starts at a multiple of
// kAlignmentBytes.
size_t attention_workspace_bytes(int query_heads, int kv_heads, int head_size, Device& device);

// The same on a GPU, queued on its stream. Every pointer is of device memory, those of `pages`, `rows` and token_begin
// too, and is read when the work runs; how the work is cut follows from the sizes alone, so a captured graph serves any
// cursors. T: float, Bf16 or Fp16; of 16-bit types the weights of the softmax are rounded to T before they meet values.
// Fast for 16-bit types, head sizes that are multiples of 8 and at most 256, or of latent caches at most 576 with
// latents of at most 512, pointers and strides that are multiples of 16 bytes, and GPUs whose blocks may have 99 KiB of
// shared memory, of latent caches 160 KiB; right whatever they are. Up to 16 tokens a row (max_tokens_per_row) are a
// decoding step, bound by reading the cache; more are prompts, whose rows are not split over their context.
// A token's bits depend on its query, on the keys and values up to its position, on whether the step is a decoding step
// or one of prompts, and, where the context is past 4096 tokens, on the row's length; never on other rows. A number
// that is not finite among a token's values may become a NaN in the outputs of it and later tokens.
// A row that names positions past the page table, pages past the pool, or more tokens than there may be has NaN for
// outputs and CudaDevice::synchronize names it; its tokens may or may not have been written.
template <typename T>
void attention(const BasicAttention<T>& args, CudaDevice& device, std::span<std::byte> workspace);

// The bytes of `workspace` that the call above needs: of the sizes in `args` alone, for at most so many rows, tokens a
// row and pages a row.
template <typename T>
size_t attention_workspace_bytes(const BasicAttention<T>& args);

}  // namespace replayssm
