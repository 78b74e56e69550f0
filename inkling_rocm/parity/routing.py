"""Routing under rounding: where float64's scores of two experts lie within a target's rounding,
either choice is right, and everything after it differs.

So the reference runs follow the target's choice of experts (with weights of their own), and the
choice itself is judged by how much score it gives away: 0 for the best experts in the best order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def is_choice(site: str, output: str) -> bool:
    """Whether an output is a gate's expert ids."""
    return site.endswith(".gate") and output == "0"


def scores_of(args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """What a gate selects by, float64 [T, X], of its arguments."""
    x_TH, weight, bias_X, _ = args
    logits = F.linear(x_TH.double(), weight.double())
    return (logits[:, : kwargs["moe"].num_experts].sigmoid() + bias_X.double()).cpu()


def weights_of(ids_TK: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """The gate's weights if it had chosen `ids_TK`, see ops/gate.py."""
    x_TH, weight, _, global_scale = args
    moe = kwargs["moe"]
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    logits = F.linear(x_TH.to(wide), weight.to(wide))
    chosen = torch.cat((logits.gather(-1, ids_TK.long()), logits[:, moe.num_experts :]), dim=-1)
    return F.logsigmoid(chosen).softmax(-1).mul_(moe.route_scale * global_scale)


def shortfall(scores_TX: Tensor, ids_TK: Tensor) -> float:
    """The most by which an expert's score is from that of the one that belongs in its place; NaN:
    these are no experts, or one of them stands twice in a row."""
    ids_TK = ids_TK.cpu().long()
    if len(ids_TK) != len(scores_TX) or not ((ids_TK >= 0) & (ids_TK < scores_TX.shape[1])).all():
        return float("nan")
    if (ids_TK.sort(dim=-1).values.diff(dim=-1) == 0).any():  # at a tie it would cost nothing
        return float("nan")
    if not ids_TK.numel():
        return 0.0
    best = scores_TX.sort(dim=-1, descending=True).values[:, : ids_TK.shape[1]]
    return float((best - scores_TX.gather(-1, ids_TK)).abs().max())
