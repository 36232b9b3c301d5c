// Attention of a decoding step on tensor cores: two warps share the keys of a tile, and where registers allow two more
// load for them.
#include "replayssm/ops/attention_tiles.cuh"

namespace replayssm {
namespace {

template <typename Narrow, typename Middle, typename Wide, typename T>
void launch_sized(const AttentionArgs<T>& args, CudaDevice& device) {
  if (args.tile_queries == Narrow::kQueries)
    launch_tiles<Narrow>(args, device);
  else if (args.tile_queries == Middle::kQueries)
    launch_tiles<Middle>(args, device);
  else
    launch_tiles<Wide>(args, device);
}

}  // namespace

template <typename T>
void launch_decoding_tiles(const AttentionArgs<T>& args, CudaDevice& device) {
  const int size = args.attention.cache.head_size;
  if (size <= 64)
    launch_sized<TileShape<64, 1, 2, 2, 4, 3>, TileShape<64, 2, 2, 2, 4, 2>, TileShape<64, 4, 2, 0, 4, 1>>(args,
                                                                                                           device);
  else if (size <= 128)
    launch_sized<TileShape<128, 1, 2, 2, 3, 2>, TileShape<128, 2, 2, 0, 3, 2>, TileShape<128, 4, 2, 0, 3, 1>>(args,
                                                                                                              device);
  else
    launch_sized<TileShape<256, 1, 2, 2, 3, 2>, TileShape<256, 2, 2, 0, 3, 2>, TileShape<256, 4, 2, 0, 3, 1>>(args,
                                                                                                              device);
}

template void launch_decoding_tiles(const AttentionArgs<Bf16>&, CudaDevice&);
template void launch_decoding_tiles(const AttentionArgs<Fp16>&, CudaDevice&);

}  // namespace replayssm
