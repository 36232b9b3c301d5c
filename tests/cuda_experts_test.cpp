// Mixture of experts on a GPU: the CPU's choices, sorted as group_choices does, the experts' products and their sum.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "replayssm/ops/experts.h"
#include "tests/bad_input.h"
#include "tests/cuda_path.h"
#include "tests/ref/linear.h"
#include "tests/router_cases.h"

namespace replayssm::test {
namespace {

class CudaExperts : public CudaTest {};

template <typename T>
DeviceBuffer<T> on_device(const std::vector<T>& values, CudaDevice& device) {
  return DeviceBuffer<T>(values, device);
}

// Elements from one that is not aligned to more than itself on.
template <typename T>
DeviceBuffer<T> shifted(std::vector<float> values, CudaDevice& device) {
  values.insert(values.begin(), kPoison);
  return on_device(to_elements<T>(values), device);
}

template <typename T>
T* odd(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + 1);
}

// Routes tokens whose logits lie apart, with poison between them.
Route route_on(CudaDevice& device) {
  return [&](const RouterCase& c, const std::vector<float>& logits, const std::vector<float>& correction) {
    const int64_t tokens = static_cast<int64_t>(logits.size()) / c.experts, stride = c.experts + 3;
    const VectorPlaces places = {tokens, 1, c.experts, stride, 0};
    const auto from = on_device(places.spread(logits), device), bias = on_device(correction, device);
    const auto expert = on_device(std::vector<int32_t>(tokens * c.top_k, -1), device);
    const auto weight = on_device(poisoned(tokens * c.top_k), device);
    route_experts({.tokens = tokens,
                   .experts = c.experts,
                   .top_k = c.top_k,
                   .router = c.router,
                   .logits = from.data(),
                   .logits_stride = stride,
                   .correction = bias.data(),
                   .expert = expert.data(),
                   .weight = weight.data()},
                  device);
    device.synchronize();
    return Routed{expert.download(device), weight.download(device)};
  };
}

TEST_F(CudaExperts, RoutingMatchesTheOracle) {
  CudaDevice device;
  const Route route = route_on(device);
  routing_matches_the_oracle(route);
  every_part_of_a_router_is_seen(route);
  a_correction_chooses_but_does_not_weigh(route);
  a_group_counts_its_two_best(route);
  of_equals_the_lowest_number_wins(route);
  huge_logits_are_numbers(route);
  a_bad_number_stays_in_its_token(route);
}

// Among equal logits too. (Moved off the middle, where other pairs of sigmoids have equal sums.) A token alone has the
// bits that it has among others.
TEST_F(CudaExperts, RoutingChoosesTheCpusExperts) {
  CudaDevice device;
  Device cpu(1);
  const Route route = route_on(device);
  for (const RouterCase& c : kRouterCases) {
    std::mt19937_64 random(11);
    const int64_t tokens = 300;
    std::vector<float> logits = random_normal(random, tokens * c.experts, 2.0f);
    for (size_t i = 0; i < logits.size() / 2; ++i) logits[i] = std::round(logits[i] * 4) / 4 + 0.1f;
    std::vector<float> correction = random_normal(random, c.experts, 0.3f);
    for (int e = 1; e < c.experts; e += 2) correction[e] = correction[e - 1];
    std::vector<int32_t> expert(tokens * c.top_k);
    std::vector<float> weight(tokens * c.top_k);
    std::vector<std::byte> workspace(route_experts_workspace_bytes(c.experts, cpu));
    route_experts({.tokens = tokens,
                   .experts = c.experts,
                   .top_k = c.top_k,
                   .router = c.router,
                   .logits = logits.data(),
                   .logits_stride = c.experts,
                   .correction = correction.data(),
                   .expert = expert.data(),
                   .weight = weight.data()},
                  cpu, workspace);
    const Routed routed = route(c, logits, correction);
    EXPECT_EQ(routed.expert, expert) << c.name;
    EXPECT_LE(relative_error(routed.weight, weight), kFloat32Bound) << c.name;
    for (const int64_t n : {int64_t{0}, tokens / 2, tokens - 1}) {
      const Routed alone = route(c, {logits.begin() + n * c.experts, logits.begin() + (n + 1) * c.experts}, correction);
      EXPECT_TRUE(same_bits(alone.weight, std::span(routed.weight).subspan(n * c.top_k, c.top_k))) << c.name;
    }
  }
}

// Experts of tokens that choose some more often than others.
std::vector<int32_t> random_choices(std::mt19937_64& random, int64_t tokens, int experts, int top_k) {
  std::vector<int32_t> expert, all(experts);
  for (int64_t n = 0; n < tokens; ++n) {
    std::iota(all.begin(), all.end(), 0);
    for (int i = 0; i < top_k; ++i) {
      const double at = std::pow(std::uniform_real_distribution<double>(0, 1)(random), 2);
      std::swap(all[i], all[i + static_cast<int>(at * (experts - i))]);
    }
    expert.insert(expert.end(), all.begin(), all.begin() + top_k);
  }
  return expert;
}

TEST_F(CudaExperts, ChoicesAreWhereTheCpuPutsThem) {
  CudaDevice device;
  std::mt19937_64 random(12);
  struct Sizes {
    int64_t tokens;
    int experts, top_k;
  };
  for (const Sizes& s :
       {Sizes{0, 7, 2}, Sizes{1, 1, 1}, Sizes{700, 1, 1}, Sizes{5, 5, 5}, Sizes{1, 512, 22}, Sizes{33, 513, 3},
        Sizes{64, 256, 8}, Sizes{256, 512, 22}, Sizes{300, 1024, 40}, Sizes{4096, 512, 22}}) {
    SCOPED_TRACE(s.tokens);
    const int64_t choices = s.tokens * s.top_k;
    const std::vector<int32_t> expert = random_choices(random, s.tokens, s.experts, s.top_k);
    std::vector<float> numbers(choices), weight(choices);  // choice i weighs i: its place tells where it went
    std::iota(numbers.begin(), numbers.end(), 0.0f);
    std::vector<int64_t> begin(s.experts + 1);
    std::vector<int32_t> token(choices);
    group_choices({.tokens = s.tokens,
                   .experts = s.experts,
                   .top_k = s.top_k,
                   .expert = expert.data(),
                   .expert_weight = numbers.data(),
                   .begin = begin.data(),
                   .token = token.data(),
                   .weight = weight.data()});
    std::vector<int32_t> place(choices);
    for (int64_t i = 0; i < choices; ++i) place[static_cast<int64_t>(weight[i])] = static_cast<int32_t>(i);
    const auto from = on_device(expert, device);
    const auto begin_there = on_device(std::vector<int32_t>(s.experts + 1, -1), device);
    const auto token_there = on_device(std::vector<int32_t>(choices, -1), device);
    const auto place_there = on_device(std::vector<int32_t>(choices, -1), device);
    place_choices({.tokens = s.tokens,
                   .experts = s.experts,
                   .top_k = s.top_k,
                   .expert = from.data(),
                   .begin = begin_there.data(),
                   .token = token_there.data(),
                   .place = place_there.data()},
                  device);
    device.synchronize();
    EXPECT_EQ(begin_there.download(device), std::vector<int32_t>(begin.begin(), begin.end()));
    EXPECT_EQ(token_there.download(device), token);
    EXPECT_EQ(place_there.download(device), place);
  }
}

// Experts with so many choices each, of tokens drawn at random.
template <typename T>
struct ProductCase {
  ProductCase(const std::vector<int>& counts, int64_t in, int64_t out, uint64_t seed)
      : experts(static_cast<int>(counts.size())), inputs(in), outputs(out), begin{0} {
    for (int count : counts) begin.push_back(begin.back() + count);
    choices = begin.back();
    tokens = choices / 2 + 1;
    std::mt19937_64 random(seed);
    for (int64_t i = 0; i < choices; ++i) token.push_back(static_cast<int32_t>(random() % tokens));
    weight = CudaPath<T>::template rounded<T>(random_normal(random, experts * outputs * inputs, 0.3f));
    x = CudaPath<T>::template rounded<T>(random_normal(random, tokens * inputs));
  }

