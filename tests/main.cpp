// Runs the tests, on the vector instructions that the environment variable REPLAYSSM_SIMD names (else the best).
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "replayssm/core/error.h"
#include "replayssm/core/simd.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    if (const char* name = std::getenv("REPLAYSSM_SIMD")) replayssm::use_simd_target(name);
  } catch (const replayssm::Error& error) {
    std::fprintf(stderr, "REPLAYSSM_SIMD: %s\n", error.what());
    return 2;
  }
  return RUN_ALL_TESTS();
}
