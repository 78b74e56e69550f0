"""Random problems: the inputs of tests, of the kernel register's cases and of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_aiter.reference import experts_reference


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of `experts`: x [T, H], ids [T, K], gamma [T, K + S] and the weights by argument
    name."""

    x: torch.Tensor
    ids: torch.Tensor
    gamma: torch.Tensor
    weights: dict[str, Any]

    def reference(self, dtype: torch.dtype = torch.float64, first_expert: int = 0) -> torch.Tensor:
        """See `experts_reference`."""
        return experts_reference(
            self.x, self.ids, self.gamma, **self.weights, first_expert=first_expert, dtype=dtype
        )


def make_problem(
    tokens: int,
    *,
    experts: int = 8,
    top_k: int = 3,
    shared: int = 2,
    hidden: int = 128,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Problem:
    """Unit-variance activations, weights that keep it, uniformly random distinct ids, gammas in (0,
    1)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        # One expert at a time: the float32 draw of a whole layer's weights would not fit beside
        # them.
        out = torch.empty(shape, dtype=dtype, device=device)
        for part in out if len(shape) == 3 else (out,):
            draw = torch.randn(part.shape, device=device, generator=generator)
            part.copy_(draw * (shape[-1] ** -0.5 if len(shape) == 3 else 1.0))
        return out

    order = torch.rand(tokens, experts, device=device, generator=generator).argsort(-1)
    return Problem(
        x=normal(tokens, hidden),
        ids=order[:, :top_k].int().contiguous(),
        gamma=torch.rand(tokens, top_k + shared, device=device, generator=generator),
        weights={
            "w13": normal(experts, 2 * width, hidden),
            "w2": normal(experts, hidden, width),
            "shared_w13": normal(shared, 2 * width, hidden),
            "shared_w2": normal(shared, hidden, width),
        },
    )


@dataclass(frozen=True, kw_only=True)
class GateProblem:
    """One call of `gate`: x [T, H], weight [X + S, H], bias [X], global_scale [1]."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    global_scale: torch.Tensor


def make_gate_problem(
    tokens: int,
    *,
    experts: int = 33,
    shared: int = 2,
    hidden: int = 200,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> GateProblem:
    """Logits of variance 1 and a small bias."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, device=device, generator=generator) * scale

    return GateProblem(
        x=normal(tokens, hidden).to(dtype),
        weight=normal(experts + shared, hidden, scale=hidden**-0.5).to(dtype),
        bias=normal(experts, scale=0.1),
        global_scale=torch.full((1,), 1.25, device=device),
    )
