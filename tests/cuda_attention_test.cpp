// Attention on a GPU: the oracle, prompts and decoding steps, splits, batches, pages in any order, padding rows, rows
// outside, bad numbers, graphs.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "tests/bad_input.h"
#include "tests/cuda_attention_rig.h"

namespace replayssm::test {
namespace {

class CudaAttention : public CudaTest {};

template <typename Run>
void for_all_types(const Run& run) {
  run(float());
  run(Bf16());
  run(Fp16());
}
template <typename Run>
void for_short_types(const Run& run) {
  run(Bf16());
  run(Fp16());
}

// Token `token` of what a call gave.
std::span<const float> token_of(const std::vector<float>& out, const Heads& h, int64_t token) {
  return std::span(out).subspan(token * h.width(), h.width());
}

template <typename T>
void prompts_match_the_oracle(const Heads& h) {
  CudaDevice device;
  const int64_t positions = 200;
  const Sequence sequence = rounded_sequence<T>(h, positions, 1);
  CudaAttentionRig<T> rig(h, 1, positions, device);
  const std::vector<float> out = rig.run({{&sequence, 0, 0, positions}});
  for (int64_t p : {0, 1, 2, 15, 16, 62, 63, 64, 65, 127, 128, 199})
    EXPECT_LE(relative_error(token_of(out, h, p), expected_output(h, sequence, p)), rig.kBound)
        << h.query_heads << " heads of " << h.size << ", position " << p;
  // Teeth: one position fewer is seen.
  EXPECT_GT(relative_error(token_of(out, h, 199), expected_output(h, sequence, 198)), kFaultBound);
}

TEST_F(CudaAttention, PromptsMatchTheOracle) {
  for_all_types([]<typename T>(T) {
    for (const Heads& h : kHeads) prompts_match_the_oracle<T>(h);
  });
  for_short_types([]<typename T>(T) {
    const int pages[] = {1, 7, 16, 64};
    int next = 0;
    for (const int size : {64, 80, 128, 256})
      for (const int group : {1, 2, 3, 4, 8}) prompts_match_the_oracle<T>({2 * group, 2, size, pages[next++ % 4]});
  });
}

// Steps of several lengths on sequences of several: one shorter than a tile, ones of several splits.
template <typename T>
void decoding_steps_match_the_oracle(const Heads& h) {
  CudaDevice device;
  const int64_t starts[] = {0, 37, 511, 1500};
  std::vector<Sequence> sequences;
  std::vector<AttentionRows> rows;
  for (const int64_t start : starts) sequences.push_back(rounded_sequence<T>(h, start + 40, 10 + start));
  CudaAttentionRig<T> rig(h, 4, 1600, device);
  for (int i = 0; i < 4; ++i) rows.push_back({&sequences[i], i, 0, starts[i]});
  rig.run(rows);
  for (const int tokens : {1, 2, 4, 8, 16}) {
    for (int i = 0; i < 4; ++i) {
      rows[i].begin = rows[i].end;
      rows[i].end += std::max(1, tokens - i);
    }
    const std::vector<float> out = rig.run(rows);
    int64_t first = 0;
    for (const AttentionRows& row : rows) {
      const int64_t last = first + (row.end - row.begin) - 1;
      for (const int64_t token : {first, last}) {
        const int64_t position = row.begin + token - first;
        EXPECT_LE(relative_error(token_of(out, h, token), expected_output(h, *row.sequence, position)), rig.kBound)
            << h.query_heads << "/" << h.kv_heads << " heads of " << h.size << ", pages of " << h.page_tokens
            << ", step of " << tokens << ", position " << position;
      }
      first = last + 1;
    }
  }
}

TEST_F(CudaAttention, DecodingStepsMatchTheOracle) {
  for_all_types([]<typename T>(T) {
    const int pages[] = {16, 1, 64, 7};
    int next = 0;
    for (const int size : {64, 80, 128, 256})
      for (const int group : {1, 2, 3, 4, 8}) decoding_steps_match_the_oracle<T>({group, 1, size, pages[next++ % 4]});
    decoding_steps_match_the_oracle<T>({16, 1, 128, 16});
    decoding_steps_match_the_oracle<T>({6, 3, 24, 16});
    decoding_steps_match_the_oracle<T>({16, 1, 256, 48});
    decoding_steps_match_the_oracle<T>({4, 1, 576, 16, 512});
    decoding_steps_match_the_oracle<T>({3, 3, 33, 16});
  });
}

// Contexts past 32 of the shortest splits.
TEST_F(CudaAttention, LongContextsMatchTheOracle) {
  for_short_types([]<typename T>(T) {
    const Heads h{2, 1, 64, 16};
    const int64_t positions = 16380;
    CudaDevice device;
    const Sequence sequence = rounded_sequence<T>(h, positions + 32, 4);
    CudaAttentionRig<T> rig(h, 1, positions + 32, device);
    rig.run({{&sequence, 0, 0, positions}});
    for (int64_t p = positions; p < positions + 32; p += 8) {
      const std::vector<float> out = rig.run({{&sequence, 0, p, p + 8}});
      for (const int64_t token : {0, 7})
        EXPECT_LE(relative_error(token_of(out, h, token), expected_output(h, sequence, p + token)), rig.kBound) << p;
    }
  });
}

TEST_F(CudaAttention, PromptsInChunksEqualWholeOnes) {
  for_all_types([]<typename T>(T) {
    for (const Heads& h : {Heads{8, 2, 64, 16}, Heads{3, 1, 128, 7}, Heads{4, 1, 256, 64}, Heads{2, 1, 576, 16, 512}}) {
      CudaDevice device;
      const int64_t positions = 330;
      const Sequence sequence = rounded_sequence<T>(h, positions, 2);
      CudaAttentionRig<T> whole(h, 1, positions, device), chunked(h, 1, positions, device);
      const std::vector<float> expected = whole.run({{&sequence, 0, 0, positions}});
      int64_t begin = 0;
      for (const int64_t end : {100, 101, 117, 250, 266, 330}) {
        const std::vector<float> out = chunked.run({{&sequence, 0, begin, end}});
        EXPECT_LE(relative_error(out, std::span(expected).subspan(begin * h.width(), out.size())), whole.kBound) << end;
        begin = end;
      }
    }
  });
}

// A step of several tokens has the bits of steps of one.
TEST_F(CudaAttention, ATokensBitsDoNotDependOnItsStep) {
  for_all_types([]<typename T>(T) {
    for (const Heads& h : {Heads{4, 1, 64, 16}, Heads{16, 2, 128, 16}, Heads{6, 1, 256, 7}, Heads{16, 1, 80, 1}}) {
      CudaDevice device;
      const int64_t start = 1015;  // a split ends within the step
      const Sequence sequence = rounded_sequence<T>(h, start + 16, 3);
      CudaAttentionRig<T> together(h, 1, start + 16, device), alone(h, 1, start + 16, device);
      together.run({{&sequence, 0, 0, start}});
      alone.run({{&sequence, 0, 0, start}});
      const std::vector<float> expected = together.run({{&sequence, 0, start, start + 16}});
      for (int64_t p = start; p < start + 16; ++p)
        EXPECT_TRUE(same_bits(alone.run({{&sequence, 0, p, p + 1}}), token_of(expected, h, p - start)))
            << h.size << " at " << p;
    }
  });
}

template <typename T>
void batches_equal_rows_alone(const Heads& h) {
  CudaDevice device;
  const int64_t positions = 1100;
  const Sequence a = rounded_sequence<T>(h, positions, 2), b = rounded_sequence<T>(h, positions, 3);
  CudaAttentionRig<T> alone(h, 2, positions, device), batch(h, 4, positions, device);
  const auto check = [&](const std::vector<AttentionRows>& rows) {
    int32_t most = 0;
    for (const auto& row : rows) most = std::max(most, static_cast<int32_t>(row.end - row.begin));
    const std::vector<float> out = batch.run(rows);
    int64_t at = 0;
    for (const auto& row : rows) {
      const int64_t count = (row.end - row.begin) * h.width();
      const auto given = std::span(out).subspan(at, count);
      at += count;
      std::vector<float> expected(count, 0.0f);
      if (row.sequence != nullptr && count > 0)
        expected = alone.run({{row.sequence, row.sequence == &a ? 1 : 0, row.begin, row.end}}, most > 16 ? most : 0);
      EXPECT_TRUE(same_bits(given, expected)) << h.size << " at " << row.begin;
    }
  };
  check({{&a, 0, 0, 700}, {nullptr, 1, 0, 2}, {&b, 2, 0, 64}});
  check({{&b, 2, 64, 65}, {&a, 0, 700, 710}});
  check({{&a, 0, 710, 714}, {&b, 2, 65, 65}, {nullptr, 3, 0, 16}});
  check({{nullptr, 1, 0, 1}, {&a, 0, 714, 820}, {&b, 2, 65, 130}});
  check({{&b, 2, 130, 131}, {&a, 0, 820, 821}});
  check({{&a, 0, 821, 837}, {&b, 2, 131, 133}});
}

TEST_F(CudaAttention, BatchesEqualRowsAlone) {
  for_all_types([]<typename T>(T) {
    for (const Heads& h : {Heads{8, 2, 64, 16}, Heads{8, 1, 128, 7}, Heads{16, 1, 256, 64}, Heads{2, 1, 576, 16, 512}})
      batches_equal_rows_alone<T>(h);
  });
}

// Rows whose splits are units of their own and rows that a unit has whole: alone all are the former.
void many_rows_equal_rows_alone(const Heads& h, int rows, int64_t positions) {
  using T = Bf16;
  CudaDevice device;
  const Sequence sequence = rounded_sequence<T>(h, positions, 2);
  CudaAttentionRig<T> rig(h, rows, positions, device);
  std::vector<AttentionRows> prompts, steps;
  for (int i = 0; i < rows; ++i) {
    const bool is_padding = i % 9 == 4;
    prompts.push_back({is_padding ? nullptr : &sequence, i, 0, is_padding ? 0 : i * (positions - 7) / rows});
    steps.push_back({is_padding ? nullptr : &sequence, i, prompts.back().end, prompts.back().end + i % 4});
  }
  for (int i = 0; i < rows; i += 50) rig.run({prompts.begin() + i, prompts.begin() + i + 50});
  const std::vector<float> out = rig.run(steps);
  int64_t at = 0;
  for (int i = 0; i < rows; ++i) {
    const int64_t count = (steps[i].end - steps[i].begin) * h.width();
    if (count > 0 && i % 7 == 0) {
      EXPECT_TRUE(same_bits(std::span(out).subspan(at, count), rig.run({steps[i]}))) << h.size << ", row " << i;
    }
    at += count;
  }
}

// More units than blocks, and more rows than threads.
TEST_F(CudaAttention, ManyRowsEqualRowsAlone) {
  many_rows_equal_rows_alone({4, 2, 64, 16}, 700, 1200);
  many_rows_equal_rows_alone({5, 1, 128, 64}, 400, 700);
  many_rows_equal_rows_alone({4, 1, 256, 64}, 400, 700);
}

// An op that is captured and replayed with other cursors, slots and pages gives what it gives uncaptured.
TEST_F(CudaAttention, AGraphServesOtherCursors) {
  for_all_types([]<typename T>(T) {
    for (const int tokens : {1, 4, 40}) {
      const Heads h{8, 2, 128, 16};
      CudaDevice device;
      const Sequence a = rounded_sequence<T>(h, 1200, 2), b = rounded_sequence<T>(h, 1200, 3);
      CudaAttentionRig<T> rig(h, 2, 1200, device);
      rig.run({{&a, 0, 0, 1100}, {&b, 1, 0, 600}});
      rig.put({{&a, 0, 20, 20 + tokens}, {&b, 1, 3, 3 + tokens}});
      CudaGraph graph(device, [&] { rig.call(); });
      const std::vector<AttentionRows> rows[] = {{{&a, 0, 1100, 1100 + tokens}, {&b, 1, 600, 600 + tokens}},
                                                 {{&b, 1, 510, 510 + tokens}, {nullptr, 0, 0, tokens}}};
      for (const auto& other : rows) {
        rig.put(other);
        graph.launch();
        device.synchronize();
        const std::vector<float> replayed = rig.read();
        EXPECT_TRUE(same_bits(rig.run(other), replayed)) << tokens;
      }
    }
  });
}

// A bad number in a token is seen from that token on, by its row alone.
TEST_F(CudaAttention, ABadNumberStaysInItsRowAndFuture) {
  const auto check = []<typename T>(const Heads& h, int64_t begin, int64_t end, int64_t at, T) {
    CudaDevice device;
    const int64_t width = h.width();
    const Sequence good = rounded_sequence<T>(h, end, 4);
    Sequence bad = good;
    CudaAttentionRig<T> rig(h, 2, end, device);
    const std::vector<AttentionRows> rows = {{&good, 1, begin, end}, {&good, 0, begin, end}};
    if (begin > 0) rig.run({{&good, 1, 0, begin}, {&good, 0, 0, begin}});
    const std::vector<float> expected = rig.run(rows);
    for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
      for (const int64_t part : {0, h.query_heads * h.size, (h.query_heads + h.kv_heads) * h.size + 1}) {
        bad.rows = good.rows;
        bad.rows[at * bad.stride + part] = value;
        const std::vector<float> out = rig.run({{&bad, 1, begin, end}, rows[1]});
        const int64_t before = (at - begin) * width;
        EXPECT_TRUE(same_bits(std::span(out).first(before), std::span(expected).first(before))) << part;
        EXPECT_TRUE(same_bits(std::span(out).last(expected.size() / 2), std::span(expected).last(expected.size() / 2)));
        const auto token = token_of(out, h, at - begin), last = token_of(out, h, end - 1 - begin);
        const auto is_finite = [](float o) { return std::isfinite(o); };
        // An infinite key is nothing to queries that point away from it.
        if (std::isinf(value) && part == h.query_heads * h.size) continue;
        EXPECT_FALSE(std::all_of(token.begin(), token.end(), is_finite)) << part;
        if (part > 0) {
          EXPECT_FALSE(std::all_of(last.begin(), last.end(), is_finite)) << part;
        }
      }
  };
  for_all_types([&]<typename T>(T type) {
    for (const Heads& h : {Heads{8, 2, 64, 16}, Heads{3, 1, 80, 7}, Heads{8, 2, 256, 16}}) {
      check(h, 0, 100, 70, type);
      check(h, 506, 518, 509, type);
      check(h, 506, 518, 513, type);
      check(h, 40, 44, 43, type);
    }
  });
}

// A row outside gives no numbers and is named; its neighbours keep their bits and nothing else is touched.
TEST_F(CudaAttention, NamesARowOutside) {
  for_all_types([]<typename T>(T) {
    const Heads h{4, 2, 64, 16};
    for (const int tokens : {1, 3, 40}) {
      CudaDevice device;
      const int64_t positions = 655;
      const Sequence a = rounded_sequence<T>(h, positions, 2), b = rounded_sequence<T>(h, positions, 3);
      CudaAttentionRig<T> rig(h, 3, positions, device);
      rig.run({{&a, 0, 0, 600}, {&a, 1, 0, 600}, {&b, 2, 0, 600}});
      const std::vector<AttentionRows> rows = {
          {&a, 0, 600, 600 + tokens}, {&a, 1, 600, 600 + tokens}, {&b, 2, 600, 600 + tokens}};
      const std::vector<float> expected = rig.run(rows);
      const auto refused = [&](auto change) {
        rig.put(rows);
        change();
        rig.call();
        expect_refusal([&] { device.synchronize(); }, "attention", "row 1", "page");
        EXPECT_NO_THROW(device.synchronize());
        const std::vector<float> out = rig.read();
        const size_t part = expected.size() / 3;
        EXPECT_TRUE(same_bits(std::span(out).first(part), std::span(expected).first(part)));
        EXPECT_TRUE(same_bits(std::span(out).last(part), std::span(expected).last(part)));
        for (float value : std::span(out).subspan(part, part)) EXPECT_TRUE(std::isnan(value));
      };
      const auto set = [&]<typename U>(const U* array, size_t index, U value) {
        device.upload(const_cast<U*>(array) + index, &value, sizeof(U));
      };
      const size_t table = rig.args.pages.table_stride;
      for (const int32_t page : {-1, static_cast<int32_t>(rig.args.cache.pages)})
        for (const size_t place : {0, 35, 37}) refused([&] { set(rig.args.pages.page_table, table + place, page); });
      for (const int64_t base : {int64_t{-4}, int64_t{660}, int64_t{1} << 40, std::numeric_limits<int64_t>::max()})
        refused([&] { set(rig.args.rows.base, 1, base); });
      refused([&] { set(rig.args.rows.history, 1, -1); });
    }
  });
}

// More tokens than a row may have.
TEST_F(CudaAttention, NamesARowOfTooManyTokens) {
  for_all_types([]<typename T>(T) {
    const Heads h{4, 2, 64, 16};
    CudaDevice device;
    const Sequence a = rounded_sequence<T>(h, 40, 2);
    CudaAttentionRig<T> rig(h, 2, 40, device);
    rig.put({{&a, 0, 0, 2}, {&a, 1, 0, 4}});
    rig.args.max_tokens_per_row = 2;
    rig.call();
    expect_refusal([&] { device.synchronize(); }, "attention", "row 1", "tokens");
    const std::vector<float> out = rig.read();
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i >= 2u * h.width());
  });
}

// The elements before the last pages' are more than 2^31.
TEST_F(CudaAttention, OffsetsPast2To31) {
  const Heads h{8, 2, 128, 16};
  CudaDevice device;
  for (const int tokens : {1, 40}) {
    const Sequence sequence = rounded_sequence<Bf16>(h, 600, 2);
    CudaAttentionRig<Bf16> near(h, 1, 600, device), far(h, 1, 600, device, (int64_t{1} << 31) / (2 * 128 * 16));
    near.run({{&sequence, 0, 0, 555}});
    far.run({{&sequence, 0, 0, 555}});
    const std::vector<AttentionRows> step = {{&sequence, 0, 555, 555 + tokens}};
    EXPECT_TRUE(same_bits(near.run(step), far.run(step)));
  }
}

// Strides and pointers that are no multiples of 16 bytes take another path to the same numbers.
TEST_F(CudaAttention, AnyAlignmentIsRight) {
  for_short_types([]<typename T>(T) {
    const Heads h{4, 2, 64, 16};
    CudaDevice device;
    const Sequence sequence = rounded_sequence<T>(h, 70, 5);
    CudaAttentionRig<T> rig(h, 1, 70, device);
    rig.put({{&sequence, 0, 0, 70}});
    const int64_t width = sequence.stride, stride = width + 3;
    std::vector<float> spaced(70 * stride + 1, kPoison);
    for (int64_t p = 0; p < 70; ++p)
      std::copy_n(sequence.rows.begin() + p * width, width, spaced.begin() + 1 + p * stride);
    const DeviceBuffer<T> inputs(to_elements<T>(spaced), device);
    rig.args.q = inputs.data() + 1;
    rig.args.k = rig.args.q + h.query_heads * h.size;
    rig.args.v = rig.args.k + h.kv_heads * h.size;
    rig.args.q_stride = rig.args.k_stride = rig.args.v_stride = stride;
    rig.call();
    device.synchronize();
    const std::vector<float> out = rig.read();
    for (const int64_t p : {0, 33, 69})
      EXPECT_LE(relative_error(token_of(out, h, p), expected_output(h, sequence, p)), rig.kBound) << p;
  });
}

TEST_F(CudaAttention, LargeScoresStayFinite) {
  for_short_types([]<typename T>(T) {
    const Heads h{2, 1, 64, 16};
    CudaDevice device;
    Sequence sequence = rounded_sequence<T>(h, 140, 5);
    for (float& value : sequence.rows) value *= 64;
    CudaAttentionRig<T> rig(h, 1, 140, device);
    for (float value : rig.run({{&sequence, 0, 0, 130}})) EXPECT_TRUE(std::isfinite(value));
    for (float value : rig.run({{&sequence, 0, 130, 134}})) EXPECT_TRUE(std::isfinite(value));
  });
}

TEST_F(CudaAttention, RefusesWhatTheContractForbids) {
  const Heads h{4, 2, 64, 16};
  CudaDevice device;
  const Sequence sequence = rounded_sequence<Bf16>(h, 600, 5);
  CudaAttentionRig<Bf16> rig(h, 1, 600, device);
  rig.put({{&sequence, 0, 0, 1}});
  const auto refuse = [&](auto change, const std::string& part) {
    BasicAttention<Bf16> bad = rig.args;
    change(bad);
    expect_refusal([&] { attention(bad, device, rig.workspace()); }, "attention", part);
  };
  const auto odd = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + 1);
  };
  refuse([](auto& a) { a.query_heads = 3; }, "query_heads a multiple of 2, got 3");
  refuse([](auto& a) { a.cache.head_size = 0; }, "head_size");
  refuse([](auto& a) { a.cache.latent_size = 65; }, "latent_size 0 .. 64");
  refuse([](auto& a) { a.cache.latent_size = 32; }, "no values");
  refuse([](auto& a) { a.cache.k = nullptr; }, "null");
  refuse([](auto& a) { a.rows.base = nullptr; }, "null");
  refuse([](auto& a) { a.q = nullptr; }, "null");
  refuse([](auto& a) { a.v = nullptr; }, "null");
  refuse([](auto& a) { a.tokens = -1; }, "number of tokens");
  refuse([](auto& a) { a.max_tokens_per_row = 0; }, "got 1 and 0");
  refuse([](auto& a) { a.rows.count = 70000; }, "0 to 65535 rows");
  refuse([](auto& a) { a.pages.table_stride = 1 << 27; }, "page tables");
  refuse([](auto& a) { a.cache.pages = int64_t{1} << 27; }, "fewer than 2^31 keys");
  refuse([](auto& a) { a.q_stride = 255; }, "strides of at least 256");
  refuse([&](auto& a) { a.q = odd(a.q); }, "q aligned to 2 bytes");
  refuse([&](auto& a) { a.cache.v = odd(a.cache.v); }, "v aligned to 2 bytes");
  EXPECT_GT(rig.workspace().size(), 0u);
  expect_refusal([&] { attention(rig.args, device, rig.workspace().first(8)); }, "attention", "workspace of");
  EXPECT_NO_THROW(attention(rig.args, device, rig.workspace()));
  device.synchronize();
}

}  // namespace
}  // namespace replayssm::test
