// Seeded random numbers on a GPU.
#include "replayssm/ops/random_fill.h"

#include <algorithm>

#include "replayssm/core/error.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/rows.cuh"
#include "replayssm/ops/uniform.h"

namespace replayssm {
namespace {

// Grid: any; a thread fills every grid's-width-th number.
template <typename T>
__global__ void random_fill_kernel(const __grid_constant__ RandomFill<T> args) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < args.count; i += step)
    store_number(args.y + i, args.low + (args.high - args.low) * fill_number(args.seed, i));
}

}  // namespace

template <typename T>
void random_fill(const RandomFill<T>& args, CudaDevice& device) {
  if (args.count == 0) return;
  require(args.y != nullptr, "random_fill: y must not be null");
  const auto blocks = static_cast<unsigned>(std::min<size_t>((args.count + 255) / 256, 8192));
  launch("random_fill", random_fill_kernel<T>, dim3(blocks), 256, 0, args, device);
}

template void random_fill(const RandomFill<float>&, CudaDevice&);
template void random_fill(const RandomFill<Bf16>&, CudaDevice&);

}  // namespace replayssm
