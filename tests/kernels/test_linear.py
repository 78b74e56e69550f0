"""linear of few tokens in Triton: emulated against float64, and on a GPU at the layers' sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator import kernel as emulated_kernel
from gcn_emulator.formats import EmuError
from gcn_emulator.triton_driver import emulate
from inkling_rocm.kernels.linear import MAX_TOKENS, Linear, linear, make_tickets
from inkling_rocm.kernels.linear_tuning import TILES
from inkling_rocm.ops.registry import OpContext
from kernel_base.arch import arch_named, arch_of_device
from tests.support.offline import compile_only
from tests.support.waits import emulated_waits


def problem(tokens, columns, depth, dtype, device="cpu"):
    x = torch.randn(tokens, depth + 8, device=device).to(dtype)[:, :depth]  # rows of another pitch
    w = (torch.randn(columns, depth, device=device) * depth**-0.5).to(dtype)
    return x, w


def run(x, w, arch, **options):
    out = torch.full((len(x), len(w)), float("nan"), device=x.device, dtype=x.dtype)
    return linear(x, w, arch=arch, out=out, **options)


def within_budget(got, x, w):
    exact = x.double() @ w.double().t()
    eager = torch.nn.functional.linear(x, w).double()
    error, allowed = (got.double() - exact).norm(), 2 * (eager - exact).norm()
    # One chain of additions where a library may add a tree.
    chain = torch.finfo(torch.float32).eps * x.shape[1] ** 0.5
    return bool(error <= allowed + max(torch.finfo(x.dtype).eps / 4, chain) * exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 13])
def test_against_float64(arch, tokens, dtype):
    x, w = problem(tokens, 61, 600, dtype)
    with emulate(arch):
        got = run(x, w, arch)
    assert not torch.isnan(got).any()
    assert within_budget(got, x, w)


@pytest.mark.parametrize("tail", [0, pytest.param(8, marks=emulated_waits)])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_slices_of_the_depth_in_one_launch(arch, dtype, tail):
    """Two token blocks, three slices, the last one short; added by the program that ends last, or
    by programs of their own, which no row of gfx942 or gfx950 asks for. A row does not depend on
    the others."""
    depth = 600
    row = TILES.select(arch, tokens=21, bits=dtype.itemsize * 8, depth=depth, columns=61)
    sizes = {"BLOCK_M": 16, "SLICE": 256, "TAIL": tail, "W_FIRST": tail > 0}
    row = replace(row, constexprs=row.constexprs | sizes)
    x, w = problem(21, 61, depth, dtype)
    tickets = make_tickets(x.device)
    with emulate(arch, counters=True) as driver:
        got = run(x, w, arch, row=row, tickets=tickets)
        part = run(x[3:7], w, arch, row=row, tickets=tickets)
    assert [record.name for record in driver.records] == ["_linear_tiles_kernel"] * 2
    # (What waits reads the count with an atomic or, as Triton 3.8 compiles it, with a load.)
    tiles = 2 * -(-61 // row.constexprs["BLOCK_N"])
    products, tails = tiles * 3, tiles * 2 if tail else 0
    atomics = driver.records[0].counters.total("global_atomic")
    assert atomics in (products + tails, products + 2 * tails), "each arrives"
    assert not tickets.any(), "the kernel leaves the tickets as it found them"
    assert within_budget(got, x, w)
    assert torch.equal(part, got[3:7])


@emulated_waits
@pytest.mark.parametrize("missing", [0, 1])
def test_tails_wait_for_every_slice(missing, monkeypatch):
    """With a product too few that has arrived the wait does not end. (One wave a program: the
    emulator counts branches between barriers.)"""
    monkeypatch.setattr(emulated_kernel, "MAX_BRANCHES", 2000)
    row = TILES.select("gfx942", tokens=21, bits=16, depth=300, columns=30)
    sizes = {"BLOCK_M": 16, "BLOCK_N": 16, "SLICE": 128, "TAIL": 8}
    row = replace(row, constexprs=row.constexprs | sizes, options=row.options | {"num_warps": 1})
    x, w = problem(21, 30, 300, torch.bfloat16)
    tickets = make_tickets(x.device) - missing
    with emulate("gfx942"):
        if missing:
            with pytest.raises(EmuError, match="endless loop"):
                run(x, w, "gfx942", row=row, tickets=tickets)
        else:
            assert within_budget(run(x, w, "gfx942", row=row, tickets=tickets), x, w)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("depth", [512, 600])
def test_the_depth_in_parts_of_one_program(arch, depth):
    sizes = {"PARTS": 4, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 64}
    row = TILES.select(arch, tokens=7, bits=16, depth=depth, columns=61)
    row = replace(row, constexprs=sizes)
    x, w = problem(7, 61, depth, torch.bfloat16)
    with emulate(arch) as driver:
        got = run(x, w, arch, row=row)
    assert [record.name for record in driver.records] == ["_linear_parts_kernel"]
    assert within_budget(got, x, w)


def test_no_amd_row_asks_for_programs_that_wait():
    """They have run on an H200 only."""
    waiting = {row.arch for row in TILES.rows if row.constexprs.get("TAIL")}
    assert waiting == {"sm90"}


def test_tails_wait_on_hopper():
    """In the code of the measured rows too an acquiring read comes before the slices' sums."""
    x = torch.empty(128, 6144, dtype=torch.bfloat16, device="meta")
    w = torch.empty(1664, 6144, dtype=torch.bfloat16, device="meta")
    row = TILES.select("sm90", tokens=128, bits=16, depth=6144, columns=1664)
    assert row.constexprs["TAIL"] > 0
    with compile_only("sm90") as kernels:
        linear(x, w, arch="sm90", row=row, tickets=torch.empty(64, device="meta").int())
    text = kernels[-1].asm["ptx"]
    waits, sums = text.index("acquire"), text.index("ld.global.cg")
    assert waits < sums


