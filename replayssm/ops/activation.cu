// Elementwise products with an activation on the GPU. A block owns a tile of elements of a token, a thread kPacks packs
// of eight; it has read its own operands before it writes, so a result may lie where an operand does.
#include "replayssm/ops/activation.h"

#include "replayssm/ops/checks.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/pack.cuh"

namespace replayssm {
namespace {

// With one, 256 x 9216 elements are more threads than an H200 has room for at once.
constexpr int kPacks = 2;

template <typename Op>
struct ActivationArgs {
  Op op;
  PackPlace place;
  unsigned tiles;  // of a token

  __device__ int64_t token() const { return blockIdx.x / tiles; }
  // The number of pack `i` of this thread among its token's.
  __device__ int64_t pack(int i) const {
    return (static_cast<int64_t>(blockIdx.x % tiles) * kPacks + i) * kTileThreads + threadIdx.x;
  }
};

// The elements of the pack that begins at `first`: none past `size`.
__device__ int elements_from(int64_t first, int64_t size) {
  return static_cast<int>(min(size - first, int64_t{kPackSize}));
}

// Calls use(i, first, count) for this thread's packs of a token's `size` elements.
template <typename Op, typename Use>
__device__ void for_packs(const ActivationArgs<Op>& launched, int64_t size, const Use& use) {
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t first = launched.pack(i) * kPackSize;
    const int count = elements_from(first, size);
    if (count > 0) use(i, first, count);
  }
}

// Grid: tokens x tiles.
template <typename T>
__global__ __launch_bounds__(kTileThreads) void silu_product_kernel(
    const __grid_constant__ ActivationArgs<BasicSiluProduct<T>> launched) {
  const BasicSiluProduct<T>& args = launched.op;
  const int64_t token = launched.token();
  wait_for_previous();
  let_next_start();
  Pack<T> gates[kPacks], ups[kPacks];
  for_packs(launched, args.size, [&](int i, int64_t first, int count) {
    gates[i] = load_pack(args.gate + token * args.gate_stride + first, launched.place, count);
    ups[i] = load_pack(args.up + token * args.up_stride + first, launched.place, count);
  });
  for_packs(launched, args.size, [&](int i, int64_t first, int count) {
    float values[kPackSize];
#pragma unroll
    for (int n = 0; n < kPackSize; ++n) values[n] = silu_product(element(gates[i], n), element(ups[i], n));
    store_pack(pack_of<T>(values), args.y + token * args.y_stride + first, launched.place, count);
  });
}

// Grid: tokens x tiles.
template <typename T>
__global__ __launch_bounds__(kTileThreads) void relu2_kernel(
    const __grid_constant__ ActivationArgs<BasicRelu2<T>> launched) {
  const BasicRelu2<T>& args = launched.op;
  const int64_t token = launched.token();
  wait_for_previous();
  let_next_start();
  Pack<T> x[kPacks];
  for_packs(launched, args.size, [&](int i, int64_t first, int count) {
    x[i] = load_pack(args.x + token * args.x_stride + first, launched.place, count);
  });
  for_packs(launched, args.size, [&](int i, int64_t first, int count) {
    float values[kPackSize];
#pragma unroll
    for (int n = 0; n < kPackSize; ++n) values[n] = relu2(element(x[i], n));
    store_pack(pack_of<T>(values), args.y + token * args.y_stride + first, launched.place, count);
  });
}

// Grid: tokens x tiles, of the packs of a token's heads in their order.
template <typename T>
__global__ __launch_bounds__(kTileThreads) void sigmoid_gate_kernel(
    const __grid_constant__ ActivationArgs<BasicSigmoidGate<T>> launched) {
  const BasicSigmoidGate<T>& args = launched.op;
  const int64_t packs = (args.size + kPackSize - 1) / kPackSize, token = launched.token();
  wait_for_previous();
  let_next_start();
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t head = launched.pack(i) / packs, first = launched.pack(i) % packs * kPackSize;
    if (head >= args.heads) continue;
    const int count = elements_from(first, args.size);
    T* const to = args.x + token * args.x_stride + head * args.size + first;
    const Pack<T> x = load_pack(to, launched.place, count);
    const Pack<T> gate =
        load_pack(args.gate + token * args.gate_stride + head * args.gate_head_stride + first, launched.place, count);
    float values[kPackSize];
#pragma unroll
    for (int n = 0; n < kPackSize; ++n) values[n] = element(x, n) * sigmoid(element(gate, n));
    store_pack(pack_of<T>(values), to, launched.place, count);
  }
}

