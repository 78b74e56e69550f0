"""A stand-in for aiter that does what its kernels do with memory and rounding, and checks what they
assume.

Weights are un-shuffled before use, so a weight that was not shuffled gives a wrong result, as it
does there. Where the real library would read out of bounds, leave a sticky error or abort, this
raises Violation.
"""

from __future__ import annotations

import enum
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from moe_aiter.aiter_backend.features import Aiter, describe

SIGNATURES = json.loads((Path(__file__).parent / "data" / "aiter_signatures.json").read_text())


class Violation(AssertionError):
    """A precondition of the real kernel that the caller broke."""


class ActivationType(enum.Enum):
    No, Silu, Gelu = -1, 0, 1


class QuantType(enum.Enum):
    No, per_Tensor = 0, 1


def signature(version: str, function: str) -> inspect.Signature:
    """The recorded signature, defaults as marks that something is there."""
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(
                p["name"],
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=empty if p["default"] is None else p["default"],
            )
            for p in SIGNATURES[version][function]
        ]
    )


def need(ok: bool, what: str) -> None:
    if not ok:
        raise Violation(what)


def unpack(w: torch.Tensor) -> torch.Tensor:
    """Rows and columns of a shuffled weight, element by element from the layout's formula."""
    N, K = w.shape[-2:]
    n, k = torch.arange(N)[:, None], torch.arange(K)[None, :]
    flat = ((((n // 16) * (K // 32) + k // 32) * 4 + (k % 32) // 8) * 16 + n % 16) * 8 + k % 8
    return w.reshape(*w.shape[:-2], N * K)[..., flat]


def fused_moe(
    hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None,
    activation=ActivationType.Gelu, quant_type=QuantType.per_Tensor, doweight_stage1=False,
    dtype=None, **others,
):  # fmt: skip
    """Two stages: act = silu(gate) * up in bf16; then bf16 atomic adds of weight * down, in no
    fixed order."""
    need(not any(value is not None for value in others.values()), f"unexpected {others}")
    (M, H), (E, N, H1) = hidden_states.shape, w1.shape
    I = w2.shape[2]
    need(M > 0, "M = 0")
    need(hidden_states.dtype == w1.dtype == w2.dtype == torch.bfloat16, "dtypes of x and weights")
    need(dtype in (None, torch.bfloat16), "output dtype")
    need(N == 2 * I and H1 == H and w2.shape[:2] == (E, H), "weight shapes")
    need(I % 128 == 0, "I % 128")
    need(E * 2 * I * H < 2**31, "expert offsets in 32 bits")
    need(topk_weight.dtype == torch.float32, "topk_weight dtype")
    need(topk_ids.dtype == torch.int32, "topk_ids dtype")
    need(topk_weight.shape == topk_ids.shape == (M, topk_ids.shape[1]), "topk shapes")
    for name, tensor in (
        ("hidden_states", hidden_states), ("w1", w1), ("w2", w2), ("topk_weight", topk_weight),
        ("topk_ids", topk_ids)
    ):  # fmt: skip
        need(tensor.is_contiguous(), f"{name} contiguous")
    need(getattr(w1, "is_shuffled", False) and getattr(w2, "is_shuffled", False), "shuffle marks")
    need(activation is ActivationType.Silu, "activation")
    need(quant_type is QuantType.No, "quant type")
    local = torch.arange(E)
    if expert_mask is not None:
        need(expert_mask.dtype == torch.int32 and expert_mask.is_contiguous(), "expert_mask")
        need(int(expert_mask[-1]) == 0, "expert_mask's last slot is masked")
        need(int(expert_mask.sum()) == E, "expert_mask counts the local experts")
        local = torch.where(expert_mask > 0, expert_mask.cumsum(0) - 1, -1)[:-1]
    need(int(topk_ids.min()) >= 0 and int(topk_ids.max()) < len(local), "ids in range")
    gate_up, down = unpack(w1), unpack(w2)
    out = torch.zeros(M, H, dtype=torch.bfloat16)
    slots = local[topk_ids.long()]
    for m, k in torch.stack(torch.where(slots >= 0)).T[torch.randperm(int((slots >= 0).sum()))]:
        e = slots[m, k]
        g, u = (gate_up[e].float() @ hidden_states[m].float()).chunk(2)
        gamma = topk_weight[m, k]
        act = (F.silu(g) * u * (gamma if doweight_stage1 else 1.0)).bfloat16()
        part = (down[e].float() @ act.float()) * (1.0 if doweight_stage1 else gamma)
        out[m] += part.bfloat16()
    return out


def biased_grouped_topk_hip(
    gating_output, correction_bias, topk_weights, topk_ids, num_expert_group, topk_grp, need_renorm,
    routed_scaling_factor=1.0,
):  # fmt: skip
    """Plain sigmoids, best score first, one group; NaN where all chosen sigmoids underflow."""
    T, X = gating_output.shape
    need(T > 0, "T = 0")
    for name, tensor in (
        ("gating_output", gating_output), ("correction_bias", correction_bias), ("topk_weights",
        topk_weights)
    ):  # fmt: skip
        need(tensor.dtype == torch.float32 and tensor.is_contiguous(), name)
    need(bool(correction_bias.isfinite().all()), "finite bias")
    need(topk_ids.dtype == torch.int32 and topk_ids.is_contiguous(), "topk_ids")
    need(correction_bias.shape == (X,) and topk_ids.shape == topk_weights.shape, "shapes")
    need(num_expert_group == 1 and topk_grp == 1, "one group")
    need(isinstance(routed_scaling_factor, float), "a host float")
    scores = gating_output.sigmoid()
    order = (scores + correction_bias).sort(dim=-1, descending=True, stable=True).indices
    ids = order[:, : topk_ids.shape[1]]
    chosen = scores.gather(1, ids)
    topk_ids.copy_(ids)
    total = chosen.sum(-1, keepdim=True) if need_renorm else 1.0
    topk_weights.copy_(chosen / total * routed_scaling_factor)


def recorded(function, version: str, name: str):
    """The function behind a recorded signature: what does not bind there is a TypeError."""
    wanted = signature(version, name)

    def call(*args, **kwargs):
        bound = wanted.bind(*args, **kwargs)
        return function(**bound.arguments)

    call.__signature__ = wanted
    return call


def fake(version: str = "2026-07", *, gate: bool = False) -> Aiter:
    """An aiter of that release; gate: with a gate kernel new enough for shared experts."""
    module = SimpleNamespace(ActivationType=ActivationType, QuantType=QuantType)
    found = describe(
        module,
        recorded(fused_moe, version, "fused_moe"),
        recorded(biased_grouped_topk_hip, version, "biased_grouped_topk_hip"),
    )
    assert isinstance(found, Aiter), found
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return Aiter(**(fields | {"gate_with_sinks": gate}))
