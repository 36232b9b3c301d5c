#!/usr/bin/env bash
# Times decoding steps of whole models on this machine's GPU and appends to a CSV:
#   tools/gpu_decode.sh [quick|full] [CSV]      (full, bench/results/h200-decode.csv)
# quick: Qwen3.5-4B and Nemotron-3-Nano-4B at four batches and 1 k of context, a few minutes; full: BF16 reads, longer
# contexts, rows in lockstep and the first layers of larger models too. Weights are random. Uses build/cuda/replayssm as
# it is; builds it if it is not there. Wants an idle GPU.
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f "$0")")")
extent=${1:-full}
csv=${2:-$root/bench/results/h200-decode.csv}
program=$root/build/cuda/replayssm
case $extent in quick | full) ;; *)
  echo "gpu_decode.sh: expected quick or full, got '$extent'" >&2
  exit 2 ;;
esac
if [ ! -x "$program" ]; then
  (cd "$root" && cmake --preset cuda -DREPLAYSSM_BUILD_TESTS=OFF && ninja -C build/cuda replayssm_command) >&2
fi

failures=0
bench() {  # CONFIG ARGS...: what fails is counted, and the rest goes on
  local config=$1
  shift
  "$program" bench decode --csv "$csv" --config "$config" "$@" || failures=$((failures + 1))
}

small=(qwen3.5-4b nemotron-3-nano-4b)
for model in "${small[@]}"; do bench "$model" --batch 256,128,32,1; done
if [ "$extent" = full ]; then
  for model in "${small[@]}"; do
    for window in 8 4; do bench "$model" --batch 256 --window "$window" --steps 256; done
    bench "$model" --batch 256,128,32 --steps 256 --decode replay --read bf16
    bench "$model" --batch 256 --steps 128 --decode replay --lockstep
    bench "$model" --batch 64 --context 8192 --steps 128
    bench "$model" --batch 16 --context 32768 --steps 64
    bench "$model" --batch 4 --context 131072 --steps 64
  done
  bench nemotron-3-super --layers 22 --batch 1,64,128 --steps 64
  bench qwen3.5-122b --layers 16 --batch 1,64,128 --steps 64
  bench kimi-linear --layers 12 --batch 1,64,128 --steps 64
fi
if [ "$failures" -gt 0 ]; then
  echo "gpu_decode.sh: $failures runs failed" >&2
  exit 1
fi
