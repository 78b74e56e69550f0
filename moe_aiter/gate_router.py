"""The gate's product, split along H in slices of fixed length, and the selection of its tokens in
the same launch.

Each program writes the partial sums of one slice, one tile of tokens (a token block) and one of
experts, and counts itself at its token block's counter. Two forms select in this launch:

- LAST: the program of a block that arrives last selects for all its tokens, BLOCK_T at a time;
- BEHIND: programs with higher numbers select for BLOCK_T tokens each, once their block's counter
  says that all partial sums are there. Hardware starts programs in the order of their numbers, so
  those they wait for run or have ended. Measured on an H200; on AMD emulated only, so no AMD row
  asks for it.

Either way the sum's order depends neither on which program is last nor on the other tokens, and
the counters are zero again at the end. bf16 products are exact in fp32; fp32 products use "ieee".
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_base.device import arrive, depart
from moe_aiter.gate_select import select_tokens


@triton.jit
def _multiply(
    partial_ptr, x_ptr, w_ptr, tokens, outputs, hidden, stride_x, pitch,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """Partial sums of this program's slice of the depth, tokens and experts."""
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h0 = tl.program_id(2) * SLICE
    offs_k = tl.arange(0, BLOCK_K)
    mask_t, mask_n = t < tokens, n < outputs
    x_ptrs = x_ptr + h0 + (t[:, None] * stride_x + offs_k[None, :])
    # Columns past the end repeat the last one and are never stored: cheaper than masking weights.
    w_ptrs = w_ptr + h0 + (tl.minimum(n, outputs - 1)[None, :] * hidden + offs_k[:, None])
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, SLICE, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + k, mask=mask_t[:, None], other=0.0)
            w = tl.load(w_ptrs + k)
        else:
            mask_k = offs_k < hidden - h0 - k
            x = tl.load(x_ptrs + k, mask=mask_t[:, None] & mask_k[None, :], other=0.0)
            w = tl.load(w_ptrs + k, mask=mask_k[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    row = tl.program_id(2).to(tl.int64) * tokens + t
    tl.store(
        partial_ptr + row[:, None] * pitch + n[None, :],
        acc,
        mask=mask_t[:, None] & mask_n[None, :],
    )


@triton.jit(do_not_specialize=("tokens", "stride_ids"))
def _router_kernel(
    partial_ptr, count_ptr, ids_ptr, weights_ptr, x_ptr, w_ptr, bias_ptr, scale_ptr,
    tokens, num_experts, hidden, route_scale, stride_x, stride_ids, pitch,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, LAST: tl.constexpr, BEHIND: tl.constexpr,
    SLICES: tl.constexpr, EVEN_K: tl.constexpr, AMD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    blocks, tiles = tl.num_programs(0), tl.num_programs(1)
    products = tiles * SLICES  # of a token block
    if BEHIND:
        layer = tl.program_id(2) - SLICES
        if layer >= 0:
            first = ((layer * tiles + tl.program_id(1)) * blocks + tl.program_id(0)) * BLOCK_T
            if first < tokens:
                start = first // BLOCK_M * BLOCK_M
                count_ptr += first // BLOCK_M
                select_tokens(
                    ids_ptr, weights_ptr, partial_ptr, bias_ptr, scale_ptr, count_ptr, products,
                    first, tokens, num_experts, route_scale, stride_ids, pitch,
                    SHARED, TOP_K, SLICES, True, BLOCK_T, BLOCK_X, BLOCK_W, PART,
                )  # fmt: skip
                waiting = tl.cdiv(tl.minimum(tokens - start, BLOCK_M), BLOCK_T)
                depart(count_ptr, first == start, products, waiting)
            return
    _multiply(
        partial_ptr, x_ptr, w_ptr, tokens, num_experts + SHARED, hidden, stride_x, pitch,
        EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, SLICE,
    )  # fmt: skip
    if BEHIND:
        arrive(count_ptr + tl.program_id(0), tl.arange(0, BLOCK_M), AMD)
    if LAST:
        count_ptr += tl.program_id(0)
        if arrive(count_ptr, tl.arange(0, BLOCK_M), AMD) < products - 1:
            return
        tl.debug_barrier()
        tl.store(count_ptr, 0)
        for t0 in range(0, BLOCK_M, BLOCK_T):
            first = tl.program_id(0) * BLOCK_M + t0
            if first < tokens:
                select_tokens(
                    ids_ptr, weights_ptr, partial_ptr, bias_ptr, scale_ptr, None, 0, first, tokens,
                    num_experts, route_scale, stride_ids, pitch,
                    SHARED, TOP_K, SLICES, False, BLOCK_T, BLOCK_X, BLOCK_W, PART,
                )  # fmt: skip
