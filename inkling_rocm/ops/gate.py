"""gate: pick K of X experts for each token and share one weight budget with the S shared ones.

    logit  = x Wg^T                                              fp32, X + S of them
    ids    = top-K of sigmoid(logit[:X]) + bias                  bias affects the selection only
    weight = softmax(logsigmoid(logit[ids + shared])) * route_scale * global_scale

The softmax of logsigmoids equals sigmoid / sum(sigmoid) wherever that is finite, and stays right
where all sigmoids underflow. Equal scores go to the lowest expert id.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.config import MoEConfig
from inkling_rocm.ops import moe_support
from inkling_rocm.ops.registry import Variant


def gate(
    x_TH: Tensor, weight: Tensor, bias_X: Tensor, global_scale: Tensor, *, moe: MoEConfig
) -> tuple[Tensor, Tensor]:
    """Route tokens.

    Args:
        x_TH: [T, H]. weight: [X + S, H], routed rows then shared rows. bias_X: fp32 [X].
            global_scale: fp32 [1].
    Returns: topk_ids int32 [T, K], best first, and weights fp32 [T, K + S]: the routed experts' in
        the order of topk_ids, then the shared experts'. (float64 weights for float64 inputs.)
    """
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    logits = F.linear(x_TH.to(wide), weight.to(wide))
    scores_TX = logits[:, : moe.num_experts].sigmoid().add_(bias_X)
    ids_TK = scores_TX.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    chosen = torch.cat((logits.gather(-1, ids_TK), logits[:, moe.num_experts :]), dim=-1)
    weights = F.logsigmoid(chosen).softmax(-1).mul_(moe.route_scale * global_scale)
    return ids_TK.int(), weights


# Best first. aiter comes behind: none of its kernels has been timed on Inkling's shapes.
VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.ops.moe_triton:Gate",
        per_engine=True,
        supports=moe_support.triton,
    ),
    Variant(
        name="aiter",
        function="inkling_rocm.ops.moe_vendor:gate",
        prepare="inkling_rocm.ops.moe_vendor:prepare_gate",
        supports=moe_support.aiter_gate,
    ),
    Variant(name="torch", function="inkling_rocm.ops.gate:gate"),
)
