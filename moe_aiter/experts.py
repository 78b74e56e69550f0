"""The routed and the shared experts of one MoE layer: which kernels run, and the argument
checks."""

from __future__ import annotations

from typing import Any

import torch

from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow
from moe_aiter.checks import check_rows, check_weight, request_arch, require
from moe_aiter.grouped import experts_by_choice, experts_looked_up
from moe_aiter.lookup import MAX_CHOICES as MOST_LOOKED_UP
from moe_aiter.lookup import MAX_EXPERTS
from moe_aiter.tokens import MAX_CHOICES, experts_by_token
from moe_aiter.tuning import PLAN


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shared_w13: torch.Tensor,
    shared_w2: torch.Tensor,
    first_expert: int = 0,
    out: torch.Tensor | None = None,
    arch: Arch | str | None = None,
    plan: TuningRow | None = None,
) -> torch.Tensor:
    """Run the experts of one rank; no host synchronisation, capturable, bitwise repeatable.

    Args:
        x: [T, H], rows of any pitch.
        topk_ids: int32 [T, K] contiguous, of the whole model's experts.
        topk_weights: fp32 [T, K + S], unit last stride.
        w13: [X, 2I, H], gate rows then up rows. w2: [X, H, I]. shared_w13: [S, 2I', H]. shared_w2:
            [S, H, I']; S may be 0. All of x's dtype, contiguous.
        first_expert: id of w13[0]: this rank's experts are first_expert .. first_expert + X - 1,
            and choices of others contribute nothing.
        plan: a row of moe_aiter.tuning.PLAN; None = the table's.
    Returns: [T, H] in x's dtype, this rank's partial sum. A token's value depends on no other
    token's.
    Raises: ValueError: an argument does not fit, or no tuning row.
    """
    op = "experts"
    check_rows(op, "x", x)
    arch = request_arch(arch, x)
    (T, H), (X, _, I), S = x.shape, w2.shape, shared_w13.shape[0]
    K = topk_ids.shape[1]
    require(op, X >= 1, "the number of local experts", X, "at least 1")
    check_weight(op, "w13", w13, (X, 2 * I, H), x)
    check_weight(op, "w2", w2, (X, H, I), x)
    shared_I = shared_w2.shape[2]
    check_weight(op, "shared_w13", shared_w13, (S, 2 * shared_I, H), x)
    check_weight(op, "shared_w2", shared_w2, (S, H, shared_I), x)
    ids_are = (tuple(topk_ids.shape), topk_ids.dtype, topk_ids.is_contiguous())
    require(
        op, ids_are == ((T, K), torch.int32, True), "topk_ids", ids_are, ((T, K), torch.int32, True)
    )
    gamma_is = (tuple(topk_weights.shape), topk_weights.dtype)
    wanted = ((T, K + S), torch.float32)
    require(op, gamma_is == wanted, "topk_weights", gamma_is, wanted)
    require(op, topk_weights.stride(1) == 1, "topk_weights' last stride", topk_weights.stride(1), 1)
    out = torch.empty(T, H, dtype=x.dtype, device=x.device) if out is None else out
    check_rows(op, "out", out, H)
    require(
        op,
        (out.shape[0], out.dtype) == (T, x.dtype),
        "out",
        (out.shape[0], out.dtype),
        (T, x.dtype),
    )
    if T == 0:
        return out
    plan = plan or PLAN.select(arch.name, tokens=T, hidden=H, width=I)
    bounds: dict[str, Any] = dict(plan.constexprs)
    most_choices = min(bounds["BY_TOKEN_CHOICES"], MAX_CHOICES)
    local: dict[str, Any] = {
        "w13": w13,
        "w2": w2,
        "first_expert": first_expert,
        "out": out,
        "arch": arch,
    }
    choices = T * K
    # One launch serves both kinds only where they are of one width (they differ under expert
    # parallelism, where the shared experts are split by width).
    one_width = S == 0 or shared_I == I
    if one_width and choices <= most_choices:
        return experts_by_token(
            x, topk_ids, topk_weights, shared_w13=shared_w13, shared_w2=shared_w2, **local
        )
    looked_up = choices <= min(bounds["LOOKUP_CHOICES"], MOST_LOOKED_UP) and X <= MAX_EXPERTS
    by_choice = experts_looked_up if looked_up else experts_by_choice
    rows_each = choices // X
    folds = looked_up or rows_each <= bounds["FOLD_ROWS"] or rows_each >= bounds["FOLD_FROM"] > 0
    if S == 0 or (one_width and folds):
        return by_choice(
            x, topk_ids, topk_weights, shared_w13=shared_w13, shared_w2=shared_w2, **local
        )
    addend = experts_by_token(
        x, None, topk_weights[:, K:], w13=None, w2=None, shared_w13=shared_w13, shared_w2=shared_w2,
        out=torch.empty_like(out), arch=arch,
    )  # fmt: skip
    return by_choice(
        x, topk_ids, topk_weights, shared_w13=None, shared_w2=None, addend=addend, **local
    )
