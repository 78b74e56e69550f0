"""The layer's own ops through inkling_rocm.kernels.

Each `make_*` binds the architecture, because an emulated one runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from inkling_rocm.kernels.norm import embed, rms_norm
from inkling_rocm.kernels.prologue import attention_prologue
from inkling_rocm.kernels.residual import residual_conv_norm
from inkling_rocm.ops.registry import OpContext


def make_attention_prologue(context: OpContext) -> Callable:
    return partial(attention_prologue, arch=context.arch)


def make_residual_conv_norm(context: OpContext) -> Callable:
    return partial(residual_conv_norm, arch=context.arch)


def make_rms_norm(context: OpContext) -> Callable:
    return partial(rms_norm, arch=context.arch)


def make_embed(context: OpContext) -> Callable:
    return partial(embed, arch=context.arch)
