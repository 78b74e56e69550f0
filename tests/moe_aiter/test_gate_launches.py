"""The gate's one-launch forms on the emulator: which calls take them, that they select what two
launches do, and that programs behind the products wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator import kernel as emulated_kernel
from gcn_emulator.formats import EmuError
from gcn_emulator.triton_driver import emulate
from kernel_base.tuning import TuningRow
from moe_aiter import GateWorkspace, gate
from moe_aiter.problems import GateProblem, make_gate_problem
from moe_aiter.reference import gate_reference
from moe_aiter.tuning import DOWN_LOOKUP, ROUTER
from tests.support.waits import emulated_waits

ARCHS = ("gfx942", "gfx950")
FIXED = {"top_k": 3, "route_scale": 2.5}
# With the depth to run each at.
FORMS = (
    ({"LAST": 4}, 300),
    ({"LAST": 16}, 256),
    pytest.param({"BEHIND": 4}, 300, marks=emulated_waits),
    pytest.param({"BEHIND": 16}, 256, marks=emulated_waits),
)


@pytest.fixture(autouse=True)
def poisoned_partial_sums() -> Iterator[None]:
    """torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def workspace() -> Iterator[GateWorkspace]:
    """Checked at the end."""
    workspace = GateWorkspace.allocate(torch.device("cpu"))
    yield workspace
    assert not workspace.tickets.any(), "the kernels leave the counters as they found them"


def router_row(arch: str, **select: int) -> TuningRow:
    """16 tokens, 32 experts and 128 of the depth a program, so that small calls have many."""
    sizes = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "SLICE": 128, **select}
    options = {"num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 16}
    return TuningRow(
        arch=arch, constexprs=sizes, options=options, evidence="guess", source="this test"
    )


def run(p: GateProblem, row: TuningRow, workspace: GateWorkspace, tokens=slice(None)):
    """Ids and weights of some tokens, into poisoned outputs, and the number of launches."""
    x = p.x[tokens]
    ids = torch.full((len(x), 3), -7, dtype=torch.int32)
    weights = torch.full((len(x), 5), float("nan"))
    with emulate(row.arch) as driver:
        gate(
            x, p.weight, p.bias, p.global_scale, **FIXED, arch=row.arch, workspace=workspace,
            rows=(row, None), ids_out=ids, weights_out=weights,
        )  # fmt: skip
    return ids, weights, len(driver.records)


def test_the_tables_take_one_launch_for_few_tokens_then_two(workspace):
    for tokens, launches in ((1, 1), (4, 1), (5, 2)):
        p = make_gate_problem(tokens, experts=8, hidden=64)
        with emulate("gfx942") as driver:
            gate(p.x, p.weight, p.bias, p.global_scale, **FIXED, arch="gfx942", workspace=workspace)
        assert len(driver.records) == launches


@pytest.mark.parametrize("arch", ARCHS)
def test_no_amd_row_asks_for_programs_that_wait(arch):
    """They have run on an H200 only."""
    assert not any(row.constexprs.get("BEHIND") for row in ROUTER.for_arch(arch))
    assert not any(row.constexprs["TAIL"] for row in DOWN_LOOKUP.for_arch(arch))
    assert any(row.constexprs.get("BEHIND") for row in ROUTER.for_arch("sm90"))
    assert any(row.constexprs["TAIL"] for row in DOWN_LOOKUP.for_arch("sm90"))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("form", "hidden"), FORMS)
def test_one_launch_of_several_token_blocks(arch, form, hidden, workspace):
    """Three blocks of 16 tokens, the last ragged; a token does not depend on the others, nor on how
    many launches there are."""
    p = make_gate_problem(37, experts=20, hidden=hidden)
    one = router_row(arch, **form)
    ids, weights, launches = run(p, one, workspace)
    assert launches == 1
    want_ids, want = gate_reference(p.x, p.weight, p.bias, p.global_scale, **FIXED)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)
    *apart, launches = run(p, router_row(arch), workspace)
    assert launches == 2
    assert torch.equal(ids, apart[0])
    torch.testing.assert_close(weights, apart[1], rtol=1e-6, atol=0)
    part = run(p, one, workspace, slice(20, 23))
    assert torch.equal(part[0], ids[20:23])
    assert torch.equal(part[1], weights[20:23])


@emulated_waits
def test_waiting_programs_past_one_layer_of_the_grid(workspace):
    """More of them than a slice has programs: 40 tokens, one each, behind layers of 3 by 1."""
    p = make_gate_problem(40, experts=20, hidden=128)
    ids, weights, _ = run(p, router_row("gfx942", BEHIND=1), workspace)
    *apart, _ = run(p, router_row("gfx942"), workspace)
    assert torch.equal(ids, apart[0])
    torch.testing.assert_close(weights, apart[1], rtol=1e-6, atol=0)


@emulated_waits
@pytest.mark.parametrize("missing", [1, 2])
def test_programs_behind_wait_for_every_product(missing, monkeypatch):
    """With fewer arrivals than products the wait does not end. (One wave a program: the emulator
    counts branches between barriers.)"""
    monkeypatch.setattr(emulated_kernel, "MAX_BRANCHES", 2000)
    p = make_gate_problem(5, experts=40, hidden=256)
    row = router_row("gfx942", BEHIND=4)
    row = replace(row, options=row.options | {"num_warps": 1})
    run(p, row, GateWorkspace.allocate(torch.device("cpu")))
    short = GateWorkspace(tickets=torch.full((64,), -missing, dtype=torch.int32))
    with pytest.raises(EmuError, match="endless loop"):
        run(p, row, short)


@emulated_waits
def test_more_token_blocks_than_counters_take_two_launches(workspace, monkeypatch):
    p = make_gate_problem(33, experts=8, hidden=64)
    assert run(p, router_row("gfx942", BEHIND=4), workspace)[2] == 1
    monkeypatch.setattr(import_module("moe_aiter.gate"), "TICKETS", 2)
    assert run(p, router_row("gfx942", BEHIND=4), workspace)[2] == 2