template <typename T>
PackPlace place_of(int64_t size, std::initializer_list<const T*> pointers, std::initializer_list<int64_t> strides) {
  uintptr_t places = 0;
  for (const T* pointer : pointers) places |= reinterpret_cast<uintptr_t>(pointer);
  for (const int64_t stride : strides) places |= static_cast<uintptr_t>(stride) * sizeof(T);
  return size % kPackSize == 0 && places % 16 == 0 ? PackPlace::kAligned : PackPlace::kAnywhere;
}

// Queues a thread for each kPacks of a token's packs.
template <typename Op>
void launch_packs(const char* op, void (*kernel)(ActivationArgs<Op>), const Op& args, int64_t packs, PackPlace place,
                  CudaDevice& device) {
  const int64_t tiles = ceiling_quotient(packs, int64_t{kPacks} * kTileThreads);
  const unsigned blocks = check_blocks(op, args.tokens * tiles);
  const ActivationArgs<Op> launched = {args, place, static_cast<unsigned>(tiles)};
  launch(op, kernel, dim3(blocks), kTileThreads, 0, launched, device, Launch::kOverlapping);
}

}  // namespace

template <typename T>
void silu_product(const BasicSiluProduct<T>& args, CudaDevice& device) {
  check_silu_product(args);
  if (args.tokens == 0 || args.size == 0) return;
  check_alignment("silu_product", sizeof(T), {{"gate", args.gate}, {"up", args.up}, {"y", args.y}});
  const PackPlace place =
      place_of<T>(args.size, {args.gate, args.up, args.y}, {args.gate_stride, args.up_stride, args.y_stride});
  launch_packs("silu_product", silu_product_kernel<T>, args, ceiling_quotient(args.size, kPackSize), place, device);
}

template <typename T>
void relu2(const BasicRelu2<T>& args, CudaDevice& device) {
  check_relu2(args);
  if (args.tokens == 0 || args.size == 0) return;
  check_alignment("relu2", sizeof(T), {{"x", args.x}, {"y", args.y}});
  const PackPlace place = place_of<T>(args.size, {args.x, args.y}, {args.x_stride, args.y_stride});
  launch_packs("relu2", relu2_kernel<T>, args, ceiling_quotient(args.size, kPackSize), place, device);
}

template <typename T>
void sigmoid_gate(const BasicSigmoidGate<T>& args, CudaDevice& device) {
  check_sigmoid_gate(args);
  if (args.tokens == 0 || args.heads == 0 || args.size == 0) return;
  check_alignment("sigmoid_gate", sizeof(T), {{"gate", args.gate}, {"x", args.x}});
  const PackPlace place =
      place_of<T>(args.size, {args.gate, args.x}, {args.gate_stride, args.gate_head_stride, args.x_stride});
  launch_packs("sigmoid_gate", sigmoid_gate_kernel<T>, args, args.heads * ceiling_quotient(args.size, kPackSize), place,
               device);
}

#define REPLAYSSM_ACTIVATIONS(T)                                       \
  template void silu_product(const BasicSiluProduct<T>&, CudaDevice&); \
  template void relu2(const BasicRelu2<T>&, CudaDevice&);              \
  template void sigmoid_gate(const BasicSigmoidGate<T>&, CudaDevice&);
REPLAYSSM_ACTIVATIONS(float)
REPLAYSSM_ACTIVATIONS(Bf16)
REPLAYSSM_ACTIVATIONS(Fp16)
#undef REPLAYSSM_ACTIVATIONS

}  // namespace replayssm
