#!/usr/bin/env bash
# Times the state-space ops on this machine and appends to bench/results/NAME.csv: tools/bench_cpu.sh NAME. Wants an idle machine.
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f "$0")")")
csv=$root/bench/results/${1:?expected a name for the machine}.csv
for shape in qwen3.5-4b kimi-linear mamba2-48x64x128; do
  "$root/run" bench ops --shape $shape --batch 1,8,32 --window 16 --tokens 1 --prefill 64,512 --csv "$csv"
  "$root/run" bench ops --shape $shape --batch 1,8,32 --window 8 --tokens 1 --csv "$csv"
  "$root/run" bench ops --shape $shape --batch 1,32 --window 16 --tokens 4 --csv "$csv"
done
for shape in nemotron-3-nano-4b nemotron-3-super; do
  "$root/run" bench ops --shape $shape --batch 1,32 --window 16 --tokens 1 --csv "$csv"
  "$root/run" bench ops --shape $shape --batch 1,32 --window 8 --tokens 1 --csv "$csv"
done
