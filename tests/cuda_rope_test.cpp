// Rotary embedding on a GPU: angles at any position, heads normed and rotated in place.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "replayssm/ops/rope.h"
#include "tests/bad_input.h"
#include "tests/cuda_path.h"
#include "tests/ref/norm.h"
#include "tests/ref/rope.h"

namespace replayssm::test {
namespace {

class CudaRope : public CudaTest {};

using Path = CudaPath<float>;

// Rows on a GPU, some without tokens, one of padding; their tokens pass position 2^24.
struct CursorRig {
  static constexpr int kPadding = 3;
  static constexpr int64_t kFar = int64_t{1} << 24;

  explicit CursorRig(Path& from) : path(from) {}

  RowRopeAngles args(int64_t tokens, int rotary_size, double theta) {
    cosine = path.elements<float>(poisoned(tokens * rotary_size / 2 + 3));
    sine = path.elements<float>(poisoned(tokens * rotary_size / 2 + 3));
    return {.tokens = tokens,
            .rows = {.count = static_cast<int>(slot.size()),
                     .slot = slots.data(),
                     .base = bases.data(),
                     .history = histories.data()},
            .token_begin = begins.data(),
            .rotary_size = rotary_size,
            .theta = theta,
            .cosine = cosine.data(),
            .sine = sine.data()};
  }
  // The position of a token; negative if it is padding or no row's.
  int64_t position(const std::vector<int32_t>& begin, int64_t token) const {
    for (size_t b = 0; b < slot.size(); ++b)
      if (token >= begin[b] && token < begin[b + 1])
        return slot[b] == kPaddingSlot ? -1 : base[b] + history[b] + (token - begin[b]);
    return -1;
  }
  // The cosines, then the sines, of what the op has written; what lies behind them is still poison.
  std::vector<float> angles() {
    std::vector<float> all;
    for (const auto* array : {&cosine, &sine}) {
      const std::vector<float> values = path.read<float>(*array);
      EXPECT_TRUE(same_bits(std::span(values).last(3), poisoned(3)));
      all.insert(all.end(), values.begin(), values.end() - 3);
    }
    return all;
  }

