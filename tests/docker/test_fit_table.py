"""docker/README.md's table of what fits where is what the weight table says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inkling_rocm.checkpoint import weight_bytes
from inkling_rocm.config import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = {"Inkling": "inkling.json", "Inkling-Small": "inkling_small.json"}


def rows() -> list[list[str]]:
    text = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    table = text.split("<!-- fit -->\n")[1].split("<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


@pytest.mark.parametrize("row", rows()[2:], ids=lambda row: f"{row[0]}-TP{row[1]}")
def test_fit(row):
    capacities = [int(name.split()[1]) for name in rows()[0][3:]]
    config = load_config(ROOT / "tests" / "data" / "configs" / CONFIGS[row[0]])
    weights = weight_bytes(config, torch.bfloat16, int(row[1])) / 1e9
    left = [f"{size - weights:.1f}" if weights < size else "no" for size in capacities]
    assert row[2:] == [f"{weights:.1f}", *left]
