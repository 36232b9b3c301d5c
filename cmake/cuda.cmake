# Says how CUDA sources are compiled, by REPLAYSSM_NVCC.
if(NOT REPLAYSSM_NVCC)
  message(FATAL_ERROR "REPLAYSSM_CUDA: no nvcc on PATH or in /usr/local/cuda/bin; set REPLAYSSM_NVCC")
endif()
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${REPLAYSSM_NVCC})
endif()
# One architecture, that of the card the kernels are tuned on; the preset cuda-all names the others too.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a)
endif()
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc's flag
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit REQUIRED)
if(NOT TARGET CUDA::cublasLt)
  message(FATAL_ERROR "REPLAYSSM_CUDA: the CUDA toolkit of ${REPLAYSSM_NVCC} has no cuBLASLt (package libcublas-dev-*); "
                      "install it or set REPLAYSSM_CUDA=OFF")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # a target's own: projects that link the library need it and may know no CUDA
# Contraction is off for the same reason as on the CPU: fused products are written out. ({fmt} 9 takes nvcc for a compiler without
# constexpr, which its checks of formats need.)
set(cuda_options "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;-DFMT_USE_CONSTEXPR=1>")
