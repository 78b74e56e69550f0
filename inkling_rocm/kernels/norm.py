"""RMSNorm of rows, and the embedding look-up with its norm: one program a row.

    rms_norm(x) = weight * cast(x / sqrt(mean(x^2) + eps))     fp32 inside; arXiv:1910.07467 eq. 4

The rounding before the multiplication is the released model's (ops/rms_norm.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_rocm.host import Comm
from inkling_rocm.kernels.checks import DTYPES, check_vector, request_arch, require
from inkling_rocm.kernels.tuning import EMBED, RMS_NORM
from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow


@triton.jit
def normed(x, weight, eps, N: tl.constexpr, AXIS: tl.constexpr):
    """`x` normalised along AXIS, in fp32 but rounded where the model rounds to x's dtype; entries
    past N are 0 and do not count."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, AXIS, keep_dims=True) / N
    unit = (wide * tl.rsqrt(mean + eps)).to(x.dtype)
    return unit.to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, stride_x_t, eps, N: tl.constexpr, BLOCK_N: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)
    mask = offs < N
    x = tl.load(x_ptr + token * stride_x_t + offs, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    y = normed(x, weight, eps, N, 0)
    tl.store(out_ptr + token * N + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _embed_kernel(
    out_ptr, ids_ptr, table_ptr, weight_ptr, first_row, num_rows, stride_table, eps,
    N: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With weight_ptr the normed rows; without, this rank's rows as they are and zeros for those
    of other ranks."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token) - first_row
    offs = tl.arange(0, BLOCK_N)
    mask = offs < N
    here = (row >= 0) & (row < num_rows)
    x = tl.load(table_ptr + row * stride_table + offs, mask=mask & here, other=0.0)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
        x = normed(x, weight, eps, N, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * N + offs, x, mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
) -> torch.Tensor:
    """Normalise the last dimension; the contract of `inkling_rocm.ops.rms_norm`, one launch.

    Args:
        x: [..., N] of one row pitch, last dimension contiguous. weight: [N], x's dtype.
        out: contiguous, x's shape; default a new tensor.
    Raises: ValueError: an argument does not fit, or no tuning row.
    """
    op = "rms_norm"
    arch = request_arch(arch, x)
    N = x.shape[-1]
    require(op, x.dtype in DTYPES, "x's dtype", x.dtype, " or ".join(map(str, DTYPES)))
    check_vector(op, "weight", weight, (N,), x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    require(op, out.is_contiguous() and out.shape == x.shape, "out", out.shape, x.shape)
    x_TN = x.view(-1, N)  # torch refuses rows of more than one pitch
    if x_TN.shape[0]:
        row = row or RMS_NORM.select(arch.name, hidden=N)
        _rms_norm_kernel[(x_TN.shape[0],)](
            out, x_TN, weight, x_TN.stride(0), eps,
            N=N,
            BLOCK_N=triton.next_power_of_2(N),
            **row.launch_kwargs(),
        )  # fmt: skip
    return out


def embed(
    input_ids: torch.Tensor,
    table_VH: torch.Tensor,
    norm_H: torch.Tensor,
    *,
    eps: float,
    comm: Comm,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
) -> torch.Tensor:
    """Look up and normalise; the contract of `inkling_rocm.ops.embed`.

    One launch on one rank; on several: look-up, all-reduce, norm.

    Raises: ValueError: an argument does not fit, or no tuning row.
    """
    op = "embed"
    arch = request_arch(arch, table_VH)
    T, (V, H) = input_ids.shape[0], table_VH.shape
    require(op, table_VH.dtype in DTYPES, "table's dtype", table_VH.dtype, DTYPES)
    require(op, input_ids.dtype == torch.int64, "input_ids' dtype", input_ids.dtype, torch.int64)
    require(op, table_VH.stride(1) == 1, "the table's last stride", table_VH.stride(1), 1)
    check_vector(op, "norm", norm_H, (H,), table_VH.dtype)
    alone = comm.tp_size == 1
    out_TH = torch.empty(T, H, dtype=table_VH.dtype, device=table_VH.device)
    if T:
        row = row or EMBED.select(arch.name, hidden=H)
        _embed_kernel[(T,)](
            out_TH, input_ids, table_VH, norm_H if alone else None, comm.tp_rank * V, V,
            table_VH.stride(0), eps,
            N=H,
            BLOCK_N=triton.next_power_of_2(H),
            **row.launch_kwargs(),
        )  # fmt: skip
    return out_TH if alone else rms_norm(comm.all_reduce(out_TH), norm_H, eps, arch=arch)
