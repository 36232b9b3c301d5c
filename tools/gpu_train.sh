#!/bin/bash
# Trains checkpoints in the background, for GPU machines on which one command may run only for some minutes:
#   gpu_train.sh smoke INPUT WORK FAMILY... [options]   checks the scans, then a short run of each family
#   gpu_train.sh start INPUT WORK [FAMILY...] [options] INPUT holds tokens.xz, tokenizer.json, heldout.jsonl
#   gpu_train.sh watch WORK SECONDS OUTPUT              waits, then copies the newest checkpoints and logs to OUTPUT/FAMILY
# FAMILY is qwen (alone where none is given), nemotron or kimi; options are those of train_tiny.py train and go to every family.
# Paths in options are seen from WORK/FAMILY: to go on from a checkpoint, copy its folder to WORK/FAMILY/NAME and start with --initial NAME.
# Families train side by side where each has a GPU of its own, else one after the other.
set -euo pipefail
tools=$(cd "$(dirname "$0")" && pwd)

# Copies tools and INPUT into WORK, of which alone the trainer reads, so that INPUT may be replaced while it runs.
prepare() {
    mkdir -p "$2/tools"
    cp "$tools"/train_tiny.py "$tools"/tiny_*.py "$2/tools/"
    cp "$1/tokenizer.json" "$1/heldout.jsonl" "$2/"
    python3 -c 'import lzma, sys; open(sys.argv[2], "wb").write(lzma.open(sys.argv[1]).read())' "$1/tokens.xz" "$2/tokens.bin"
}

# train_family WORK GPU FAMILY [options]
train_family() {
    cd "$1/$3"
    local status=0
    CUDA_VISIBLE_DEVICES=$2 PYTHONUNBUFFERED=1 python3 ../tools/train_tiny.py train --family "$3" --tokens ../tokens.bin \
        --tokenizer ../tokenizer.json --heldout ../heldout.jsonl --output checkpoint "${@:4}" >train.log 2>errors.log || status=$?
    echo $status >finished
}

# train_all WORK FAMILIES [options]: returns when all are done
train_all() {
    local work=$1 families gpus index=0
    read -ra families <<<"$2"
    shift 2
    gpus=$( (nvidia-smi -L 2>/dev/null || true) | wc -l)
    if [ "$gpus" -ge ${#families[@]} ]; then
        for family in "${families[@]}"; do
            train_family "$work" $index "$family" "$@" &
            index=$((index + 1))
        done
        wait
    else
        for family in "${families[@]}"; do (train_family "$work" 0 "$family" "$@"); done
    fi
}

verb=${1:-}
case $verb in
smoke | start)
    input=$2 work=$3
    shift 3
    families=()
    while [[ ${1:-} =~ ^(qwen|nemotron|kimi)$ ]]; do
        families+=("$1")
        shift
    done
    [ ${#families[@]} -gt 0 ] || families=(qwen)
    prepare "$input" "$work"
    work=$(cd "$work" && pwd)
    # So that watch waits for those too that have not begun.
    for family in "${families[@]}"; do mkdir -p "$work/$family/checkpoint" && rm -f "$work/$family/finished"; done
    if [ "$verb" = start ]; then
        export -f train_family train_all
        setsid bash -c 'train_all "$@"' bash "$work" "${families[*]}" "$@" >"$work/errors.log" 2>&1 </dev/null &
    else
        nvidia-smi -L || true
        train_all "$work" "${families[*]}" "$@" &
        python3 "$work/tools/train_tiny.py" scans || echo "scans: FAILED"
        wait
        for family in "${families[@]}"; do
            echo "== $family: exit status $(cat "$work/$family/finished")"
            cat "$work/$family/train.log"
            tail -n 15 "$work/$family/errors.log"
        done
    fi
    ;;
watch)
    work=$2 seconds=$3 output=$4
    end=$((SECONDS + seconds))
    is_running() {
        for folder in "$work"/*/checkpoint; do [ -e "$folder/../finished" ] || return 0; done
        return 1
    }
    while [ $SECONDS -lt $end ] && is_running; do sleep 1; done
    for folder in "$work"/*/checkpoint; do
        folder=${folder%/checkpoint}
        family=$(basename "$folder")
        mkdir -p "$output/$family"
        for file in train.log checkpoint/model.safetensors checkpoint/config.json; do
            [ ! -e "$folder/$file" ] || cp "$folder/$file" "$output/$family/"
        done
        if [ -e "$folder/finished" ]; then
            python3 "$work/tools/train_tiny.py" eval --model "$folder/checkpoint" --tokenizer "$work/tokenizer.json" \
                --heldout "$work/heldout.jsonl" --output "$output/$family/figures.json" || echo "no figures"
            echo "== $family: exit status $(cat "$folder/finished")"
        else
            echo "== $family: running"
        fi
        tail -n 8 "$folder/train.log" || true
        tail -n 3 "$folder/errors.log" || true
    done
    ;;
*)
    sed -n 2,8p "$0"
    exit 2
    ;;
esac
