#!/usr/bin/env bash
# Starts the SGLang server with inkling-rocm's model. Arguments are `sglang.launch_server`'s; anything that does not
# begin with a dash is run instead (`docker run IMAGE inkling-rocm doctor --engine sglang`).
set -euo pipefail
if [ $# -eq 0 ] || [ "${1#-}" != "$1" ]; then
    set -- inkling-rocm serve --engine sglang --host 0.0.0.0 --port "${PORT:-30000}" "$@"
fi
exec "$@"
