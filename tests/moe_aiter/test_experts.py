"""Experts on the emulator against float64: every way through, tile edges, edges of routing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from kernel_base.tuning import TuningRow
from moe_aiter import dense_mlp, experts
from moe_aiter.problems import Problem, make_problem
from moe_aiter.reference import dense_mlp_reference
from moe_aiter.routing import sort_choices

ARCHS = ("gfx942", "gfx950")
# Sizes around 16 (one-launch gate, first token tile) and 64 (row blocks).
SIZES = (0, 1, 2, 5, 16, 17, 63, 64, 65)


def plan(by_token_choices: int, fold_rows: int, lookup_choices: int = 0) -> TuningRow:
    """A way through, whatever the table says: crossovers are tuning, not mathematics."""
    constexprs = {
        "BY_TOKEN_CHOICES": by_token_choices, "LOOKUP_CHOICES": lookup_choices,
        "FOLD_ROWS": fold_rows, "FOLD_FROM": 0,
    }  # fmt: skip
    return TuningRow(
        arch="any", constexprs=constexprs, options={}, evidence="guess", source="under test"
    )


BY_TOKEN, LOOKED_UP = plan(128, 0), plan(0, 0, 1024)
FOLDED, SEPARATE = plan(0, 1 << 30), plan(0, -1)
WAYS = {"token": BY_TOKEN, "lookup": LOOKED_UP, "folded": FOLDED, "separate": SEPARATE}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def run(problem: Problem, arch: str = "gfx942", **arguments) -> torch.Tensor:
    """The kernels on the emulator, into a NaN-poisoned output."""
    out = torch.full_like(problem.x, float("nan"))
    with emulate(arch):
        return experts(
            problem.x, problem.ids, problem.gamma, **problem.weights, out=out, arch=arch,
            **arguments,
        )  # fmt: skip


def error_and_budget(problem: Problem, out: torch.Tensor, **reference):
    """Relative error, and twice that of eager code in the same dtype plus an ulp."""
    want = problem.reference(**reference)
    norm = want.norm() + 1e-30
    eager = (problem.reference(problem.x.dtype, **reference).double() - want).norm() / norm
    budget = 2 * eager + torch.finfo(problem.x.dtype).eps
    return float((out.double() - want).norm() / norm), float(budget)


def assert_close(problem: Problem, out: torch.Tensor, **reference) -> None:
    error, budget = error_and_budget(problem, out, **reference)
    assert error <= budget


@pytest.mark.parametrize(
    ("arch", "tokens"), [("gfx942", t) for t in SIZES] + [("gfx950", t) for t in (5, 65)]
)
def test_sizes(arch, tokens):
    problem = make_problem(tokens, experts=8, hidden=64, width=32)
    assert_close(problem, run(problem, arch))


@pytest.mark.full
@pytest.mark.parametrize("tokens", [257, 1024])
@pytest.mark.parametrize("arch", ARCHS)
def test_large_sizes(tokens, arch):
    problem = make_problem(tokens, experts=8, hidden=128, width=64)
    assert_close(problem, run(problem, arch))


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        pytest.param(BY_TOKEN, torch.bfloat16, id="token-bf16"),
        pytest.param(LOOKED_UP, torch.bfloat16, id="lookup-bf16"),
        pytest.param(FOLDED, torch.bfloat16, id="folded-bf16"),
        pytest.param(SEPARATE, torch.bfloat16, id="separate-bf16"),
        pytest.param(BY_TOKEN, torch.float32, id="token-fp32"),
        pytest.param(LOOKED_UP, torch.float32, id="lookup-fp32"),
        pytest.param(FOLDED, torch.float32, id="folded-fp32"),
    ],
)
def test_every_way_at_odd_sizes(way, dtype):
    problem = make_problem(13, experts=5, hidden=72, width=40, dtype=dtype)
    assert_close(problem, run(problem, "gfx942", plan=way))


@pytest.mark.parametrize(("top_k", "shared"), [(1, 1), (2, 0), (6, 2), (8, 3)])
@pytest.mark.parametrize("way", [BY_TOKEN, LOOKED_UP, FOLDED], ids=["token", "lookup", "folded"])
def test_top_k_and_shared_counts(top_k, shared, way):
    problem = make_problem(9, experts=11, top_k=top_k, shared=shared, hidden=64, width=32)
    assert_close(problem, run(problem, "gfx950", plan=way))


@every_way
def test_one_expert_and_one_token_each(way):
    crowded = make_problem(18, experts=18, top_k=1, hidden=64, width=32)
    crowded.ids.fill_(7)
    assert_close(crowded, run(crowded, plan=way))
    spread = make_problem(18, experts=18, top_k=1, hidden=64, width=32)
    spread.ids.copy_(torch.arange(18).flip(0)[:, None])
    assert_close(spread, run(spread, plan=way))


@every_way
def test_a_choice_named_twice_counts_twice(way):
    problem = make_problem(4, experts=6, top_k=3, hidden=64, width=32)
    problem.ids[:, 1] = problem.ids[:, 0]
    assert_close(problem, run(problem, plan=way))


@every_way
@pytest.mark.parametrize("first", [0, 5, 9])
def test_expert_parallel_range(way, first):
    whole = make_problem(11, experts=12, top_k=3, hidden=64, width=32)
    local = {name: whole.weights[name][first : first + 3].clone() for name in ("w13", "w2")}
    part = Problem(x=whole.x, ids=whole.ids, gamma=whole.gamma, weights=whole.weights | local)
    out = run(part, first_expert=first, plan=way)
    assert_close(part, out, first_expert=first)


def test_shared_experts_of_another_width():
    problem = make_problem(5, experts=6, hidden=64, width=32)
    narrow = {
        "shared_w13": problem.weights["shared_w13"][:, :32].contiguous(),
        "shared_w2": problem.weights["shared_w2"][:, :, :16].contiguous(),
    }
    part = Problem(
        x=problem.x, ids=problem.ids, gamma=problem.gamma, weights=problem.weights | narrow
    )
    assert_close(part, run(part))


def test_more_choices_of_one_expert_than_a_row_block():
    """Also the launches: neither a sort nor a sum of their own."""
    problem = make_problem(40, experts=6, hidden=64, width=32)
    problem.ids[:, 0] = 5
    out = torch.full_like(problem.x, float("nan"))
    with emulate("gfx942") as driver:
        experts(
            problem.x, problem.ids, problem.gamma, **problem.weights, out=out, arch="gfx942",
            plan=LOOKED_UP,
        )  # fmt: skip
    assert len(driver.records) == 2
    assert_close(problem, out)


def test_expert_parallel_rank_that_nobody_chose():
    problem = make_problem(20, experts=4, shared=0, hidden=64, width=32)
    for way in (FOLDED, BY_TOKEN, LOOKED_UP):
        assert not run(problem, first_expert=100, plan=way).any()


@every_way
def test_repeated_runs_are_bitwise_equal(way):
    problem = make_problem(12, experts=6, hidden=64, width=32)
    assert torch.equal(run(problem, plan=way), run(problem, plan=way))


@every_way
def test_a_token_does_not_depend_on_its_neighbours(way):
    problem = make_problem(12, experts=6, hidden=64, width=32)
    alone = Problem(
        x=problem.x[5:6], ids=problem.ids[5:6], gamma=problem.gamma[5:6], weights=problem.weights
    )
    assert torch.equal(run(alone, plan=way)[0], run(problem, plan=way)[5])


@every_way
def test_weights_beyond_32_bit_offsets(way, monkeypatch):
    """Both weights of the last experts lie past 2^31 elements; what is before them is never
    touched, nor resident. Weights beyond 2 GiB also get other code: no buffer loads."""
    hidden, width = 256, 128
    problem = make_problem(3, experts=4, top_k=3, hidden=hidden, width=width)
    behind = 2**31 // (hidden * width)
    big = {
        name: torch.empty(behind + 4, *problem.weights[name].shape[1:], dtype=torch.bfloat16)
        for name in ("w13", "w2")
    }
    for name, tensor in big.items():
        tensor[-4:] = problem.weights[name]

    def sort_last(ids, *, num_experts, **arguments):
        """Row blocks of the last four experts only: the launches need none for the others."""
        assert num_experts == behind + 4
        order = sort_choices(ids - behind, num_experts=4, **arguments)
        used = order.block_expert >= 0
        order.block_expert[used] += behind
        return order

    want = run(problem, plan=way)
    monkeypatch.setattr("moe_aiter.grouped.sort_choices", sort_last)
    moved = Problem(
        x=problem.x, ids=problem.ids + behind, gamma=problem.gamma, weights=problem.weights | big
    )
    out = run(moved, plan=way)
    assert torch.equal(out, want)
    assert_close(problem, out)


def test_nan_in_one_token_stays_there():
    problem = make_problem(12, experts=6, hidden=64, width=32)
    problem.x[3] = float("nan")
    for way in WAYS.values():
        finite = run(problem, plan=way).isfinite().all(1)
        assert not finite[3]
        assert finite[torch.arange(12) != 3].all()


def test_strided_rows():
    problem = make_problem(6, experts=6, hidden=64, width=32)
    wide = torch.full((6, 96), float("nan"), dtype=problem.x.dtype)
    wide[:, :64] = problem.x
    strided = Problem(x=wide[:, :64], ids=problem.ids, gamma=problem.gamma, weights=problem.weights)
    assert torch.equal(run(strided), run(problem))


def test_the_oracle_sees_faults():
    problem = make_problem(9, experts=6, hidden=64, width=32)
    out = run(problem)
    w2, ids = problem.weights["w2"], problem.ids
    faults = {
        "two experts swapped": {"weights": problem.weights | {"w2": w2[[1, 0, 2, 3, 4, 5]]}},
        "gate and up swapped": {
            "weights": problem.weights | {"w13": problem.weights["w13"].roll(32, 1)}
        },
        "a shared expert dropped": {
            "weights": problem.weights | {"shared_w2": problem.weights["shared_w2"] * 0}
        },
        "weights of the wrong choice": {"gamma": problem.gamma.roll(1, 1)},
        "ids of the next token": {"ids": ids.roll(1, 0)},
    }
    for name, changed in faults.items():
        fields = {"x": problem.x, "ids": ids, "gamma": problem.gamma, "weights": problem.weights}
        error, budget = error_and_budget(Problem(**(fields | changed)), out)
        assert error > budget, name


@pytest.mark.parametrize("tokens", [0, 1, 17, 70])
def test_dense_mlp(tokens):
    problem = make_problem(tokens, experts=1, top_k=1, hidden=72, width=40)
    gate_up, down = problem.weights["w13"][0], problem.weights["w2"][0]
    scale = torch.tensor([1.75])
    out = torch.full_like(problem.x, float("nan"))
    with emulate("gfx942"):
        dense_mlp(problem.x, gate_up, down, scale, out=out, arch="gfx942")
    want = dense_mlp_reference(problem.x, gate_up, down, scale)
    eager = dense_mlp_reference(problem.x, gate_up, down, scale, dtype=torch.bfloat16)
    assert (out.double() - want).norm() <= 2 * (eager.double() - want).norm()


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("topk_ids", torch.zeros(4, 3), "topk_ids"),
        ("topk_ids", torch.zeros(4, 3, dtype=torch.int64), "int32"),
        ("topk_weights", torch.zeros(4, 4), "topk_weights"),
        ("topk_weights", torch.zeros(4, 5, dtype=torch.bfloat16), "float32"),
        ("w13", torch.zeros(8, 64, 64), "dtype"),
        ("w2", torch.zeros(8, 64, 16, dtype=torch.bfloat16), "w13's shape"),
        ("x", torch.zeros(4, 128, dtype=torch.bfloat16)[:, ::2], "stride"),
    ],
)
def test_wrong_arguments_are_named(argument, value, message):
    p = make_problem(4, hidden=64, width=32)
    arguments = {"x": p.x, "topk_ids": p.ids, "topk_weights": p.gamma, **p.weights, argument: value}
    with pytest.raises(ValueError, match=message):
        experts(**arguments, arch="gfx942")


def test_cpu_tensors_without_an_architecture_are_refused():
    p = make_problem(4, hidden=64, width=32)
    with pytest.raises(ValueError, match="reference"):
        experts(p.x, p.ids, p.gamma, **p.weights)