  Path& path;
  std::vector<int32_t> slot = {3, 9, 0, kPaddingSlot, 7, 2, 5, 1};
  std::vector<int64_t> base = {5, 0, 262140, 77, 4, kFar - 6, 1000, 12};
  std::vector<int32_t> history = {0, 0, 4, 2, 1, 3, 0, 4}, token_begin = {0, 0, 2, 5, 9, 9, 19, 40, 40};
  DeviceBuffer<int32_t> slots = path.array<int32_t>(slot), histories = path.array<int32_t>(history),
                        begins = path.array<int32_t>(token_begin);
  DeviceBuffer<int64_t> bases = path.array<int64_t>(base);
  DeviceBuffer<float> cosine, sine;
};

// One token's of angles that hold those of `tokens`.
std::vector<float> angles_of(std::span<const float> angles, int64_t tokens, int64_t token) {
  const size_t half = angles.size() / 2 / tokens;
  std::vector<float> own;
  for (const size_t at : {token * half, (tokens + token) * half})
    own.insert(own.end(), angles.begin() + at, angles.begin() + at + half);
  return own;
}

std::vector<double> expected_angles(int rotary_size, double theta, int64_t position) {
  std::vector<double> cosines, sines;
  for (int i = 0; i < rotary_size / 2; ++i) {
    const double angle = ref::rope_angle(i, rotary_size, theta, position);
    cosines.push_back(std::cos(angle));
    sines.push_back(std::sin(angle));
  }
  cosines.insert(cosines.end(), sines.begin(), sines.end());
  return cosines;
}

void expect_angles(const CursorRig& rig, const std::vector<int32_t>& begin, const std::vector<float>& angles,
                   const RowRopeAngles& args) {
  for (int64_t n = 0; n < args.tokens; ++n) {
    const std::vector<float> own = angles_of(angles, args.tokens, n);
    const int64_t position = rig.position(begin, n);
    EXPECT_LE(relative_error(own, expected_angles(args.rotary_size, args.theta, std::max<int64_t>(position, 0))),
              kFloat32Bound)
        << "token " << n << " at " << position;
    if (position < 0) continue;
    EXPECT_GT(relative_error(own, expected_angles(args.rotary_size, args.theta, position + 1)), 100 * kFloat32Bound);
  }
}

TEST_F(CudaRope, AnglesFollowTheCursors) {
  Path path;
  CursorRig rig(path);
  constexpr int64_t kTokens = 43;  // three are no row's
  ASSERT_EQ(rig.position(rig.token_begin, 40), -1);
  ASSERT_EQ(rig.position(rig.token_begin, 18), CursorRig::kFar + 6);
  for (const int rotary_size : {2, 6, 64, 128})
    for (const double theta : {1e4, 1e7}) {
      SCOPED_TRACE(testing::Message() << rotary_size << " of " << theta);
      RowRopeAngles args = rig.args(kTokens, rotary_size, theta);
      rope_angles(args, path.device);
      const std::vector<float> angles = rig.angles();
      expect_angles(rig, rig.token_begin, angles, args);

      // A token's bits depend on its position alone, which is the row's next here.
      args = rig.args(21, rotary_size, theta);
      args.token_begin = nullptr;
      args.tokens_per_row = 3;  // the last row's are not asked for
      rope_angles(args, path.device);
      const std::vector<float> equal = rig.angles();
      expect_angles(rig, {0, 3, 6, 9, 12, 15, 18, 21, 24}, equal, args);
      for (int64_t t = 0; t < 3; ++t)
        EXPECT_TRUE(same_bits(angles_of(equal, 21, 15 + t), angles_of(angles, kTokens, 9 + t)));
    }
}

TEST_F(CudaRope, AnglesAreThoseOfTheCursorsWhenTheWorkRuns) {
  Path path;
  CursorRig rig(path);
  const RowRopeAngles args = rig.args(40, 64, 1e7);
  CudaGraph graph(path.device, [&] { rope_angles(args, path.device); });
  for (const int64_t step : {0, 1, 7777}) {
    for (int64_t& base : rig.base) base += step;
    rig.bases.upload(rig.base, path.device);
    graph.launch();
    expect_angles(rig, rig.token_begin, rig.angles(), args);
  }
}

TEST_F(CudaRope, AnglesRefuseWrongArguments) {
  Path path;
  CursorRig rig(path);
  const RowRopeAngles good = rig.args(40, 64, 1e7);
  const auto refused = [&](const auto& change, const auto&... parts) {
    RowRopeAngles bad = good;
    change(bad);
    expect_refusal([&] { rope_angles(bad, path.device); }, "rope_angles", parts...);
  };
  refused([](auto& args) { args.tokens = -1; }, "tokens >= 0", "got -1 and 64");
  refused([](auto& args) { args.rotary_size = 3; }, "even rotary_size", "got 40 and 3");
  refused([](auto& args) { args.rotary_size = -2; }, "rotary_size >= 0");
  refused([](auto& args) { args.theta = 0; }, "theta > 0, got 0");
  refused([](auto& args) { args.theta = std::numeric_limits<double>::quiet_NaN(); }, "theta > 0");
  refused([](auto& args) { args.rows.count = 0; }, "expected token_begin and rows");
  refused(
      [](auto& args) {
        args.token_begin = nullptr;
        args.tokens_per_row = 4;
      },
      "or 40 tokens in rows of tokens_per_row", "got 8 rows of 4");
  refused(
      [](auto& args) {
        args.token_begin = nullptr;
        args.tokens_per_row = 0;
      },
      "got 8 rows of 0");
  refused([](auto& args) { args.rows.slot = nullptr; }, "must not be null");
  refused([](auto& args) { args.rows.base = nullptr; }, "must not be null");
  refused([](auto& args) { args.rows.history = nullptr; }, "must not be null");
  refused([](auto& args) { args.cosine = nullptr; }, "must not be null");
  refused([](auto& args) { args.sine = nullptr; }, "must not be null");
  refused([](auto& args) { args.rows.base = reinterpret_cast<const int64_t*>(args.rows.slot + 1); },
          "base aligned to 8 bytes");
  refused([](auto& args) { args.tokens = int64_t{1} << 34; }, "fewer than 2^31 blocks");
  EXPECT_NO_THROW(rope_angles(RowRopeAngles{.tokens = 3, .rows = {}, .rotary_size = 0}, path.device));
}

// Where the arrays of a call lie: what is added to strides, what comes first, what comes before angles.
struct HeadPlaces {
  int64_t gap = 0, lead = 0, angle_lead = 0;
};

// Heads of tokens at chosen positions.
template <typename T>
struct HeadsCase {
  static constexpr double kTheta = 1e7;
  static constexpr int64_t kSomePositions[] = {0, 1, 63, 4095, 77777, 262143, (int64_t{1} << 24) + 1};

