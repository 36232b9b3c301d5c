// A model directory's tensors: whole or in shards, found by name, refused by name.
#include "replayssm/model/checkpoint.h"

#include <gtest/gtest.h>

#include "tests/bad_input.h"

namespace replayssm {
namespace {

using test::expect_refusal;

const std::string kBytes(24, 'b');

Tensor tensor(const std::string& name, std::vector<int64_t> shape) {
  Tensor made{name, Dtype::kBF16, std::move(shape), {}};
  made.bytes = std::as_bytes(std::span(kBytes).first(static_cast<size_t>(made.elements()) * 2));
  return made;
}

void write_shard(const test::TemporaryDirectory& directory, const std::string& file,
                 const std::vector<Tensor>& tensors) {
  write_safetensors(directory.path(file), tensors);
}

void write_index(const test::TemporaryDirectory& directory, const std::string& weight_map) {
  directory.write("model.safetensors.index.json", R"({"metadata":{"total_size":1},"weight_map":)" + weight_map + "}");
}

TEST(Checkpoint, FindsTensorsOfOneFile) {
  const test::TemporaryDirectory directory;
  write_shard(directory, "model.safetensors", {tensor("model.a", {2, 3}), tensor("b", {})});
  const Checkpoint checkpoint(directory.path());
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"b", "model.a"}));
  EXPECT_EQ(checkpoint.find("c"), nullptr);
  EXPECT_EQ(&checkpoint.require_tensor("model.a", {Dtype::kF32, Dtype::kBF16}, {2, 3}), checkpoint.find("model.a"));
  EXPECT_NO_THROW(checkpoint.require_tensor("b", {Dtype::kBF16}, {}));
  expect_refusal(
      [&] {
        checkpoint.require_tensor("c", {Dtype::kF32, Dtype::kBF16}, {4});
      },
      "tensor c: expected F32 or BF16 [4], got none");
  expect_refusal(
      [&] {
        checkpoint.require_tensor("model.a", {Dtype::kF32}, {2, 3});
      },
      "tensor model.a: expected dtype F32, got BF16");
  expect_refusal(
      [&] {
        checkpoint.require_tensor("model.a", {Dtype::kBF16}, {3, 2});
      },
      "tensor model.a: expected shape [3, 2], got [2, 3]");
  expect_refusal([&] { checkpoint.require_tensor("b", {Dtype::kBF16}, {1}); }, "expected shape [1], got []");
  EXPECT_EQ(checkpoint.require_prefix({"model.language_model.", "model."}, "a"), "model.");
  expect_refusal(
      [&] {
        checkpoint.require_prefix({"model.language_model.", "model."}, "e");
      },
      "model.language_model.e or model.e, got neither");
}

TEST(Checkpoint, FindsTensorsOfShards) {
  const test::TemporaryDirectory directory;
  write_shard(directory, "one.safetensors", {tensor("a", {2}), tensor("unnamed", {1})});
  write_shard(directory, "two.safetensors", {tensor("b", {3}), tensor("a", {4})});
  write_index(directory, R"({"a":"one.safetensors","b":"two.safetensors"})");
  const Checkpoint checkpoint(directory.path());
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_NO_THROW(checkpoint.require_tensor("a", {Dtype::kBF16}, {2}));
  EXPECT_NO_THROW(checkpoint.require_tensor("b", {Dtype::kBF16}, {3}));
}

TEST(Checkpoint, RefusesDirectoriesWithoutTensors) {
  const test::TemporaryDirectory directory;
  expect_refusal([&] { Checkpoint(directory.path("none")); }, "expected a model directory, got nothing");
  expect_refusal([&] { Checkpoint(directory.write("file", "x")); }, "expected a model directory, got a file");
  expect_refusal([&] { Checkpoint checkpoint(directory.path()); }, "model.safetensors.index.json, got neither");
  directory.write("model.safetensors", "short");
  expect_refusal([&] { Checkpoint checkpoint(directory.path()); }, "model.safetensors", "truncated");
}

TEST(Checkpoint, RefusesBrokenIndexes) {
  const test::TemporaryDirectory directory;
  write_shard(directory, "one.safetensors", {tensor("a", {2})});
  const auto line = [&](const std::string& weight_map) {
    write_index(directory, weight_map);
    return test::refusal([&] { Checkpoint checkpoint(directory.path()); });
  };
  const auto expect = [&](const std::string& weight_map, const std::string& part) {
    const std::string given = line(weight_map);
    EXPECT_NE(given.find(part), std::string::npos) << given;
  };
  expect("7", "weight_map: expected an object, got 7");
  expect("{}", "weight_map: expected tensors, got none");
  expect("{\"a\":7}", "weight_map.a: expected a string, got 7");
  expect(R"({"a":"two.safetensors"})", "two.safetensors, got nothing");
  expect(R"({"a":"one.safetensors","b":"one.safetensors"})", "expected the tensor b");
  for (const char* shard : {"../one.safetensors", "/one.safetensors", "sub/one.safetensors", "..", "", "config.json",
                            "one.safetensors\\u0000.safetensors"})
    expect(fmt::format(R"({{"a":"{}"}})", shard), "expected the name of a .safetensors file in the same directory");
  directory.write("model.safetensors.index.json", "{}");
  expect_refusal([&] { Checkpoint checkpoint(directory.path()); }, "weight_map: expected an object, got nothing");
  directory.write("model.safetensors.index.json", "");
  expect_refusal([&] { Checkpoint checkpoint(directory.path()); }, "index.json", "empty");
  write_index(directory, R"({"a":"cut.safetensors"})");
  directory.write("cut.safetensors", "123");
  expect_refusal([&] { Checkpoint checkpoint(directory.path()); }, "cut.safetensors", "truncated");
}

}  // namespace
}  // namespace replayssm
