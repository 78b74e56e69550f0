"""The mixture of experts in plain torch: what every kernel here is compared with.

With float64 inputs these are the reference; with the model's dtype they show the rounding of eager
code, which sets the error budget.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gate_reference(
    x_TH: Tensor,
    weight: Tensor,
    bias_X: Tensor,
    global_scale: Tensor,
    *,
    top_k: int,
    route_scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Ids [T, K] (int32, best first, ties to the lowest) and weights [T, K + S] in `dtype`."""
    experts = bias_X.shape[0]
    logits = F.linear(x_TH.to(dtype), weight.to(dtype))
    scores = logits[:, :experts].sigmoid() + bias_X.to(dtype)
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return ids.int(), weigh(logits, ids, experts, route_scale * global_scale.to(dtype))


def weigh(logits: Tensor, ids_TK: Tensor, experts: int, scale: Tensor) -> Tensor:
    """Weights [T, K + S] of given choices: softmax of logsigmoids of the chosen and shared
    logits."""
    chosen = torch.cat((logits.gather(-1, ids_TK.long()), logits[:, experts:]), dim=-1)
    return F.logsigmoid(chosen).softmax(-1) * scale


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of rows that hold the gate half, then the up half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def experts_reference(
    x_TH: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    w13: Tensor,
    w2: Tensor,
    shared_w13: Tensor,
    shared_w2: Tensor,
    first_expert: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Sum of the routed experts of the local range and of the shared ones, [T, H] in `dtype`.

    Products are rounded to `dtype`, weights and sums are at least fp32. Rows of no local expert are
    0.
    """
    wide = torch.promote_types(dtype, torch.float32)
    x = x_TH.to(dtype)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    K = topk_ids.shape[1]
    for local in range(w13.shape[0]):
        token, slot = (topk_ids == first_expert + local).nonzero(as_tuple=True)
        if len(token):
            down = F.linear(swiglu(F.linear(x[token], w13[local].to(dtype))), w2[local].to(dtype))
            out.index_add_(0, token, down.to(wide) * topk_weights[token, slot, None].to(wide))
    for shared in range(shared_w13.shape[0]):
        inner = swiglu(F.linear(x, shared_w13[shared].to(dtype)))
        inner = inner * topk_weights[:, K + shared, None].to(dtype)
        out += F.linear(inner, shared_w2[shared].to(dtype)).to(wide)
    return out.to(dtype)


def dense_mlp_reference(
    x_TH: Tensor, gate_up: Tensor, down_HI: Tensor, global_scale: Tensor, dtype=torch.float64
) -> Tensor:
    """down(silu(gate) * up) * global_scale, [T, H] in `dtype`."""
    inner = swiglu(F.linear(x_TH.to(dtype), gate_up.to(dtype)))
    return F.linear(inner, down_HI.to(dtype)) * global_scale.to(dtype)
