#!/usr/bin/env bash
# The command line: command_test.sh PROGRAM. Bad input ends with status 2 and one line on standard error.
set -u
program=$1
bad=0

fault() {
  echo "$*"
  bad=1
}

# expect_error PATTERN ARGS...: status 2, nothing on standard output, one line that matches the pattern.
expect_error() {
  local pattern=$1 out err status
  shift
  err=$({ out=$("$program" "$@" </dev/null); status=$?; printf '%s' "$out" >&3; exit $status; } 2>&1 3>/dev/null)
  status=$?
  [ $status -eq 2 ] || fault "$*: status $status, expected 2"
  [ "$(printf '%s\n' "$err" | wc -l)" -eq 1 ] || fault "$*: more than one line: $err"
  printf '%s\n' "$err" | grep -qE "$pattern" || fault "$*: expected a message like '$pattern', got '$err'"
}

"$program" --version | grep -qE '^replayssm [0-9]+\.[0-9]+\.[0-9]+$' || fault "--version"
[ $bad -eq 0 ]
