// How often this program has asked for memory through operator new.
#pragma once

#include <cstdint>

namespace replayssm::test {

int64_t allocations();

}  // namespace replayssm::test
