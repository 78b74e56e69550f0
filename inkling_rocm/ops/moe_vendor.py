"""gate and experts through AMD's aiter, with weights prepared in its layout when the model is
built."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache

import torch
from torch import Tensor

from inkling_rocm.config import MoEConfig
from inkling_rocm.ops.registry import OpContext
from moe_aiter.aiter_backend import selftest
from moe_aiter.aiter_backend.calls import AiterExperts, AiterGate
from moe_aiter.aiter_backend.features import Aiter, find_aiter
from moe_aiter.aiter_backend.refusals import refuse_experts, refuse_gate


@cache
def _aiter() -> Aiter | str:
    return find_aiter()


@cache
def _selftest(**facts: int) -> str | None:
    return selftest.run(facts)


def _facts(context: OpContext) -> dict[str, int] | None:
    moe, text = context.config.text.moe, context.config.text
    if moe is None:
        return None
    return {
        "experts": moe.num_experts,
        "top_k": moe.top_k,
        "shared": moe.num_shared_experts,
        "hidden": text.hidden_size,
        "width": moe.intermediate_size // context.tp_size,
    }


def supports_experts(context: OpContext) -> str | None:
    """Why aiter cannot run the experts; the last question is its self-test on this machine."""
    facts = _facts(context)
    if facts is None:
        return "the model has no experts"
    if context.ep_size > 1:
        return "its call is only wired for experts split by width, not for expert parallelism"
    reason = refuse_experts(
        context.arch,
        _aiter(),
        hip=torch.version.hip is not None,
        dtype=context.dtype,
        experts=facts["experts"] + facts["shared"],
        hidden=facts["hidden"],
        width=facts["width"],
    )
    return reason or _selftest(**facts)


def supports_gate(context: OpContext) -> str | None:
    """Why aiter cannot be the gate."""
    facts = _facts(context)
    if facts is None:
        return "the model has no experts"
    aiter = _aiter()
    reason = refuse_gate(context.arch, aiter, hip=torch.version.hip is not None)
    return reason or _selftest(**facts)


def _installed() -> Aiter:
    aiter = _aiter()
    if isinstance(aiter, str):
        raise ValueError(f"aiter experts: {aiter}")
    return aiter


EXPERT_WEIGHTS = ("w13", "w2", "shared_w13", "shared_w2")


def prepare_experts(weights: MutableMapping[str, Tensor], context: OpContext) -> AiterExperts:
    """A layer's experts in aiter's layout; takes the originals out of `weights`, so that they are
    freed.

    Raises: ValueError: they were taken before.
    """
    gone = [name for name in EXPERT_WEIGHTS if f"moe.{name}" not in weights]
    if gone:
        raise ValueError(
            f"aiter experts: a layer's {', '.join(gone)} are gone: they were shuffled for aiter "
            "and freed; load the model again to change them"
        )
    w13, w2, shared_w13, shared_w2 = (weights.pop(f"moe.{name}") for name in EXPERT_WEIGHTS)
    return AiterExperts.prepare(
        _installed(), w13=w13, w2=w2, shared_w13=shared_w13, shared_w2=shared_w2
    )


def experts(
    x_TH: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    w13: None,
    w2: None,
    shared_w13: None,
    shared_w2: None,
    prepared: AiterExperts,
) -> Tensor:
    """The contract of `inkling_rocm.ops.experts`, except that runs are not bitwise repeatable."""
    return prepared(x_TH, topk_ids, topk_weights)


def prepare_gate(weights: MutableMapping[str, Tensor], context: OpContext) -> AiterGate:
    """A layer's gate as aiter wants it; the originals stay."""
    moe = context.config.text.moe
    assert moe is not None, "supports_gate refuses models without experts"
    return AiterGate.prepare(
        _installed(),
        weights["moe.gate_weight"],
        weights["moe.gate_bias"],
        weights["moe.global_scale"],
        top_k=moe.top_k,
        route_scale=moe.route_scale,
    )


def gate(
    x_TH: Tensor,
    weight: Tensor,
    bias_X: Tensor,
    global_scale: Tensor,
    *,
    moe: MoEConfig,
    prepared: AiterGate,
) -> tuple[Tensor, Tensor]:
    """The contract of `inkling_rocm.ops.gate`, except where all chosen logits are below -88."""
    return prepared(x_TH)
