#include "bench/roof.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bench/machine.h"
#include "bench/memory_roof.h"
#include "bench/op_memory.h"
#include "replayssm/core/buffer.h"
#include "replayssm/core/error.h"
#include "replayssm/core/simd.h"

#ifdef REPLAYSSM_HAS_CUDA
#include "bench/cuda_roof.h"
#endif

namespace replayssm::bench {
namespace {

constexpr int kRounds = 9;

template <typename Measure>
double median_of_rounds(const Measure& measure) {
  std::vector<double> values;
  for (int round = 0; round < kRounds; ++round) values.push_back(measure());
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void run_cpu_roof(int threads) {
  Device device(threads, /*pin=*/true);
  const int64_t count = int64_t{rotating_sets(1 << 20)} << 20;
  Buffer<float> memory(count);
  fill_random(memory, -1, 1, 1);
  fmt::print("{}, {} threads, {}; {:.2f} GB of memory, medians of {}\n", processor_name(), device.threads().size(),
             simd_target(), 4e-9 * static_cast<double>(count), kRounds);
  fmt::print("read             {:8.1f} GB/s\n",
             1e-9 * median_of_rounds([&] { return read_roof(memory.data(), memory.size(), device); }));
  fmt::print("update in place  {:8.1f} GB/s, read and written\n",
             1e-9 * median_of_rounds([&] { return update_roof(memory.data(), memory.size(), device); }));
  fmt::print("multiply and add {:8.1f} GFLOP/s, FP32\n",
             1e-9 * median_of_rounds([&] { return multiply_add_roof(device); }));
}

#ifdef REPLAYSSM_HAS_CUDA
void run_cuda_roof() {
  CudaDevice device;
  const CudaRoofs roofs = measure_roofs(device);
  fmt::print("{}, {}; {:.2f} GB of memory\n", device.properties().name, cuda_device_label(device),
             1e-9 * static_cast<double>(roofs.bytes));
  fmt::print("read             {:8.1f} GB/s\n", 1e-9 * roofs.read);
  fmt::print("update in place  {:8.1f} GB/s, read and written\n", 1e-9 * roofs.update);
  fmt::print("copy             {:8.1f} GB/s, read and written\n", 1e-9 * roofs.copy);
}
#else
void run_cuda_roof() {
  fail("--device cuda: this build has no CUDA");
}
#endif

}  // namespace

void run_roof(const RoofOptions& options) {
  check_device(options.device, options.threads);
  if (options.device == "cuda")
    run_cuda_roof();
  else
    run_cpu_roof(options.threads);
}

}  // namespace replayssm::bench
