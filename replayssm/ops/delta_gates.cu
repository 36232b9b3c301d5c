// The gates of the delta rule as an op of its own on the GPU.
#include "replayssm/core/cuda_launch.cuh"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/gates.cuh"

namespace replayssm {
namespace {

// Grid: one dimension over gate_threads(args).
template <typename T>
__global__ __launch_bounds__(kTileThreads) void delta_gates_kernel(const __grid_constant__ BasicDeltaGates<T> args,
                                                                   DeltaGateTiles tiles) {
  wait_for_earlier_work();
  let_later_work_start();
  make_gates(args, tiles, static_cast<int64_t>(blockIdx.x) * kTileThreads + threadIdx.x);
}

}  // namespace

template <typename T>
void delta_gates(const BasicDeltaGates<T>& args, CudaDevice& device) {
  check_delta_gates(args);
  check_alignment("delta_gates", sizeof(T), {{"a", args.a}, {"b", args.b}});
  check_alignment("delta_gates", sizeof(float),
                  {{"a_log", args.a_log}, {"dt_bias", args.dt_bias}, {"g", args.g}, {"beta", args.beta}});
  const int64_t threads = gate_threads(args);
  require(threads < int64_t{1} << 31, "delta_gates: expected fewer than 2^31 packs of gates, got {}", threads);
  if (threads == 0) return;
  launch_overlapped("delta_gates", delta_gates_kernel<T>, ceiling_quotient(threads, kTileThreads), kTileThreads, device,
                    args, gate_tiles(args));
}

template void delta_gates(const BasicDeltaGates<float>&, CudaDevice&);
template void delta_gates(const BasicDeltaGates<Bf16>&, CudaDevice&);
template void delta_gates(const BasicDeltaGates<Fp16>&, CudaDevice&);

}  // namespace replayssm
