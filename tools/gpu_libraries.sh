#!/usr/bin/env bash
# Copies the shared libraries that BUILD's programs need into BUILD/lib, for machines that lack them; C's, C++'s and CUDA's
# own are left out: tools/gpu_libraries.sh [BUILD], by itself build/cuda.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
build=${1:-build/cuda}
mkdir -p "$build/lib"
for program in "$build/replayssm" "$build/replayssm_cuda_tests"; do
  [ ! -x "$program" ] || ldd "$program"
done | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
  grep -vE '/lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|cublasLt|cublas)\.so' | xargs -r cp -Lt "$build/lib"
du -sh "$build/lib"
