"""residual_conv_norm: the seam between two halves of a layer.

    y        = cast(sum over ranks of partial)       rounded BEFORE it enters the taps and the ring
    residual = residual + short_conv(y)
    normed   = rms_norm(residual)

One op, because on a GPU exactly this (all-reduce, convolution, residual, norm) is worth one launch.
Rounding the
reduced sum first keeps a result independent of chunk borders: the ring is stored in the same dtype.

A block drafter (model/dflash.py) taps y + residual, the stream as it would be without the short
convolution: only this op has the reduced sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inkling_rocm.host import BatchMeta, Comm, ConvStateView
from inkling_rocm.ops import triton_support
from inkling_rocm.ops.registry import Variant
from inkling_rocm.ops.rms_norm import rms_norm
from inkling_rocm.ops.short_conv import short_conv


def residual_conv_norm(
    partial_TH: Tensor,
    residual_TH: Tensor,
    *,
    conv_WH: Tensor,
    norm_H: Tensor,
    eps: float,
    meta: BatchMeta,
    ring: ConvStateView,
    comm: Comm,
    second_partial_TH: Tensor | None = None,
    tap_TH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reduce, convolve, add, normalise.

    Args:
        partial_TH: [T, H], this rank's partial sum; may be overwritten.
        second_partial_TH: a second one to add to it (routed and shared experts computed apart).
        residual_TH: [T, H], the residual stream.
        conv_WH: fp32 [W, H]. norm_H: [H].
        tap_TH: [T, H] in the model dtype, rows may be strided; None = not wanted.
    Returns: (normed [T, H], residual [T, H]), both in the model dtype.
    In place: ring (see short_conv); tap_TH, if given, gets y + residual, rounded once.
    """
    if second_partial_TH is not None:
        partial_TH = partial_TH + second_partial_TH
    reduced_TH = comm.all_reduce(partial_TH)
    if tap_TH is not None:
        torch.add(residual_TH, reduced_TH, out=tap_TH)
    residual_TH = residual_TH + short_conv(reduced_TH, conv_WH, meta, ring)
    return rms_norm(residual_TH, norm_H, eps), residual_TH


VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.ops.layer_triton:make_residual_conv_norm",
        per_engine=True,
        supports=triton_support.layer,
    ),
    Variant(name="torch", function="inkling_rocm.ops.residual_conv_norm:residual_conv_norm"),
)
