// Unicode's normalization form C.
#pragma once

#include <string>
#include <string_view>

namespace replayssm {

// NFC of `text`, which is valid UTF-8. Takes time in proportion to the text (times a logarithm) whatever it holds.
std::string nfc(std::string_view text);

}  // namespace replayssm
