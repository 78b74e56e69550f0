"""Decode and verify: what a program takes never shows in the result, and how the bias is read."""

import inspect
import re

import pytest
import torch

from gcn_emulator.triton_driver import assembly, emulate
from tests.triton_attn.problems import DECODE_OPTIONS, make_problem, run, small_row, within_budget
from triton_attn import DecodeWorkspace, attention_decode, decode, decode_kernels
from triton_attn.register import ENTRIES
from triton_attn.tuning import DECODE

ARCHS = ("gfx942", "gfx950")
BF16 = torch.bfloat16


@pytest.mark.parametrize("here", [True, False], ids=["merged by the last", "merged by a launch"])
@pytest.mark.parametrize(
    ("entry", "q_lens", "window"),
    [("decode", (1, 1, 1), 0), ("verify", (3, 1, 2), 0), ("verify", (3, 2, 1), 70)],
    ids=["decode", "verify", "window"],
)
def test_groups_and_units_are_the_same_bits(target, entry, q_lens, window, here):
    """Many programs take one unit each, few take a group: the batch decides, not the result."""
    problem = make_problem(q_lens, (170, 40, 97), heads=4, window=window, dtype=BF16)
    outs = []
    for fill in (1_000_000, 0):
        row = small_row(target.arch, DECODE_OPTIONS, UNITS=4, MERGE_HERE=here, FILL=fill)
        outs.append(run(target, problem, entry, row=row, lse=True))
    assert within_budget(problem, outs[0][0])
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("here", [True, False], ids=["merged by the last", "merged by a launch"])
def test_row_blocks(target, monkeypatch, here):
    """Tokens of a request in several tiles, the last one partly filled; every ticket is put
    back."""
    monkeypatch.setattr(decode, "tile_rows", lambda *_: 8)
    problem = make_problem((5, 0, 2), (150, 9, 31), heads=4, dtype=BF16)
    work = DecodeWorkspace.allocate(
        target.device, max_requests=3, num_kv_heads=1, max_rows=20, head_dim=64
    )
    work.partial.fill_(float("nan"))
    row = small_row(target.arch, DECODE_OPTIONS, MERGE_HERE=here)
    out = run(target, problem, "verify", row=row, workspace=work)
    assert within_budget(problem, out)
    assert not work.tickets.any()


def test_a_batch_without_keys_is_zero():
    """max_kv_len may be the largest of the lengths: 0 when every row is padding."""
    problem = make_problem((1, 1), (1, 1), dtype=BF16)
    paged = {**problem.paged, "kv_len": torch.zeros(2, dtype=torch.int32)}
    out = torch.full_like(problem.q, float("nan"))
    with emulate("gfx942"):
        attention_decode(
            problem.q, problem.k_pages, problem.v_pages, max_kv_len=0, out=out, arch="gfx942",
            **paged,
        )  # fmt: skip
    assert not out.any()


def profile_loads(asm: str) -> list[str]:
    """Mnemonics of the vector loads whose source line lies in `_profile_tile`."""
    lines, first = inspect.getsourcelines(decode_kernels._profile_tile.fn)
    file = re.search(r'\.file\s+(\d+)\s.*"decode_kernels\.py"', asm)
    assert file, "no line table"
    at, found = (0, 0), []
    for line in asm.splitlines():
        if place := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            at = (int(place[1]), int(place[2]))
        load = re.match(r"\s*((?:buffer|global|flat)_load_\w+)", line)
        if load and at[0] == int(file[1]) and first <= at[1] < first + len(lines):
            found.append(load[1])
    return found


def narrow(loads: list[str]) -> list[str]:
    return [load for load in loads if not re.search(r"dwordx[234]", load)]


def loads_of_row(arch, row) -> list[str]:
    """Of the bias, in every kernel that the row's cases launch."""
    entry = next(e for e in ENTRIES if e.table is DECODE)
    with emulate(arch) as driver:
        for case in entry.cases(arch, row):
            case.run(torch.device("cpu"))
    kernels = {record.key for record in driver.records if "merge" not in record.name}
    found = [profile_loads(assembly(key)) for key in kernels]
    assert all(found), "a kernel reads no bias"
    return [load for loads in found for load in loads]


WIDE = [
    pytest.param(
        arch, row, id=f"{arch}-{i}", marks=[] if (arch, i) == ("gfx950", 4) else [pytest.mark.full]
    )
    for arch in ARCHS
    for i, row in enumerate(DECODE.for_arch(arch))
]


@pytest.mark.parametrize(("arch", "row"), WIDE)
def test_the_bias_is_read_with_wide_loads(arch, row):
    """8 bytes a lane or more, whatever the tile and the workgroup."""
    assert not narrow(loads_of_row(arch, row))


def test_narrow_loads_of_the_bias_would_be_seen(monkeypatch):
    monkeypatch.setattr(decode, "_pack", lambda *_: 1)
    few = {"window": (1, None), "rows": (None, 32)}
    row = next(r for r in DECODE.for_arch("gfx950") if r.when == few)
    assert narrow(loads_of_row("gfx950", row))
