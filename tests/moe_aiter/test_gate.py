"""Gate on the emulator: selection, ties, extremes, weights against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from moe_aiter import gate
from moe_aiter.problems import make_gate_problem
from moe_aiter.reference import gate_reference, weigh

ARCHS = ("gfx942", "gfx950")
SCALE = 2.5


def run(x, weight, bias, scale=None, *, top_k=3, arch="gfx942", **arguments):
    """Ids and weights from the emulator, into poisoned outputs."""
    scale = torch.ones(1) if scale is None else scale
    T, outputs = x.shape[0], top_k + weight.shape[0] - bias.shape[0]
    arguments.setdefault("ids_out", torch.full((T, top_k), -7, dtype=torch.int32))
    with emulate(arch):
        return gate(
            x, weight, bias, scale, top_k=top_k, route_scale=SCALE, arch=arch,
            weights_out=torch.full((T, outputs), float("nan")), **arguments,
        )  # fmt: skip


def run_logits(logits, bias=None, *, top_k=3, shared=2):
    """The gate on given logits: x is the identity (and zeros), so x W^T = logits."""
    bias = torch.zeros(logits.shape[1] - shared) if bias is None else bias
    weight = torch.zeros(logits.shape[1], 64)
    weight[:, : logits.shape[0]] = logits.t()
    return run(torch.eye(logits.shape[0], 64), weight, bias, top_k=top_k)


@pytest.mark.parametrize(
    ("arch", "tokens"),
    [("gfx942", t) for t in (0, 1, 2, 5, 16, 17, 63, 64, 65)] + [("gfx950", t) for t in (5, 65)],
)
def test_sizes(arch, tokens):
    p = make_gate_problem(tokens, experts=20, hidden=72)
    ids, weights = run(p.x, p.weight, p.bias, p.global_scale, arch=arch)
    want_ids, want = gate_reference(
        p.x, p.weight, p.bias, p.global_scale, top_k=3, route_scale=SCALE
    )
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("experts", "top_k", "shared"), [(8, 1, 1), (5, 5, 3), (33, 8, 2), (16, 6, 0)]
)
@pytest.mark.parametrize("tokens", [3, 18])
def test_counts(experts, top_k, shared, tokens):
    p = make_gate_problem(tokens, experts=experts, shared=shared, hidden=64, dtype=torch.float32)
    ids, weights = run(p.x, p.weight, p.bias, top_k=top_k)
    want_ids, want = gate_reference(
        p.x, p.weight, p.bias, torch.ones(1), top_k=top_k, route_scale=SCALE
    )
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [1, 16, 17])
@pytest.mark.parametrize("arch", ARCHS)
def test_inkling_counts(tokens, arch):
    p = make_gate_problem(tokens, experts=256, hidden=1024)
    ids, weights = run(p.x, p.weight, p.bias, top_k=6, arch=arch)
    want_ids, want = gate_reference(
        p.x, p.weight, p.bias, torch.ones(1), top_k=6, route_scale=SCALE
    )
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [2, 20])
def test_ties_go_to_the_lowest_id(rows):
    logits = torch.zeros(rows, 11)
    logits[0, 5] = 1.0
    ids, _ = run_logits(logits)
    assert ids.tolist() == [[5, 0, 1]] + [[0, 1, 2]] * (rows - 1)


def test_equal_rows_of_the_router_tie_exactly():
    p = make_gate_problem(6, experts=40, hidden=200)
    p.weight[:40] = p.weight[0]
    ids, _ = run(p.x, p.weight, torch.zeros(40))
    assert ids.tolist() == [[0, 1, 2]] * 6


def test_bias_selects_but_does_not_weigh():
    logits, bias = torch.randn(4, 11), torch.zeros(9)
    bias[7] = 5.0
    ids, weights = run_logits(logits, bias)
    assert (ids[:, 0] == 7).all()
    want = weigh(logits.double(), ids, 9, torch.tensor(SCALE))
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)


def test_masked_experts_are_chosen_last_and_once():
    bias = torch.full((9,), float("-inf"))
    bias[4] = 0.0
    ids, _ = run_logits(torch.zeros(2, 11), bias)
    assert ids.tolist() == [[4, 0, 1]] * 2


@pytest.mark.parametrize("top_k", [3, 9])
def test_a_nan_score_ranks_last(top_k):
    logits = torch.linspace(-1, 1, 11)[None]
    clean = logits.clone()
    clean[0, [8, 2]] = -1e4
    logits[0, [8, 2]] = float("nan")
    ids, weights = run_logits(logits, top_k=top_k)
    assert ids.tolist() == [[7, 6, 5, 4, 3, 1, 0, 2, 8][:top_k]]
    if top_k == 3:
        want = weigh(clean.double(), ids, 9, torch.tensor(SCALE))
        torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [-1e4, 1e4])
def test_extreme_logits_stay_finite_and_share_the_budget(value):
    _, weights = run_logits(torch.full((3, 11), value))
    torch.testing.assert_close(weights, torch.full((3, 5), SCALE / 5))


def test_extreme_differences():
    logits = torch.full((2, 11), -1e4)
    logits[0, 4], logits[1, 10] = -1e4 + 3, 1e4
    ids, weights = run_logits(logits, torch.linspace(0.1, 0, 9))
    assert ids.tolist() == [[0, 1, 2]] * 2
    want = weigh(logits.double(), ids, 9, torch.tensor(SCALE))
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("arch", ARCHS)
def test_more_weights_than_experts(arch, tokens):
    """K + S past the next power of two of X; fp32 as in tiny models."""
    p = make_gate_problem(tokens, experts=8, shared=3, hidden=48, dtype=torch.float32)
    arguments = (p.x, p.weight, p.bias, torch.ones(1))
    ids, weights = run(*arguments, top_k=6, arch=arch)
    want_ids, want = gate_reference(*arguments, top_k=6, route_scale=SCALE)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-7)


def test_capture_of_ids_in_a_replay_buffer():
    p = make_gate_problem(5, experts=8, hidden=64)
    buffer = torch.full((5, 4, 3), -1, dtype=torch.int32)
    ids, _ = run(p.x, p.weight, p.bias, ids_out=buffer[:, 2])
    assert torch.equal(ids, buffer[:, 2])
    assert torch.equal(ids, run(p.x, p.weight, p.bias)[0])
    assert (buffer[:, [0, 1, 3]] == -1).all()


def test_repeated_runs_and_neighbours():
    p = make_gate_problem(9, experts=20, hidden=600)
    ids, weights = run(p.x, p.weight, p.bias)
    again = run(p.x, p.weight, p.bias)
    alone = run(p.x[4:5], p.weight, p.bias)
    assert torch.equal(ids, again[0])
    assert torch.equal(weights, again[1])
    assert torch.equal(weights[4], alone[1][0])


def test_the_oracle_sees_a_missing_bias():
    p = make_gate_problem(16, experts=20, hidden=72)
    ids, _ = run(p.x, p.weight, p.bias)
    without, _ = gate_reference(
        p.x, p.weight, p.bias * 0, torch.ones(1), top_k=3, route_scale=SCALE
    )
    assert not torch.equal(ids, without)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(8, dtype=torch.bfloat16)}, "bias's dtype"),
        ({"bias": torch.zeros(12)}, "weight's rows"),
        ({"weight": torch.zeros(10, 64)}, "weight's dtype"),
        ({"top_k": 9}, "top_k"),
        ({"global_scale": torch.zeros(2)}, "global_scale"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    p = make_gate_problem(2, experts=8, hidden=64)
    arguments = {
        "x": p.x, "weight": p.weight, "bias": p.bias, "global_scale": p.global_scale, "top_k": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        gate(**(arguments | change), route_scale=1.0, arch="gfx942")
