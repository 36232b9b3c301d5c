// Attention of prompts on tensor cores: eight warps, each with 16 queries and all keys.
#include "replayssm/ops/attention_tiles.cuh"

namespace replayssm {

template <typename T>
void launch_prompt_tiles(const AttentionArgs<T>& args, CudaDevice& device) {
  constexpr int kWarps = kPromptTileQueries / 16;
  const int size = args.attention.cache.head_size;
  if (size <= 64)
    launch_tiles<TileShape<64, kWarps, 1, 0, 3, 1>>(args, device);
  else if (size <= 128)
    launch_tiles<TileShape<128, kWarps, 1, 0, 3, 1>>(args, device);
  else
    launch_tiles<TileShape<256, kWarps, 1, 0, 3, 1>>(args, device);
}

template void launch_prompt_tiles(const AttentionArgs<Bf16>&, CudaDevice&);
template void launch_prompt_tiles(const AttentionArgs<Fp16>&, CudaDevice&);

}  // namespace replayssm
