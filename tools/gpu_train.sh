#!/bin/bash
# Trains a checkpoint on one GPU in the background, for machines on which one command may run only for some minutes:
#   gpu_train.sh start INPUT WORK [options of train_tiny.py train]   INPUT holds tokens.xz, tokenizer.json, heldout.jsonl
#   gpu_train.sh watch WORK SECONDS OUTPUT                           waits, then copies the newest checkpoint and the log
set -euo pipefail
tools=$(cd "$(dirname "$0")" && pwd)

case ${1:-} in
start)
    input=$2 work=$3
    shift 3
    # The trainer reads nothing outside WORK, so that INPUT may be replaced while it runs.
    mkdir -p "$work/tools" "$work/checkpoint"
    cp "$tools/train_tiny.py" "$work/tools/"
    cp "$input/tokenizer.json" "$input/heldout.jsonl" "$work/"
    python3 -c 'import lzma, sys; open(sys.argv[2], "wb").write(lzma.open(sys.argv[1]).read())' "$input/tokens.xz" "$work/tokens.bin"
    cd "$work"
    PYTHONUNBUFFERED=1 setsid bash -c 'python3 tools/train_tiny.py train --tokens tokens.bin --tokenizer tokenizer.json \
        --heldout heldout.jsonl --output checkpoint "$@"; echo $? >finished' bash "$@" >train.log 2>errors.log </dev/null &
    ;;
watch)
    work=$2 seconds=$3 output=$4
    end=$((SECONDS + seconds))
    while [ $SECONDS -lt $end ] && [ ! -e "$work/finished" ]; do sleep 1; done
    mkdir -p "$output"
    cp "$work/train.log" "$work/errors.log" "$output/"
    for file in model.safetensors config.json; do
        [ ! -e "$work/checkpoint/$file" ] || cp "$work/checkpoint/$file" "$output/"
    done
    if [ -e "$work/finished" ]; then
        python3 "$work/tools/train_tiny.py" eval --model "$work/checkpoint" --tokenizer "$work/tokenizer.json" \
            --heldout "$work/heldout.jsonl" --output "$output/figures.json"
    fi
    tail -n 12 "$work/train.log"
    tail -n 3 "$work/errors.log"
    ;;
*)
    sed -n 2,4p "$0"
    exit 2
    ;;
esac
