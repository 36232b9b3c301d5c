#!/usr/bin/env bash
# Runs the CUDA tests, then the short ones under compute-sanitizer, on a GPU machine that may lack what building needs, from
# binaries built elsewhere (tools/gpu_libraries.sh gathers their libraries): tools/gpu_check.sh [BUILD [LOGS [PROCESSES]]], by
# itself build/cuda, BUILD/logs and 4 processes side by side on one GPU. What failed and the counts come last.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 2
source tools/sanitizer.sh
build=${1:-build/cuda}
logs=${2:-$build/logs}
processes=${3:-4}
tests=$build/replayssm_cuda_tests
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
mkdir -p "$logs"
rm -f "$logs"/cuda_tests_*.log "$logs"/{memcheck,racecheck}.log

gpus=$("$tests" --gpus) || exit 2
if [ "$gpus" = 0 ]; then
  echo "gpu_check.sh: no GPU here"
  exit 2
fi
status=0 pids=()
for ((i = 0; i < processes; ++i)); do
  GTEST_TOTAL_SHARDS=$processes GTEST_SHARD_INDEX=$i "$tests" >"$logs/cuda_tests_$i.log" 2>&1 &
  pids+=($!)
done
for i in "${!pids[@]}"; do
  wait "${pids[i]}" || { status=1; echo "process $i of the tests: exit status $?"; }
done
tests_seconds=$SECONDS

sanitizer_pids=()
if [ -n "$(find_sanitizer)" ]; then
  for tool in memcheck racecheck; do
    run_sanitizer $tool "$tests" >"$logs/$tool.log" 2>&1 &
    sanitizer_pids+=($!)
  done
  for pid in "${sanitizer_pids[@]}"; do wait "$pid" || status=1; done
fi

all=("$logs"/cuda_tests_*.log)
count() { cat "${all[@]}" | grep -cE "^\[ +$1 +\] .*\([0-9]+ ms\)$"; }
grep -hA9 ': Failure$' "${all[@]}" | grep -vE '^\[|^$' | head -n 60
echo "== slowest"
grep -hE '^\[ +(OK|FAILED) +\] .* \([0-9]+ ms\)$' "${all[@]}" | sed -E 's/.*\] (.*) \(([0-9]+) ms\)/\2 ms \1/' | sort -rn | head -n 6
echo "== failed"
grep -hE '^\[ +FAILED +\] .* \([0-9]+ ms\)$' "${all[@]}" | cut -c 14- | head -n 40
for log in "${all[@]}"; do  # a process that died
  grep -q '^\[=*\] .* ran' "$log" || { echo "died in: $(grep '^\[ RUN' "$log" | tail -n 1)"; tail -n 3 "$log"; }
done
echo "== summary: $(count OK) passed, $(count FAILED) failed, $(count SKIPPED) skipped in $tests_seconds s"
if [ ${#sanitizer_pids[@]} -eq 0 ]; then
  echo "compute-sanitizer: skipped, it is not on this machine"
else
  for tool in memcheck racecheck; do
    grep -E '^=+ (Error|Invalid|Race|ERROR SUMMARY|RACECHECK SUMMARY|Program hit)|Device not supported' "$logs/$tool.log" | tail -n 6
    echo "$tool: $(grep -cE '^\[ +OK' "$logs/$tool.log") tests, $(grep -oE '[A-Z]+ SUMMARY: .*' "$logs/$tool.log" | tail -n 1)"
  done
fi
exit $status
