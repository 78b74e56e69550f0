"""Weights prepared for aiter, and the calls.

The shared experts are folded in: they are the experts after the routed ones, chosen by every token
with the weights the gate gave them. One launch sequence then serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from moe_aiter.aiter_backend.features import Aiter
from moe_aiter.aiter_backend.layout import shuffle
from moe_aiter.checks import check_rows, require

# Added to the shared experts' scores so that they are always chosen; large against sigmoid + bias,
# and finite because the kernel subtracts scores. The step keeps the shared experts in order.
SINK_BIAS = 1024.0


@dataclass(frozen=True, kw_only=True)
class AiterExperts:
    """One layer's experts in aiter's layout.

    Attributes:
        w1: [X + S, 2I, H], shuffled. w2: [X + S, H, I], shuffled.
        expert_mask: int32 [global experts + S + 1], 1 = on this rank, the last entry 0; None
            without expert parallelism.
        global_experts: routed experts of the whole model; ids are below it.
        shared: S.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    expert_mask: torch.Tensor | None
    global_experts: int
    shared: int
    aiter: Aiter

    @staticmethod
    def prepare(
        aiter: Aiter,
        *,
        w13: torch.Tensor,
        w2: torch.Tensor,
        shared_w13: torch.Tensor,
        shared_w2: torch.Tensor,
        first_expert: int = 0,
        global_experts: int | None = None,
    ) -> AiterExperts:
        """Concatenate and shuffle once, at load; the caller may free the originals.

        Args: as `moe_aiter.experts`; global_experts: of the whole model, None = all are here.
        Raises: ValueError: the local range leaves the model's, or a weight has no shuffled form.
        """
        X, S = w13.shape[0], shared_w13.shape[0]
        total = X if global_experts is None else global_experts
        widths = (w2.shape[2], shared_w2.shape[2])
        require("aiter experts", widths[0] == widths[1], "routed and shared width", widths, "equal")
        end = first_expert + X
        fits = min(first_expert, total - end) > -1
        require(
            "aiter experts",
            fits,
            "the local range",
            (first_expert, first_expert + X),
            f"in {total}",
        )
        mask = None
        if total != X:
            mask = torch.zeros(total + S + 1, dtype=torch.int32, device=w13.device)
            mask[first_expert : first_expert + X] = 1
            mask[total : total + S] = 1
        return AiterExperts(
            w1=shuffle(torch.cat((w13, shared_w13))), w2=shuffle(torch.cat((w2, shared_w2))),
            expert_mask=mask, global_experts=total, shared=S, aiter=aiter,
        )  # fmt: skip

    def arguments(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> dict:
        """The keyword arguments of fused_moe for T >= 1 tokens (all of them; the rest are
        defaults).

        Raises: ValueError: an argument that aiter would accept and compute wrongly with.
        """
        op = "aiter experts"
        check_rows(op, "x", x, self.w2.shape[1])
        require(op, x.dtype == torch.bfloat16, "x's dtype", x.dtype, torch.bfloat16)
        T, K = topk_ids.shape
        require(
            op, T >= 1, "the number of tokens", T, "at least 1: aiter leaves a sticky error at 0"
        )
        require(op, topk_ids.dtype == torch.int32, "topk_ids' dtype", topk_ids.dtype, torch.int32)
        gamma_is = (tuple(topk_weights.shape), topk_weights.dtype)
        wanted = ((T, K + self.shared), torch.float32)
        require(op, gamma_is == wanted, "topk_weights", gamma_is, wanted)
        sinks = self.global_experts + torch.arange(
            self.shared, dtype=torch.int32, device=x.device
        ).expand(T, self.shared)
        return {
            "hidden_states": x.contiguous(),
            "w1": self.w1,
            "w2": self.w2,
            "topk_weight": topk_weights.contiguous(),
            "topk_ids": torch.cat((topk_ids, sinks), dim=1),
            "expert_mask": self.expert_mask,
            "activation": self.aiter.silu,
            "quant_type": self.aiter.no_quant,
            "doweight_stage1": False,
            "dtype": torch.bfloat16,
        }

    def __call__(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], this rank's partial sum. Not bitwise repeatable: aiter adds experts atomically in
        bf16.

        Ids must lie in 0 .. global_experts - 1: aiter reads out of bounds otherwise, and looking
        would cost a host synchronisation; the gate guarantees it.
        """
        if x.shape[0] == 0:
            return torch.empty_like(x)
        return self.aiter.fused_moe(**self.arguments(x, topk_ids, topk_weights))


@dataclass(frozen=True, kw_only=True)
class AiterGate:
    """One layer's gate: a torch router product (fp32; aiter's own linear rounds to bf16), then one
    aiter launch.

    Differs from the other variants in one place: where all chosen and shared logits are below about
    -88 every sigmoid underflows and the weights are NaN.

    Attributes:
        weight: fp32 [X + S, H]. bias: fp32 [X + S], the shared experts' large.
        scale: route_scale * global_scale, on the host.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    scale: float
    top_k: int
    shared: int
    aiter: Aiter

    @staticmethod
    def prepare(
        aiter: Aiter,
        weight: torch.Tensor,
        bias: torch.Tensor,
        global_scale: torch.Tensor,
        *,
        top_k: int,
        route_scale: float,
    ) -> AiterGate:
        """Once, at load (reads global_scale to the host). Arguments as `moe_aiter.gate`."""
        S = weight.shape[0] - bias.shape[0]
        sinks = SINK_BIAS * torch.arange(S, 0, -1, dtype=torch.float32, device=bias.device)
        return AiterGate(
            weight=weight.float(), bias=torch.cat((bias.float(), sinks)),
            scale=route_scale * float(global_scale), top_k=top_k, shared=S, aiter=aiter,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int32 [T, K] and weights fp32 [T, K + S], as `moe_aiter.gate`."""
        T, S, chosen = x.shape[0], self.shared, self.top_k + self.shared
        weights = torch.empty(T, chosen, dtype=torch.float32, device=x.device)
        ids = torch.empty(T, chosen, dtype=torch.int32, device=x.device)
        if T == 0:
            return ids[:, S:].contiguous(), weights
        self.aiter.gate(
            gating_output=F.linear(x.float(), self.weight),
            correction_bias=self.bias,
            topk_weights=weights,
            topk_ids=ids,
            num_expert_group=1,
            topk_grp=1,
            need_renorm=True,
            routed_scaling_factor=self.scale,
        )
        # Best score first: the shared experts lead, in order. They go last here.
        return ids[:, S:].contiguous(), torch.cat((weights[:, S:], weights[:, :S]), dim=1)
