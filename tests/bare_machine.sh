#!/usr/bin/env bash
# A stranger's machine: makes a Debian 12 root with debootstrap (minbase), enters it with pivot_root in namespaces of its own,
# and runs README commands there in a fresh clone of this checkout's HEAD with no other step. Needs root, network and about 6 GB.
#
#   tests/bare_machine.sh [OPTIONS] ['COMMAND'…]       a COMMAND is what follows ./temper; by default: 'run configs/smoke.yaml'
#     --ccache DIR   mount this compiler cache in the machine (otherwise everything is compiled there)
#     --at PATH      where the clone lies in the machine (default /root/temper); with --ccache, a path of the same shape as the
#                    checkout which filled the cache gives the most hits
#     --in FOLDER    where the root is made (default: TMPDIR or /tmp)
#
# A plain chroot would not do: the kernel refuses user namespaces inside it, and sandboxes are made of those. The network is
# the host's, and so are apt's sources and proxies, pip's configuration, and certificates added by hand: they say where this
# site gets its packages, and are copied when the script runs. Exit status: 0 if every command succeeded. Mounts, processes and
# the folder are gone at the end, however it ends: the mounts and processes belong to the namespaces.
set -euo pipefail

say() { printf 'bare machine: %s\n' "$*"; }
die() { printf 'bare machine: %s\n' "$*" >&2; exit 2; }
package_count() { grep -c '^Status: install ok' "${1%/}/var/lib/dpkg/status"; }
disk_mb() { du -sxm --exclude=/ccache "$@" | awk '{sum += $1} END {print sum}'; }