  std::span<const float> row(int64_t choice) const { return std::span(x).subspan(token[choice] * inputs, inputs); }

  std::vector<double> expected() const {
    std::vector<double> y;
    for (int e = 0; e < experts; ++e) {
      const auto matrix = std::span(weight).subspan(e * outputs * inputs, outputs * inputs);
      for (int64_t i = begin[e]; i < begin[e + 1]; ++i) {
        const std::vector<double> own = ref::linear(matrix, row(i), 1, inputs, outputs);
        y.insert(y.end(), own.begin(), own.end());
      }
    }
    return y;
  }

  // y [choices, outputs]. `shift` elements lie before the arrays; without `has_token` x is given by choice.
  std::vector<float> run(CudaDevice& device, int64_t x_gap, int64_t y_gap, int shift, bool has_token = true) const {
    const auto elements = [&](const std::vector<float>& values) {
      return shift == 0 ? on_device(to_elements<T>(values), device) : shifted<T>(values, device);
    };
    std::vector<float> rows = x;
    if (!has_token) {
      rows.clear();
      for (int64_t i = 0; i < choices; ++i) rows.insert(rows.end(), row(i).begin(), row(i).end());
    }
    const VectorPlaces x_places = {has_token ? tokens : choices, 1, inputs, inputs + x_gap, 0};
    const VectorPlaces y_places = {choices, 1, outputs, outputs + y_gap, 0};
    const auto begins = on_device(begin, device), token_there = on_device(token, device);
    const auto weights = elements(weight), from = elements(x_places.spread(rows));
    const auto y = elements(poisoned(choices * y_places.stride));
    experts_linear(ExpertsLinear<T>{.choices = choices,
                                    .experts = experts,
                                    .inputs = inputs,
                                    .outputs = outputs,
                                    .begin = begins.data(),
                                    .token = has_token ? token_there.data() : nullptr,
                                    .weight = weights.data() + shift,
                                    .x = from.data() + shift,
                                    .x_stride = x_places.stride,
                                    .y = y.data() + shift,
                                    .y_stride = y_places.stride},
                   device);
    device.synchronize();
    std::vector<float> result = to_floats<T>(y.download(device));
    if (shift > 0) result.erase(result.begin());
    EXPECT_TRUE(y_places.is_clean_between(result));
    return y_places.gather(result);
  }

