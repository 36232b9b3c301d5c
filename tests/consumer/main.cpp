// Uses an installed replayssm as another program would.
#include <replayssm/core/device.h>
#include <replayssm/core/simd.h>
#include <replayssm/core/version.h>

#include <cstdio>

int main() {
  replayssm::Device device(2);
  std::printf("replayssm %s on %s\n", REPLAYSSM_VERSION, replayssm::simd_target().c_str());
  return device.threads().size() == 2 ? 0 : 1;
}
