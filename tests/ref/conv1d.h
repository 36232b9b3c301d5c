// Float64 oracle of the causal depthwise convolution, over a whole sequence at once.
#pragma once

#include <cmath>
#include <vector>

namespace replayssm::ref {

// x [T, channels], weight [width, channels], bias [channels] or empty -> [T, channels]
inline std::vector<double> conv1d(const std::vector<float>& x, int channels, int width,
                                  const std::vector<float>& weight, const std::vector<float>& bias, bool use_silu) {
  const int T = int(x.size()) / channels;
  std::vector<double> out;
  for (int t = 0; t < T; ++t)
    for (int c = 0; c < channels; ++c) {
      double sum = bias.empty() ? 0.0 : bias[c];
      for (int i = 0; i < width; ++i) {
        const int source = t - (width - 1) + i;
        if (source >= 0) sum += double(weight[i * channels + c]) * x[source * channels + c];
      }
      out.push_back(use_silu ? sum / (1 + std::exp(-sum)) : sum);
    }
  return out;
}

}  // namespace replayssm::ref
