// The gates of the delta rule as an op of its own on the GPU.
#include "replayssm/ops/checks.h"
#include "replayssm/ops/gates.cuh"
#include "replayssm/ops/launch.cuh"

namespace replayssm {
namespace {

template <typename T>
struct GatesArgs {
  BasicDeltaGates<T> gates;
  DeltaGateTiles tiles;
};

// Grid: one dimension over gate_threads(args.gates).
template <typename T>
__global__ __launch_bounds__(kTileThreads) void delta_gates_kernel(const __grid_constant__ GatesArgs<T> args) {
  wait_for_previous();
  let_next_start();
  make_gates(args.gates, args.tiles, static_cast<int64_t>(blockIdx.x) * kTileThreads + threadIdx.x);
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
  const GatesArgs<T> launched = {args, gate_tiles(args)};
  launch("delta_gates", delta_gates_kernel<T>, dim3(static_cast<unsigned>(ceiling_quotient(threads, kTileThreads))),
         kTileThreads, 0, launched, device, Launch::kOverlapping);
}

template void delta_gates(const BasicDeltaGates<float>&, CudaDevice&);
template void delta_gates(const BasicDeltaGates<Bf16>&, CudaDevice&);
template void delta_gates(const BasicDeltaGates<Fp16>&, CudaDevice&);

}  // namespace replayssm
