#!/usr/bin/env bash
# Times the state-space ops on this machine's GPU and appends to a CSV, the figures that matter most first:
#   tools/gpu_bench.sh [quick|full|layers|attention] [CSV]      (full, bench/results/h200.csv)
# full: the target table at batch 256, whole layer steps, sweeps over batches, windows and tokens, prefill, and attention
# (to CSV-attention), some minutes; quick: batch 256, 32 and 1 of the table, about one; layers, attention: these alone.
# Uses build/cuda/replayssm as it is; builds it if it is not there. Wants an idle GPU.
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f "$0")")")
extent=${1:-full}
csv=${2:-$root/bench/results/h200.csv}
program=$root/build/cuda/replayssm
case $extent in quick | full | layers | attention) ;; *)
  echo "gpu_bench.sh: expected quick, full, layers or attention, got '$extent'" >&2
  exit 2 ;;
esac
if [ ! -x "$program" ]; then
  (cd "$root" && cmake --preset cuda -DREPLAYSSM_BUILD_TESTS=OFF && ninja -C build/cuda replayssm_command) >&2
fi

failures=0
bench() {  # SHAPE ARGS...: what fails is counted, and the rest goes on
  local shape=$1
  shift
  "$program" bench ops --device cuda --csv "$csv" --shape "$shape" "$@" || failures=$((failures + 1))
}

# Every row of the target table for these batches.
targets() {  # BATCHES
  local shape
  for shape in "${shapes[@]}"; do
    bench "$shape" --batch "$1" --window 16
    bench "$shape" --batch "$1" --window 4,8 --decode replay,exact
    bench "$shape" --batch "$1" --window 16 --decode replay --read bf16
    bench "$shape" --batch "$1" --window 16,8,32 --tokens 4 --accepted 4,2.8 --decode replay
    bench "$shape" --batch "$1" --window 8,16,32 --tokens 4 --accepted 4,2.8 --decode replay --read bf16
  done
}

# The steps of whole layers.
layers() {
  local shape
  for shape in "${shapes[@]}"; do
    bench "$shape" --batch 256,32,1 --window 8,16 --layer
  done
}

attention() {
  "$program" bench attention --device cuda --csv "${csv%.csv}-attention.csv" --page 64 --batch 256,128,32,1 \
    --context 1024,1088,8192 --tokens 1,4 --heads 16:4:256,40:8:128,32:8:128,16:8:64,32:1:576:512 ||
    failures=$((failures + 1))
}

sweeps() {
  local shape
  for shape in "${shapes[@]}"; do
    bench "$shape" --batch 1,8,32,128,512,2,4,16,64 --window 16
    bench "$shape" --batch 1,8,32,128,512,2,4,16,64 --window 16 --decode replay --read bf16
    bench "$shape" --batch 1,8,32,128,512 --window 16 --tokens 4 --accepted 4,2.8 --decode replay
  done
  for shape in "${shapes[@]}"; do
    bench "$shape" --batch 1,8,32,128,512,2,4,16,64 --window 4,8 --decode replay,exact
    bench "$shape" --batch 256,32 --window 4,8,16,32 --tokens 1,2,4,8 --decode replay,exact
    bench "$shape" --batch 256,32 --window 4,8,16,32 --tokens 1,2,4,8 --decode replay --read bf16
    bench "$shape" --batch 1 --decode conventional --prefill 512,4096x8
  done
}

start=$SECONDS
shapes=(qwen3.5-4b nemotron-3-super nemotron-3-nano-4b kimi-linear qwen3.5-122b)
"$program" bench roof --device cuda
case $extent in
  quick) targets 256,32,1 ;;
  layers) layers ;;
  attention) attention ;;
  full)
    targets 256
    layers
    sweeps
    attention ;;
esac
echo "gpu_bench.sh: $((SECONDS - start)) s, $failures of the runs failed; figures in $csv"
[ "$failures" -eq 0 ]
