// Choosing the next token from a row of logits.
//
// In this order (that of transformers' logits processors, whose definitions these are):
//   1. repetition penalty r: for every token that occurs in the row's history, l <- l / r if l > 0, else l * r (once,
//      however often it occurs)
//   2. temperature 0: the largest logit, of equals the lowest token. Else l <- l / temperature
//      (where that overflows: as 0), and:
//   3. top-k: tokens below the k-th largest logit are dropped (equals of the k-th stay)
//   4. top-p: with p = softmax of what is left, in falling order, tokens whose larger predecessors already sum to
//      top_p or more are dropped (the first stays; of equals the lower token comes first)
//   5. min-p: tokens with p < min_p * max p are dropped
//   6. one token is drawn from the softmax of what is left, by inverting its cumulative sum at a uniform number
// Sums are float64. The uniform number is a function of (seed, sequence, position) alone, so a run can be repeated and
// a row draws the same token whatever the batch, the threads and the vector instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/device.h"

namespace replayssm {

// temperature >= 0 (0: greedy); top_k >= 0 (0: off); 0 <= top_p <= 1 (1: off); 0 <= min_p <= 1 (0: off);
// repetition_penalty > 0 (1: off).
struct SampleSettings {
  float temperature = 0;
  int32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  uint64_t seed = 0;
};

// Throws Error unless every field is within its range.
void check_settings(const SampleSettings& settings);

// What a row with a NaN or an infinity among its logits gets; other rows are not affected.
inline constexpr int32_t kNoToken = -1;

// Throws Error for sizes < 0, vocabulary 0, null pointers, settings out of range, history tokens outside the
// vocabulary.
struct Sample {
  int64_t rows = 0;
  int64_t vocabulary = 0;
  const float* logits = nullptr;  // [rows, vocabulary], logits_stride; not changed
  int64_t logits_stride = 0;
  const SampleSettings* settings = nullptr;  // [rows]
  const uint64_t* sequence = nullptr;        // [rows] number of the row's sequence, or null: 0
  const int64_t* position = nullptr;         // [rows] position of the token that is drawn
  const int32_t* history = nullptr;          // tokens of all rows, for the penalty; null if no row has one
  const int64_t* history_begin = nullptr;    // [rows + 1] row r's are history_begin[r] .. history_begin[r+1]-1
  int32_t* token = nullptr;                  // [rows]
};
void sample(const Sample& args, Device& device, std::span<std::byte> workspace);

// The bytes of `workspace` for a vocabulary of this size. Contents are scratch.
size_t sample_workspace_bytes(int64_t vocabulary, Device& device);

// The same on a GPU, queued on its stream. Every pointer is of device memory, those of settings and histories too, and
// is read when the work runs, so a captured call serves any; the caller answers for settings within their range.
// history_begin may be null if no row has a penalty. A row that is greedy without a penalty, or that only has a
// temperature, costs one or two readings of its logits. A row's token depends on nothing but its own logits, settings,
// history, sequence and position; it is the CPU's but where a float64 sum of another order moves a boundary of steps 4
// to 6 past the uniform number, or past a probability's threshold. A history token outside the vocabulary is passed
// over. workspace: sample_workspace_bytes(rows, vocabulary, device) bytes of device memory, aligned to kAlignmentBytes.
// Throws Error as above for what the host sees, and for a vocabulary above 2^30.
void sample(const Sample& args, CudaDevice& device, std::span<std::byte> workspace);
size_t sample_workspace_bytes(int64_t rows, int64_t vocabulary, CudaDevice& device);

// The uniform number of [0, 1) that `sample` uses.
double sample_uniform(uint64_t seed, uint64_t sequence, int64_t position);

}  // namespace replayssm
