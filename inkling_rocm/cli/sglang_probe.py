"""Which Inkling SGLang would serve here: run as a process of its own, prints one line of JSON.

`python -m inkling_rocm.cli.sglang_probe` loads SGLang's plugins and asks its model registry, as a
server does at start.
What SGLang only logs (a plugin that fails) is in the answer; what it raises ends the process.
"""

from __future__ import annotations

import json
import logging
import os
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec

ARCHITECTURE = "InklingForConditionalGeneration"
GROUP = "sglang.srt.plugins"


def installed_version(name: str) -> str | None:
    """Version of a distribution, None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def pinned_version() -> str | None:
    """The SGLang version the `sglang` extra names; None: inkling-rocm has no metadata here."""
    try:
        lines = requires("inkling-rocm") or []
    except PackageNotFoundError:
        return None
    found = [line for line in lines if line.startswith("sglang==")]
    return found[0].split(";")[0].removeprefix("sglang==").strip() if found else None


class _Messages(logging.Handler):
    """Keeps error messages, each with the exception that came with it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        reason = record.exc_info[1] if record.exc_info else None
        self.lines.append(record.getMessage() + (f": {reason!r}" if reason else ""))


def probe() -> dict:
    """What `inkling-rocm doctor --engine sglang` reports about this Python's SGLang."""
    answer: dict = {
        "sglang": installed_version("sglang"),
        "pinned": pinned_version(),
        "cutlass": installed_version("nvidia-cutlass-dsl"),
        "external": os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE", ""),
        "allowed": os.environ.get("SGLANG_PLUGINS", ""),
        "plugins": [
            entry.name
            for entry in entry_points(group=GROUP)
            if entry.value.startswith("inkling_rocm.")
        ],
        "errors": [],
        "model": None,
        "refusal": None,
    }
    if answer["sglang"] is None or find_spec("sglang") is None:
        return answer
    messages = _Messages()
    logging.getLogger(GROUP).addHandler(messages)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.models.registry import ModelRegistry

    model = ModelRegistry.models.get(ARCHITECTURE)
    if model is not None:
        answer["model"] = f"{model.__module__}.{model.__name__}"
        # The plugin's stand-in, which ends a server with this reason (sglang_plugin/entry.py).
        answer["refusal"] = getattr(model, "refusal", None)
    answer["errors"] = messages.lines
    return answer


if __name__ == "__main__":
    # On a line of its own: imports print too.
    print("\n" + json.dumps(probe()))