  int experts;
  int64_t inputs, outputs, choices, tokens;
  std::vector<int32_t> begin, token;
  std::vector<float> weight, x;
};

template <typename T>
void products_match_the_oracle() {
  // Few and many choices an expert: full tiles, tiles of one choice, experts without any.
  const std::vector<int> few = {0, 1, 0, 7, 32, 33, 16, 0, 2, 17, 65, 0}, many = {129, 0, 200, 64, 1};
  CudaDevice device;
  struct Sizes {
    int64_t inputs, outputs;
  };
  for (const Sizes& s : {Sizes{1, 1}, Sizes{8, 8}, Sizes{64, 128}, Sizes{72, 136}, Sizes{33, 17}, Sizes{200, 264},
                         Sizes{321, 129}, Sizes{1024, 24}})
    for (const auto& counts : {few, many, std::vector<int>{1}, std::vector<int>{0, 0, 3}}) {
      SCOPED_TRACE(s.inputs);
      const ProductCase<T> product(counts, s.inputs, s.outputs, 21);
      const std::vector<float> y = product.run(device, 0, 0, 0);
      EXPECT_LE(relative_error(y, product.expected()), CudaPath<T>::kBound) << product.choices;
      EXPECT_TRUE(same_bits(y, product.run(device, 8, 16, 0)));
      EXPECT_TRUE(same_bits(y, product.run(device, 5, 3, 1, false)));
    }
}

TEST_F(CudaExperts, ProductsMatchTheOracle) {
  products_match_the_oracle<float>();
  products_match_the_oracle<Bf16>();
  products_match_the_oracle<Fp16>();
}

// Token 0's row among any number of others of its expert and of other experts, which are no numbers.
template <typename T>
void a_rows_bits_depend_on_nothing_else() {
  CudaDevice device;
  const ProductCase<T> alone({1}, 328, 136, 22);
  const std::vector<float> bits = alone.run(device, 0, 0, 0);
  for (const int count : {1, 2, 16, 17, 32, 33, 64, 100, 129, 300})
    for (const int place : {0, count / 2, count - 1}) {
      ProductCase<T> product({3, count, 0, 40}, alone.inputs, alone.outputs, 23);
      std::ranges::fill(product.x, std::numeric_limits<float>::quiet_NaN());
      std::ranges::copy(alone.row(0), product.x.begin());
      for (int32_t& token : product.token) token = std::max(token, 1);
      product.token[3 + place] = 0;
      const int64_t matrix = alone.outputs * alone.inputs;
      std::ranges::copy(alone.weight, product.weight.begin() + matrix);
      const std::vector<float> y = product.run(device, 0, 0, 0);
      const auto own = std::span(y).subspan((3 + place) * alone.outputs, alone.outputs);
      EXPECT_TRUE(same_bits(own, bits)) << count << " choices, the one at " << place;
      EXPECT_EQ(std::ranges::count_if(y, [](float value) { return std::isnan(value); }),
                (product.choices - 1) * alone.outputs);
    }
}

TEST_F(CudaExperts, ARowsBitsDependOnNothingElse) {
  a_rows_bits_depend_on_nothing_else<float>();
  a_rows_bits_depend_on_nothing_else<Bf16>();
  a_rows_bits_depend_on_nothing_else<Fp16>();
}

template <typename T, typename Out>
struct SumCase {
  SumCase(int64_t n, int k, int64_t s, uint64_t seed) : tokens(n), top_k(k), size(s), place(n * k) {
    std::mt19937_64 random(seed);
    expert = random_choices(random, n, 2 * k, k);
    std::iota(place.begin(), place.end(), 0);
    std::shuffle(place.begin(), place.end(), random);
    weight = random_normal(random, n * k);
    gate = CudaPath<T>::template rounded<T>(random_normal(random, n, 2.0f));
    x = CudaPath<T>::template rounded<T>(random_normal(random, n * k * s));
    before = CudaPath<T>::template rounded<Out>(random_normal(random, n * s));
  }

