// Attention: the oracle, latent caches, splits of a prompt, batches, threads, pages in any order, padding rows, bad
// numbers.
#include "replayssm/ops/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "replayssm/core/buffer.h"
#include "replayssm/core/error.h"
#include "tests/arrays.h"
#include "tests/attention_cases.h"
#include "tests/tolerance.h"

namespace replayssm {
namespace {

using namespace replayssm::test;

// A cache of `slots` sequences of at most `positions`, with pages dealt out in a shuffled order.
struct Cache {
  Cache(const Heads& h, int slots, int64_t positions) : heads(h), table_stride(positions / h.page_tokens + 1) {
    const int64_t pages = slots * table_stride;
    k = poisoned(pages * h.kv_heads * h.page_tokens * h.size);
    if (h.latent_size == 0) v = k;
    page_table.resize(pages);
    std::iota(page_table.begin(), page_table.end(), 0);
    std::mt19937_64 random(9);
    std::shuffle(page_table.begin(), page_table.end(), random);
  }

  struct Row {
    const Sequence* sequence;  // null: padding
    int slot;
    int64_t begin, end;
  };

  // Appends and attends; returns [N, Q, E].
  std::vector<float> run(const std::vector<Row>& rows, Device& device) {
    std::vector<int32_t> slot, history, token_begin = {0}, table;
    std::vector<int64_t> base;
    std::vector<float> q;
    const int64_t stride = (heads.query_heads + 2 * heads.kv_heads) * heads.size;
    for (const Row& row : rows) {
      slot.push_back(row.sequence == nullptr ? kPaddingSlot : row.slot);
      history.push_back(static_cast<int32_t>(std::min<int64_t>(row.begin, 3)));
      base.push_back(row.begin - history.back());
      token_begin.push_back(token_begin.back() + static_cast<int32_t>(row.end - row.begin));
      for (int64_t i = 0; i < table_stride; ++i) table.push_back(page_table[row.slot * table_stride + i]);
      if (row.sequence == nullptr)
        q.insert(q.end(), (row.end - row.begin) * stride, kPoison);
      else
        q.insert(q.end(), row.sequence->rows.begin() + row.begin * stride,
                 row.sequence->rows.begin() + row.end * stride);
    }
    std::vector<float> out = poisoned(token_begin.back() * heads.width());
    const bool has_values = heads.latent_size == 0;
    Attention args{.cache = {.kv_heads = heads.kv_heads,
                             .head_size = heads.size,
                             .latent_size = heads.latent_size,
                             .pages = static_cast<int64_t>(page_table.size()),
                             .page_tokens = heads.page_tokens,
                             .k = k.data(),
                             .v = has_values ? v.data() : nullptr},
                   .pages = {.page_table = table.data(), .table_stride = static_cast<int>(table_stride)},
                   .rows = {.count = static_cast<int>(rows.size()),
                            .slot = slot.data(),
                            .base = base.data(),
                            .history = history.data()},
                   .token_begin = token_begin.data(),
                   .query_heads = heads.query_heads,
                   .scale = 1.0f / std::sqrt(static_cast<float>(heads.size)),
                   .q = q.data(),
                   .k = q.data() + heads.query_heads * heads.size,
                   .v = has_values ? q.data() + (heads.query_heads + heads.kv_heads) * heads.size : nullptr,
                   .q_stride = stride,
                   .k_stride = stride,
                   .v_stride = stride,
                   .out = out.data()};
    Buffer<float> workspace(attention_workspace_bytes(heads.query_heads, heads.kv_heads, heads.size, device) /
                            sizeof(float));
    std::fill(workspace.begin(), workspace.end(), kPoison);
    attention(args, device, std::as_writable_bytes(std::span(workspace.data(), workspace.size())));
    return out;
  }

