// What tests of attention on the CPU and on a GPU share: the heads, a sequence's numbers, its outputs by the oracle.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/arrays.h"
#include "tests/ref/attention.h"

namespace replayssm::test {

struct Heads {
  int query_heads, kv_heads, size, page_tokens;
  int latent_size = 0;

  int value_size() const { return latent_size > 0 ? latent_size : size; }
  int width() const { return query_heads * value_size(); }  // of a token's output
};
// The last five keep latents: the sizes of a head of Kimi-Linear, odd ones, nothing beside the latent, two heads of
// them.
inline const Heads kHeads[] = {{8, 2, 64, 16},     {4, 4, 20, 64},     {6, 1, 256, 7},       {5, 1, 17, 128},
                               {2, 2, 1, 1},       {40, 1, 48, 32},    {2, 1, 576, 16, 512}, {3, 1, 44, 5, 35},
                               {5, 1, 24, 64, 24}, {20, 1, 33, 16, 1}, {6, 2, 40, 7, 32}};

// One sequence's q, k, v in rows of a projection, [positions, Q + 2 M, D]; a latent cache leaves the values alone.
struct Sequence {
  Sequence(const Heads& h, int64_t positions, uint64_t seed) : stride((h.query_heads + 2 * h.kv_heads) * h.size) {
    std::mt19937_64 random(seed);
    rows = random_normal(random, positions * stride);
  }
  int64_t stride;
  std::vector<float> rows;
};

// The oracle's output at a position.
inline std::vector<double> expected_output(const Heads& h, const Sequence& sequence, int64_t position) {
  std::vector<float> q, k, v;
  const auto row = [&](int64_t p) { return sequence.rows.begin() + p * sequence.stride; };
  q.assign(row(position), row(position) + h.query_heads * h.size);
  for (int64_t p = 0; p <= position; ++p) {
    const auto keys = row(p) + h.query_heads * h.size, values = keys + h.kv_heads * h.size;
    k.insert(k.end(), keys, values);
    if (h.latent_size == 0) v.insert(v.end(), values, values + h.kv_heads * h.size);
    for (int m = 0; m < h.kv_heads; ++m) v.insert(v.end(), keys + m * h.size, keys + m * h.size + h.latent_size);
  }
  return ref::attention(q, k, v, h.query_heads, h.kv_heads, h.size, h.value_size(), position + 1,
                        1 / std::sqrt(static_cast<double>(h.size)));
}

}  // namespace replayssm::test
