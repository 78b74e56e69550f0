"""linear of few tokens in one launch: y = x W^T, every weight read once.

One token: a program owns BLOCK_N rows of W over the whole depth and multiplies them with the token
elementwise, added up at the end; there are as many loads in flight as a program has registers for.

More: tiles, with the depth split over programs where the columns are too few to fill the GPU. The
program of a tile that ends last (an integer ticket) adds the slices' fp32 sums in their
order, where libraries need a second launch. Which one that is does not show in the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_rocm.kernels.linear_tuning import TILES, VECTOR
from inkling_rocm.ops.linear import linear as linear_reference
from inkling_rocm.ops.registry import OpContext
from kernel_base.device import arrive
from kernel_base.tuning import TuningRow

# Above FEW_TOKENS a library's product is as fast or faster (H200). But where the columns are few it
# splits the depth and takes a second launch; up to MAX_TOKENS this one takes the place of both,
# unless the depth is so short that nobody splits it.
FEW_TOKENS, MAX_TOKENS = 16, 64
FEW_COLUMNS, SHORT_DEPTH = 2048, 1024
# Most tiles of a split product.
TICKETS = 4096


@triton.jit
def _linear_vector_kernel(
    out_ptr, x_ptr, w_ptr, columns, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Columns past the end repeat the last one and are never stored: cheaper than masking weights.
    rows = w_ptr + tl.minimum(n, columns - 1)[:, None].to(tl.int64) * DEPTH
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        if start + BLOCK_K <= DEPTH:
            x = tl.load(x_ptr + start + k)
            w = tl.load(rows + (start + k)[None, :])
        else:
            mask = start + k < DEPTH
            x = tl.load(x_ptr + start + k, mask=mask, other=0.0)
            w = tl.load(rows + (start + k)[None, :], mask=mask[None, :], other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < columns)


@triton.jit(do_not_specialize=("tokens",))
def _linear_tiles_kernel(
    out_ptr, partial_ptr, tickets_ptr, x_ptr, w_ptr, tokens, columns, depth, stride_x, stride_out,
    SLICES: tl.constexpr, EVEN_K: tl.constexpr, AMD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = tl.program_id(1) * SLICE
    mask_t = (t < tokens)[:, None]
    mask = mask_t & (n < columns)[None, :]
    x_ptrs = x_ptr + first + t[:, None].to(tl.int64) * stride_x + k[None, :]
    # Columns past the end repeat the last one and are never stored: cheaper than masking weights.
    rows = tl.minimum(n, columns - 1)[None, :].to(tl.int64)
    w_ptrs = w_ptr + first + rows * depth + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, tl.minimum(SLICE, depth - first), BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=mask_t, other=0.0)
            w = tl.load(w_ptrs + start)
        else:
            mask_k = k < depth - first - start
            x = tl.load(x_ptrs + start, mask=mask_t & mask_k[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=mask_k[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if SLICES > 1:
        at = t[:, None] * columns + n[None, :]
        tl.store(partial_ptr + tl.program_id(1) * tokens * columns + at, acc, mask=mask)
        tickets_ptr += tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if arrive(tickets_ptr, t, AMD) < SLICES - 1:
            return
        tl.debug_barrier()
        tl.store(tickets_ptr, 0)
        # The programs that wrote these ran on other compute units: read past this one's L1.
        acc = tl.load(partial_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        for _ in tl.static_range(1, SLICES):
            partial_ptr += tokens * columns
            acc += tl.load(partial_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    out_ptrs = out_ptr + t[:, None].to(tl.int64) * stride_out + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
        c: dict[str, Any] = dict(row.constexprs)
        tiles, blocks = triton.cdiv(M, c["BLOCK_N"]), triton.cdiv(T, c["BLOCK_M"])
        # A slice longer than the depth is the whole depth; so is one of too many tiles.
        if tiles * blocks > TICKETS or c["SLICE"] > N:
            c["SLICE"] = triton.cdiv(N, c["BLOCK_K"]) * c["BLOCK_K"]
        slices = triton.cdiv(N, c["SLICE"])
        even = N % c["SLICE"] == 0 and c["SLICE"] % c["BLOCK_K"] == 0
        partial = None
        if slices > 1:
            partial = torch.empty(slices, T, M, dtype=torch.float32, device=x_TN.device)
            tickets = make_tickets(x_TN.device) if tickets is None else tickets
        _linear_tiles_kernel[(tiles, slices, blocks)](
            out, partial, tickets, x_TN, weight_MN, T, M, N, x_TN.stride(0), out.stride(0),
            SLICES=slices, EVEN_K=even,
            AMD=arch.startswith("gfx"), **c, **row.launch_options(),
        )  # fmt: skip
    return out


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
