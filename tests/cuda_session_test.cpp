// Saved sessions of a pool on a GPU: continuing equals never having stopped, and files pass from one side to the other.
#include "replayssm/state/cuda_session.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "replayssm/state/session_file.h"
#include "tests/bad_input.h"
#include "tests/cuda_mini_model.h"

namespace replayssm::test {
namespace {

constexpr int kWindow = 6, kMaxStep = 4;

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// A prompt and `steps` steps of one token each, the last with three rejected drafts behind it.
template <typename Model, typename Pool>
void grow(Model& model, Pool& pool, Lane& lane, int prefill, int steps) {
  if (prefill > 0) advance(model, pool, {&lane}, StepKind::kPrefill, prefill);
  for (int step = 0; step < steps; ++step)
    advance(model, pool, {&lane}, StepKind::kReplay, step + 1 == steps ? kMaxStep : 1, {1});
}

class CudaSession : public CudaTest {
 protected:
  TemporaryDirectory directory_;
};

template <typename T>
void expect_continued(CheckpointForm form, const std::string& path) {
  CudaPoolRig<T> rig(cuda_mini_layout(kWindow, kMaxStep, form));
  for (const int prefill : {0, 1, 13}) {
    for (const int steps : {0, 1, 4, kWindow, kWindow + 1, 2 * kWindow + 1}) {
      const auto pool = rig.pool(2), other = rig.pool(3);
      pool->allocate(1);
      Lane lane = cuda_lane(*pool, 1);
      grow(rig.model, *pool, lane, prefill, steps);
      const auto before = pool_bytes_of(*pool);
      save_session(*pool, lane.handle, path);
      EXPECT_EQ(pool_bytes_of(*pool), before);
      lane.outputs.clear();
      Lane loaded = lane;
      loaded.handle = load_session(*other, path, 300);
      EXPECT_EQ(other->cursor(loaded.handle), pool->cursor(lane.handle));
      run_cuda_script(rig.model, *pool, {&lane}, 77, 20);
      run_cuda_script(rig.model, *other, {&loaded}, 77, 20);
      ASSERT_TRUE(same_bits(loaded.outputs, lane.outputs)) << prefill << " + " << steps;
    }
  }
}

TEST_F(CudaSession, LoadAndContinueEqualsContinue) {
  expect_continued<float>(CheckpointForm::kWords, directory_.path("session"));
  expect_continued<Bf16>(CheckpointForm::kPlanes, directory_.path("session"));
  expect_continued<Fp16>(CheckpointForm::kWords, directory_.path("session"));
}

// From the GPU to the CPU and on: the file stays the same, and the products that a GPU does not keep are right there.
TEST_F(CudaSession, APoolOnTheCpuTakesItOver) {
  const std::string path = directory_.path("session"), again = directory_.path("again");
  CudaPoolRig<Bf16> rig(cuda_mini_layout(kWindow, kMaxStep));
  const auto pool = rig.pool(1), back = rig.pool(1);
  Lane lane = cuda_lane(*pool, 1);
  grow(rig.model, *pool, lane, 13, 5);
  save_session(*pool, lane.handle, path);

  MiniModel model(rig.model.layout());
  std::vector<float> outputs[2];
  for (const Readout readout : {Readout::kDirect, Readout::kExact}) {
    StatePool host(model.layout(), pool_size(model.layout(), 1, 300), {.is_poisoned = true});
    const Handle handle = load_session(host, path, 300);
    save_session(host, handle, again);
    EXPECT_EQ(contents_of(again), contents_of(path));
    model.readout = readout;
    outputs[readout == Readout::kExact] = model.run(host, StepKind::kReplay, {handle}, {{3}})[0];
  }
  EXPECT_LT(relative_error(outputs[0], outputs[1]), kFloat32Bound);

  Lane loaded = lane;
  loaded.handle = load_session(*back, again, 300);
  save_session(*back, loaded.handle, again);
  EXPECT_EQ(contents_of(again), contents_of(path));
  run_cuda_script(rig.model, *pool, {&lane}, 77, 20);
  run_cuda_script(rig.model, *back, {&loaded}, 77, 20);
  EXPECT_TRUE(same_bits(loaded.outputs, lane.outputs));
}

// Without a layer whose products the CPU keeps, what a GPU's pool loads it saves as it was.
TEST_F(CudaSession, APoolOnTheGpuTakesItOver) {
  const std::string path = directory_.path("session"), again = directory_.path("again");
  StateLayout layout = cuda_mini_layout(kWindow, kMaxStep);
  layout.layers.erase(layout.layers.begin());
  MiniModel model(layout);
  StatePool host(layout, pool_size(layout, 1, 300), {.is_poisoned = true});
  Lane lane;
  lane.handle = host.allocate(300);
  grow(model, host, lane, 13, 5);
  save_session(host, lane.handle, path);

  CudaPoolRig<float> rig(layout);
  const auto pool = rig.pool(2);
  const Handle handle = load_session(*pool, path, 300);
  save_session(*pool, handle, again);
  EXPECT_EQ(contents_of(again), contents_of(path));

  CudaPoolRig<Bf16> narrow(layout);
  const auto other = narrow.pool(2);
  const PoolCounts before = other->counts();
  expect_refusal([&] { load_session(*other, path, 300); }, "layers.0.k holds", "no number of BF16");
  EXPECT_EQ(other->counts(), before);
}

TEST_F(CudaSession, Refusals) {
  const std::string path = directory_.path("session");
  CudaPoolRig<Fp16> rig(cuda_mini_layout(kWindow, kMaxStep));
  const auto pool = rig.pool(2);
  Lane lane = cuda_lane(*pool, 1);
  grow(rig.model, *pool, lane, 3, 2);
  save_session(*pool, lane.handle, path);
  expect_refusal([&] { load_session(*pool, path, 4); }, "has 5 tokens", "only 4");
  const Handle second = load_session(*pool, path, 300);
  expect_refusal([&] { load_session(*pool, path, 300); }, "none of 2 is free");
  pool->free(second);
  expect_refusal([&] { load_session(*pool, path, 513); }, "1 to 512 tokens long, given 513");
  CudaStatePool small(rig.model.layout(), {2, 6}, rig.device, {.element = Dtype::kF16, .max_sequence_tokens = 40});
  const Handle shorter = load_session(small, path, 40);
  expect_refusal([&] { load_session(small, path, 41); }, "1 to 40 tokens long, given 41");
  expect_refusal([&] { load_session(small, path, 20); }, "20 tokens need 3 KV pages of 8 tokens, 1 of 6 are free");
  small.free(shorter);
  EXPECT_EQ(small.counts().free_pages, 6);
  const std::vector<int> one = {1};
  pool->begin_step(StepKind::kReplay, std::vector<Handle>{lane.handle}, one);
  expect_refusal([&] { save_session(*pool, lane.handle, path); }, "step is begun");
  expect_refusal([&] { load_session(*pool, path, 300); }, "step is begun");
  pool->abort_step();
  expect_refusal([&] { save_session(*pool, lane.handle, path); }, "aborted");
  pool->free(lane.handle);
  expect_refusal([&] { save_session(*pool, lane.handle, path); }, "not a live sequence");
}

}  // namespace
}  // namespace replayssm::test
