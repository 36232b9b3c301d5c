#!/usr/bin/env bash
# Times the state-space ops on this machine and appends to bench/results/NAME.csv: tools/bench_cpu.sh NAME [ROUNDS]. Wants an
# idle machine.
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f "$0")")")
csv=$root/bench/results/${1:?expected a name for the machine}.csv
rounds=${2:-15}
bench() { "$root/run" bench ops --rounds "$rounds" --csv "$csv" "$@"; }
for shape in qwen3.5-4b kimi-linear mamba2-48x64x128; do
  bench --shape $shape --batch 1,8,32 --window 16 --tokens 1 --prefill 64,512
  bench --shape $shape --batch 1,8,32 --window 8 --tokens 1
  bench --shape $shape --batch 1,32 --window 16 --tokens 4
  bench --shape $shape --batch 1,32 --window 16,8 --tokens 1 --prefill 512 --read bf16
done
for shape in nemotron-3-nano-4b nemotron-3-super; do
  bench --shape $shape --batch 1,32 --window 16 --tokens 1
  bench --shape $shape --batch 1,32 --window 8 --tokens 1
  bench --shape $shape --batch 1,32 --window 16,8 --tokens 1 --read bf16
done
