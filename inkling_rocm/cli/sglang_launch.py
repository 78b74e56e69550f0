"""`inkling-rocm serve --engine sglang ...` is `python -m sglang.launch_server ...`, after a check
that SGLang would serve our model.

The arguments are SGLang's and go to it as they are, so they are not parsed here.
"""

from __future__ import annotations

import os
import sys

from inkling_rocm.cli.doctor_sglang import sglang_lines


def sglang_command(arguments: list[str]) -> list[str] | None:
    """The command for `inkling-rocm` called with `arguments`; None when they do not ask for
    SGLang."""
    if not arguments or arguments[0] != "serve":
        return None
    rest, engine = [], None
    words = iter(arguments[1:])
    for word in words:
        if word == "--engine":
            engine = next(words, None)
        elif word.startswith("--engine="):
            engine = word.removeprefix("--engine=")
        else:
            rest.append(word)
    if engine != "sglang":
        return None
    return [sys.executable, "-m", "sglang.launch_server", *rest]


def launch(command: list[str]) -> None:
    """Become SGLang's server. Exits with 1 and the reasons when it would not serve our model."""
    lines, missing = sglang_lines()
    if missing:
        sys.exit("\n".join([*lines, "SGLang was not started."]))
    os.execv(command[0], command)
