// Rows of an embedding table. Memory-bound and a thousandth of a step: plain loops.
#include "replayssm/ops/embed.h"

#include <algorithm>

#include "replayssm/ops/checks.h"

namespace replayssm {

void embed(const Embed& args, Device& device) {
  check_embed_sizes(args);
  if (args.tokens == 0 || args.size == 0) return;
  require((args.table != nullptr) != (args.table_f32 != nullptr), "embed: expected exactly one of table and table_f32");
  require(args.token != nullptr && args.y != nullptr, "embed: token and y must not be null");
  for (int64_t n = 0; n < args.tokens; ++n)
    require(args.token[n] >= 0 && args.token[n] < args.vocabulary, "embed: expected tokens of 0 .. {}, got {}",
            args.vocabulary - 1, args.token[n]);
  device.threads().parallel_for(args.tokens, std::max<int64_t>(1, 16384 / args.size),
                                [&](int64_t begin, int64_t end, int) {
                                  for (int64_t n = begin; n < end; ++n) {
                                    float* y = args.y + n * args.size;
                                    const int64_t from = args.token[n] * args.size;
                                    if (args.table != nullptr)
                                      for (int64_t i = 0; i < args.size; ++i) y[i] = to_float(args.table[from + i]);
                                    else
                                      std::copy_n(args.table_f32 + from, args.size, y);
                                  }
                                });
}

}  // namespace replayssm