  HeadsCase(int d, int r, bool has_q, bool has_k, bool zero_centred, std::mt19937_64& random)
      : head_size(d),
        rotary_size(r),
        has_q_norm(has_q),
        has_k_norm(has_k),
        is_zero_centred(zero_centred),
        position(std::begin(kSomePositions), std::end(kSomePositions)),
        q(CudaPath<T>::template rounded<T>(random_normal(random, position.size() * query_heads * d, 3.0f))),
        k(CudaPath<T>::template rounded<T>(random_normal(random, position.size() * key_heads * d, 3.0f))),
        q_norm(random_normal(random, d, 0.5f, zero_centred ? 0.1f : 1.0f)),
        k_norm(random_normal(random, d, 0.5f, zero_centred ? 0.1f : 1.0f)) {}

  // The heads, in order: queries, then keys.
  int64_t heads() const { return static_cast<int64_t>(position.size()) * (query_heads + key_heads); }
  bool is_query(int64_t index) const { return index < static_cast<int64_t>(position.size()) * query_heads; }
  bool is_normed(int64_t index) const { return is_query(index) ? has_q_norm : has_k_norm; }
  std::span<float> head(int64_t index) {
    const int64_t queries = static_cast<int64_t>(position.size()) * query_heads;
    return is_query(index) ? std::span(q).subspan(index * head_size, head_size)
                           : std::span(k).subspan((index - queries) * head_size, head_size);
  }
  int64_t token_of(int64_t index) const {
    const int64_t queries = static_cast<int64_t>(position.size()) * query_heads;
    return is_query(index) ? index / query_heads : (index - queries) / key_heads;
  }

  // What head `index` becomes, or would with other weights or at another position.
  std::vector<double> expected(int64_t index, bool of_query, int64_t at) {
    const std::span<const float> x = head(index);
    const std::vector<double> normed = is_normed(index)
                                           ? ref::rms_norm(x, of_query ? q_norm : k_norm, is_zero_centred, 1e-6)
                                           : std::vector<double>(x.begin(), x.end());
    return ref::rope(normed, rotary_size, kTheta, at);
  }

  // A case of one head alone.
  HeadsCase alone(int64_t index) {
    HeadsCase one = *this;
    one.position = {position[token_of(index)]};
    one.query_heads = is_query(index) ? 1 : 0;
    one.key_heads = is_query(index) ? 0 : 1;
    const auto own = head(index);
    one.q.assign(own.begin(), own.begin() + one.query_heads * head_size);
    one.k.assign(own.begin(), own.begin() + one.key_heads * head_size);
    return one;
  }

  // The heads as the op leaves them. Sees that nothing else is written.
  std::vector<float> run(const HeadPlaces& places) const {
    CudaPath<T> path;
    const auto behind = [](int64_t lead, std::vector<float> values) {
      values.insert(values.begin(), lead, kPoison);
      return values;
    };
    const int64_t tokens = static_cast<int64_t>(position.size());
    const VectorPlaces q_places = {tokens, query_heads, head_size, query_heads * head_size + places.gap, head_size};
    const VectorPlaces k_places = {tokens, key_heads, head_size, key_heads * head_size + places.gap, head_size};
    std::vector<float> cosine, sine;
    for (const int64_t at : position)
      for (int i = 0; i < rotary_size / 2; ++i) {
        const double angle = ref::rope_angle(i, rotary_size, kTheta, at);
        cosine.push_back(static_cast<float>(std::cos(angle)));
        sine.push_back(static_cast<float>(std::sin(angle)));
      }
    const auto cosines = path.template elements<float>(behind(places.angle_lead, cosine));
    const auto sines = path.template elements<float>(behind(places.angle_lead, sine));
    const auto q_norms = path.template elements<float>(behind(places.lead, q_norm));
    const auto k_norms = path.template elements<float>(behind(places.lead, k_norm));
    auto queries = path.template elements<T>(behind(places.lead, q_places.spread(q)));
    auto keys = path.template elements<T>(behind(places.lead, k_places.spread(k)));
    place_heads(PlaceHeads<T>{.tokens = tokens,
                              .query_heads = query_heads,
                              .key_heads = key_heads,
                              .head_size = head_size,
                              .rotary_size = rotary_size,
                              .q_norm = has_q_norm ? q_norms.data() + places.lead : nullptr,
                              .k_norm = has_k_norm ? k_norms.data() + places.lead : nullptr,
                              .is_zero_centred = is_zero_centred,
                              .eps = 1e-6f,
                              .cosine = rotary_size > 0 ? cosines.data() + places.angle_lead : nullptr,
                              .sine = rotary_size > 0 ? sines.data() + places.angle_lead : nullptr,
                              .q = query_heads > 0 ? queries.data() + places.lead : nullptr,
                              .k = key_heads > 0 ? keys.data() + places.lead : nullptr,
                              .q_stride = q_places.stride,
                              .k_stride = k_places.stride},
                path.device);
    std::vector<float> heads;
    for (const auto& [array, of] : {std::pair(&queries, &q_places), {&keys, &k_places}}) {
      std::vector<float> values = path.template read<T>(*array);
      EXPECT_TRUE(std::all_of(values.begin(), values.begin() + places.lead, [](float x) { return std::isnan(x); }));
      values.erase(values.begin(), values.begin() + places.lead);
      EXPECT_TRUE(of->is_clean_between(values));
      const std::vector<float> dense = of->gather(values);
      heads.insert(heads.end(), dense.begin(), dense.end());
    }
    return heads;
  }

