"""gate, experts and dense_mlp through moe_aiter's Triton kernels.

The `make_*` functions bind the architecture: an emulated one runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import moe_aiter
from inkling_rocm.config import MoEConfig
from inkling_rocm.ops.registry import OpContext
from kernel_base.arch import Arch

# One workspace a device, made outside graph capture: a model's gates are ordered on its stream.
_WORKSPACES: dict[torch.device, moe_aiter.GateWorkspace] = {}


def _workspace(device: torch.device) -> moe_aiter.GateWorkspace | None:
    workspace = _WORKSPACES.get(device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if workspace is None and not capturing:
        workspace = _WORKSPACES[device] = moe_aiter.GateWorkspace.allocate(device)
    return workspace


def make_gate(context: OpContext) -> Callable:
    return partial(gate, arch=context.arch)


def make_experts(context: OpContext) -> Callable:
    return partial(experts, arch=context.arch)


def make_dense_mlp(context: OpContext) -> Callable:
    return partial(dense_mlp, arch=context.arch)


def gate(
    x_TH: Tensor,
    weight: Tensor,
    bias_X: Tensor,
    global_scale: Tensor,
    *,
    moe: MoEConfig,
    arch: Arch | None = None,
) -> tuple[Tensor, Tensor]:
    """The contract of `inkling_rocm.ops.gate`."""
    return moe_aiter.gate(
        x_TH,
        weight,
        bias_X,
        global_scale,
        top_k=moe.top_k,
        route_scale=moe.route_scale,
        workspace=_workspace(x_TH.device),
        arch=arch,
    )


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
    arch: Arch | None = None,
) -> Tensor:
    """The contract of `inkling_rocm.ops.experts`."""
    return moe_aiter.experts(
        x_TH,
        topk_ids,
        topk_weights,
        w13=w13,
        w2=w2,
        shared_w13=shared_w13,
        shared_w2=shared_w2,
        first_expert=first_expert,
        arch=arch,
    )


def dense_mlp(
    x_TH: Tensor,
    gate_up: Tensor,
    down_HI: Tensor,
    global_scale: Tensor,
    *,
    arch: Arch | None = None,
) -> Tensor:
    """The contract of `inkling_rocm.ops.dense_mlp`."""
    return moe_aiter.dense_mlp(x_TH, gate_up, down_HI, global_scale, arch=arch)
