#!/usr/bin/env bash
# Lays SGLang's Triton kernels out as an importable peer: bench/peers/setup.sh DIR. Nothing of DIR is ever committed.
# Downloads the wheel, keeps the few kernel files, and puts stubs where they import the rest of SGLang.
set -eu
dir=$1; here=$(dirname "$(readlink -f "$0")"); tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m pip download -q --no-deps --python-version 3.11 --only-binary=:all: -d "$tmp" sglang==0.5.23
(cd "$tmp" && python3 -m zipfile -e sglang-*.whl x)
mkdir -p "$dir/sglang/kernels/ops/attention" "$dir/sglang/kernels/ops/moe" "$dir/sglang/kernels/jit" "$dir/sglang/srt/utils"
for f in attention/extend_attention attention/decode_attention attention/score_mod moe/inkling_moe; do
  cp "$tmp/x/sglang/kernels/ops/$f.py" "$dir/sglang/kernels/ops/$f.py"
done
for d in sglang sglang/kernels sglang/kernels/ops sglang/kernels/ops/attention sglang/kernels/ops/moe sglang/kernels/jit sglang/srt; do
  : > "$dir/$d/__init__.py"
done
cp "$here/stub_environ.py" "$dir/sglang/srt/environ.py"
cp "$here/stub_utils.py" "$dir/sglang/srt/utils/__init__.py"
cp "$here/stub_utils.py" "$dir/sglang/srt/utils/common.py"
cp "$here/stub_jit_utils.py" "$dir/sglang/kernels/jit/utils.py"
echo "peer ready in $dir (put it on PYTHONPATH)"
