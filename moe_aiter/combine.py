"""Every token's sum over its partial rows: by a launch of its own, or within the down launch.

    out[t, :] = sum over the local choices of t, then over the shared experts, then the addend

in fp32, in this order, rounded once: who adds up does not show in the result.

Within the down launch the sum waits until every row block has arrived at the count of its columns.
It is made either by programs behind the products, spread over tokens and columns, which wait
(TAIL), or by the program of a column tile that arrives last, which asks nothing of the order in
which hardware starts programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_base.arch import Arch
from kernel_base.device import arrive, await_arrivals, await_previous
from kernel_base.tuning import TuningRow
from moe_aiter.tuning import COMBINE


@triton.jit(do_not_specialize=("shared_row", "shared_rows", "first_expert", "num_experts"))
def _combine_kernel(
    out_ptr, partial_ptr, addend_ptr, ids_ptr, place_ptr, shared_row, shared_rows, first_expert,
    num_experts, hidden, stride_out, stride_addend,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, HAS_ADDEND: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    await_previous(EARLY)
    t = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs < hidden
    acc = tl.zeros([BLOCK_N], tl.float32)
    for k in tl.static_range(TOP_K):
        local = tl.load(ids_ptr + t * TOP_K + k) - first_expert
        inside = (local >= 0) & (local < num_experts)
        row = t * TOP_K + k
        if place_ptr is not None:
            row = tl.load(place_ptr + row, mask=inside, other=0).to(tl.int64)
        part = tl.load(partial_ptr + row * hidden + offs, mask=mask & inside, other=0.0)
        acc += part.to(tl.float32)
    for s in tl.static_range(SHARED):
        part = tl.load(
            partial_ptr + (shared_row + s * shared_rows + t) * hidden + offs, mask=mask, other=0.0
        )
        acc += part.to(tl.float32)
    if HAS_ADDEND:
        acc += tl.load(addend_ptr + t * stride_addend + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * stride_out + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_tile(
    out_ptr, partial_ptr, addend_ptr, ids_ptr, t0, n0, tokens, choices, first_expert, num_experts,
    hidden, stride_out, stride_addend,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out for BLOCK_T tokens from t0 and BLOCK_C columns from n0."""
    t = t0 + tl.arange(0, BLOCK_T)
    offs_n = n0 + tl.arange(0, BLOCK_C)
    mask = (t < tokens)[:, None] & (offs_n < hidden)[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for k in tl.static_range(TOP_K):
        local = tl.load(ids_ptr + t * TOP_K + k, mask=t < tokens, other=-1) - first_expert
        inside = (local >= 0) & (local < num_experts)
        ptrs = partial_ptr + (t * TOP_K + k).to(tl.int64)[:, None] * hidden + offs_n[None, :]
        # The programs that wrote these ran on other compute units: read past this one's L1.
        part = tl.load(ptrs, mask=mask & inside[:, None], other=0.0, cache_modifier=".cg")
        acc += part.to(tl.float32)
    for s in tl.static_range(SHARED):
        row = (choices + s * tokens + t).to(tl.int64)
        ptrs = partial_ptr + row[:, None] * hidden + offs_n[None, :]
        acc += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if addend_ptr is not None:
        ptrs = addend_ptr + t.to(tl.int64)[:, None] * stride_addend + offs_n[None, :]
        acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * stride_out + offs_n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def wait_and_sum(
    index, arrived_ptr, block_expert_ptr, out_ptr, partial_ptr, addend_ptr, ids_ptr, tokens,
    choices, blocks, first_expert, num_experts, hidden, stride_out, stride_addend,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The index-th program behind the products. Programs of empty slots do not arrive."""
    per_columns = tl.cdiv(tokens, BLOCK_T)
    n0 = index // per_columns * BLOCK_C
    slot = tl.arange(0, BLOCKS)
    experts = tl.load(block_expert_ptr + slot, mask=slot < blocks, other=-1)
    products = tl.sum((experts >= 0).to(tl.int32), 0) + SHARED * tl.cdiv(tokens, BLOCK_M)
    await_arrivals(arrived_ptr + n0 // BLOCK_N, products)
    _sum_tile(
        out_ptr, partial_ptr, addend_ptr, ids_ptr, index % per_columns * BLOCK_T, n0, tokens,
        choices, first_expert, num_experts, hidden, stride_out, stride_addend,
        TOP_K, SHARED, BLOCK_T, BLOCK_C,
    )  # fmt: skip


@triton.jit
def arrive_and_sum(
    n0, programs, arrived_ptr, out_ptr, partial_ptr, addend_ptr, ids_ptr, tokens, choices,
    first_expert, num_experts, hidden, stride_out, stride_addend,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, AMD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The end of a program of the columns n0 .. n0 + BLOCK_N: the last of `programs` adds up."""
    before = arrive(arrived_ptr + n0 // BLOCK_N, tl.arange(0, BLOCK_T), AMD)
    if before == programs - 1:
        tl.debug_barrier()
        for t0 in range(0, tokens, BLOCK_T):
            for n in range(n0, n0 + BLOCK_N, BLOCK_C):
                _sum_tile(
                    out_ptr, partial_ptr, addend_ptr, ids_ptr, t0, n, tokens, choices,
                    first_expert, num_experts, hidden, stride_out, stride_addend,
                    TOP_K, SHARED, BLOCK_T, BLOCK_C,
                )  # fmt: skip


def combine(
    out: torch.Tensor,
    partial: torch.Tensor,
    addend: torch.Tensor | None,
    topk_ids: torch.Tensor,
    *,
    place: torch.Tensor | None = None,
    first_expert: int,
    num_experts: int,
    shared: int,
    shared_rows: int | None = None,
    arch: Arch,
    row: TuningRow | None = None,
) -> torch.Tensor:
    """Sum a token's partial rows: its local choices in order, its shared experts, then the addend.

    Args:
        out: [T, H]. partial: [T * K + shared * T, H], choices then shared experts; rows of choices
            outside first_expert .. first_expert + num_experts - 1 are never read. addend: [T, H] or
            None.
        place: int32 [T * K], the row of each local choice; None: its number.
        shared_rows: rows from one shared expert's first to the next one's, the last of partial;
            None: T.
    """
    (T, H), K = out.shape, topk_ids.shape[1]
    row = row or COMBINE.select(arch.name, hidden=H)
    each = shared_rows or T
    _combine_kernel[(T, triton.cdiv(H, row.constexprs["BLOCK_N"]))](
        out, partial, addend, topk_ids, place, partial.shape[0] - shared * each, each, first_expert,
        num_experts, H, out.stride(0), 0 if addend is None else addend.stride(0),
        TOP_K=K, SHARED=shared, HAS_ADDEND=addend is not None,
        EARLY=bool(row.options.get("launch_pdl")), **row.launch_kwargs(waits=True),
    )  # fmt: skip
    return out
