"""Every tuning row of the emulated architectures, compiled and run with its own tiles."""

import pytest
import torch

from gcn_emulator.triton_driver import emulate
from kernel_base.arch import arch_named
from kernel_base.register import entries
from triton_attn.tuning import PROFILE_WRITER

ARCHS = ("gfx942", "gfx950")
ROWS = [
    (entry, row)
    for entry in entries()
    if entry.name.startswith("triton_attn.")
    for arch in ARCHS
    for row in entry.table.for_arch(arch)
]


def check(entry, row):
    for case in entry.cases(row.arch, row):
        with emulate(row.arch) as driver:  # races are errors
            outcomes = case.run(torch.device("cpu"))
        for outcome in outcomes:
            norm = outcome.reference.norm()
            error = (outcome.out.double() - outcome.reference).norm() / norm
            eager = (outcome.eager.double() - outcome.reference).norm() / norm
            assert error <= 2 * eager + torch.finfo(outcome.out.dtype).eps, case.name
        for record in driver.records:
            static = record.static
            assert static.vgpr_spills == 0, record.name
            assert static.scratch == 0, record.name
            assert static.lds <= arch_named(row.arch).lds_bytes, record.name
            if "merge" not in record.name:
                assert any(name.startswith("v_mfma") for name in static.instructions), record.name


@pytest.mark.full
@pytest.mark.parametrize(
    ("entry", "row"),
    ROWS,
    ids=[f"{e.name.split('.')[1]}-{r.arch}-{i}" for i, (e, r) in enumerate(ROWS)],
)
def test_row(entry, row):
    check(entry, row)


@pytest.mark.parametrize("arch", ARCHS)
def test_writer_row(arch):
    entry = next(e for e, _ in ROWS if e.table is PROFILE_WRITER)
    check(entry, PROFILE_WRITER.select(arch, bits=16))
