"""linear of few tokens in one launch: y = x W^T, every weight read once.

Libraries split such a product along its depth to fill the GPU, and add the parts in a second
launch. Here a program owns BLOCK_N output columns over the whole depth. One token: rows of W times
the token, elementwise, added up at the end; there are as many loads in flight as a program has
registers for. A few more: the tiles of kernels/lm_head.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_rocm.kernels.linear_tuning import TILES, VECTOR
from inkling_rocm.kernels.lm_head import _lm_head_kernel
from inkling_rocm.ops.linear import linear as linear_reference
from inkling_rocm.ops.registry import OpContext
from kernel_base.tuning import TuningRow

# Above this a library's product is faster by more than the second launch costs (H200).
MAX_TOKENS = 16


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


def linear(
    x_TN: Tensor,
    weight_MN: Tensor,
    *,
    arch: str,
    row: TuningRow | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The contract of `inkling_rocm.ops.linear` for at most MAX_TOKENS tokens; no host
    synchronisation, capturable.

    Args:   x_TN: N contiguous. weight_MN: contiguous. row: launch configuration to force.
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
    facts = {"tokens": T, "bits": x_TN.element_size() * 8, "depth": N}
    if T == 1:
        row = row or VECTOR.select(arch, **facts)
        _linear_vector_kernel[(triton.cdiv(M, row.constexprs["BLOCK_N"]),)](
            out, x_TN, weight_MN, M, DEPTH=N, **row.launch_kwargs()
        )
    elif T > 1:
        row = row or TILES.select(arch, **facts)
        c: dict[str, Any] = dict(row.constexprs)
        _lm_head_kernel[(triton.cdiv(M, c["BLOCK_N"]),)](
            out, x_TN, weight_MN, T, M, N, 1.0, x_TN.stride(0), out.stride(0),
            EVEN_K=N % c["BLOCK_K"] == 0, DIVIDE=False, **row.launch_kwargs(),
        )  # fmt: skip
    return out


def make_linear(context: OpContext):
    """The op of one engine."""
    return partial(_few_or_many, arch=context.arch.name)


def _few_or_many(x_TN: Tensor, weight_MN: Tensor, *, arch: str) -> Tensor:
    """The contract of `inkling_rocm.ops.linear`."""
    if x_TN.shape[0] > MAX_TOKENS:
        return linear_reference(x_TN, weight_MN)
    return linear(x_TN, weight_MN, arch=arch)
