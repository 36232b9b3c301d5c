// Files: mapping refuses what is not a file with contents; an atomic file appears whole or not at all.
#include "replayssm/core/mapped_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <utility>

#include "replayssm/core/atomic_file.h"
#include "tests/bad_input.h"

namespace replayssm {
namespace {

using test::expect_refusal;

TEST(MappedFile, HoldsTheFilesBytes) {
  const test::TemporaryDirectory directory;
  const std::string contents("a\0b\xFFz", 5);
  MappedFile first(directory.write("file", contents));
  MappedFile second(directory.write("other", "other"));
  EXPECT_EQ(first.text(), contents);
  second = std::move(first);
  EXPECT_EQ(second.text(), contents);
  EXPECT_EQ(second.path(), directory.path("file"));
}

TEST(MappedFile, RefusesWhatIsNotAFileWithContents) {
  const test::TemporaryDirectory directory;
  expect_refusal([&] { MappedFile(directory.path("none")); }, directory.path("none"), "No such file");
  expect_refusal([&] { MappedFile file(directory.path()); }, "expected a file, got a directory");
  expect_refusal([&] { MappedFile(directory.write("empty", "")); }, "empty");
  expect_refusal([&] { MappedFile(directory.write("file", "x") + "/below"); }, "Not a directory");
  expect_refusal([&] { MappedFile file(std::string("a\0b", 3)); }, "zero byte");
  ASSERT_EQ(mkfifo(directory.path("pipe").c_str(), 0600), 0);
  expect_refusal([&] { MappedFile(directory.path("pipe")); }, "expected a regular file");
}

TEST(AtomicFile, AppearsOnlyWhenCommitted) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.write("file", "old");
  {
    AtomicFile file(path);
    file.write("new contents");
    EXPECT_EQ(MappedFile(path).text(), "old");
  }
  EXPECT_EQ(MappedFile(path).text(), "old");
  EXPECT_EQ(directory.entries(), 1u);
  AtomicFile file(path);
  file.write("new ");
  file.write("contents");
  file.commit();
  EXPECT_EQ(MappedFile(path).text(), "new contents");
  EXPECT_EQ(directory.entries(), 1u);
  expect_refusal([&] { file.write("more"); }, path);
  expect_refusal([&] { file.commit(); }, path);
}

TEST(AtomicFile, LeavesNothingWhenItFails) {
  const test::TemporaryDirectory directory;
  expect_refusal([&] { AtomicFile(directory.path("none/file")); }, "none/file", "No such file");
  expect_refusal([&] { AtomicFile(""); }, "file name");
  ASSERT_EQ(mkdir(directory.path("taken").c_str(), 0700), 0);
  directory.write("taken/inside", "x");
  expect_refusal(
      [&] {
        AtomicFile file(directory.path("taken"));
        file.write("x");
        file.commit();
      },
      "taken");
  EXPECT_EQ(directory.entries(), 1u);
}

// A full disk, played by the limit on a file's size.
TEST(AtomicFile, LeavesNothingWhenTheDiskIsFull) {
  const test::TemporaryDirectory directory;
  struct rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {4096, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string line = test::refusal([&] {
    AtomicFile file(directory.path("file"));
    file.write(std::string(10000, 'x'));
    file.commit();
  });
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_NE(line.find("cannot be written"), std::string::npos) << line;
  EXPECT_EQ(directory.entries(), 0u);
}

}  // namespace
}  // namespace replayssm
