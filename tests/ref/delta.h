// Float64 oracle of the delta rule and its gates, written from docs/math.md: one token at a time, no replay, no chunks.
#pragma once

#include <cmath>
#include <vector>

namespace replayssm::ref {

// One log-decay from its pre-activation: the softplus form, or with a lower bound < 0 the bounded form.
inline double delta_gate(double a, double dt_bias, double a_log, double lower_bound) {
  const double x = a + dt_bias, rate = std::exp(a_log);
  return lower_bound < 0 ? lower_bound / (1 + std::exp(-rate * x)) : -rate * std::log1p(std::exp(x));
}

// The state [H, V, K] of one sequence. gate_size is 1 or K.
struct DeltaSequence {
  int heads, key_heads, key_size, value_size, gate_size;
  std::vector<double> state;

  DeltaSequence(int h, int g, int k, int v, int gate)
      : heads(h), key_heads(g), key_size(k), value_size(v), gate_size(gate), state(size_t(h) * v * k, 0.0) {}
};

// Advances `sequence` by one token and returns its output [H, V]. q, k are [G, K]; v [H, V]; g [H, gate_size]; beta
// [H].
inline std::vector<double> delta_step(DeltaSequence& sequence, const float* q, const float* k, const float* v,
                                      const float* g, const float* beta) {
  const int K = sequence.key_size, V = sequence.value_size;
  std::vector<double> out(size_t(sequence.heads) * V);
  for (int h = 0; h < sequence.heads; ++h) {
    const int key_head = h / (sequence.heads / sequence.key_heads);
    double q_squares = 0, k_squares = 0;
    for (int c = 0; c < K; ++c) {
      q_squares += double(q[key_head * K + c]) * q[key_head * K + c];
      k_squares += double(k[key_head * K + c]) * k[key_head * K + c];
    }
    for (int row = 0; row < V; ++row) {
      double* s = &sequence.state[(size_t(h) * V + row) * K];
      double product = 0, output = 0;
      for (int c = 0; c < K; ++c) {
        s[c] *= std::exp(double(g[sequence.gate_size == 1 ? h : h * K + c]));
        product += s[c] * k[key_head * K + c] / std::sqrt(k_squares + 1e-6);
      }
      const double d = beta[h] * (v[h * V + row] - product);
      for (int c = 0; c < K; ++c) {
        s[c] += d * k[key_head * K + c] / std::sqrt(k_squares + 1e-6);
        output += s[c] * q[key_head * K + c] / std::sqrt(q_squares + 1e-6) / std::sqrt(double(K));
      }
      out[size_t(h) * V + row] = output;
    }
  }
  return out;
}

}  // namespace replayssm::ref
