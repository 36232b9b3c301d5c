// Runs the tests, on the vector instructions that the environment variable REPLAYSSM_SIMD names (else the best).
// With --simd_targets it only lists the vector targets: "NAME runs" or "NAME lacks" a line; with --gpus it only says
// how many GPUs there are.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "replayssm/core/cuda_device.h"
#include "replayssm/core/error.h"
#include "replayssm/core/simd.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc == 2 && std::string_view(argv[1]) == "--simd_targets") {
    for (const std::string& name : replayssm::simd_targets()) std::printf("%s runs\n", name.c_str());
    for (const std::string& name : replayssm::unsupported_simd_targets()) std::printf("%s lacks\n", name.c_str());
    return 0;
  }
#ifdef REPLAYSSM_HAS_CUDA
  if (argc == 2 && std::string_view(argv[1]) == "--gpus") {
    std::printf("%d\n", replayssm::cuda_device_count());
    return 0;
  }
#endif
  try {
    if (const char* name = std::getenv("REPLAYSSM_SIMD")) replayssm::use_simd_target(name);
  } catch (const replayssm::Error& error) {
    std::fprintf(stderr, "REPLAYSSM_SIMD: %s\n", error.what());
    return 2;
  }
  return RUN_ALL_TESTS();
}
