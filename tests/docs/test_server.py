"""docs/server.md names every error code, endpoint and limit that there is."""

import re
from pathlib import Path

from inkling_rocm.server.app import _POST_ROUTES
from inkling_rocm.server.prompts import MAX_CHOICES
from inkling_rocm.server.protocol import MAX_N, MAX_STOPS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_error_code_is_there():
    used = {"not_found", "no_token_possible"}
    package = ROOT / "inkling_rocm"
    engine = ("validate", "constraint", "engine_thread")
    files = [
        *(package / "server").glob("*.py"),
        *(package / f"engine/{name}.py" for name in engine),
    ]
    for file in files:
        used |= set(re.findall(r'\bcode ?= ?"(\w+)"', file.read_text(encoding="utf-8")))
    rows = re.findall(r"^\| [45]\d\d \| (.*?) \|", TEXT, re.M)
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row)} == used


def test_every_endpoint_is_there():
    assert all(f"`POST {path}`" in TEXT for path, _, _ in _POST_ROUTES)


def test_limits_are_those_of_the_code():
    assert f"`n` is at most {MAX_N}, prompts times `n` at most {MAX_CHOICES}," in TEXT
    assert f"`stop` at most {MAX_STOPS} strings" in TEXT
