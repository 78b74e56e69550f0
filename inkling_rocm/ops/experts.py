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
) -> Tensor:
    """Run the experts of one rank.

    Args:
        x_TH: [T, H]. topk_ids: int32 [T, K]. topk_weights: fp32 [T, K + S].
        w13: [X, 2I, H], gate rows then up rows. w2: [X, H, I]. shared_w13: [S, 2I, H]. shared_w2:
            [S, H, I].
    Returns: [T, H] in x's dtype, this rank's partial sum.
    """
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    K = topk_ids.shape[1]
    out_TH = torch.zeros(x_TH.shape, dtype=wide, device=x_TH.device)
    by_expert = topk_ids.flatten().sort(stable=True)
    token = by_expert.indices // K
    weight = topk_weights[:, :K].reshape(-1)[by_expert.indices].to(wide)
    hit, counts = by_expert.values.unique_consecutive(return_counts=True)
    x_sorted = x_TH[token]
    begin = 0
    for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
        part = slice(begin, begin + count)
        gate, up = F.linear(x_sorted[part], w13[expert]).chunk(2, dim=-1)
        down = F.linear(F.silu(gate) * up, w2[expert])
        out_TH.index_add_(0, token[part], down.to(wide) * weight[part, None])
        begin += count
    for shared in range(shared_w13.shape[0]):
        gate, up = F.linear(x_TH, shared_w13[shared]).chunk(2, dim=-1)
        gamma = topk_weights[:, K + shared, None].to(x_TH.dtype)
        out_TH += F.linear(F.silu(gate) * up * gamma, shared_w2[shared]).to(wide)
    return out_TH.to(x_TH.dtype)


VARIANTS = (Variant(name="torch", function="inkling_rocm.ops.experts:experts"),)
