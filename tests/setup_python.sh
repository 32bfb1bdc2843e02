#!/usr/bin/env bash
# Makes the Python environment of the long test tier and prints its interpreter: tests/setup_python.sh [DIR], by default
# build/python. Returns at once when DIR was made from the same requirements. A missing or broken package is an error.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
list=$root/tests/python/requirements.txt
dir=$(realpath -m "${1:-$root/build/python}")
python=$dir/bin/python3
want=$(cat "$list" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
say() { printf 'temper: %s\n' "$*" >&2; }

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock" # two test runs at once must not build it both
flock 9
if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$want" ] && [ -x "$python" ]; then echo "$python"; exit 0; fi
[ ! -e "$dir" ] || [ -f "$dir/pyvenv.cfg" ] || { say "$dir exists and is no Python environment"; exit 1; }

say "making the tests' Python environment in $dir (a few GB; minutes the first time)"
rm -rf "$dir"
log=$dir.log
install() { "$python" -m pip install --disable-pip-version-check --no-deps --only-binary=:all: -r "$1"; }
works() { "$python" -c 'import gguf, jinja2, numpy, openai, safetensors, tokenizers, torch, transformers, trl.trainer.grpo_trainer; torch.ones(2) @ torch.ones(2)'; }
# torch asks for all of CUDA, triton included, to be installed beside it; the list is what its import needs.
{
  python3 -m venv "$dir" && grep -v '# toolkit$' "$list" >"$dir/few.txt" && install "$dir/few.txt" && { works || { install "$list" && works; }; }
} >"$log" 2>&1 9>&- </dev/null || { tail -n 30 "$log" >&2; say "no Python environment for the tests (whole log: $log)"; exit 1; }
echo "$want" >"$dir/stamp"
echo "$python"