# ---- Outside: a folder, and the clean-up of everything.
outside() {
  local cache='' at=/root/temper parent=${TMPDIR:-/tmp} commands=()
  while [ $# -gt 0 ]; do
    case $1 in
      --ccache) cache=$(realpath -e "${2:?--ccache needs a folder}"); shift 2 ;;
      --at) at=${2:?--at needs a path}; shift 2 ;;
      --in) parent=$(realpath -e "${2:?--in needs a folder}"); shift 2 ;;
      -*) die "unknown option $1" ;;
      *) commands+=("$1"); shift ;;
    esac
  done
  [ ${#commands[@]} -gt 0 ] || commands=('run configs/smoke.yaml')
  [ "$(id -u)" -eq 0 ] || die "must be root: it makes devices, mounts and a new root"
  if ! command -v debootstrap >/dev/null; then
    say "installing debootstrap"
    apt-get install -y --no-install-recommends debootstrap >/dev/null 2>&1 ||
      die "debootstrap is missing and apt-get could not install it"
  fi
  source=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
  [ -z "$(git -C "$source" status --porcelain --untracked-files=no)" ] ||
    say "note: the checkout has changes; the machine gets HEAD without them"

  folder=$(mktemp -d "$parent/temper-bare-machine.XXXXXX")
  inside_pid=''
  clean_up() {
    trap - EXIT INT TERM
    # Killing unshare kills the first process of the machine (--kill-child), and with it every other and every mount.
    if [ -n "$inside_pid" ]; then kill -KILL "$inside_pid" 2>/dev/null || true; wait "$inside_pid" 2>/dev/null || true; fi
    # A process that is being killed may hold a file for a moment.
    for _ in $(seq 50); do rm -rf --one-file-system "$folder" 2>/dev/null && break; sleep 0.2; done
    if [ -e "$folder" ]; then say "could not remove $folder" >&2; exit 3; fi
    say "cleaned up"
  }
  trap clean_up EXIT
  trap 'exit 130' INT TERM
  mkdir "$folder/root"
  unshare --mount --pid --ipc --uts --fork --kill-child --mount-proc --propagation private \
    bash "$0" --inside "$source" "$folder" "$at" "$cache" "${commands[@]}" &
  inside_pid=$!
  local rc=0
  wait "$inside_pid" || rc=$?
  inside_pid=''
  exit "$rc"
}

# What tells apt, pip and TLS where this site gets things: copied, so that no host is named here.
copy_site() {
  local root=$1
  cp /etc/resolv.conf /etc/hosts "$root/etc/"
  rm -f "$root/etc/apt/sources.list"
  for path in sources.list sources.list.d keyrings trusted.gpg.d auth.conf.d; do
    [ ! -e "/etc/apt/$path" ] || cp -rL "/etc/apt/$path" "$root/etc/apt/"
  done
  local keyring
  for keyring in /usr/share/keyrings/*; do [ ! -f "$keyring" ] || cp -n "$keyring" "$root/usr/share/keyrings/"; done
  # Only how to reach a source (proxies, retries, checks): hooks of the host's own programs have no place in a bare machine.
  apt-config dump | grep -E '^Acquire::[^ ]* "..*";$' | grep -vE '^Acquire::(IndexTargets|cdrom|Changelogs)' \
    >"$root/etc/apt/apt.conf.d/90site" || true
  [ ! -f /etc/pip.conf ] || cp -L /etc/pip.conf "$root/etc/pip.conf"
  if [ -d /usr/local/share/ca-certificates ]; then
    mkdir -p "$root/usr/local/share/ca-certificates"
    cp -rL /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/"
  fi
}

devices() {
  local dev=$1 node
  mount -t tmpfs -o mode=755,size=1m bare-dev "$dev"
  for node in null zero full random urandom tty; do touch "$dev/$node" && mount --bind "/dev/$node" "$dev/$node"; done
  mkdir "$dev/pts" "$dev/shm"
  mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 bare-pts "$dev/pts"
  mount -t tmpfs -o mode=1777 bare-shm "$dev/shm"
  ln -s pts/ptmx "$dev/ptmx"
  ln -s /proc/self/fd "$dev/fd"
  for node in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${node%:*}" "$dev/${node#*:}"; done
}

# ---- Inside the namespaces, first with the host's root, then with the new one.
inside() {
  local source=$1 folder=$2 at=$3 cache=$4 root=$2/root
  shift 4
  local began=$SECONDS suite=bookworm mirror
  mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Identifier: Packages' |
    awk -v suite=$suite '$1 == suite && !found {print $2; found = 1}')
  [ -n "$mirror" ] || die "apt on this host has no source for $suite"
  if ! debootstrap --variant=minbase "$suite" "$root" "$mirror" >"$folder/debootstrap.log" 2>&1; then
    tail -n 20 "$folder/debootstrap.log" >&2
    die "debootstrap failed"
  fi
  copy_site "$root"
  mkdir -p "$root$(dirname "$at")"
  git clone --quiet --no-hardlinks "$source" "$root$at"
  git -C "$root$at" checkout --quiet --detach "$(git -C "$source" rev-parse HEAD)"
  chown -R root:root "$root$at"
  say "Debian $suite (minbase) made in $((SECONDS - began)) s: $(package_count "$root") packages, $(disk_mb "$root") MB;" \
    "clone of $(git -C "$source" rev-parse --short=12 HEAD) at $at"

  mount --bind "$root" "$root"
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  devices "$root/dev"
  mount -t tmpfs -o mode=755 bare-run "$root/run"
  if [ -n "$cache" ]; then mkdir -p "$root/ccache" && mount --bind "$cache" "$root/ccache"; fi
  cp "$0" "$root/run/bare_machine.sh"
  hostname bare-machine
  local variables=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb) name
  for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY $(compgen -e | grep '^PIP_' || true); do
    [ -z "${!name:-}" ] || variables+=("$name=${!name}")
  done
  # The same file compiled at another place is a hit if paths are seen relative to the folder above the checkout.
  [ -z "$cache" ] || variables+=(CCACHE_DIR=/ccache CCACHE_BASEDIR="$(dirname "$at")" CCACHE_NOHASHDIR=1)
  cd "$root"
  mkdir .host
  pivot_root . .host
  cd /
  umount -l /.host
  rmdir /.host
  exec env -i "${variables[@]}" /bin/bash /run/bare_machine.sh --machine "$at" "$@" </dev/null
}

# ---- The machine.
machine() {
  local at=$1
  shift
  [ "$(id -u)" -eq 0 ] && unshare --user --map-root-user true || die "no user namespaces in the machine"
  local rc=0 status words began ended bare_mb packages
  bare_mb=$(disk_mb /)
  packages=$(package_count /)
  cd "$at"
  for command in "$@"; do
    say "\$ ./temper $command"
    read -ra words <<<"$command"
    began=$(date +%s)
    status=0
    ./temper "${words[@]}" || status=$?
    if [ $status -eq 0 ]; then say "./temper $command: ok"; else rc=1; say "./temper $command: FAILED with status $status"; fi
    ended=$(date +%s)
    phases "$began" "$ended"
  done
  local clone_mb
  clone_mb=$(disk_mb "$at")
  say "packages installed: $(($(package_count /) - packages)); root $(disk_mb /) MB (was $bare_mb MB)," \
    "of which the clone with its build and runs $clone_mb MB"
  return $rc
}

# Set-up ends with its stamp and a build with the last line of Ninja's log.
phases() {
  local from=$1 to=$2 text='' at
  for phase in "set-up:build/setup.stamp" "build:build/release/.ninja_log"; do
    at=$(stat -c %Y "${phase#*:}" 2>/dev/null || echo 0)
    if [ "$at" -ge "$from" ]; then text+="${phase%%:*} $((at - from)) s, "; from=$at; fi
  done
  say "time: ${text}run $((to - from)) s"
}

case ${1:-} in
  --inside) shift; inside "$@" ;;
  --machine) shift; machine "$@" ;;
  *) outside "$@" ;;
esac
