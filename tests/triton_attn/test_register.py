"""Every tuning row of the emulated architectures, compiled and run with its own tiles."""

import re

import pytest
import torch

from gcn_emulator.triton_driver import emulate
from kernel_base.arch import arch_named
from triton_attn import attention_prefill
from triton_attn.cases import make_case
from triton_attn.register import ENTRIES
from triton_attn.tuning import PROFILE_WRITER

ARCHS = ("gfx942", "gfx950")
ROWS = [(entry, row) for entry in ENTRIES for arch in ARCHS for row in entry.table.for_arch(arch)]


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


def narrow_loads(arch, page_size, head_dim, window):
    """Vector loads of less than 8 bytes in the prefill kernel that the table chooses."""
    case = make_case(
        (70,), (200,), heads=1, kv_heads=1, head_dim=head_dim, window=window, extent=48,
        dtype=torch.bfloat16, device=torch.device("cpu"), page_size=page_size,
    )  # fmt: skip
    with emulate(arch) as driver:
        attention_prefill(
            case.q, case.k_pages, case.v_pages, cu_seqlens_q=case.cu_seqlens_q,
            q_start=case.q_start, score_mod=case.bias, arch=arch, **case.paged,
        )  # fmt: skip
    loads = [n for n in driver.records[-1].static.instructions if re.match(r"(buf|glo).*_load_", n)]
    assert loads
    return [name for name in loads if not re.search(r"dwordx[24]$", name)]


@pytest.mark.parametrize("window", [0, 48])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("arch", ARCHS)
def test_bias_keys_and_values_are_read_8_bytes_at_a_time_or_more(arch, head_dim, window):
    assert narrow_loads(arch, 128, head_dim, window) == []


def test_page_numbers_of_small_pages_are_narrow_loads():
    """The check above notices a narrow load."""
    assert narrow_loads("gfx950", 16, 128, 48) == ["buffer_load_dword"]


@pytest.mark.parametrize("arch", ARCHS)
def test_writer_row(arch):
    entry = next(e for e, _ in ROWS if e.table is PROFILE_WRITER)
    check(entry, PROFILE_WRITER.select(arch, bits=16))
