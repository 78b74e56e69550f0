"""lm_head in one launch: logits = cast((hidden / mup) unembed^T), stored as fp32.

The bytes are the weights'; the division by mup, the rounding to the model dtype (the released
model's logits are rounded, see ops/lm_head.py) and the widening to fp32 ride along. A program owns
BLOCK_N vocabulary rows and all tokens (up to BLOCK_M), so every weight is read once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_rocm.host import Comm
from inkling_rocm.kernels.lm_head_tuning import LM_HEAD
from inkling_rocm.ops.lm_head import lm_head as lm_head_reference
from inkling_rocm.ops.registry import OpContext
from kernel_base.tuning import TuningRow

# Above this a library's product is faster (measured on an H200 at 128 tokens).
MAX_TOKENS = 64


@triton.jit(do_not_specialize=("tokens",))
def _lm_head_kernel(
    out_ptr, x_ptr, w_ptr, tokens, vocabulary, hidden, mup, stride_x, stride_out,
    EVEN_K: tl.constexpr, DIVIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mask_t = (t < tokens)[:, None]
    x_ptrs = x_ptr + t[:, None].to(tl.int64) * stride_x + k[None, :]
    # Rows past the end repeat the last one and are never stored: cheaper than masking weights.
    w_ptrs = w_ptr + tl.minimum(n, vocabulary - 1)[None, :].to(tl.int64) * hidden + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, hidden, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=mask_t, other=0.0)
            w = tl.load(w_ptrs + start)
        else:
            mask_k = k < hidden - start
            x = tl.load(x_ptrs + start, mask=mask_t & mask_k[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=mask_k[:, None], other=0.0)
        if DIVIDE:
            x = (x.to(tl.float32) / mup).to(w.dtype)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    logits = acc.to(w_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + t[:, None].to(tl.int64) * stride_out + n[None, :],
        logits,
        mask=mask_t & (n < vocabulary)[None, :],
    )


def local_logits(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    *,
    mup_multiplier: float,
    vocabulary: int,
    dtype: torch.dtype,
    arch: str,
    row: TuningRow | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One rank's logits of at most MAX_TOKENS tokens; no host synchronisation, capturable.

    Args:
        hidden_TH: [T, H], H contiguous. weight_VH: contiguous, hidden's dtype. vocabulary: rows of
            weight_VH to score. dtype: of the result; the values are rounded to hidden's dtype.
        row: launch configuration to force.
    Returns: [T, vocabulary].
    Raises: ValueError: an argument does not fit, or there is no tuning row for arch.
    """
    T, H = hidden_TH.shape
    if weight_VH.shape[1] != H or weight_VH.dtype != hidden_TH.dtype or hidden_TH.stride(1) != 1:
        raise ValueError(
            f"lm_head: hidden {tuple(hidden_TH.shape)} {hidden_TH.dtype} and weights "
            f"{tuple(weight_VH.shape)} {weight_VH.dtype} do not fit"
        )
    if T > MAX_TOKENS:
        raise ValueError(f"lm_head: {T} tokens, wanted at most {MAX_TOKENS}")
    if out is None:
        out = torch.empty(T, vocabulary, dtype=dtype, device=hidden_TH.device)
    if T == 0:
        return out
    row = row or LM_HEAD.select(arch, tokens=T, bits=hidden_TH.element_size() * 8)
    c: dict[str, Any] = dict(row.constexprs)
    _lm_head_kernel[(triton.cdiv(vocabulary, c["BLOCK_N"]),)](
        out, hidden_TH, weight_VH, T, vocabulary, H, float(mup_multiplier), hidden_TH.stride(0),
        out.stride(0), EVEN_K=H % c["BLOCK_K"] == 0, DIVIDE=mup_multiplier != 1.0,
        **row.launch_kwargs(),
    )  # fmt: skip
    return out


class LmHead:
    """The op of one engine: the contract of `inkling_rocm.ops.lm_head`."""

    def __init__(self, context: OpContext):
        self._arch = context.arch.name

    def __call__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        *,
        mup_multiplier: float,
        vocab_size: int,
        comm: Comm,
    ) -> Tensor:
        if hidden_TH.shape[0] > MAX_TOKENS:
            return lm_head_reference(
                hidden_TH, weight_VH, mup_multiplier=mup_multiplier, vocab_size=vocab_size,
                comm=comm,
            )  # fmt: skip
        alone = comm.tp_size == 1
        local_TV = local_logits(
            hidden_TH,
            weight_VH,
            mup_multiplier=mup_multiplier,
            vocabulary=vocab_size if alone else weight_VH.shape[0],
            dtype=torch.float32 if alone else hidden_TH.dtype,
            arch=self._arch,
        )
        return local_TV if alone else comm.all_gather(local_TV, dim=-1)[:, :vocab_size].float()
