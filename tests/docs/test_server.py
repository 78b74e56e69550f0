"""docs/server.md names every error code and endpoint that there is."""

import re
from pathlib import Path

from inkling_rocm.server.app import _POST_ROUTES
from inkling_rocm.server.prompts import MAX_CHOICES
from inkling_rocm.server.protocol import MAX_N, MAX_STOPS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_error_code_is_there():
    used = {"not_found", "no_token_possible"}
    files = [
        *(ROOT / "inkling_rocm/server").glob("*.py"),
        *(ROOT / "inkling_rocm/engine").glob("*.py"),
    ]
    for file in files:
        used |= set(re.findall(r'\bcode ?= ?"(\w+)"', file.read_text(encoding="utf-8")))
    table = TEXT[TEXT.index("## Errors") : TEXT.index("## Its end")]
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", table))
    assert named == used


def test_every_endpoint_is_there():
    assert all(f"`POST {path}`" in TEXT for path, _, _ in _POST_ROUTES)


def test_limits_are_those_of_the_code():
    for limit in (
        f"`n` is at most {MAX_N},",
        f"at most {MAX_CHOICES},",
        f"at most {MAX_STOPS} strings",
    ):
        assert limit in TEXT
