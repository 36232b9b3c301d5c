// Float64 oracle of Mamba-2, written from docs/math.md: one token at a time, no replay, no chunks.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace replayssm::ref {

// The state [H, P, N] of one sequence.
struct Mamba2Sequence {
  int heads, groups, head_size, state_size;
  std::vector<double> state;

  Mamba2Sequence(int h, int g, int p, int n)
      : heads(h), groups(g), head_size(p), state_size(n), state(size_t(h) * p * n, 0.0) {}
};

// Advances `sequence` by one token and returns its output [H, P]. x, z are [H, P]; b, c [G, N]; dt [H] after softplus
// and clamp; a_log, d [H]. d and z may be null.
inline std::vector<double> mamba2_step(Mamba2Sequence& sequence, const float* x, const float* b, const float* c,
                                       const float* dt, const float* z, const float* a_log, const float* d) {
  const int P = sequence.head_size, N = sequence.state_size;
  std::vector<double> out(size_t(sequence.heads) * P);
  for (int h = 0; h < sequence.heads; ++h) {
    const int group = h / (sequence.heads / sequence.groups);
    const double decay = std::exp(-std::exp(double(a_log[h])) * dt[h]);
    for (int p = 0; p < P; ++p) {
      double* s = &sequence.state[(size_t(h) * P + p) * N];
      double y = d == nullptr ? 0.0 : double(d[h]) * x[h * P + p];
      for (int n = 0; n < N; ++n) {
        s[n] = decay * s[n] + double(dt[h]) * x[h * P + p] * b[group * N + n];
        y += s[n] * c[group * N + n];
      }
      if (z != nullptr) y *= z[h * P + p] / (1 + std::exp(-double(z[h * P + p])));
      out[size_t(h) * P + p] = y;
    }
  }
  return out;
}

// dt' of one head.
inline double mamba2_gate(double dt, double dt_bias, double time_step_min, double time_step_max) {
  const double u = dt + dt_bias;
  return std::clamp(u > 20 ? u : std::log1p(std::exp(u)), time_step_min, time_step_max);
}

}  // namespace replayssm::ref
