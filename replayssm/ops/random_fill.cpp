#include "replayssm/ops/random_fill.h"

#include <type_traits>

#include "replayssm/ops/uniform.h"

namespace replayssm {

template <typename T>
void random_fill(const RandomFill<T>& args) {
  for (size_t i = 0; i < args.count; ++i) {
    const float value = args.low + (args.high - args.low) * fill_number(args.seed, i);
    if constexpr (std::is_same_v<T, float>)
      args.y[i] = value;
    else
      args.y[i] = to_bf16(value);
  }
}

template void random_fill(const RandomFill<float>&);
template void random_fill(const RandomFill<Bf16>&);

}  // namespace replayssm
