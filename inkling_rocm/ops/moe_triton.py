"""gate, experts and dense_mlp through moe_aiter's Triton kernels.

`Gate` and the `make_*` functions bind the architecture: an emulated one runs on CPU tensors.
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


def make_experts(context: OpContext) -> Callable:
    return partial(experts, arch=context.arch)


def make_dense_mlp(context: OpContext) -> Callable:
    return partial(dense_mlp, arch=context.arch)


class Gate:
    """The op of one engine: the contract of `inkling_rocm.ops.gate`.

    The counters of its launches are its own: another engine of the process may start, on a stream
    of its own, while this one serves, and programs that wait could then wait for ever.
    """

    def __init__(self, context: OpContext):
        self._arch = context.arch
        self._workspace: moe_aiter.GateWorkspace | None = None

    def __call__(
        self, x_TH: Tensor, weight: Tensor, bias_X: Tensor, global_scale: Tensor, *, moe: MoEConfig
    ) -> tuple[Tensor, Tensor]:
        device = x_TH.device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._workspace is None and not capturing:
            self._workspace = moe_aiter.GateWorkspace.allocate(device)
        return moe_aiter.gate(
            x_TH,
            weight,
            bias_X,
            global_scale,
            top_k=moe.top_k,
            route_scale=moe.route_scale,
            workspace=self._workspace,
            arch=self._arch,
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
