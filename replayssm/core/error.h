// The one exception type of the library, and the checks that throw it.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace replayssm {

// Thrown for every refused argument, file or request. The text is one line: it names what was wrong, what was
// expected and what was given.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(fmt::format(text, std::forward<Args>(args)...));
}

// fail(text, args...) unless `condition` holds.
template <typename... Args>
void require(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) [[unlikely]]
    throw Error(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace replayssm
