"""gate and experts: ties, extremes, and a loop over tokens as the second opinion."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from inkling_rocm.config import MoEConfig
from inkling_rocm.ops.experts import experts
from inkling_rocm.ops.gate import gate

HIDDEN = 12


def moe_config(num_experts=9, top_k=3, shared=2) -> MoEConfig:
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        num_shared_experts=shared,
        intermediate_size=7,
        route_scale=2.5,
    )


def route(logits, bias=None, moe=None, scale=1.0):
    """The gate on given logits: x is the identity's row, so x W^T = logits."""
    moe = moe or moe_config()
    x = torch.eye(logits.shape[0])
    bias = torch.zeros(moe.num_experts) if bias is None else bias
    return gate(x, logits.t().contiguous(), bias, torch.tensor([scale]), moe=moe)


def test_ties_go_to_the_lowest_id():
    ids, _ = route(torch.zeros(2, 11))
    assert ids.tolist() == [[0, 1, 2]] * 2
    logits = torch.zeros(1, 11)
    logits[0, 5] = 1.0
    assert route(logits)[0].tolist() == [[5, 0, 1]]


def test_bias_selects_but_does_not_weigh():
    logits = torch.randn(4, 11)
    bias = torch.zeros(9)
    bias[7] = 5.0
    ids, weights = route(logits, bias)
    assert (ids[:, 0] == 7).all()
    chosen = torch.cat((logits.gather(1, ids.long()), logits[:, 9:]), 1)
    expected = chosen.sigmoid() / chosen.sigmoid().sum(-1, keepdim=True) * 2.5
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("value", [-1e4, 1e4])
def test_extreme_logits_stay_finite_and_share_the_budget(value):
    ids, weights = route(torch.full((3, 11), value), scale=0.5)
    torch.testing.assert_close(weights, torch.full((3, 5), 2.5 * 0.5 / 5))
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32


def test_extreme_differences_keep_their_order():
    logits = torch.full((1, 11), -1e4)
    logits[0, 4] = -1e4 + 3
    ids, weights = route(logits, torch.linspace(0.1, 0, 9))
    assert weights.isfinite().all()
    assert weights.sum().item() == pytest.approx(2.5)
    assert ids.tolist() == [[0, 1, 2]], "sigmoid underflows to 0 there: the bias decides"


@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
@pytest.mark.parametrize(("top_k", "shared"), [(1, 1), (2, 2), (6, 3), (9, 1)])
def test_experts_against_a_loop(tokens, top_k, shared):
    moe = moe_config(top_k=top_k, shared=shared)
    X, I = moe.num_experts, moe.intermediate_size
    x = torch.randn(tokens, HIDDEN).double()
    w13, w2 = torch.randn(X, 2 * I, HIDDEN).double(), torch.randn(X, HIDDEN, I).double()
    s13, s2 = torch.randn(shared, 2 * I, HIDDEN).double(), torch.randn(shared, HIDDEN, I).double()
    ids = torch.rand(tokens, X).argsort(-1)[:, :top_k].int()
    weights = torch.rand(tokens, top_k + shared).double()
    want = torch.zeros_like(x)
    for t in range(tokens):
        for k in range(top_k):
            e = int(ids[t, k])
            inner = F.silu(w13[e, :I] @ x[t]) * (w13[e, I:] @ x[t])
            want[t] += weights[t, k] * (w2[e] @ inner)
        for s in range(shared):
            inner = F.silu(s13[s, :I] @ x[t]) * (s13[s, I:] @ x[t]) * weights[t, top_k + s]
            want[t] += s2[s] @ inner
    arguments = {"w13": w13, "w2": w2, "shared_w13": s13, "shared_w2": s2}
    got = experts(x, ids, weights, **arguments)
    torch.testing.assert_close(got, want)
    if tokens:
        wrong = {**arguments, "w2": w2[[1, 0, *range(2, X)]]}
        moved = experts(x, torch.zeros_like(ids), weights, **arguments)
        assert not torch.allclose(moved, experts(x, torch.zeros_like(ids), weights, **wrong))


@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 100])
def test_an_expert_nobody_chose_has_no_influence(tokens):
    """0 * inf is NaN: in fp16 an expert that was not chosen may overflow with finite weights."""
    X, K, S, I, H = 4, 2, 1, 8, 16
    w13, w2 = torch.randn(X, 2 * I, H), torch.randn(X, H, I)
    shared = {"shared_w13": torch.randn(S, 2 * I, H), "shared_w2": torch.randn(S, H, I)}
    x, ids = torch.randn(tokens, H), torch.tensor([[0, 1]] * tokens, dtype=torch.int32)
    weights = torch.rand(tokens, K + S)
    wanted = experts(x, ids, weights, w13=w13, w2=w2, **shared)
    w2[3] = float("inf")
    torch.testing.assert_close(experts(x, ids, weights, w13=w13, w2=w2, **shared), wanted)
