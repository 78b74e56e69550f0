"""The correctness gate: rows count only if the kernels passed here, in the same process, on this
device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from bench.moe.problems import EXPERTS, SHARED, TOP_K, Layer
from moe_aiter import dense_mlp, experts, gate
from moe_aiter.problems import Problem, make_gate_problem, make_problem
from moe_aiter.reference import (
    dense_mlp_reference,
    experts_reference,
    gate_reference,
    weigh,
)

# Tokens of a large batch that are compared (their experts' weights are converted to float64).
SAMPLE = 24


def check(out: torch.Tensor, want: torch.Tensor, eager: torch.Tensor) -> tuple[bool, float, float]:
    """(passes, error, eager error), relative norms; NaN never passes."""
    norm = want.norm()
    error = float((out.double() - want).norm() / norm)
    budget = float((eager.double() - want).norm() / norm)
    return error <= 2 * budget + torch.finfo(out.dtype).eps, error, budget


def _compare(run: Callable[[Problem], torch.Tensor], p: Problem) -> tuple[bool, float, float]:
    out = run(p)
    first, second = (
        experts_reference(p.x, p.ids, p.gamma, **p.weights, dtype=d)
        for d in (torch.float64, p.x.dtype)
    )
    return check(out, first, second)


def layer_passes(run: Callable[[Problem], torch.Tensor], layer: Layer) -> tuple[bool, float, float]:
    """One call at its real shape, a sample of its tokens against float64 of the experts they
    chose."""
    call = layer.calls[0]
    out = run(call)
    take = torch.linspace(0, layer.tokens - 1, min(SAMPLE, layer.tokens)).long().unique()
    take = take.to(out.device)
    ids = call.ids[take]
    used, local = ids.unique(return_inverse=True)
    weights = {
        name: w[used.long()] if name in ("w13", "w2") else w for name, w in call.weights.items()
    }
    sample = Problem(x=call.x[take], ids=local.int(), gamma=call.gamma[take], weights=weights)
    return check(out[take], sample.reference(), sample.reference(torch.bfloat16))


def small_cases() -> Iterator[tuple[str, bool, float, float]]:
    """(name, passes, error, eager error) over sizes, counts, both dtypes and the edges of
    routing."""

    def ours(p):
        out = torch.full_like(p.x, float("nan"))
        return experts(p.x, p.ids, p.gamma, **p.weights, out=out)

    for tokens in (1, 2, 5, 16, 17, 63, 64, 65, 257, 1024):
        for dtype in (torch.bfloat16, torch.float32):
            for top_k, shared in ((6, 2), (1, 1), (2, 0), (8, 3)):
                p = make_problem(
                    tokens, experts=32, top_k=top_k, shared=shared, hidden=264, width=136,
                    dtype=dtype,
                    device="cuda",
                )  # fmt: skip
                yield (f"experts T={tokens} {dtype} K={top_k} S={shared}", *_compare(ours, p))
        p = make_problem(tokens, experts=32, hidden=256, width=128, device="cuda")
        p.ids[:, 0] = 5
        same = torch.equal(ours(p), ours(p))
        ok, error, eager = _compare(ours, p)
        yield f"experts T={tokens} one crowded expert, repeated", ok and same, error, eager
        g = make_gate_problem(tokens, experts=EXPERTS, hidden=1024, device="cuda")
        arguments = (g.x, g.weight, g.bias, g.global_scale)
        fixed = {"top_k": TOP_K, "route_scale": 8.0}
        ids, weights = gate(*arguments, **fixed)
        want_ids, _ = gate_reference(*arguments, **fixed)
        # Scores closer than fp32 rounding may swap places; weights are those of the ids chosen.
        same = float((ids == want_ids).float().mean())
        want, eager = (
            weigh(F.linear(g.x.to(d), g.weight.to(d)), ids, EXPERTS, 8.0 * g.global_scale.to(d))
            for d in (torch.float64, torch.float32)
        )
        ok, error, eager_error = check(weights, want, eager)
        yield f"gate T={tokens}", ok and same > 0.999, error, eager_error
        ties = (
            g.x,
            g.weight[:1].expand(EXPERTS + SHARED, -1).contiguous(),
            g.bias * 0,
            g.global_scale,
        )
        tied = gate(*ties, **fixed)[0]
        lowest = bool((tied == torch.arange(TOP_K, device="cuda")).all())
        yield f"gate T={tokens} ties", lowest, 0.0, 0.0
        mlp = (p.x, p.weights["w13"][0], p.weights["w2"][0], g.global_scale)
        found = (dense_mlp_reference(*mlp), dense_mlp_reference(*mlp, dtype=torch.bfloat16))
        yield (f"dense_mlp T={tokens}", *check(dense_mlp(*mlp), *found))
