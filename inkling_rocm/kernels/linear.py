"""linear of few tokens in one launch: the launcher of linear_kernels.py, and the op."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from inkling_rocm.kernels.linear_kernels import (
    _linear_parts_kernel,
    _linear_tiles_kernel,
    _linear_vector_kernel,
)
from inkling_rocm.kernels.linear_tuning import TILES, VECTOR
from inkling_rocm.ops.linear import linear as linear_reference
from inkling_rocm.ops.registry import OpContext
from kernel_base.tuning import TuningRow

# Above FEW_TOKENS a library's product is as fast or faster (H200). But where the columns are few it
# splits the depth and takes a second launch; up to MAX_TOKENS this one takes the place of both,
# unless the depth is so short that nobody splits it.
FEW_TOKENS, MAX_TOKENS = 48, 128
FEW_COLUMNS, SHORT_DEPTH = 2048, 1024
# Most tiles of a split product.
TICKETS = 4096


def make_tickets(device: torch.device) -> Tensor:
    """What `linear` counts in. Calls that share it must be ordered on one stream; a captured graph
    must keep it alive."""
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


def linear(
    x_TN: Tensor,
    weight_MN: Tensor,
    *,
    arch: str,
    row: TuningRow | None = None,
    out: Tensor | None = None,
    tickets: Tensor | None = None,
) -> Tensor:
    """The contract of `inkling_rocm.ops.linear` for at most MAX_TOKENS tokens; no host
    synchronisation, capturable.

    Args:
        x_TN: N contiguous. weight_MN: contiguous. row: launch configuration to force.
        tickets: see make_tickets; None makes some where they are needed.
    Raises: ValueError: an argument does not fit, or there is no tuning row for arch.
    """
    (T, N), M = x_TN.shape, weight_MN.shape[0]
    if weight_MN.shape[1] != N or weight_MN.dtype != x_TN.dtype or x_TN.stride(1) != 1:
        raise ValueError(
            f"linear: x {tuple(x_TN.shape)} {x_TN.dtype}, strides {x_TN.stride()}, and weights "
            f"{tuple(weight_MN.shape)} {weight_MN.dtype} do not fit"
        )
    if not weight_MN.is_contiguous() or T > MAX_TOKENS:
        raise ValueError(
            f"linear: {T} tokens, weight strides {weight_MN.stride()}; wanted at most "
            f"{MAX_TOKENS} and contiguous weights"
        )
    if out is None:
        out = torch.empty(T, M, dtype=x_TN.dtype, device=x_TN.device)
    facts = {"tokens": T, "bits": x_TN.element_size() * 8, "depth": N, "columns": M}
    if T == 1:
        row = row or VECTOR.select(arch, **facts)
        _linear_vector_kernel[(triton.cdiv(M, row.constexprs["BLOCK_N"]),)](
            out, x_TN, weight_MN, M, DEPTH=N, **row.launch_kwargs()
        )
    elif T > 1:
        row = row or TILES.select(arch, **facts)
        if "PARTS" in row.constexprs:
            _launch_parts(out, x_TN, weight_MN, row)
        else:
            _launch_tiles(out, x_TN, weight_MN, tickets, arch, row)
    return out


def _launch_parts(out: Tensor, x_TN: Tensor, weight_MN: Tensor, row: TuningRow) -> None:
    (T, N), M = x_TN.shape, weight_MN.shape[0]
    c: dict[str, Any] = dict(row.constexprs)
    if c["BLOCK_M"] < T:
        raise ValueError(f"linear: {T} tokens, row {c}; wanted a BLOCK_M for all of them")
    _linear_parts_kernel[(triton.cdiv(M, c["BLOCK_N"]),)](
        out, x_TN, weight_MN, T, M, N, x_TN.stride(0), out.stride(0),
        EVEN_K=N % (c["PARTS"] * c["BLOCK_K"]) == 0, **row.launch_kwargs(),
    )  # fmt: skip


def _launch_tiles(
    out: Tensor, x_TN: Tensor, weight_MN: Tensor, tickets: Tensor | None, arch: str, row: TuningRow
) -> None:
    (T, N), M = x_TN.shape, weight_MN.shape[0]
    c: dict[str, Any] = dict(row.constexprs)
    tiles = triton.cdiv(M, c["BLOCK_N"]) * triton.cdiv(T, c["BLOCK_M"])
    # A slice longer than the depth is the whole depth; so is one of too many tiles.
    if tiles > TICKETS or c["SLICE"] > N:
        c["SLICE"] = triton.cdiv(N, c["BLOCK_K"]) * c["BLOCK_K"]
    slices, tails, partial = triton.cdiv(N, c["SLICE"]), 0, None
    if slices > 1:
        partial = torch.empty(slices, T, M, dtype=torch.float32, device=x_TN.device)
        tickets = make_tickets(x_TN.device) if tickets is None else tickets
        tails = c["BLOCK_M"] // c["TAIL"] if c["TAIL"] else 0
    else:
        c["TAIL"] = 0
    even = N % c["BLOCK_K"] == 0 and c["SLICE"] % c["BLOCK_K"] == 0
    _linear_tiles_kernel[(tiles * (slices + tails),)](
        out, partial, tickets, x_TN, weight_MN, T, M, N, x_TN.stride(0), out.stride(0),
        SLICES=slices, EVEN_K=even, AMD=arch.startswith("gfx"), **c, **row.launch_options(),
    )  # fmt: skip


class Linear:
    """The op of one engine: the contract of `inkling_rocm.ops.linear`."""

    def __init__(self, context: OpContext):
        self._arch = context.arch.name
        self._tickets: Tensor | None = None

    def __call__(self, x_TN: Tensor, weight_MN: Tensor) -> Tensor:
        (tokens, depth), columns = x_TN.shape, weight_MN.shape[0]
        splits = columns <= FEW_COLUMNS and depth > SHORT_DEPTH
        if tokens > (MAX_TOKENS if splits else FEW_TOKENS):
            return linear_reference(x_TN, weight_MN)
        if self._tickets is None and not _capturing(x_TN.device):
            self._tickets = make_tickets(x_TN.device)
        return linear(x_TN, weight_MN, arch=self._arch, tickets=self._tickets)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