  // By the formula in N, in the order of the experts.
  template <typename N, typename MultiplyAdd>
  std::vector<N> expected(const MultiplyAdd& multiply_add) const {
    std::vector<N> y;
    for (int64_t n = 0; n < tokens; ++n) {
      std::vector<int64_t> order(top_k);
      std::iota(order.begin(), order.end(), n * top_k);
      std::ranges::sort(order, {}, [&](int64_t i) { return expert[i]; });
      const N factor = has_gate ? 1 / (1 + std::exp(-static_cast<N>(gate[n]))) : 1;
      for (int64_t c = 0; c < size; ++c) {
        N sum = 0;
        for (int64_t i : order)
          sum = multiply_add(has_weight ? weight[i] : 1, x[(has_place ? place[i] : i) * size + c], sum);
        y.push_back(is_added ? multiply_add(factor, sum, before[n * size + c]) : factor * sum);
      }
    }
    return y;
  }

  std::vector<float> run(CudaDevice& device, int64_t x_gap, int64_t y_gap, int shift) const {
    const VectorPlaces x_places = {tokens * top_k, 1, size, size + x_gap, 0};
    const VectorPlaces y_places = {tokens, 1, size, size + y_gap, 0};
    const VectorPlaces gate_places = {tokens, 1, 1, 1 + x_gap, 0};
    const std::vector<float> start = is_added ? before : poisoned(before.size());
    const auto experts = on_device(expert, device), places = on_device(place, device);
    const auto weights = on_device(weight, device);
    const auto gates = on_device(to_elements<T>(gate_places.spread(gate)), device);
    const auto from = shifted<T>(x_places.spread(x), device);
    const auto to = shifted<Out>(y_places.spread(start), device);
    const auto from_aligned = on_device(to_elements<T>(x_places.spread(x)), device);
    const auto to_aligned = on_device(to_elements<Out>(y_places.spread(start)), device);
    add_experts(AddExperts<T, Out>{.tokens = tokens,
                                   .top_k = top_k,
                                   .size = size,
                                   .expert = has_place ? experts.data() : nullptr,
                                   .place = has_place ? places.data() : nullptr,
                                   .weight = has_weight ? weights.data() : nullptr,
                                   .gate = has_gate ? gates.data() : nullptr,
                                   .gate_stride = gate_places.stride,
                                   .x = shift > 0 ? from.data() + 1 : from_aligned.data(),
                                   .x_stride = x_places.stride,
                                   .is_added = is_added,
                                   .y = shift > 0 ? to.data() + 1 : to_aligned.data(),
                                   .y_stride = y_places.stride},
                device);
    device.synchronize();
    std::vector<float> result = to_floats<Out>((shift > 0 ? to : to_aligned).download(device));
    if (shift > 0) result.erase(result.begin());
    EXPECT_TRUE(y_places.is_clean_between(result));
    return y_places.gather(result);
  }

