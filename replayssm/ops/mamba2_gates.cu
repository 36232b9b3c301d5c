// The gates of Mamba-2 as an op of its own on the GPU.
#include "replayssm/ops/checks.h"
#include "replayssm/ops/gates.cuh"
#include "replayssm/ops/launch.cuh"

namespace replayssm {
namespace {

// Grid: one dimension over gate_threads(args).
template <typename T>
__global__ __launch_bounds__(kTileThreads) void mamba2_gates_kernel(const __grid_constant__ BasicMamba2Gates<T> args) {
  wait_for_previous();
  let_next_start();
  make_gates(args, Mamba2GateTiles(), static_cast<int64_t>(blockIdx.x) * kTileThreads + threadIdx.x);
}

}  // namespace

template <typename T>
void mamba2_gates(const BasicMamba2Gates<T>& args, CudaDevice& device) {
  check_mamba2_gates(args);
  check_alignment("mamba2_gates", sizeof(T), {{"dt", args.dt}});
  check_alignment("mamba2_gates", sizeof(float), {{"dt_bias", args.dt_bias}, {"out", args.out}});
  const int64_t threads = gate_threads(args);
  require(threads < int64_t{1} << 31, "mamba2_gates: expected fewer than 2^31 gates, got {}", threads);
  if (threads == 0) return;
  launch("mamba2_gates", mamba2_gates_kernel<T>, dim3(static_cast<unsigned>(ceiling_quotient(threads, kTileThreads))),
         kTileThreads, 0, args, device, Launch::kOverlapping);
}

template void mamba2_gates(const BasicMamba2Gates<float>&, CudaDevice&);
template void mamba2_gates(const BasicMamba2Gates<Bf16>&, CudaDevice&);
template void mamba2_gates(const BasicMamba2Gates<Fp16>&, CudaDevice&);

}  // namespace replayssm
