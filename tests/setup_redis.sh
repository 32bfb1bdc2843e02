#!/usr/bin/env bash
# Installs what `temper bench pool` compares with: Debian's Redis server and the client library hiredis. Starts no service. A build made
# before must be configured again, which this does for build/release if it is there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
run=()
[ "$(id -u)" -eq 0 ] || run=(sudo)
# RUNLEVEL keeps the package's script from starting the server.
"${run[@]}" apt-get update -q
"${run[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -q --no-install-recommends redis-server libhiredis-dev
redis-server --version
if [ -f "$root/build/release/CMakeCache.txt" ]; then cmake "$root/build/release" >/dev/null; fi
