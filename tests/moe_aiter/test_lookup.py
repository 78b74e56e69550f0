"""Row blocks that programs look up themselves, on the emulator: their places, both makers of the
sum."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator import kernel as emulated_kernel
from gcn_emulator.formats import EmuError
from gcn_emulator.triton_driver import emulate
from kernel_base.arch import arch_named
from kernel_base.tuning import TuningRow
from moe_aiter import grouped
from moe_aiter.grouped import experts_by_choice, experts_looked_up
from moe_aiter.problems import Problem, make_problem
from moe_aiter.routing import sort_choices
from moe_aiter.tuning import DOWN_LOOKUP, SWIGLU_LOOKUP
from tests.moe_aiter.test_experts import assert_close, error_and_budget
from tests.support.offline import compile_only
from tests.support.waits import emulated_waits

GARBAGE = 0x5A5A5A5A
BLOCK_M = 16
TILE = 32  # columns of a down program


def rows(arch: str, tail: bool) -> tuple[TuningRow, TuningRow]:
    """The table's rows of few choices, with small tiles and the sum made by programs behind the
    products (tail), or by the last to arrive."""
    facts = {"rows": 1, "bits": 16, "width": 64, "hidden": 136}
    up, down = (table.select(arch, **facts) for table in (SWIGLU_LOOKUP, DOWN_LOOKUP))
    assert up.constexprs["BLOCK_M"] == BLOCK_M
    more = {"TAIL": tail, "BLOCK_N": TILE, "BLOCK_C": TILE // 2, "BLOCK_T": 4}
    return up, replace(down, constexprs={**down.constexprs, **more})


sums = pytest.mark.parametrize(
    "tail", [False, pytest.param(True, marks=emulated_waits)], ids=["last", "tail"]
)


@pytest.fixture
def scratch(monkeypatch):
    """After a call of this, all that the launches allocate is poisoned; it returns the integers."""
    empty, taken = torch.empty, []

    def poisoned(*shape, dtype, **options):
        out = empty(*shape, dtype=dtype, **options)
        if dtype.is_floating_point:
            return out.fill_(float("nan"))
        taken.append(out.fill_(GARBAGE))
        return out

    def poison():
        monkeypatch.setattr(torch, "empty", poisoned)
        return taken

    yield poison
    monkeypatch.undo()


def run(problem: Problem, tail: bool, *, arch: str = "gfx942", **arguments) -> torch.Tensor:
    out = torch.full_like(problem.x, float("nan"))
    weights = problem.weights | arguments
    with emulate(arch) as driver:
        experts_looked_up(
            problem.x, problem.ids, problem.gamma, **weights, out=out, arch=arch_named(arch),
            rows=rows(arch, tail),
        )  # fmt: skip
    assert len(driver.records) == 2
    return out


@sums
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_an_expert_of_more_than_a_row_block(arch, tail):
    problem = make_problem(18, experts=4, top_k=2, hidden=104, width=40)
    problem.ids[:, 1] = 3
    assert_close(problem, run(problem, tail, arch=arch))


@sums
def test_every_arrival_is_counted(scratch, tail):
    """The sums behind the products wait for the programs of used row blocks, the last to arrive
    knows by all of them: one more and the sums never come, one less and they may come early."""
    problem = make_problem(9, experts=7, top_k=2, shared=2, hidden=136, width=40)
    problem.ids.copy_(problem.ids % 3 * 2)
    taken = scratch()
    out = run(problem, tail)
    arrived = taken[-1]
    used = problem.ids.unique().numel()  # none has more than a block
    slots = problem.ids.numel() // BLOCK_M + 7
    tiles = -(-136 // TILE)
    assert arrived[:tiles].tolist() == [(used if tail else slots) + 2] * tiles
    assert_close(problem, out)


@emulated_waits
@pytest.mark.parametrize("missing", [0, 1])
def test_sums_behind_the_products_wait_for_every_arrival(scratch, monkeypatch, missing):
    """The emulator runs programs in their order, so it would not miss a wait: but with an arrival
    too few it does not end. (One wave a program: the emulator counts branches between barriers.)"""
    problem = make_problem(5, experts=3, top_k=2, shared=1, hidden=40, width=32)
    taken, launch = scratch(), grouped._down_grouped_kernel

    class Short:
        def __getitem__(self, grid):
            taken[-1].fill_(-missing)  # what the first launch left at zero
            return lambda *args, **options: launch[grid](*args, **options | {"num_warps": 1})

    monkeypatch.setattr(emulated_kernel, "MAX_BRANCHES", 2000)
    monkeypatch.setattr(grouped, "_down_grouped_kernel", Short())
    if missing:
        with pytest.raises(EmuError, match="endless loop"):
            run(problem, True)
    else:
        assert_close(problem, run(problem, True))


@emulated_waits
@pytest.mark.parametrize("first_expert", [0, 3])
def test_blocks_are_those_of_a_sort(scratch, first_expert):
    """Experts without a choice, with one, with several blocks; ids of other ranks between."""
    problem = make_problem(40, experts=9, top_k=3, shared=1, hidden=32, width=32)
    generator = torch.Generator().manual_seed(0)
    problem.ids.copy_(torch.randint(0, 11, (40, 3), generator=generator))
    problem.ids[:, 0] = 7
    taken = scratch()
    run(problem, True, first_expert=first_expert)
    with emulate("gfx942"):
        want = sort_choices(
            problem.ids, num_experts=9, block_m=BLOCK_M, first_expert=first_expert,
            arch=arch_named("gfx942"),
        )  # fmt: skip
    slots = want.block_expert.numel()
    choice, expert, begin, end = taken[0].split([120, *[-(-slots // 4) * 4] * 3])
    used = want.block_expert >= 0
    assert torch.equal(expert[:slots], want.block_expert)
    assert torch.equal(begin[:slots][used], want.block_begin[used])
    assert torch.equal(end[:slots][used], want.block_end[used])
    local = int(want.block_end[used].max())
    assert torch.equal(choice[:local], want.choice[:local])


def test_all_waves_have_left_the_places_before_one_reads_them():
    """The emulator does not see a wave read, without a barrier, what another stores."""
    problem = make_problem(60, experts=9, top_k=2, hidden=40, width=32)
    with compile_only("gfx942") as kernels:
        experts_looked_up(
            problem.x, problem.ids, problem.gamma, **problem.weights, out=problem.x,
            arch=arch_named("gfx942"), rows=rows("gfx942", False),
        )  # fmt: skip
    accesses = re.findall(
        r"^\s+(?:(?:buffer|global)_(store|load)|s_(barrier|waitcnt vmcnt\(0\)))",
        kernels[0].asm["amdgcn"],
        re.MULTILINE,
    )
    found = [access or other for access, other in accesses]
    # The counters are zeroed, the ids loaded; places and block stored; the block's choices loaded.
    places = found.index("store", found.index("load"))
    left, read = found[places:].index("waitcnt vmcnt(0)"), found[places:].index("load")
    assert "barrier" in found[places:][left:read]


@sums
@pytest.mark.parametrize("shared", [0, 1])
def test_a_range_of_experts(tail, shared):
    """Ids of other ranks contribute nothing; a rank that nobody chose stores the sum of nothing."""
    problem = make_problem(6, experts=9, top_k=2, shared=shared, hidden=72, width=40)
    local = {name: problem.weights[name][4:7].clone() for name in ("w13", "w2")}
    part = replace(problem, weights=problem.weights | local)
    assert_close(part, run(part, tail, first_expert=4), first_expert=4)
    away = run(part, tail, first_expert=100)
    if shared:
        assert_close(part, away, first_expert=100)
    else:
        assert not away.any()


@sums
def test_an_addend_comes_last(tail):
    """As where the shared experts have another width: a sum of its own, rounded once with it."""
    problem = make_problem(5, experts=4, top_k=2, shared=0, hidden=72, width=40)
    addend = torch.randn(5, 72, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = problem.reference() + addend.double()
    eager = problem.reference(torch.bfloat16).double() + addend.double()
    out = run(problem, tail, addend=addend)
    assert (out.double() - want).norm() <= 2 * (eager - want).norm()
    assert (out.double() - problem.reference()).norm() > 2 * (eager - want).norm()


@emulated_waits
def test_who_finds_the_blocks_and_who_sums_does_not_show(scratch):
    problem = make_problem(9, experts=4, top_k=2, hidden=104, width=40)
    out = torch.full_like(problem.x, float("nan"))
    with emulate("gfx942"):
        experts_by_choice(
            problem.x, problem.ids, problem.gamma, **problem.weights, out=out,
            arch=arch_named("gfx942"), rows=rows("gfx942", False),
        )  # fmt: skip
    scratch()
    assert torch.equal(out, run(problem, False))
    assert torch.equal(out, run(problem, True))


def test_row_blocks_of_two_sizes_are_refused():
    problem = make_problem(5, experts=4, hidden=72, width=40)
    up, down = rows("gfx942", False)
    small = replace(up, constexprs={**up.constexprs, "BLOCK_M": 32})
    with pytest.raises(ValueError, match="BLOCK_M is 32 in the gate/up row and 16 in the down row"):
        experts_looked_up(
            problem.x, problem.ids, problem.gamma, **problem.weights, out=problem.x,
            arch=arch_named("gfx942"), rows=(small, down),
        )  # fmt: skip


@emulated_waits
def test_the_oracle_sees_faults():
    problem = make_problem(19, experts=6, hidden=136, width=40)
    out = run(problem, True)
    moved = problem.ids.clone()
    moved[7, 0] = (moved[7, 0] + 1) % 6
    for name, changed in {
        "a choice of another expert": {"ids": moved},
        "gammas of the next token": {"gamma": problem.gamma.roll(1, 0)},
    }.items():
        error, budget = error_and_budget(replace(problem, **changed), out)
        assert error > budget, name
    last = out.clone()
    last[:, 128:] = last[:, :8]
    error, budget = error_and_budget(problem, last)
    assert error > budget, "the last columns"
