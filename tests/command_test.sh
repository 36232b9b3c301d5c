#!/usr/bin/env bash
# The command line: command_test.sh PROGRAM MODEL. Bad input ends with status 2 and one line on standard error.
set -u
program=$(readlink -f "$1") model=$(readlink -f "$2")
bad=0
files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT

fault() {
  echo "FAULT $*"
  bad=1
}

# expect_error PATTERN ARGS...: status 2, nothing on standard output, one line that matches the pattern.
expect_error() {
  local pattern=$1 status
  shift
  timeout 60 "$program" "$@" </dev/null >"$files/out" 2>"$files/err"
  status=$?
  [ $status -eq 2 ] || fault "$*: status $status, expected 2"
  [ ! -s "$files/out" ] || fault "$*: wrote to standard output"
  [ "$(wc -l <"$files/err")" -eq 1 ] || fault "$*: expected one line, got: $(cat "$files/err")"
  grep -qE "^replayssm: .*$pattern" "$files/err" || fault "$*: expected a message like '$pattern', got: $(cat "$files/err")"
}

# expect_output TEXT ARGS...: status 0 and this text, and a statistics line on standard error.
expect_output() {
  local text=$1
  shift
  timeout 60 "$program" "$@" </dev/null >"$files/out" 2>"$files/err" || fault "$*: status $?"
  printf '%s' "$text" | cmp -s - "$files/out" || fault "$*: expected '$text', got '$(cat "$files/out")'"
  grep -qE '^replayssm: [0-9]+ tokens in ' "$files/err" || fault "$*: no statistics: $(cat "$files/err")"
}

