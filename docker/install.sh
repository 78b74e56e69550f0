#!/usr/bin/env bash
# Installs inkling-rocm into an SGLang image's Python without changing any package that is already there.
# Usage: install.sh SOURCE_FOLDER SGLANG_VERSION. PYTHON names the interpreter (default: python3).
set -euo pipefail
source_folder="$1"
sglang_version="$2"
here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-python3}"
held="$(mktemp)"
# Debian's marker guards against what held.py checks below.
export PIP_BREAK_SYSTEM_PACKAGES=1
trap 'rm -f "$held"' EXIT

"$python" "$here/held.py" require sglang "$sglang_version"
"$python" "$here/held.py" write "$held"
"$python" -m pip install --no-cache-dir --constraint "$held" --requirement "$here/requirements.txt"
"$python" -m pip install --no-cache-dir --no-deps "$source_folder"
"$python" "$here/held.py" check "$held"
