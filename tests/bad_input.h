// Bad input in tests: a refusal is one Error of one line that says what it must; and a directory for files.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "replayssm/core/error.h"

namespace replayssm::test {

// The line with which `action` refuses; a failure of the test if it does not throw Error or the line breaks.
template <typename Action>
std::string refusal(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    const std::string line = error.what();
    EXPECT_EQ(line.find('\n'), std::string::npos) << line;
    EXPECT_LT(line.size(), 600u) << line;
    return line;
  }
  ADD_FAILURE() << "expected an Error";
  return "";
}

// Expects `action` to be refused with a line that holds each of `parts`.
template <typename Action, typename... Parts>
void expect_refusal(Action&& action, const Parts&... parts) {
  const std::string line = refusal(action);
  for (const std::string_view part : {std::string_view(parts)...})
    EXPECT_NE(line.find(part), std::string::npos) << "'" << part << "' is not in: " << line;
}

// A directory of one test, removed afterwards. It lies in memory where there is room: on a slow disk a thousand small
// files, each waited for, take minutes.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (parent() / "replayssm-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw Error("no temporary directory");
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::string path() const { return path_.string(); }
  std::string path(std::string_view name) const { return (path_ / name).string(); }
  std::string write(std::string_view name, std::string_view contents) const {
    std::ofstream(path_ / name, std::ios::binary) << contents;
    return path(name);
  }
  size_t entries() const { return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), {})); }

 private:
  static std::filesystem::path parent() {
    constexpr std::uintmax_t kNeededBytes = 64 << 20;
    const std::filesystem::path memory = "/dev/shm";
    std::error_code error;
    const std::filesystem::space_info space = std::filesystem::space(memory, error);
    const bool is_usable = !error && space.available >= kNeededBytes && access(memory.c_str(), W_OK) == 0;
    return is_usable ? memory : std::filesystem::temp_directory_path();
  }

  std::filesystem::path path_;
};

}  // namespace replayssm::test
