// Oracle of byte-pair encoding: looks over the whole word before each merge.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

namespace replayssm::ref {

// merges: (left, right) -> (rank, merged).
inline std::vector<int32_t> byte_pairs(std::string_view word, const int32_t* byte_tokens,
                                       const std::map<std::pair<int32_t, int32_t>, std::pair<int, int32_t>>& merges) {
  std::vector<int32_t> tokens;
  for (const char byte : word) tokens.push_back(byte_tokens[static_cast<unsigned char>(byte)]);
  for (;;) {
    size_t best = 0;
    std::pair<int, int32_t> chosen = {-1, 0};
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = merges.find({tokens[i], tokens[i + 1]});
      if (found == merges.end() || (chosen.first >= 0 && found->second.first >= chosen.first)) continue;
      best = i;
      chosen = found->second;
    }
    if (chosen.first < 0) return tokens;
    tokens[best] = chosen.second;
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

}  // namespace replayssm::ref
