# How everything is compiled, here and in the cross build of tests/neon.

# Contraction is off so that one expression has the same bits at every call site; fused products are written out.
set(cxx_warnings -Wall -Wextra -Wpedantic -Wshadow)
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${cxx_warnings};-ffp-contract=off;-fno-math-errno>")
# Errors with the reference compiler; with others, which warn of other things, the build goes on.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION MATCHES "^12\\.")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# The targets left out differ from their neighbours only in instructions that the ops do not use, or are not tested.
set(disabled_targets "HWY_AVX3_DL|HWY_SSSE3|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128")
add_compile_definitions("HWY_DISABLED_TARGETS=(${disabled_targets})")
# Four portable lanes for compilers up to GCC 12.2 too: the fault that makes Highway avoid them there is in 16-bit and
# 32-bit integer products, which no op uses; every target is tested.
add_compile_definitions(HWY_BROKEN_EMU128=0)
# Under the sanitizers this machine's best target alone: the portable one takes four fifths of such a build, and its
# tests ten times as long.
if(REPLAYSSM_SANITIZE)
  add_compile_options(-march=native)
  add_compile_definitions(HWY_COMPILE_ONLY_STATIC)
endif()