  Heads heads;
  int64_t table_stride;
  std::vector<int32_t> page_table;
  std::vector<float> k, v;
};

TEST(Attention, PrefillMatchesTheOracle) {
  Device device(2);
  for (const Heads& h : kHeads) {
    const int64_t positions = 200, width = h.width();
    const Sequence sequence(h, positions, 1);
    Cache cache(h, 1, positions);
    const std::vector<float> out = cache.run({{&sequence, 0, 0, positions}}, device);
    for (int64_t p : {0, 1, 2, 15, 16, 62, 63, 64, 65, 127, 128, 199})
      EXPECT_LE(relative_error(std::span(out).subspan(p * width, width), expected_output(h, sequence, p)),
                kFloat32Bound)
          << h.query_heads << " heads of " << h.size << ", position " << p;
    // Teeth: one position fewer is seen.
    EXPECT_GT(relative_error(std::span(out).subspan(199 * width, width), expected_output(h, sequence, 198)),
              100 * kFloat32Bound);
  }
}

TEST(Attention, BitsDependOnNeitherSplitNorBatchNorThreadsNorPages) {
  for (const Heads& h : kHeads) {
    const int64_t positions = 150, width = h.width();
    const Sequence a(h, positions, 2), b(h, positions, 3);
    Device one(1);
    Cache whole(h, 2, positions);
    const std::vector<float> a_out = whole.run({{&a, 1, 0, positions}}, one);
    const std::vector<float> b_out = whole.run({{&b, 0, 0, positions}}, one);
    for (int threads : {1, 2, 3}) {
      Device device(threads);
      Cache cache(h, 3, positions);
      const auto check = [&](const std::vector<Cache::Row>& rows) {
        const std::vector<float> out = cache.run(rows, device);
        int64_t at = 0;
        for (const auto& row : rows) {
          const int64_t count = (row.end - row.begin) * width;
          const auto given = std::span(out).subspan(at, count);
          at += count;
          if (row.sequence == nullptr)
            EXPECT_TRUE(same_bits(given, std::vector<float>(count, 0.0f)));
          else
            EXPECT_TRUE(
                same_bits(given, std::span(row.sequence == &a ? a_out : b_out).subspan(row.begin * width, count)))
                << h.size << " at " << row.begin << " threads " << threads;
        }
      };
      // Pieces of all lengths, decode beside prefill, rows that trade places, rows without tokens, padding.
      check({{&a, 0, 0, 1}, {nullptr, 1, 0, 2}, {&b, 2, 0, 64}});
      check({{&b, 2, 64, 65}, {&a, 0, 1, 63}});
      check({{&a, 0, 63, 66}, {&b, 2, 65, 65}});
      check({{&a, 0, 66, 149}, {&b, 2, 65, 130}, {nullptr, 1, 0, 1}});
      check({{&b, 2, 130, 131}, {&a, 0, 149, 150}});
      check({{&b, 2, 131, 150}});
    }
  }
}

// A latent cache sees what a cache of the same keys and of values cut off behind the latent sees.
TEST(Attention, ALatentCacheHasTheBitsOfItsKeysAsValues) {
  const Heads latent{6, 1, 72, 16, 64}, plain{6, 1, 72, 16};
  const int64_t positions = 140;
  const Sequence given(latent, positions, 6);
  Sequence doubled = given;
  for (int64_t p = 0; p < positions; ++p) {
    const auto keys = doubled.rows.begin() + p * doubled.stride + latent.query_heads * latent.size;
    std::copy_n(keys, latent.size, keys + latent.size);
  }
  Device device(2);
  const std::vector<float> out = Cache(latent, 1, positions).run({{&given, 0, 0, positions}}, device);
  const std::vector<float> wide = Cache(plain, 1, positions).run({{&doubled, 0, 0, positions}}, device);
  for (int64_t head = 0; head < positions * latent.query_heads; ++head)
    EXPECT_TRUE(same_bits(std::span(out).subspan(head * 64, 64), std::span(wide).subspan(head * 72, 64))) << head;
}

TEST(Attention, ABadNumberStaysInItsRowAndFuture) {
  const Heads h = kHeads[0];
  const int64_t positions = 100, width = h.width();
  const Sequence good(h, positions, 4);
  Sequence bad = good;
  const int64_t at = 70;
  Device device(2);
  Cache cache(h, 2, positions);
  const std::vector<float> expected = cache.run({{&good, 0, 0, positions}}, device);
  const float values[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()};
  for (float value : values) {
    for (int64_t part : {0, h.query_heads * h.size, (h.query_heads + h.kv_heads) * h.size}) {
      bad.rows = good.rows;
      bad.rows[at * bad.stride + part] = value;
      const std::vector<float> out = cache.run({{&bad, 1, 0, positions}, {&good, 0, 0, positions}}, device);
      EXPECT_TRUE(same_bits(std::span(out).subspan(0, at * width), std::span(expected).subspan(0, at * width)));
      EXPECT_TRUE(same_bits(std::span(out).subspan(positions * width), expected));
      // An infinite key is finite where its query points away from it; some head's does not.
      EXPECT_FALSE(std::all_of(out.begin() + at * width, out.begin() + (at + 1) * width, [](float o) {
        return std::isfinite(o);
      })) << part;
    }
  }
}

TEST(Attention, LargeScoresStayFinite) {
  const Heads h{2, 1, 32, 16};
  Sequence sequence(h, 130, 5);
  for (float& value : sequence.rows) value *= 100;
  Cache cache(h, 1, 130);
  Device device(1);
  const std::vector<float> out = cache.run({{&sequence, 0, 0, 130}}, device);
  EXPECT_LE(relative_error(std::span(out).last(64), expected_output(h, sequence, 129)), 100 * kFloat32Bound);
}

TEST(Attention, RefusesWrongArguments) {
  Device device(1);
  Buffer<float> workspace(attention_workspace_bytes(4, 2, 8, device) / sizeof(float));
  std::vector<float> floats(4096, 1.0f), out = poisoned(4 * 32);
  std::vector<int32_t> slot = {0}, history = {1}, token_begin = {0, 4}, table = {0, 1};
  std::vector<int64_t> base = {2};
  const Attention good{
      .cache = {.kv_heads = 2, .head_size = 8, .pages = 2, .page_tokens = 4, .k = floats.data(), .v = floats.data()},
      .pages = {table.data(), 2},
      .rows = {1, slot.data(), base.data(), history.data()},
      .token_begin = token_begin.data(),
      .query_heads = 4,
      .scale = 1,
      .q = floats.data(),
      .k = floats.data(),
      .v = floats.data(),
      .q_stride = 32,
      .k_stride = 16,
      .v_stride = 16,
      .out = out.data()};
  const auto bytes = std::as_writable_bytes(std::span(workspace.data(), workspace.size()));
  const auto refused = [&](auto change) {
    Attention bad = good;
    change(bad);
    EXPECT_THROW(attention(bad, device, bytes), Error);
  };
  refused([](Attention& a) { a.query_heads = 3; });
  refused([](Attention& a) { a.cache.head_size = 0; });
  refused([](Attention& a) { a.cache.pages = 1; });
  refused([](Attention& a) { a.pages.table_stride = 1; });
  refused([](Attention& a) { a.q = nullptr; });
  refused([](Attention& a) { a.cache.k = nullptr; });
  refused([](Attention& a) { a.cache.v = nullptr; });
  refused([](Attention& a) { a.v = nullptr; });
  refused([](Attention& a) { a.cache.latent_size = 8; });
  refused([](Attention& a) { a.cache.latent_size = 8, a.v = nullptr; });
  refused([](Attention& a) { a.cache.latent_size = 8, a.cache.v = nullptr; });
  refused([](Attention& a) { a.cache.latent_size = 9, a.v = a.cache.v = nullptr; });
  refused([](Attention& a) { a.cache.latent_size = -1; });
  EXPECT_THROW(attention(good, device, bytes.first(8)), Error);
  table[1] = -1;
  EXPECT_THROW(attention(good, device, bytes), Error);
  table[1] = 1;
  base[0] = 5;
  EXPECT_THROW(attention(good, device, bytes), Error);
  base[0] = -1;
  EXPECT_THROW(attention(good, device, bytes), Error);
  base[0] = 2;
  token_begin[1] = -1;
  EXPECT_THROW(attention(good, device, bytes), Error);
  for (float value : out) EXPECT_TRUE(std::isnan(value));
  token_begin[1] = 4;
  attention(good, device, bytes);
}

}  // namespace
}  // namespace replayssm
