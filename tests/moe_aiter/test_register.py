"""Every tuning row of every launcher, through the kernel register's own cases and judgement."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from inkling_rocm.verify.cases import run_row
from moe_aiter.register import ENTRIES

ROWS = [
    pytest.param(entry, arch, row, id=f"{entry.name}-{arch}-{index}")
    for entry in ENTRIES
    for arch in ("gfx942", "gfx950")
    for index, row in enumerate(entry.table.for_arch(arch))
]


@pytest.mark.full
@pytest.mark.parametrize(("entry", "arch", "row"), ROWS)
def test_row(entry, arch, row):
    assert run_row(entry, arch, row).failures == []


def test_both_products_of_a_pair_agree_on_their_row_block():
    """One sort serves both, so the tables must choose one BLOCK_M for the same facts."""
    tables = {entry.name: entry.table for entry in ENTRIES}
    up, down = tables["moe_aiter.swiglu_grouped"], tables["moe_aiter.down_grouped"]
    for arch in {row.arch for row in up.rows}:
        for rows in (0, 1, 12, 13, 24, 25, 48, 49, 95, 96, 1000):
            for bits, bulk in itertools.product((16, 32), (False, True)):
                facts = {"rows": rows, "bits": bits, "width": 384, "hidden": 6144, "bulk": bulk}
                first, second = up.select(arch, **facts), down.select(arch, **facts)
                assert first.constexprs["BLOCK_M"] == second.constexprs["BLOCK_M"]
