#!/usr/bin/env bash
# The rules of the house that a search can hold: walls.sh RULE prints what breaks the rule and then exits with status 1.
set -u
cd "$(dirname "$0")/.." || exit 2

sources() { find replayssm apps tests bench -regex '.*\.\(h\|cpp\|cu\|cuh\)' 2>/dev/null | sort; }

# Every include of a file of ours, as "room file target".
own_includes() {
  sources | xargs grep -HoE '^#include +"[^"]*"' | sed -E 's/:#include +"/ /; s/"$//' |
    while read -r file target; do
      case $file in
        replayssm/*) room=${file#replayssm/} room=${room%%/*} ;;
        *) room=${file%%/*} ;;
      esac
      echo "$room $file $target"
    done
}

case ${1:-} in
  rooms)  # core <- ops <- state <- model <- engine <- server <- bench <- apps <- tests
    own_includes | awk '
      BEGIN { n = split("core ops state model engine server bench apps tests", names)
              for (i = 1; i <= n; i++) rank[names[i]] = i }
      { split($3, part, "/"); target = part[1] == "replayssm" ? part[2] : part[1]
        if (!($1 in rank) || !(target in rank) || rank[target] > rank[$1]) print $2 " includes " $3 }' ;;
  paths)  # include paths start at replayssm/ (or at the folder of an app, a test or a benchmark)
    own_includes | awk '$2 ~ /^replayssm/ && $3 !~ /^replayssm\// || $3 ~ /\.\./ { print $2 " includes " $3 }' ;;
  cuda)  # CUDA headers are named in .cu and .cuh files and in the device file alone
    sources | grep -vE '\.(cu|cuh)$|^replayssm/core/device\.' |
      xargs grep -nE '#include +[<"](cuda|cub/|cublas|cudnn|cutlass|cute/|thrust|nccl|nv)' ;;
  lengths)
    { sources; find . -path ./build -prune -o \( -name '*.py' -o -name '*.sh' -o -name CMakeLists.txt \) -print
      echo run; echo check; } | xargs wc -l | awk '$2 != "total" && $1 > 800 { print $2 " has " $1 " lines, at most 800" }' ;;
  names)
    find replayssm apps tests bench tools python -type f 2>/dev/null |
      grep -E '(^|[/_.-])(utils?|commons?|helpers?|managers?|base|impl|handlers?|misc)([_.-][^/]*)?$' ;;
  marks)  # what is unfinished is no comment
    sources | xargs grep -nE '\b(TODO|FIXME|XXX)\b' ;;
  *)
    echo "walls.sh: expected rooms, paths, cuda, lengths, names or marks, got '${1:-}'"
    exit 2 ;;
esac | { ! grep .; }
