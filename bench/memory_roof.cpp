#include "bench/memory_roof.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/memory_roof.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <atomic>
#include <chrono>

HWY_BEFORE_NAMESPACE();
namespace replayssm::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

float read_kernel(const float* memory, size_t count) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  auto a = hn::Zero(d), b = a, c = a, e = a;
  for (size_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    a = hn::Add(a, hn::LoadU(d, memory + i));
    b = hn::Add(b, hn::LoadU(d, memory + i + lanes));
    c = hn::Add(c, hn::LoadU(d, memory + i + 2 * lanes));
    e = hn::Add(e, hn::LoadU(d, memory + i + 3 * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))));
}

// In integers: halves of words that lie there as planes would be denormal or signalling as floats.
void update_kernel(float* memory, size_t count, uint32_t addend) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> words;
  const size_t lanes = hn::Lanes(d);
  const auto change = hn::Set(words, addend);
  for (size_t i = 0; i + lanes <= count; i += lanes)
    hn::StoreU(hn::BitCast(d, hn::Add(change, hn::BitCast(words, hn::LoadU(d, memory + i)))), d, memory + i);
}

// Returns the number of operations done.
double multiply_add_kernel(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  constexpr int kChains = 10;
  hn::Vec<hn::ScalableTag<float>> sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = hn::Set(d, static_cast<float>(i));
  const auto factor = hn::Set(d, 0.999f), addend = hn::Set(d, 0.001f);
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) sums[i] = hn::MulAdd(sums[i], factor, addend);
  for (int i = 1; i < kChains; ++i) sums[0] = hn::Add(sums[0], sums[i]);
  *sink = hn::GetLane(hn::SumOfLanes(d, sums[0]));
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm::bench {
HWY_EXPORT(read_kernel);
HWY_EXPORT(update_kernel);
HWY_EXPORT(multiply_add_kernel);

namespace {

std::atomic<float> sink;  // keeps the compiler from dropping the reads

template <typename Body>
double seconds_of(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double read_roof(const float* memory, size_t count, Device& device) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(read_kernel);
  const int64_t share = static_cast<int64_t>(count) / device.threads().size();
  const double seconds = seconds_of([&] {
    device.threads().parallel_for(device.threads().size(), 1, [&](int64_t begin, int64_t, int) {
      sink.store(kernel(memory + begin * share, share), std::memory_order_relaxed);
    });
  });
  return static_cast<double>(count) * sizeof(float) / seconds;
}

double update_roof(float* memory, size_t count, Device& device) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(update_kernel);
  const int64_t share = static_cast<int64_t>(count) / device.threads().size();
  const double seconds = seconds_of([&] {
    device.threads().parallel_for(device.threads().size(), 1,
                                  [&](int64_t begin, int64_t, int) { kernel(memory + begin * share, share, 0); });
  });
  return 2.0 * static_cast<double>(count) * sizeof(float) / seconds;
}

double multiply_add_roof(Device& device) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(multiply_add_kernel);
  std::atomic<int64_t> operations{0};
  const double seconds = seconds_of([&] {
    device.threads().parallel_for(device.threads().size(), 1, [&](int64_t, int64_t, int) {
      float result;
      operations += static_cast<int64_t>(kernel(20'000'000, &result));
      sink.store(result, std::memory_order_relaxed);
    });
  });
  return static_cast<double>(operations) / seconds;
}

}  // namespace replayssm::bench
#endif  // HWY_ONCE
