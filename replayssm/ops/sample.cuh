// Internal to sampling on a GPU: how its kernels read rows of logits. A row is cut into sections of 512 tokens, each
// read by one warp, whatever the batch: so a row's sums have one order.
#pragma once

#include <cstdint>

#include "replayssm/ops/sample.h"
#include "replayssm/ops/scan.cuh"

namespace replayssm {

inline constexpr int kSectionTokens = 512;
inline constexpr int kSectionMarks = kSectionTokens / 32;  // words
inline constexpr int kLaneTokens = kSectionTokens / 32;
// What a section comes to.
struct alignas(16) SectionSum {
  float largest;  // of the logits after step 1
  int32_t token;  // the lowest that has it; kNoToken if one of the section's logits is NaN or infinite
  double sum;     // of e^(l - the largest) after the temperature, if anybody needs it; infinite if an l overflows there
};

struct SampleArgs {
  Sample sample;
  int sections;      // of a row
  SectionSum* sums;  // [rows, sections]
  uint32_t* marks;   // [rows, sections * kSectionMarks] the bit of each token of the history, of rows with a penalty
};

struct LogitRow {
  const float* logits;
  int vocabulary;
  bool is_aligned;                  // to 16 bytes
  const uint32_t* marks = nullptr;  // null: no penalty
  float penalty = 1, temperature = 1;
};

__device__ inline bool has_penalty(const Sample& sample, const SampleSettings& settings) {
  return sample.history != nullptr && sample.history_begin != nullptr && settings.repetition_penalty != 1.0f;
}
__device__ inline bool has_top_k(const SampleSettings& settings, int64_t vocabulary) {
  return settings.top_k > 0 && settings.top_k < vocabulary;
}
__device__ inline bool is_filtered(const SampleSettings& settings) {
  return settings.top_k > 0 || settings.top_p < 1.0f || settings.min_p > 0.0f;
}
// Whether a draw needs the sum over the whole vocabulary.
__device__ inline bool needs_total(const SampleSettings& settings, int64_t vocabulary) {
  return !is_filtered(settings) || (settings.top_p < 1.0f && !has_top_k(settings, vocabulary));
}

// A row's logits as they lie, and with what its settings make of them: apart, so that the loads of both overlap.
__device__ inline LogitRow logit_row(const SampleArgs& args, int64_t row) {
  LogitRow result;
  result.logits = args.sample.logits + row * args.sample.logits_stride;
  result.vocabulary = static_cast<int>(args.sample.vocabulary);
  result.is_aligned = reinterpret_cast<uintptr_t>(result.logits) % 16 == 0;
  return result;
}
__device__ inline void set_settings(const SampleArgs& args, int64_t row, const SampleSettings& settings,
                                    LogitRow& logits) {
  if (has_penalty(args.sample, settings)) logits.marks = args.marks + row * args.sections * kSectionMarks;
  logits.penalty = settings.repetition_penalty;
  logits.temperature = settings.temperature;
}

// All but the seed. Volatile loads, which stay where they are: the compiler moves others behind the use of logits that
// were loaded later.
__device__ inline SampleSettings load_settings(const SampleSettings* from) {
  SampleSettings settings;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
               : "=f"(settings.temperature), "=r"(settings.top_k)
               : "l"(&from->temperature));
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(settings.top_p), "=f"(settings.min_p) : "l"(&from->top_p));
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(settings.repetition_penalty) : "l"(&from->repetition_penalty));
  return settings;
}

// A lane owns four runs of four tokens of a section: its token i, of 0 .. kLaneTokens - 1.
__device__ inline int section_token(int section, int i) {
  return section * kSectionTokens + i / 4 * 128 + static_cast<int>(threadIdx.x % 32) * 4 + i % 4;
}

// The lane's logits, minus infinity behind the vocabulary.
__device__ inline void read_section(const LogitRow& row, int section, float (&logits)[kLaneTokens]) {
  if (row.is_aligned && (section + 1) * kSectionTokens <= row.vocabulary) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(row.logits + section_token(section, i));
      logits[i] = four.x, logits[i + 1] = four.y, logits[i + 2] = four.z, logits[i + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    const int token = section_token(section, i);
    logits[i] = token < row.vocabulary ? row.logits[token] : -INFINITY;
  }
}

// How many of the lane's places lie behind the vocabulary.
__device__ inline int places_behind(const LogitRow& row, int section) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < kLaneTokens; i += 4) count += min(max(section_token(section, i) + 4 - row.vocabulary, 0), 4);
  return count;
}

// How many of the lane's logits are NaN or infinite.
__device__ inline int count_bad(const float (&logits)[kLaneTokens]) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) count += isfinite(logits[i]) ? 0 : 1;
  return count;
}

__device__ inline float penalised(float logit, float penalty) {
  return logit > 0.0f ? logit / penalty : logit * penalty;
}

// Step 1. No bit is set behind the vocabulary.
__device__ inline void penalise_section(const LogitRow& row, int section, float (&logits)[kLaneTokens]) {
  if (row.marks == nullptr) return;
  uint32_t fours[kLaneTokens / 4], any = 0;
#pragma unroll
  for (int i = 0; i < kLaneTokens; i += 4) {
    const int token = section_token(section, i);
    fours[i / 4] = row.marks[token / 32] >> (token % 32) & 15u;
    any |= fours[i / 4];
  }
  if (any == 0) return;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i)
    if ((fours[i / 4] >> (i % 4) & 1u) != 0) logits[i] = penalised(logits[i], row.penalty);
}

// The lane's logits after the temperature, which is not 0; minus infinity behind the vocabulary.
__device__ inline void read_scaled_section(const LogitRow& row, int section, float (&logits)[kLaneTokens]) {
  read_section(row, section, logits);
  penalise_section(row, section, logits);
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) logits[i] = logits[i] / row.temperature;
}
__device__ inline float read_scaled(const LogitRow& row, int token) {
  if (token >= row.vocabulary) return -INFINITY;
  float logit = row.logits[token];
  if (row.marks != nullptr && (row.marks[token / 32] >> (token % 32) & 1u) != 0) logit = penalised(logit, row.penalty);
  return logit / row.temperature;
}

// Rises with the logit; equals have one. No number's is 0.
__device__ inline uint32_t order_of(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // of the two zeros the positive one
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float logit_of(uint32_t order) {
  return __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7FFFFFFFu : ~order);
}

// How far a logit lies below the row's largest, and the weight in the softmax that follows from it.
__device__ inline double depth_of(float logit, float largest) {
  return static_cast<double>(largest) - static_cast<double>(logit);
}
__device__ inline double weight_of(float logit, float largest) {
  return exp(static_cast<double>(logit) - static_cast<double>(largest));
}

}  // namespace replayssm
