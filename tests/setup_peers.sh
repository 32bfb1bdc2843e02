#!/usr/bin/env bash
# Makes the environments in which `temper bench engine --against …` runs its peers: tests/setup_peers.sh [NAME…], of torch, vllm and
# llama.cpp, by default all. Each lies in build/peers/NAME and is made once from its pinned list (tests/python/): torch is the
# environment of tests/setup_python.sh (2.3 GB), vllm takes 3.3 GB, llama.cpp half a GB and, because it is compiled, some ten minutes on two
# cores. What cannot be made is an error that says why.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
peers=$root/build/peers
say() { printf 'temper: %s\n' "$*" >&2; }
fail() { tail -n 30 "$2" >&2; say "no environment for the peer $1 (whole log: $2)"; exit 1; }

pip() { "$dir/bin/python3" -m pip --disable-pip-version-check "$@"; }
# Whether build/peers/$1 was made from this script and list.
fresh() { [ "$(cat "$dir/stamp" 2>/dev/null)" = "$want" ] && [ -x "$dir/bin/python3" ]; }

# torch asks for all of CUDA to be installed beside it; the list is what its import needs, and `toolkit` what a CUDA toolkit brings too.
make_vllm() {
  works() { "$dir/bin/python3" -c 'import torch, vllm; torch.ones(2) @ torch.ones(2)'; }
  install() { pip install --no-deps --only-binary=:all: -r "$1"; }
  python3 -m venv "$dir" && grep -v '# toolkit$' "$list" >"$dir/few.txt" && install "$dir/few.txt" && { works || { install "$list" && works; }; }
}

# The package is built for this CPU (-march=native). Beside its libraries lie copies in which the kernels may use less: peers are capped to
# what ours uses.
make_llama_cpp() {
  local archive source isa wide lib
  command -v g++ cmake ninja >/dev/null || { echo 'llama.cpp needs g++, cmake and ninja to be compiled'; return 1; }
  python3 -m venv "$dir" && mkdir "$dir/source" &&
    pip install --no-deps --only-binary=:all: -r <(grep -v llama-cpp-python "$list") &&
    pip download --no-deps --no-binary=:all: -d "$dir/source" "$(grep -o '^llama-cpp-python==[0-9.]*' "$list")" || return 1
  archive=$(echo "$dir"/source/*.tar.gz)
  tar -C "$dir/source" -xf "$archive" || return 1
  source=${archive%.tar.gz}
  CMAKE_ARGS='-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF' \
    CMAKE_BUILD_PARALLEL_LEVEL=2 pip install --no-deps "$source" || return 1
  lib=$("$dir/bin/python3" -c 'import llama_cpp, pathlib; print(pathlib.Path(llama_cpp.__file__).parent / "lib")') || return 1
  for isa in avx512 avx2; do
    wide=$([ $isa = avx512 ] && echo ON || echo OFF)
    cmake -G Ninja -S "$source/vendor/llama.cpp" -B "$dir/source/$isa" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF \
      -DGGML_LLAMAFILE=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=$wide \
      -DGGML_AVX512_VBMI=$wide -DGGML_AVX512_VNNI=$wide -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
      -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF &&
      cmake --build "$dir/source/$isa" --target ggml-cpu -j2 &&
      cp -a "$lib" "$dir/lib/llama_cpp-$isa" && cp -a "$dir/source/$isa"/bin/libggml-cpu.so* "$dir/lib/llama_cpp-$isa/" || return 1
  done
  rm -rf "$dir/source"
}

mkdir -p "$peers"
exec 9>"$peers/lock" # two runs at once must not build them both
flock 9
[ $# -gt 0 ] || set -- torch vllm llama.cpp
for name in "$@"; do
  dir=$peers/$name
  case $name in
    torch)
      "$root/tests/setup_python.sh" 9>&- >/dev/null || { say "no environment for the peer torch"; exit 1; }
      [ -e "$dir" ] || ln -s ../python "$dir"
      continue ;;
    vllm) list=$root/tests/python/vllm.txt ;;
    llama.cpp) list=$root/tests/python/llama_cpp.txt ;;
    *) say "'$name' is no peer: torch, vllm, llama.cpp"; exit 2 ;;
  esac
  want=$(cat "$list" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
  if fresh; then continue; fi
  say "making the environment of the peer $name in $dir (minutes the first time)"
  rm -rf "$dir"
  "make_${name//./_}" >"$dir.log" 2>&1 9>&- </dev/null || fail "$name" "$dir.log"
  echo "$want" >"$dir/stamp"
done
echo "$peers"
