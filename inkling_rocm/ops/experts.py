"""experts: the routed and the shared experts of one MoE layer.

    out = sum_k w[k] * down_e(silu(x G_e) * (x U_e))                      e = topk_ids[k]
        + sum_s down_s(silu(x G_s) * (x U_s) * w[K + s])

Each expert's down projection is rounded to the model dtype; weighting and sums are fp32, in the
order routed experts by id, then shared experts; one rounding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.ops import moe_support
from inkling_rocm.ops.registry import Variant


def experts(
    x_TH: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    w13: Tensor,
    w2: Tensor,
    shared_w13: Tensor,
    shared_w2: Tensor,
    first_expert: int = 0,
) -> Tensor:
    """Run the experts of one rank.

    Args:
        x_TH: [T, H]. topk_ids: int32 [T, K]. topk_weights: fp32 [T, K + S].
        w13: [X, 2I, H], gate rows then up rows. w2: [X, H, I]. shared_w13: [S, 2I, H]. shared_w2:
            [S, H, I].
        first_expert: id of w13[0]. Choices outside first_expert .. first_expert + X - 1 are other
            ranks' (expert parallelism) and add nothing here.
    Returns: [T, H] in x's dtype, this rank's partial sum.
    """
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    (T, K), X = topk_ids.shape, w13.shape[0]
    # With few tokens that hit most experts, one batched product over all experts is cheaper than a
    # loop over the hit ones: the weights are what is read, and they are read once either way.
    all_at_once = T <= MAX_TOKENS_ALL_AT_ONCE and T * K >= X
    routed = _all_experts if all_at_once else _hit_experts
    ids_TK = topk_ids.long() - first_expert
    out_TH = routed(x_TH, ids_TK, topk_weights[:, :K].to(wide), w13, w2)
    gamma_TS1 = topk_weights[:, K:, None].to(x_TH.dtype)
    inner_TSI = _swiglu(_every_expert(x_TH, shared_w13)) * gamma_TS1
    out_TH += torch.bmm(inner_TSI.transpose(0, 1), shared_w2.transpose(1, 2)).to(wide).sum(0)
    return out_TH.to(x_TH.dtype)


MAX_TOKENS_ALL_AT_ONCE = 64


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _every_expert(x_TH: Tensor, w13: Tensor) -> Tensor:
    """The first projection of every expert as one product, [T, experts, 2I]."""
    return F.linear(x_TH, w13.flatten(0, 1)).view(x_TH.shape[0], *w13.shape[:2])


def _hit_experts(x_TH, ids_TK, weights_TK, w13, w2) -> Tensor:
    """Sum over the routed experts, one expert at a time; [T, H] in the weights' dtype."""
    out_TH = torch.zeros(x_TH.shape, dtype=weights_TK.dtype, device=x_TH.device)
    by_expert = ids_TK.flatten().sort(stable=True)
    token = by_expert.indices // ids_TK.shape[1]
    weight = weights_TK.flatten()[by_expert.indices]
    hit, counts = by_expert.values.unique_consecutive(return_counts=True)
    x_sorted = x_TH[token]
    begin = 0
    for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
        part = slice(begin, begin + count)
        begin += count
        if not 0 <= expert < w13.shape[0]:
            continue
        down = F.linear(_swiglu(F.linear(x_sorted[part], w13[expert])), w2[expert])
        out_TH.index_add_(0, token[part], down.to(weight.dtype) * weight[part, None])
    return out_TH


def _all_experts(x_TH, ids_TK, weights_TK, w13, w2) -> Tensor:
    """The same sum: every expert runs on every token, the chosen ones' rows are picked."""
    inner_TXI = _swiglu(_every_expert(x_TH, w13))
    down_XTH = torch.bmm(inner_TXI.transpose(0, 1), w2.transpose(1, 2))
    (T, K), H = ids_TK.shape, x_TH.shape[1]
    is_local_TK = (ids_TK >= 0) & (ids_TK < w13.shape[0])
    rows = ids_TK.clamp(0, w13.shape[0] - 1) * T + torch.arange(T, device=ids_TK.device)[:, None]
    down_TKH = down_XTH.view(-1, H).index_select(0, rows.flatten()).view(T, K, H)
    weights_TK = torch.where(is_local_TK, weights_TK, 0)
    return (down_TKH.to(weights_TK.dtype) * weights_TK[:, :, None]).sum(1)


VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.ops.moe_triton:make_experts",
        per_engine=True,
        supports=moe_support.triton,
    ),
    Variant(
        name="aiter",
        function="inkling_rocm.ops.moe_vendor:experts",
        prepare="inkling_rocm.ops.moe_vendor:prepare_experts",
        supports=moe_support.aiter_experts,
    ),
    Variant(name="torch", function="inkling_rocm.ops.experts:experts"),
)