# A copy of the model in which one file is another.
broken_model() {  # NAME FILE SED-EXPRESSION
  mkdir -p "$files/$1"
  ln -sf "$model"/* "$files/$1/"
  rm "$files/$1/$2"
  LC_ALL=C sed "$3" "$model/$2" >"$files/$1/$2"
  ! cmp -s "$model/$2" "$files/$1/$2" || fault "broken_model $1: nothing was changed"
  echo "$files/$1"
}

# Flags.
"$program" --version | grep -qE '^replayssm [0-9]+\.[0-9]+\.[0-9]+$' || fault "--version"
for command in "" demo generate info eval "eval ppl" bench "bench ops" "bench roof"; do
  # shellcheck disable=SC2086
  "$program" $command --help >"$files/out" || fault "$command --help"
  grep -q -- --help "$files/out" || fault "$command --help is not help"
done
expect_error "subcommand"
expect_error "not expected: frob" frob
expect_error "not expected: --frob" --frob
expect_error "MODEL" generate
expect_error "MODEL" info
expect_error "not expected: --frob" generate "$model" -p x --frob
expect_error "prompt" generate "$model"
expect_error "window.*got 0" generate "$model" -p x --window 0
expect_error "window.*got 0" generate "$model" -p x --window 0 --decode conventional
expect_error "window.*1000000" generate "$model" -p x --window 1000000
expect_error "conventional, replay or exact.*'fast'" generate "$model" -p x --decode fast
expect_error "new-tokens.*-1" generate "$model" -p x -n -1
expect_error "new-tokens.*many" generate "$model" -p x -n many
expect_error "batch.*got 0" generate "$model" -p x --batch 0
expect_error "batch.*2000000000" generate "$model" -p x --batch 2000000000
expect_error "threads.*-1" generate "$model" -p x --threads -1
expect_error "temperature.*-1" generate "$model" -p x --temperature -1
expect_error "top_p.*2" generate "$model" -p x --top-p 2
expect_error "text" eval ppl "$model"
expect_error "subcommand" eval
expect_error "window.*got 0" eval ppl "$model" --text "$0" --window 0
expect_error "batch.*got 0" eval ppl "$model" --text "$0" --batch 0
expect_error "window.*got 1" eval ppl "$model" --text "$0" --context 1
expect_error "op: expected mamba2.*'delta'" bench ops --shape nemotron-3-super --op delta
expect_error "shape: expected one of.*kimi-k3.*'mystery'" bench ops --shape mystery
expect_error "window: expected 1 to 1024, got 0" bench ops --window 4,0
expect_error "tokens: expected 1 to 8 .the window., got 9" bench ops --window 4,8 --tokens 1,9
expect_error "prefill: expected TOKENS or TOKENSxSEQUENCES, got '64y2'" bench ops --prefill 64y2
expect_error "prefill: expected 1 to 1024 sequences, got 0" bench ops --prefill 64x0
for command in ops roof; do
  expect_error "device: expected cpu or cuda, got 'gpu'" bench $command --device gpu
  expect_error "threads: expected with --device cpu alone, got 2" bench $command --device cuda --threads 2
  [ -e /dev/nvidiactl ] || expect_error "cuda: (this build has no CUDA|no GPU was found|the GPU's driver)" bench $command --device cuda
done
for flag in "accepted 1" "decode replay" "type bf16" "out fp32" layer plan; do
  # shellcheck disable=SC2086
  expect_error "${flag% *}: expected with --device cuda alone" bench ops --$flag
done
on_gpu=(bench ops --device cuda)
expect_error "accepted: expected more than 0, at most 4 .the tokens., got 5" "${on_gpu[@]}" --tokens 4 --accepted 2.8,5
expect_error "accepted: expected a multiple of 0.05, got 2.81" "${on_gpu[@]}" --tokens 4 --accepted 2.81
expect_error "decode: expected conventional, replay or exact, got 'fast'" "${on_gpu[@]}" --decode exact,fast
expect_error "decode: conventional decodes 1 token a step, got --tokens 2,4" "${on_gpu[@]}" --tokens 2,4 --decode conventional
for device in cpu cuda; do
  expect_error "read: expected fp32 or bf16, got 'fp8'" bench ops --device $device --read fp8
done
expect_error "type: expected bf16, fp16 or fp32, got 'int8'" "${on_gpu[@]}" --type int8
expect_error "out: expected bf16 .the type. or fp32, got 'fp16'" "${on_gpu[@]}" --out fp16
expect_error "csv: its rows are of bf16 inputs and outputs, got fp16 and fp32" "${on_gpu[@]}" --type fp16 --out fp32 --csv "$files/csv"
expect_error "layer: the layer step decodes replay and exact, got conventional" "${on_gpu[@]}" --layer --decode exact,conventional
expect_error "layer: the layer step's outputs are of its inputs' type, fp16, got fp32" "${on_gpu[@]}" --layer --type fp16 --out fp32
expect_error "layer: the layer step decodes, got --prefill" "${on_gpu[@]}" --layer --prefill 64
decode=(bench decode --steps 8)
expect_error "batch: expected 1 to 4096, got 0" "${decode[@]}" --batch 8,0
expect_error "decode.*conventional, replay or exact.*'fast'" "${decode[@]}" --decode fast
expect_error "read: expected fp32 or bf16, got 'fp8'" "${decode[@]}" --read fp8
expect_error "window: expected 1 to 63, got 64" "${decode[@]}" --window 64
expect_error "context: expected 1 to [0-9]+, got 0" "${decode[@]}" --context 0
expect_error "config: expected kimi-linear, .*a model directory or a config.json, got 'mystery'" "${decode[@]}" --config mystery
expect_error "config: $model/config.json has no weights; --random-weights" "${decode[@]}" --config "$model/config.json"
expect_error "layers: expected at most 32, the model's, got 33" "${decode[@]}" --layers 33
expect_error "layers: a checkpoint cannot be cut" "${decode[@]}" --config "$model" --layers 2
[ -e /dev/nvidiactl ] || expect_error "(this build has no CUDA|no GPU was found|the GPU's driver)" "${decode[@]}"
expect_error "device: expected cpu or cuda, got 'gpu'" generate "$model" -p x --device gpu
expect_error "type: expected bf16 or fp32, got 'fp8'" generate "$model" -p x --device cuda --type fp8
expect_error "type: expected with --device cuda alone, got fp32" generate "$model" -p x --type fp32
expect_error "threads: expected with --device cpu alone, got 2" generate "$model" -p x --device cuda --threads 2
[ -e /dev/nvidiactl ] || expect_error "(this build has no CUDA|no GPU was found|the GPU's driver)" generate "$model" -p x --device cuda
expect_error "longest step.*4.*5" info "$model" --window 4 --step-tokens 5

# Prompts.
expect_error "$files/nothing: No such file" generate "$model" --prompt-file "$files/nothing"
expect_error "$files: Is a directory" generate "$model" --prompt-file "$files"
expect_error "at least one token" generate "$model" -p ""
expect_error "context of [0-9]+ tokens" generate "$model" -p x -n 1000000
yes "many words" | head -c 200000 >"$files/long"
expect_error "context of [0-9]+ tokens" generate "$model" --prompt-file "$files/long"
expect_error "at most [0-9]+ bytes" generate "$model" --prompt-file /dev/zero
expect_error "$files/nothing: cannot be opened: No such file" eval ppl "$model" --text "$files/nothing"
: >"$files/empty"
expect_error "empty: expected a file with contents" eval ppl "$model" --text "$files/empty"

# Models.
expect_error "$files/nothing/config.json" generate "$files/nothing" -p x
expect_error "$files/nothing/config.json" info "$files/nothing"
expect_error "$files/nothing/config.json" demo "$files/nothing"
expect_error "model_type.*mystery" info "$(broken_model architecture config.json 's/"model_type": "[^"]*"/"model_type": "mystery"/')"
expect_error 'hidden_size.*"wide"' info "$(broken_model field config.json 's/"hidden_size": [0-9]*/"hidden_size": "wide"/')"
expect_error "embed_tokens.*expected.*got" info "$(broken_model shape config.json 's/"hidden_size": [0-9]*/"hidden_size": 128/')"
expect_error "expected .*BF16.* got .*I16" info "$(broken_model dtype model.safetensors 's/"BF16"/"I16" /')"
expect_error "tokenizer.json.*merges" info "$(broken_model tokenizer tokenizer.json 's/"merges"/"verges"/')"
expect_error "tokenizer.json" info "$(broken_model syntax tokenizer.json '1s/{/[/')"
truncated=$(broken_model truncated config.json 's/$/ /')
rm "$truncated/model.safetensors"
expect_error "model.safetensors" generate "$truncated" -p x
for bytes in 0 5 1000 5000000; do
  head -c $bytes "$model/model.safetensors" >"$truncated/model.safetensors"
  expect_error "$truncated/model.safetensors" info "$truncated"
done

# What comes out.
"$program" info "$model" >"$files/out" || fault "info"
for name in parameters layers checkpoint ring convolution "keys and values"; do
  grep -q "$name" "$files/out" || fault "info: no $name"
done
# A config alone will do; the checkpoints are those of the published shapes, FP32.
while read -r name bytes; do
  "$program" info "$(dirname "$0")/fixtures/configs/$name" >"$files/out" || fault "info $name"
  grep -qE "^  checkpoint +$bytes bytes$" "$files/out" || fault "info $name: expected a checkpoint of $bytes bytes"
done <<'END'
qwen3.5-4b 50331648
qwen3.5-122b 150994944
qwen3.6-27b 150994944
nemotron-3-nano-4b 82575360
nemotron-3-super 167772160
kimi-linear 41943040
kimi-k3 434110464
END
head -c 3000 "$(dirname "$0")/../README.md" >"$files/text"
"$program" eval ppl "$model" --text "$files/text" --context 100 --window 5 --batch 3 >"$files/out" || fault "eval ppl"
grep -q "exact has conventional's bits: yes" "$files/out" || fault "eval ppl: $(cat "$files/out")"
for name in prefill conventional replay exact; do grep -q "^$name " "$files/out" || fault "eval ppl: no $name"; done
"$program" demo "$model" "$(dirname "$0")"/../models/{mamba2,kda}-tiny -n 9 --window 4 >"$files/out" || fault "demo of three models"
[ "$(grep -c ' identical: yes$' "$files/out")" -eq 3 ] || fault "demo of three models: $(tail -n 3 "$files/out")"
printf 'a\xff\xfe\xe2\x82 b\xf0\x9f\x98\x80\r\n\x00\xc3' >"$files/bytes"
"$program" generate "$model" --prompt-file "$files/bytes" -n 0 --echo 2>/dev/null | head -c -1 |
  cmp -s - "$files/bytes" || fault "a prompt of any bytes does not come back"
"$program" generate "$model" --prompt-file - -n 0 --echo <"$files/bytes" 2>/dev/null | head -c -1 |
  cmp -s - "$files/bytes" || fault "a prompt from standard input does not come back"
drawn=(generate "$model" -p "The state of" -n 40 --temperature 1 --top-k 40 --seed 7)
text=$("$program" "${drawn[@]}" --decode conventional 2>/dev/null; echo .)
text=${text%.}
expect_output "$text" "${drawn[@]}" --decode conventional --threads 1
expect_output "$text" "${drawn[@]}" --decode exact --window 5
expect_output "$text" "${drawn[@]}" --decode exact --window 16 --threads 3
"$program" "${drawn[@]}" --decode conventional -p "Another" --batch 2 2>/dev/null >"$files/out"
[ "$(grep -c '^=== [1-4] ===$' "$files/out")" -eq 4 ] || fault "--batch: expected four headings"
awk '/^=== /{p = ($2 == 1); next} p' "$files/out" | cmp -s - <(printf '%s' "$text") ||
  fault "a sequence of a batch is not what it is alone"
[ "$("$program" "${drawn[@]}" --seed 8 --decode conventional 2>/dev/null)" != "${text%$'\n'}" ] || fault "--seed has no effect"

# Of 16 steps replay from planes reads half of the state, 1.5 MiB, in 15.
for read in fp32 bf16; do
  "$program" bench ops --shape mamba2-48x64x128 --batch 1 --rounds 1 --read $read --csv "$files/ops.csv" >/dev/null ||
    fault "bench ops --read $read"
done
awk -F, '$12 == "replay" { bytes[$10] = $16 } $10 == "fp32-planes" { ++planes }
         END { exit !(bytes["fp32"] - bytes["bf16"] == 15 / 16 * 786432 && planes == 2) }' "$files/ops.csv" ||
  fault "bench ops: $(cat "$files/ops.csv")"

# Ends.
"$program" generate "$model" -p x -n 1000 --temperature 1 --threads 1 2>"$files/err" | head -c 1 >/dev/null
case ${PIPESTATUS[0]} in 0 | 141) ;; *) fault "a closed pipe: status ${PIPESTATUS[0]}" ;; esac
[ ! -s "$files/err" ] || fault "a closed pipe: $(cat "$files/err")"
(
  trap '' PIPE
  "$program" generate "$model" -p x -n 1000 --temperature 1 --threads 1 2>"$files/err" | head -c 1 >/dev/null
  exit "${PIPESTATUS[0]}"
) || fault "a closed pipe, signal ignored: status $?"
[ ! -s "$files/err" ] || fault "a closed pipe, signal ignored: $(cat "$files/err")"
"$program" generate "$model" -p x -n 3 >/dev/full 2>"$files/err"
[ $? -eq 2 ] && grep -q "standard output: No space" "$files/err" || fault "a full disk: $(cat "$files/err")"
rm "$files/out"
"$program" generate "$model" -p x -n 2000 --temperature 5 --threads 1 >"$files/out" 2>"$files/err" &
pid=$!
until [ -s "$files/out" ] || ! kill -0 $pid; do sleep 0.02; done
kill -INT $pid
wait $pid
[ $? -eq 130 ] || fault "Ctrl-C: status $?"
grep -q "tokens/s" "$files/err" || fault "Ctrl-C: no statistics"
[ "$(tail -c 1 "$files/out")" = "" ] || fault "Ctrl-C: the text does not end its line"
[ $bad -eq 0 ]
