# The Debian packages that the project needs, and what installs those that are missing. Sourced by run and check, which set root.

build_packages=(g++ cmake ninja-build pkg-config libhwy-dev nlohmann-json3-dev libcli11-dev libfmt-dev libpcre2-dev
                libutf8proc-dev libxxhash-dev)
test_packages=("${build_packages[@]}" libgtest-dev clang-format g++-aarch64-linux-gnu)

# require_packages NAME...: installs the missing ones; where that needs a password, says how and exits with status 2.
require_packages() {
  local missing=() name as_root=()
  if ! command -v dpkg-query apt-get >/dev/null; then
    echo "replayssm: not a Debian system; it needs what these packages hold: $*" >&2
    return
  fi
  for name; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
      echo "replayssm: packages are missing; install them with: sudo apt-get install ${missing[*]}" >&2
      exit 2
    fi
    as_root=(sudo -n)
  fi
  echo "replayssm: installing ${missing[*]}" >&2
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
  if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } \
      </dev/null >"$root/build/logs/packages.log" 2>&1; then
    tail -n 20 "$root/build/logs/packages.log" >&2
    echo "replayssm: installing packages failed; try: sudo apt-get update && sudo apt-get install ${missing[*]}" >&2
    exit 2
  fi
}
