"""gate and experts through AMD's aiter, with weights prepared in its layout.

`prepare_experts` belongs at load, where the originals can be freed; a layer that was not prepared
then is prepared by its first call, beside the originals.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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


# By the weight tensor itself, with its version: an in-place update (weight sync) prepares anew.
_EXPERTS = WeakTensorKeyDictionary()
_GATES = WeakTensorKeyDictionary()


def _installed() -> Aiter:
    aiter = _aiter()
    if isinstance(aiter, str):
        raise ValueError(f"aiter experts: {aiter}")
    return aiter


def prepare_experts(w13: Tensor, w2: Tensor, shared_w13: Tensor, shared_w2: Tensor) -> AiterExperts:
    """A layer's experts in aiter's layout; made once, found again by w13."""
    version, prepared = _EXPERTS.get(w13, (-1, None))
    if prepared is None or version != w13._version:
        prepared = AiterExperts.prepare(
            _installed(), w13=w13, w2=w2, shared_w13=shared_w13, shared_w2=shared_w2
        )
        _EXPERTS[w13] = (w13._version, prepared)
    return prepared


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
    """The contract of `inkling_rocm.ops.experts`, except that runs are not bitwise repeatable."""
    return prepare_experts(w13, w2, shared_w13, shared_w2)(x_TH, topk_ids, topk_weights)


def gate(
    x_TH: Tensor, weight: Tensor, bias_X: Tensor, global_scale: Tensor, *, moe: MoEConfig
) -> tuple[Tensor, Tensor]:
    """The contract of `inkling_rocm.ops.gate`, except where all chosen logits are below -88."""
    version, prepared = _GATES.get(weight, (-1, None))
    if prepared is None or version != weight._version:
        prepared = AiterGate.prepare(
            _installed(),
            weight,
            bias_X,
            global_scale,
            top_k=moe.top_k,
            route_scale=moe.route_scale,
        )
        _GATES[weight] = (weight._version, prepared)
    return prepared(x_TH)
