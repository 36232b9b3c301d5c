// Rows of an embedding table on the GPU.
#include "replayssm/ops/embed.h"

#include "replayssm/ops/checks.h"
#include "replayssm/ops/launch.cuh"
#include "replayssm/ops/pack.cuh"

namespace replayssm {
namespace {

template <typename T>
struct EmbedArgs {
  CudaEmbed<T> embed;
  PackPlace place;
  unsigned tiles;  // of a row
};

// Grid: tokens x tiles of kTileChannels elements. A thread owns a pack.
template <typename T>
__global__ __launch_bounds__(kTileThreads) void embed_kernel(const __grid_constant__ EmbedArgs<T> launched) {
  const CudaEmbed<T>& args = launched.embed;
  const int64_t n = blockIdx.x / launched.tiles;
  const int64_t first = static_cast<int64_t>(blockIdx.x % launched.tiles) * kTileChannels + threadIdx.x * kPackSize;
  if (first >= args.size) return;
  const int count = static_cast<int>(min(args.size - first, int64_t{kPackSize}));
  wait_for_previous();
  let_next_start();
  const int64_t token = args.token[n];
  Pack<float> y = pack_filled<float>(NAN);
  if (token >= 0 && token < args.vocabulary) {
    const Pack<T> row = load_pack(args.table + token * args.size + first, launched.place, count);
    float values[kPackSize];
#pragma unroll
    for (int i = 0; i < kPackSize; ++i) values[i] = element(row, i);
    y = pack_of<float>(values);
  }
  store_pack(y, args.y + n * args.size + first, launched.place, count);
}

}  // namespace

template <typename T>
void embed(const CudaEmbed<T>& args, CudaDevice& device) {
  check_embed_sizes(args);
  if (args.tokens == 0 || args.size == 0) return;
  require(!has_null({args.token, args.table, args.y}), "embed: token, table and y must not be null");
  check_alignment("embed", sizeof(T), {{"table", args.table}});
  check_alignment("embed", 4, {{"token", args.token}, {"y", args.y}});
  const uintptr_t places = reinterpret_cast<uintptr_t>(args.table) | reinterpret_cast<uintptr_t>(args.y);
  const PackPlace place = args.size % kPackSize == 0 && places % 16 == 0 ? PackPlace::kAligned : PackPlace::kAnywhere;
  const int64_t tiles = ceiling_quotient(args.size, kTileChannels);
  const unsigned blocks = check_blocks("embed", args.tokens * tiles);
  const EmbedArgs<T> launched = {args, place, static_cast<unsigned>(tiles)};
  launch("embed", embed_kernel<T>, dim3(blocks), kTileThreads, 0, launched, device, Launch::kOverlapping);
}

template void embed(const CudaEmbed<float>&, CudaDevice&);
template void embed(const CudaEmbed<Bf16>&, CudaDevice&);
template void embed(const CudaEmbed<Fp16>&, CudaDevice&);

}  // namespace replayssm
