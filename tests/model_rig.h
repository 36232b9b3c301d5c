// The tiny models of tests/fixtures/models, ready to run, and scripts that drive them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "replayssm/core/safetensors.h"
#include "replayssm/model/language_model.h"
#include "replayssm/model/model.h"
#include "tests/arrays.h"
#include "tests/tolerance.h"

namespace replayssm::test {

inline const std::vector<const char*> kModels = {"qwen3_5-tiny",
                                                 "qwen3_5_moe-tiny",
                                                 "nemotron_h-tiny",
                                                 "kimi_linear-tiny",
                                                 "qwen3_next-tiny",
                                                 "qwen3_next_moe-tiny",
                                                 "nemotron_h_moe-tiny",
                                                 "kimi_linear_respelled-tiny",
                                                 "kimi_linear_bounded-tiny"};
// One of each kind of block, for the tests that need no more.
inline const std::span<const char* const> kKinds = std::span(kModels).first(4);

inline std::string fixture_directory(const std::string& name) {
  return std::string(REPLAYSSM_SOURCE_DIR) + "/tests/fixtures/models/" + name;
}

// A text and the logits that transformers gives for each of its tokens, or another tensor of such.
struct ExpectedLogits {
  explicit ExpectedLogits(const std::string& name, const char* tensor = "logits") {
    const SafetensorsFile file(fixture_directory(name) + "/expected.safetensors");
    const Tensor& tokens = *file.find("tokens");
    token.resize(static_cast<size_t>(tokens.elements()));
    std::memcpy(token.data(), tokens.bytes.data(), tokens.bytes.size());
    const Tensor& values = *file.find(tensor);
    logits.resize(static_cast<size_t>(values.elements()));
    read_floats(values, logits);
    vocabulary = values.shape[1];
  }
  std::span<const float> rows(int64_t begin, int64_t end) const {
    return std::span(logits).subspan(begin * vocabulary, (end - begin) * vocabulary);
  }

  int64_t vocabulary = 0;
  std::vector<int32_t> token;
  std::vector<float> logits;  // [tokens, vocabulary]
};

// Weights of a model directory; many rigs may share them.
struct ModelFixture {
  explicit ModelFixture(const std::string& directory)
      : config(read_config(directory)), weights(load_weights(Checkpoint(directory), config)) {}
  ModelConfig config;
  Weights weights;
};

enum class Decoder { kConventional, kDirect, kExact };

struct RigOptions {
  int threads = 1;
  int window = 8;
  int max_step_tokens = 4;
  int max_tokens = 96;
  int slots = 6;
  CheckpointForm form = CheckpointForm::kWords;
};

// A model with a pool of its own, whose memory was NaN before.
class ModelRig {
 public:
  explicit ModelRig(const ModelFixture& fixture, const RigOptions& options = {})
      : device_(options.threads),
        layout_(layout_of(fixture, options)),
        pool(layout_, pool_size(layout_, options.slots, 2048), {.max_rows = options.slots, .is_poisoned = true}),
        model(fixture.config, fixture.weights, layout_, options.max_tokens, device_) {}

  // Runs and commits a step; the logits of all its tokens, [N, vocabulary].
  std::vector<float> step(StepKind kind, const std::vector<Handle>& rows, const std::vector<int>& counts,
                          const std::vector<int32_t>& token, Readout readout = Readout::kDirect,
                          const std::vector<int>& accepted = {}) {
    const StepPlan& plan = pool.begin_step(kind, rows, counts);
    std::vector<int32_t> wanted(token.size());
    for (size_t n = 0; n < wanted.size(); ++n) wanted[n] = static_cast<int32_t>(n);
    std::vector<float> logits = poisoned(token.size() * model.config().vocabulary);
    model.forward(
        {.plan = &plan, .token = token.data(), .readout = readout, .logit_token = wanted, .logits = logits.data()},
        pool);
    flushes += plan.flushes;
    if (accepted.empty())
      pool.commit();
    else
      pool.commit(accepted);
    return logits;
  }

  std::vector<float> prefill(Handle row, std::span<const int32_t> token) {
    return step(StepKind::kPrefill, {row}, {static_cast<int>(token.size())}, {token.begin(), token.end()});
  }

  // One window of the same length in every row.
  std::vector<float> decode(Decoder decoder, const std::vector<Handle>& rows, const std::vector<int32_t>& token,
                            const std::vector<int>& accepted = {}) {
    const std::vector<int> counts(rows.size(), static_cast<int>(token.size() / rows.size()));
    return step(decoder == Decoder::kConventional ? StepKind::kConventional : StepKind::kReplay, rows, counts, token,
                decoder == Decoder::kExact ? Readout::kExact : Readout::kDirect, accepted);
  }

 private:
  static StateLayout layout_of(const ModelFixture& fixture, const RigOptions& options) {
    StateLayout layout =
        state_layout(fixture.config, fixture.weights.fingerprint, options.window, options.max_step_tokens, 16);
    layout.form = options.form;
    return layout;
  }

  Device device_;
  StateLayout layout_;

 public:
  StatePool pool;
  LanguageModel model;
  int flushes = 0;
};

// The logits of a whole text, read in one prefill, are those expected, token by token.
template <typename Rig>
void expect_prefill(Rig& rig, const ExpectedLogits& text, const char* name) {
  const std::vector<float> logits = rig.prefill(rig.pool.allocate(200), text.token);
  EXPECT_LE(relative_error(logits, text.logits), kModelBound) << name;
  for (size_t n = 0; n < text.token.size(); ++n)
    EXPECT_LE(relative_error(std::span(logits).subspan(n * text.vocabulary, text.vocabulary), text.rows(n, n + 1)),
              kModelBound)
        << name << " token " << n;
}

struct DecodeCase {
  Decoder decoder;
  int tokens, window;
};
inline constexpr DecodeCase kDecodeCases[] = {{Decoder::kConventional, 1, 8}, {Decoder::kDirect, 1, 16},
                                              {Decoder::kDirect, 1, 5},       {Decoder::kDirect, 4, 8},
                                              {Decoder::kExact, 1, 6},        {Decoder::kExact, 2, 5}};
inline constexpr int kPrompt = 70;

// The logits of positions kPrompt .. end, decoded after a prefill. `how` is what a rig's decode takes beside.
template <typename Rig, typename... How>
std::vector<float> decode_text(Rig& rig, const ExpectedLogits& text, const DecodeCase& c, How... how) {
  const Handle row = rig.pool.allocate(200);
  rig.prefill(row, std::span(text.token).first(kPrompt));
  std::vector<float> logits;
  for (size_t n = kPrompt; n < text.token.size(); n += c.tokens) {
    const auto some =
        rig.decode(c.decoder, {row}, {text.token.begin() + n, text.token.begin() + n + c.tokens}, {}, how...);
    logits.insert(logits.end(), some.begin(), some.end());
  }
  rig.pool.free(row);
  return logits;
}

}  // namespace replayssm::test
