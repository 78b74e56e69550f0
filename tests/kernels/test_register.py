"""Every tuning row of every layer kernel, through the kernel register's own cases and judgement."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from inkling_rocm.kernels.register import ENTRIES
from inkling_rocm.verify.cases import run_row

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