def test_the_budget_sees_a_dropped_column():
    x, w = problem(3, 40, 64, torch.bfloat16)
    dropped = w.clone()
    dropped[:, 5] = 0
    with emulate("gfx942"):
        assert not within_budget(run(x, dropped, "gfx942"), x, w)


def test_wrong_arguments_are_named():
    x, w = problem(2, 40, 64, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        linear(x, w[:, :32], arch="gfx942")
    with pytest.raises(ValueError, match="at most"):
        linear(torch.zeros(MAX_TOKENS + 1, 64), w, arch="gfx942")


def test_which_products_are_the_librarys():
    """Above 48 tokens: those of many columns, which fill a GPU, and those of a short depth."""
    op = Linear(OpContext(config=None, arch=arch_named("gfx942"), dtype="", tp_size=1))
    launched = {}
    for tokens, columns, depth in ((49, 40, 1032), (49, 40, 64), (49, 2056, 1032), (48, 40, 64)):
        x, w = problem(tokens, columns, depth, torch.bfloat16)
        with emulate("gfx942") as driver:
            assert within_budget(op(x, w), x, w)
        launched[tokens, columns, depth] = len(driver.records)
    assert list(launched.values()) == [1, 0, 0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 17, 33, 48, 49, 100, 128, 129])
@pytest.mark.parametrize(
    ("columns", "depth"), [(1664, 6144), (1408, 6144), (6144, 1024), (4096, 4096), (6656, 4096)]
)
def test_sizes_of_the_layers(columns, depth, tokens, dtype):
    device = torch.device("cuda")
    arch = arch_of_device(device)
    x, w = problem(tokens, columns, depth, dtype, device)
    op = Linear(OpContext(config=None, arch=arch, dtype="", tp_size=1))
    got = op(x, w)
    assert within_budget(got, x, w)
    assert torch.equal(got, op(x, w))
