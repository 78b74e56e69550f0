"""One rank's MoE layer at the models' shapes, with several routings to rotate through."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_aiter.problems import Problem, make_problem

TOP_K, SHARED, EXPERTS = 6, 2, 256
# hidden size, expert width of one rank at TP8
MODELS = {"inkling-tp8": (6144, 384), "small-tp8": (4096, 256)}
# A graph runs calls with different routings, so that no call finds its experts in L2 from the last.
ROUTINGS = 8
# The shared experts are in every call: those too come from memory only if the calls have copies.
SHARED_COPIES = 4


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one rank and, for one T, `ROUTINGS` calls (x, ids, gamma)."""

    name: str
    calls: tuple[Problem, ...]

    @property
    def tokens(self) -> int:
        return self.calls[0].x.shape[0]

    def hit_experts(self) -> float:
        """Distinct experts a call reads, mean over the routings."""
        hits = [call.ids.unique().numel() for call in self.calls]
        return sum(hits) / len(hits)

    def floor_us(self, bytes_per_s: float, flops: float, *, shared: int = 0) -> float:
        """The larger of: hit experts' bytes (and the shared ones') at the copy rate, arithmetic at
        the
        matmul rate; activations are not counted."""
        (_, H, I), T = self.calls[0].weights["w2"].shape, self.tokens
        read = (self.hit_experts() + shared) * 3 * H * I * 2 / bytes_per_s
        work = T * (TOP_K + shared) * 6 * H * I / flops
        return 1e6 * max(read, work)


def routing(tokens: int, seed: int, device) -> torch.Tensor:
    """Distinct random experts a token; with 4 tokens or fewer, no expert twice in the batch."""
    generator = torch.Generator(device).manual_seed(1000 + seed)
    if tokens * TOP_K <= 24:
        order = torch.rand(EXPERTS, device=device, generator=generator).argsort()
        return order[: tokens * TOP_K].view(tokens, TOP_K).int()
    draw = torch.rand(tokens, EXPERTS, device=device, generator=generator)
    return draw.argsort(-1)[:, :TOP_K].int().contiguous()


def skewed_routing(tokens: int, seed: int, device) -> torch.Tensor:
    """The router's choice with unit-variance logits and a selection bias of deviation 0.05, one for
    all seeds: some experts get three times the mean, others next to nothing."""
    bias = torch.rand(EXPERTS, device=device, generator=torch.Generator(device).manual_seed(0))
    generator = torch.Generator(device).manual_seed(2000 + seed)
    score = torch.randn(tokens, EXPERTS, device=device, generator=generator).sigmoid()
    score += (2 * bias - 1) * 0.05 * 3**0.5
    return score.topk(TOP_K, dim=-1).indices.int().contiguous()


def make_weights(model: str, device="cuda") -> dict[str, torch.Tensor]:
    """Random weights of one layer (3.6 GB for Inkling at TP8)."""
    hidden, width = MODELS[model]
    return make_problem(
        1, experts=EXPERTS, top_k=TOP_K, shared=SHARED, hidden=hidden, width=width, device=device
    ).weights


def make_layer(
    model: str, tokens: int, weights: dict[str, torch.Tensor], shared: int, *, skewed: bool = False
) -> Layer:
    """`ROUTINGS` calls; shared = 0 leaves the shared experts out (the routed experts alone)."""
    choose = skewed_routing if skewed else routing
    hidden, _ = MODELS[model]
    device = weights["w13"].device
    copies = []
    for _ in range(SHARED_COPIES):
        parts = {name: weights[name][:shared].clone() for name in ("shared_w13", "shared_w2")}
        copies.append(weights | parts)
    calls = []
    for seed in range(ROUTINGS):
        generator = torch.Generator(device).manual_seed(seed)
        gamma = torch.rand(tokens, TOP_K + shared, device=device, generator=generator)
        x = torch.randn(tokens, hidden, device=device, generator=generator).bfloat16()
        chosen = copies[seed % SHARED_COPIES]
        calls.append(Problem(x=x, ids=choose(tokens, seed, device), gamma=gamma, weights=chosen))
    name = f"{model} T={tokens}" + (", uneven" if skewed else "")
    return Layer(name=name, calls=tuple(calls))
