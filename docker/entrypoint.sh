#!/usr/bin/env bash
# Starts SGLang's server with inkling-rocm's model, once the doctor agrees that SGLang would serve it. Arguments are
# `sglang.launch_server`'s; anything that does not begin with a dash is run instead (`docker run IMAGE bash`).
set -euo pipefail
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    exec "$@"
fi
inkling-rocm doctor --engine sglang
exec python3 -m sglang.launch_server --host 0.0.0.0 --port "${PORT:-30000}" "$@"
