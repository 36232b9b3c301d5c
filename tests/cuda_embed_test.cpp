// Rows of an embedding table on a GPU.
#include <gtest/gtest.h>

#include <algorithm>

#include "replayssm/ops/embed.h"
#include "tests/bad_input.h"
#include "tests/cuda_path.h"

namespace replayssm::test {
namespace {

class CudaEmbedding : public CudaTest {};

// In arrays of which `lead` elements come first, and as many last.
template <typename T>
void rows_are_exact(int64_t size, int64_t lead) {
  SCOPED_TRACE(testing::Message() << "size " << size << ", behind " << lead);
  constexpr int32_t kVocabulary = 37;
  CudaPath<T> path;
  std::mt19937_64 random(3);
  std::vector<float> table = CudaPath<T>::template rounded<T>(random_normal(random, lead + kVocabulary * size));
  table[lead] = std::numeric_limits<float>::infinity();
  table[lead + size - 1] = to_float(to_element<T>(1e-7f));  // of Fp16 below the normal numbers
  const std::vector<int32_t> tokens = {36, 0, 0, 17, -1, 36, 37, 5, std::numeric_limits<int32_t>::min(), 1};
  const auto rows = path.template elements<T>(table);
  const auto token = path.template array<int32_t>(tokens);
  const int64_t count = static_cast<int64_t>(tokens.size()) * size;
  const std::vector<float> before(count + 2 * lead, -1.0f);  // a poison that a row of NaN is told from
  auto y = path.template elements<float>(before);
  embed(CudaEmbed<T>{.tokens = static_cast<int64_t>(tokens.size()),
                     .vocabulary = kVocabulary,
                     .size = size,
                     .token = token.data(),
                     .table = rows.data() + lead,
                     .y = y.data() + lead},
        path.device);
  const std::vector<float> result = path.template read<float>(y);
  for (size_t n = 0; n < tokens.size(); ++n) {
    const auto row = std::span(result).subspan(lead + n * size, size);
    if (tokens[n] >= 0 && tokens[n] < kVocabulary) {
      EXPECT_TRUE(same_bits(row, std::span(table).subspan(lead + tokens[n] * size, size))) << n;
    } else {
      EXPECT_TRUE(std::ranges::all_of(row, [](float value) { return std::isnan(value); })) << n;
    }
  }
  EXPECT_TRUE(same_bits(std::span(result).first(lead), std::span(before).first(lead)));
  EXPECT_TRUE(same_bits(std::span(result).last(lead), std::span(before).last(lead)));
}

TEST_F(CudaEmbedding, RowsAreExactAndTokensOutsideGiveNaN) {
  for (const int64_t size : {1, 8, 33, 1000, 1032, 2560})
    for (const int64_t lead : {0, 1, 8}) {
      rows_are_exact<float>(size, lead);
      rows_are_exact<Bf16>(size, lead);
      rows_are_exact<Fp16>(size, lead);
    }
}

TEST_F(CudaEmbedding, RefusesWrongArguments) {
  CudaPath<Bf16> path;
  const auto table = path.elements<Bf16>(std::vector<float>(16, 1.0f));
  const auto token = path.array<int32_t>(std::vector<int32_t>{1});
  auto y = path.elements<float>(poisoned(8));
  const CudaEmbed<Bf16> good = {
      .tokens = 1, .vocabulary = 2, .size = 8, .token = token.data(), .table = table.data(), .y = y.data()};
  const auto refused = [&](const auto& change, const auto&... parts) {
    CudaEmbed<Bf16> bad = good;
    change(bad);
    expect_refusal([&] { embed(bad, path.device); }, "embed", parts...);
  };
  const auto odd = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + 1);
  };
  refused([](auto& args) { args.tokens = -1; }, "sizes >= 0", "tokens -1");
  refused([](auto& args) { args.vocabulary = -1; }, "vocabulary -1");
  refused([](auto& args) { args.size = -1; }, "size -1");
  refused([](auto& args) { args.token = nullptr; }, "token, table and y must not be null");
  refused([](auto& args) { args.table = nullptr; }, "must not be null");
  refused([](auto& args) { args.y = nullptr; }, "must not be null");
  refused([&](auto& args) { args.table = odd(args.table); }, "table aligned to 2 bytes");
  refused([&](auto& args) { args.token = odd(args.token); }, "token aligned to 4 bytes");
  refused([&](auto& args) { args.y = odd(args.y); }, "y aligned to 4 bytes");
  refused([](auto& args) { args.tokens = int64_t{1} << 31; }, "fewer than 2^31 blocks");
  EXPECT_NO_THROW(embed(CudaEmbed<Bf16>{.tokens = 0, .size = 8}, path.device));
  embed(good, path.device);
  EXPECT_EQ(path.read<float>(y), std::vector<float>(8, 1.0f));
}

}  // namespace
}  // namespace replayssm::test
