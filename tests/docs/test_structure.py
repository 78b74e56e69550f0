"""docs/structure.md names files and folders that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([a-z_]+(?:/[a-z_]+)*(?:/|/[a-z_]+\.py|\.py))`")


def missing(text: str) -> list[str]:
    """What a text names that is nowhere: paths from the root, below inkling_rocm/, or a file's name
    alone."""
    return [
        name
        for name in NAMED.findall(text)
        if not (ROOT / name).exists()
        and not (ROOT / "inkling_rocm" / name).exists()
        and ("/" in name or not any(ROOT.glob(f"*/**/{name}")))
    ]


def test_every_name_is_there():
    text = (ROOT / "docs/structure.md").read_text()
    assert len(NAMED.findall(text)) > 60
    assert missing(text) == []


def test_the_check_can_fail():
    text = "`engine/core.py` `engine/heart.py` `kernel_base/` `core.py` `heart.py`, `nowhere/`"
    assert missing(text) == ["engine/heart.py", "heart.py", "nowhere/"]
