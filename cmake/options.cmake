# How everything is compiled, here and in the cross build of tests/neon.

# Contraction is off so that one expression has the same bits at every call site; fused products are written out.
add_compile_options(-Wall -Wextra -Wpedantic -Wshadow -ffp-contract=off -fno-math-errno)
# Of the reference compiler; others, which warn of other things, are to build too.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION MATCHES "^12\\.")
  add_compile_options(-Werror)
endif()
# The targets left out differ from their neighbours only in instructions that the ops do not use.
add_compile_definitions("HWY_DISABLED_TARGETS=(HWY_AVX3_DL|HWY_SSSE3|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")
# Four portable lanes for compilers up to GCC 12.2 too: the fault that makes Highway avoid them there is in 16-bit and
# 32-bit integer products, which no op uses; every target is tested.
add_compile_definitions(HWY_BROKEN_EMU128=0)