  int64_t tokens;
  int top_k;
  int64_t size;
  bool has_place = true, has_weight = true, has_gate = false, is_added = true;
  std::vector<int32_t> expert, place;
  std::vector<float> weight, gate, x, before;
};

template <typename T, typename Out>
void sums_match_the_oracle() {
  CudaDevice device;
  for (const int64_t size : {1, 8, 33, 1024, 1032, 2311})
    for (const int top_k : {1, 3, 8, 22})
      for (int options = 0; options < 16; ++options) {
        SumCase<T, Out> sum(5, top_k, size, 31);
        sum.has_place = (options & 1) == 0;
        if (!sum.has_place && top_k != 1) continue;
        sum.has_weight = (options & 2) == 0;
        sum.has_gate = (options & 4) != 0;
        sum.is_added = (options & 8) == 0;
        SCOPED_TRACE(testing::Message() << size << " channels, " << top_k << " experts, options " << options);
        const std::vector<float> y = sum.run(device, 0, 0, 0);
        const auto in_float64 = sum.template expected<double>([](double a, double b, double c) { return a * b + c; });
        EXPECT_LE(relative_error(y, in_float64), (CudaPath<T, Out>::kBound));
        if (!sum.has_gate) {
          const auto in_order =
              sum.template expected<float>([](float a, float b, float c) { return std::fma(a, b, c); });
          EXPECT_TRUE(same_bits(y, CudaPath<T>::template rounded<Out>(in_order)));
        }
        EXPECT_TRUE(same_bits(y, sum.run(device, 16, 8, 0)));
        EXPECT_TRUE(same_bits(y, sum.run(device, 5, 3, 1)));
      }
}

TEST_F(CudaExperts, SumsMatchTheOracle) {
  sums_match_the_oracle<float, float>();
  sums_match_the_oracle<Bf16, Bf16>();
  sums_match_the_oracle<Bf16, float>();
  sums_match_the_oracle<Fp16, Fp16>();
  sums_match_the_oracle<Fp16, float>();
}

// A block of experts without an activation, captured once and launched with other logits.
TEST_F(CudaExperts, ACapturedBlockServesAnyChoices) {
  constexpr int kExperts = 12, kTopK = 4;
  constexpr int64_t kTokens = 20, kInputs = 40, kSize = 24, kChoices = kTokens * kTopK;
  const RouterConfig router = {.scores = RouterScores::kSigmoid, .scale = 1.7};
  CudaDevice device;
  std::mt19937_64 random(41);
  const std::vector<float> up = random_normal(random, kExperts * kSize * kInputs, 0.3f);
  const std::vector<float> down = random_normal(random, kExperts * kInputs * kSize, 0.3f);
  const std::vector<float> x = random_normal(random, kTokens * kInputs);
  const auto up_there = on_device(up, device), down_there = on_device(down, device), x_there = on_device(x, device);
  DeviceBuffer<float> logits(kTokens * kExperts, device), weight(kChoices, device);
  DeviceBuffer<int32_t> expert(kChoices, device), token(kChoices, device), place(kChoices, device);
  DeviceBuffer<int32_t> begin(kExperts + 1, device);
  DeviceBuffer<float> inner(kChoices * kSize, device), outputs(kChoices * kInputs, device);
  DeviceBuffer<float> y(kTokens * kInputs, device);
  CudaGraph graph(device, [&] {
    route_experts({.tokens = kTokens,
                   .experts = kExperts,
                   .top_k = kTopK,
                   .router = router,
                   .logits = logits.data(),
                   .logits_stride = kExperts,
                   .expert = expert.data(),
                   .weight = weight.data()},
                  device);
    place_choices({.tokens = kTokens,
                   .experts = kExperts,
                   .top_k = kTopK,
                   .expert = expert.data(),
                   .begin = begin.data(),
                   .token = token.data(),
                   .place = place.data()},
                  device);
    ExpertsLinear<float> product = {.choices = kChoices,
                                    .experts = kExperts,
                                    .inputs = kInputs,
                                    .outputs = kSize,
                                    .begin = begin.data(),
                                    .token = token.data(),
                                    .weight = up_there.data(),
                                    .x = x_there.data(),
                                    .x_stride = kInputs,
                                    .y = inner.data(),
                                    .y_stride = kSize};
    experts_linear(product, device);
    product.inputs = kSize;
    product.outputs = kInputs;
    product.token = nullptr;
    product.weight = down_there.data();
    product.x = inner.data();
    product.x_stride = kSize;
    product.y = outputs.data();
    product.y_stride = kInputs;
    experts_linear(product, device);
    add_experts(AddExperts<float, float>{.tokens = kTokens,
                                         .top_k = kTopK,
                                         .size = kInputs,
                                         .expert = expert.data(),
                                         .place = place.data(),
                                         .weight = weight.data(),
                                         .x = outputs.data(),
                                         .x_stride = kInputs,
                                         .is_added = false,
                                         .y = y.data(),
                                         .y_stride = kInputs},
                device);
  });
  for (int step = 0; step < 3; ++step) {
    const std::vector<float> own_logits = random_normal(random, kTokens * kExperts, 2.0f);
    logits.upload(own_logits, device);
    y.upload(poisoned(kTokens * kInputs), device);
    graph.launch();
    device.synchronize();
    std::vector<double> expected;
    for (int64_t n = 0; n < kTokens; ++n) {
      std::vector<double> sum(kInputs);
      for (const auto& [e, w] : ref::route(std::span(own_logits).subspan(n * kExperts, kExperts), {}, router, kTopK)) {
        const auto middle = ref::linear(std::span(up).subspan(e * kSize * kInputs), std::span(x).subspan(n * kInputs),
                                        1, kInputs, kSize);
        const auto output = ref::linear(std::span(down).subspan(e * kInputs * kSize), middle, 1, kSize, kInputs);
        for (int64_t c = 0; c < kInputs; ++c) sum[c] += w * output[c];
      }
      expected.insert(expected.end(), sum.begin(), sum.end());
    }
    EXPECT_LE(relative_error(y.download(device), expected), kFloat32Bound) << step;
  }
}

TEST_F(CudaExperts, RoutingRefusesWrongArguments) {
  CudaDevice device;
  const auto logits = on_device(std::vector<float>(24, 0.0f), device);
  const auto expert = on_device(std::vector<int32_t>(8, -1), device);
  const auto weight = on_device(poisoned(8), device);
  const RouteExperts good = {.tokens = 2,
                             .experts = 12,
                             .top_k = 3,
                             .logits = logits.data(),
                             .logits_stride = 12,
                             .expert = expert.data(),
                             .weight = weight.data()};
  const auto refused = [&](auto change, auto... parts) {
    RouteExperts bad = good;
    change(bad);
    expect_refusal([&] { route_experts(bad, device); }, "experts", parts...);
  };
  refused([](RouteExperts& a) { a.tokens = -1; }, "tokens", "-1");
  refused([](RouteExperts& a) { a.experts = a.logits_stride = 1025; }, "1 to 1024", "got 1025");
  refused([](RouteExperts& a) { a.tokens = int64_t{1} << 31; }, "fewer than 2^31");
  refused([](RouteExperts& a) { a.logits_stride = 11; }, "logits_stride", "12", "11");
  refused([](RouteExperts& a) { a.weight = nullptr; }, "weight");
  refused([](RouteExperts& a) { a.router.has_correction = true; }, "correction");
  refused([](RouteExperts& a) { a.logits = odd(a.logits); }, "logits aligned to 4 bytes");
  expect_refusal([&] { route_experts({.tokens = 2, .experts = 12, .top_k = 13}, device); }, "top_k", "got 13");
  route_experts({.experts = 12, .top_k = 3}, device);

  const PlaceChoices place = {.tokens = 2,
                              .experts = 12,
                              .top_k = 3,
                              .expert = expert.data(),
                              .begin = expert.data(),
                              .token = expert.data(),
                              .place = expert.data()};
  const auto place_refused = [&](auto change, auto... parts) {
    PlaceChoices bad = place;
    change(bad);
    expect_refusal([&] { place_choices(bad, device); }, "place_choices", parts...);
  };
  place_refused([](PlaceChoices& a) { a.tokens = -1; }, "tokens >= 0", "-1");
  place_refused([](PlaceChoices& a) { a.top_k = 0; }, "top_k >= 1", "0");
  place_refused([](PlaceChoices& a) { a.experts = 1025; }, "1 to 1024", "got 1025");
  place_refused([](PlaceChoices& a) { a.tokens = int64_t{1} << 30; }, "at most 1073741824 choices", "of 3");
  place_refused([](PlaceChoices& a) { a.begin = nullptr; }, "begin");
  place_refused([](PlaceChoices& a) { a.place = nullptr; }, "place must not be null");
  place_refused([](PlaceChoices& a) { a.token = odd(a.token); }, "token aligned to 4 bytes");
  device.synchronize();
  for (float value : weight.download(device)) EXPECT_TRUE(std::isnan(value));
}

TEST_F(CudaExperts, ProductsAndSumsRefuseWrongArguments) {
  CudaDevice device;
  const auto numbers = on_device(to_elements<Bf16>(poisoned(64)), device);
  const auto indices = on_device(std::vector<int32_t>(16, 0), device);
  const auto sums = on_device(poisoned(64), device);
  const ExpertsLinear<Bf16> product = {.choices = 2,
                                       .experts = 2,
                                       .inputs = 8,
                                       .outputs = 4,
                                       .begin = indices.data(),
                                       .token = indices.data(),
                                       .weight = numbers.data(),
                                       .x = numbers.data(),
                                       .x_stride = 8,
                                       .y = numbers.data(),
                                       .y_stride = 4};
  using Product = ExpertsLinear<Bf16>;
  const auto product_refused = [&](auto change, auto... parts) {
    Product bad = product;
    change(bad);
    expect_refusal([&] { experts_linear(bad, device); }, "experts_linear", parts...);
  };
  product_refused([](Product& a) { a.choices = -1; }, "choices of 0 to", "got -1");
  product_refused([](Product& a) { a.experts = 0; }, "experts of 1 to 1024", "got 0");
  product_refused([](Product& a) { a.inputs = 0; }, "inputs of 1 to", "got 0");
  product_refused([](Product& a) { a.outputs = 0; }, "outputs of 1 to", "got 0");
  product_refused([](Product& a) { a.begin = nullptr; }, "begin");
  product_refused([](Product& a) { a.weight = nullptr; }, "weight");
  product_refused([](Product& a) { a.x_stride = 7; }, "x_stride >= 8", "got 7 and 4");
  product_refused([](Product& a) { a.y_stride = 3; }, "y_stride >= 4", "got 8 and 3");
  product_refused([](Product& a) { a.x = odd(a.x); }, "x aligned to 2 bytes");
  experts_linear(Product{.experts = 2, .inputs = 8, .outputs = 4}, device);

  using Sum = AddExperts<Bf16, float>;
  const Sum sum = {.tokens = 2,
                   .top_k = 2,
                   .size = 8,
                   .expert = indices.data(),
                   .place = indices.data(),
                   .weight = sums.data(),
                   .x = numbers.data(),
                   .x_stride = 8,
                   .y = sums.data(),
                   .y_stride = 8};
  const auto sum_refused = [&](auto change, auto... parts) {
    Sum bad = sum;
    change(bad);
    expect_refusal([&] { add_experts(bad, device); }, "add_experts", parts...);
  };
  sum_refused([](Sum& a) { a.tokens = -1; }, "tokens", "-1");
  sum_refused([](Sum& a) { a.size = -1; }, "size", "-1");
  sum_refused([](Sum& a) { a.top_k = 0; }, "top_k 1 .. 1024", "got 0");
  sum_refused([](Sum& a) { a.place = nullptr; }, "top_k 1 .. 1 without place", "got 2");
  sum_refused([](Sum& a) { a.expert = nullptr; }, "expert must not be null");
  sum_refused([](Sum& a) { a.x = nullptr; }, "x and y");
  sum_refused([](Sum& a) { a.x_stride = 7; }, "x_stride", "got 7 and 8");
  sum_refused([](Sum& a) { a.y = odd(a.y); }, "y aligned to 4 bytes");
  add_experts(Sum{.tokens = 2, .size = 0}, device);
  device.synchronize();
  for (float value : sums.download(device)) EXPECT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace replayssm::test
