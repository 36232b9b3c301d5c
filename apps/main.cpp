// The `replayssm` command.
#include <cstdio>

#include "replayssm/core/version.h"

int main() {
  std::printf("replayssm %s\n", REPLAYSSM_VERSION);
  return 0;
}