  int query_heads = 5, key_heads = 2;
  int head_size, rotary_size;
  bool has_q_norm, has_k_norm, is_zero_centred;
  std::vector<int64_t> position;
  std::vector<float> q, k, q_norm, k_norm;
};

// Head sizes and what is rotated of them. Those of models are 256 with 64, 64 and 128 whole.
constexpr std::pair<int, int> kHeadSizes[] = {{256, 64}, {128, 128}, {64, 64},   {64, 16},   {16, 0},
                                              {20, 6},   {8, 8},     {2, 2},     {80, 48},   {248, 240},
                                              {264, 80}, {512, 512}, {1000, 90}, {1024, 32}, {1024, 1024}};

template <typename T>
void heads_match_the_oracle() {
  using Bounds = CudaPath<T>;
  std::mt19937_64 random(5);
  for (const auto& [size, rotary_size] : kHeadSizes)
    for (const auto& [has_q, has_k, zero_centred] :
         {std::tuple(true, true, true), {true, true, false}, {false, true, false}, {false, false, false}}) {
      SCOPED_TRACE(testing::Message() << size << ", " << rotary_size << " rotated, norms " << has_q << has_k
                                      << zero_centred);
      HeadsCase<T> heads(size, rotary_size, has_q, has_k, zero_centred, random);
      const std::vector<float> result = heads.run({});
      for (const HeadPlaces& places : {HeadPlaces{16, 8, 8}, HeadPlaces{1, 1, 1}, HeadPlaces{8, 0, 1}})
        EXPECT_TRUE(same_bits(heads.run(places), result));
      for (int64_t index = 0; index < heads.heads(); ++index) {
        const auto given = std::span(result).subspan(index * size, size);
        const bool is_query = heads.is_query(index);
        const int64_t at = heads.position[heads.token_of(index)];
        EXPECT_LE(relative_error(given, heads.expected(index, is_query, at)), Bounds::kBound) << index;
        if (heads.is_normed(index)) {
          EXPECT_GT(relative_error(given, heads.expected(index, !is_query, at)), Bounds::kOtherFormula);
        } else if (rotary_size == 0) {
          EXPECT_TRUE(same_bits(given, heads.head(index)));
        }
        if (rotary_size == 0) continue;
        const std::vector<double> neighbour = heads.expected(index, is_query, at + 1);
        EXPECT_GT(relative_error(given.first(rotary_size), std::span(neighbour).first(rotary_size)),
                  Bounds::kOtherFormula);
      }
    }
}

TEST_F(CudaRope, HeadsMatchTheOracleWhereverTheyLie) {
  heads_match_the_oracle<float>();
  heads_match_the_oracle<Bf16>();
  heads_match_the_oracle<Fp16>();
}

template <typename T>
void heads_are_rounded_once() {
  for (const auto& [size, rotary_size] : kHeadSizes) {
    SCOPED_TRACE(size);
    std::mt19937_64 narrow(6), wide(6);
    HeadsCase<T> heads(size, rotary_size, true, false, true, narrow);
    HeadsCase<float> same(size, rotary_size, true, false, true, wide);
    same.q = heads.q;
    same.k = heads.k;
    EXPECT_TRUE(same_bits(heads.run({}), CudaPath<T>::template rounded<T>(same.run({}))));
  }
}

TEST_F(CudaRope, HeadsAreRoundedOnce) {
  heads_are_rounded_once<Bf16>();
  heads_are_rounded_once<Fp16>();
}

template <typename T>
void a_heads_bits_depend_on_nothing_else() {
  std::mt19937_64 random(7);
  for (const auto& [size, rotary_size] : {std::pair(256, 64), {128, 128}, {34, 10}, {520, 48}}) {
    SCOPED_TRACE(size);
    HeadsCase<T> heads(size, rotary_size, true, true, true, random);
    const std::vector<float> clean = heads.run({});
    const auto head_of = [size = size](const std::vector<float>& all, int64_t index) {
      return std::span(all).subspan(index * size, size);
    };
    for (int64_t index = 0; index < heads.heads(); index += 6)
      EXPECT_TRUE(same_bits(heads.alone(index).run({}), head_of(clean, index)));
    for (int64_t index = 0; index < heads.heads(); index += 2)
      heads.head(index)[size - 1] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> spoilt = heads.run({});
    for (int64_t index = 0; index < heads.heads(); ++index) {
      const auto given = head_of(spoilt, index);
      if (index % 2 == 1)
        EXPECT_TRUE(same_bits(given, head_of(clean, index)));
      else
        EXPECT_TRUE(std::all_of(given.begin(), given.end(), [](float x) { return std::isnan(x); }));
    }
  }
}

TEST_F(CudaRope, AHeadsBitsDependOnNothingElse) {
  a_heads_bits_depend_on_nothing_else<float>();
  a_heads_bits_depend_on_nothing_else<Bf16>();
}

TEST_F(CudaRope, HeadsRefuseWrongArguments) {
  CudaPath<Bf16> path;
  auto x = path.elements<Bf16>(std::vector<float>(64, 1.0f));
  const auto ones = path.elements<float>(std::vector<float>(16, 1.0f));
  const PlaceHeads<Bf16> good = {.tokens = 1,
                                 .query_heads = 2,
                                 .key_heads = 1,
                                 .head_size = 16,
                                 .rotary_size = 8,
                                 .q_norm = ones.data(),
                                 .k_norm = ones.data(),
                                 .cosine = ones.data(),
                                 .sine = ones.data(),
                                 .q = x.data(),
                                 .k = x.data() + 32,
                                 .q_stride = 32,
                                 .k_stride = 16};
  const auto refused = [&](const auto& change, const auto&... parts) {
    PlaceHeads<Bf16> bad = good;
    change(bad);
    expect_refusal([&] { place_heads(bad, path.device); }, "place_heads", parts...);
  };
  const auto odd = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + 1);
  };
  refused([](auto& args) { args.tokens = -1; }, "got -1, 2 and 1");
  refused([](auto& args) { args.query_heads = -1; }, "query_heads and key_heads >= 0");
  refused([](auto& args) { args.key_heads = -1; }, "query_heads and key_heads >= 0");
  refused([](auto& args) { args.head_size = 15; }, "even head_size of 2 .. 1024, got 15");
  refused([](auto& args) { args.head_size = 0; }, "got 0");
  refused([](auto& args) { args.head_size = 1026; }, "got 1026");
  refused([](auto& args) { args.rotary_size = 7; }, "even rotary_size of 0 .. 16, got 7");
  refused([](auto& args) { args.rotary_size = 18; }, "got 18");
  refused([](auto& args) { args.eps = -1; }, "eps >= 0, got -1");
  refused([](auto& args) { args.q = nullptr; }, "q and k must not be null");
  refused([](auto& args) { args.k = nullptr; }, "q and k must not be null");
  refused([](auto& args) { args.cosine = nullptr; }, "cosine and sine must not be null");
  refused([](auto& args) { args.sine = nullptr; }, "cosine and sine must not be null");
  refused([&](auto& args) { args.k = odd(args.k); }, "k aligned to 2 bytes");
  refused([&](auto& args) { args.q_norm = odd(args.q_norm); }, "q_norm aligned to 4 bytes");
  refused([](auto& args) { args.tokens = int64_t{1} << 33; }, "fewer than 2^31 blocks");
  EXPECT_NO_THROW(place_heads(PlaceHeads<Bf16>{.tokens = 0, .query_heads = 1, .head_size = 2}, path.device));
  place_heads(good, path.device);
  EXPECT_TRUE(std::isfinite(path.read<Bf16>(x)[0]));
}

}  // namespace
}  // namespace replayssm::test
