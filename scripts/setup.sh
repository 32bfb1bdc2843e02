#!/usr/bin/env bash
# Installs the Debian packages of scripts/packages.txt that are missing. Does nothing, in a few milliseconds, once done.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
list=$root/scripts/packages.txt
stamp=$root/build/setup.stamp
want=$(sha256sum "$list" | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

mapfile -t packages < <(grep -v '^#' "$list" | grep .)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "temper: installing ${#missing[@]} Debian packages: ${missing[*]}" >&2
  run=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "temper: not root and no sudo; as root run: apt-get install ${missing[*]}" >&2; exit 1; }
    run=(sudo)
  fi
  log=$(mktemp)
  { "${run[@]}" apt-get update && DEBIAN_FRONTEND=noninteractive "${run[@]}" apt-get install -y --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1 </dev/null || { tail -n 30 "$log" >&2; echo "temper: apt-get failed (whole log: $log)" >&2; exit 1; }
  rm -f "$log"
fi
mkdir -p "$root/build"
echo "$want" >"$stamp"
