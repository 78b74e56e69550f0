"""Token sorting: choices grouped by expert, in a stable order: no atomics, no host synchronisation,
the same result on every run.

Few choices, one launch: program e finds where expert e's choices go by counting those of smaller
ids, then writes them there in their original order. Every program reads all choices twice.

Many choices, two launches: the first counts each expert's choices in each chunk and numbers them;
in the last, program c knows from the counts where its chunk's choices go. It adds up those of all
chunks, or, with many small chunks, a launch between did that once for all: three launches.

Row blocks of expert e live at block slots lt // BLOCK_M + e .. (lt = choices of smaller local ids):
since ceil(n / b) <= (lt + n) // b - lt // b + 1 these ranges never overlap, so no program has to
know how many blocks the others need; slots left over are marked empty and a GEMM program that meets
one leaves. By size (on request, not in one launch) the experts with the largest blocks come first
and the empty slots last: programs that take every n-th block then end together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_base.arch import Arch
from kernel_base.device import await_previous, let_next_start
from kernel_base.tuning import TuningRow
from moe_aiter.checks import require
from moe_aiter.tuning import SORT

# Choices compared with all experts and all others of a chunk, and chunks counted, at a time.
STRIP, CHUNKS = tl.constexpr(16), tl.constexpr(64)
# What a program of the scan between holds: experts, and chunks at a time.
SCAN_EXPERTS, SCAN_CHUNKS = tl.constexpr(8), tl.constexpr(256)
# By size, every expert's rows begin at a multiple of this: bulk stores take 16 rows at a time.
ROW_ALIGN = tl.constexpr(16)


@triton.jit(do_not_specialize=("choices", "first_expert", "num_experts"))
def _sort_kernel(
    sorted_ptr, block_expert_ptr, block_begin_ptr, block_end_ptr, ids_ptr,
    choices, first_expert, num_experts, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0)
    offs = tl.arange(0, BLOCK_P)
    below = tl.zeros([BLOCK_P], tl.int32)
    equal = tl.zeros([BLOCK_P], tl.int32)
    for p0 in range(0, choices, BLOCK_P):
        p = p0 + offs
        local = tl.load(ids_ptr + p, mask=p < choices, other=-1) - first_expert
        inside = (p < choices) & (local >= 0)
        below += (inside & (local < e)).to(tl.int32)
        equal += (inside & (local == e)).to(tl.int32)
    begin = tl.sum(below, 0)
    count = tl.sum(equal, 0)
    at = begin
    if count > 0:
        for p0 in range(0, choices, BLOCK_P):
            p = p0 + offs
            local = tl.load(ids_ptr + p, mask=p < choices, other=-1) - first_expert
            mine = (p < choices) & (local == e)
            rank = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(sorted_ptr + at + rank - 1, p, mask=mine)
            at += tl.sum(mine.to(tl.int32), 0)
    first_slot = begin // BLOCK_M + e
    last_slot = (begin + count) // BLOCK_M + e + 1
    for slot in range(first_slot, last_slot):
        row = begin + (slot - first_slot) * BLOCK_M
        tl.store(block_expert_ptr + slot, tl.where(row < begin + count, e, -1))
        tl.store(block_begin_ptr + slot, row)
        tl.store(block_end_ptr + slot, begin + count)
    if e == num_experts - 1:  # ids outside the local range leave slots behind the last expert's
        for slot in range(last_slot, choices // BLOCK_M + num_experts):
            tl.store(block_expert_ptr + slot, -1)


@triton.jit(do_not_specialize=("choices", "first_expert", "num_experts"))
def _rank_kernel(
    counts_ptr, rank_ptr, ids_ptr, choices, first_expert, num_experts,
    CHAINED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """counts[c, e] = choices of expert e in chunk c; rank[p] = those of p's expert before p in its
    chunk.

    Compared in strips whose sums run along the axis that every thread holds whole: nothing crosses
    threads.
    """
    let_next_start(CHAINED)
    chunk = tl.program_id(0)
    x = tl.arange(0, BLOCK_X)
    offs = tl.arange(0, BLOCK_P)
    p = chunk * BLOCK_P + offs
    local = tl.load(ids_ptr + p, mask=p < choices, other=-1) - first_expert
    found = tl.zeros([BLOCK_X], tl.int32)
    rank = tl.zeros([BLOCK_P], tl.int32)
    for p0 in tl.range(0, BLOCK_P, STRIP, loop_unroll_factor=2):
        strip = p0 + tl.arange(0, STRIP)
        q = chunk * BLOCK_P + strip
        local_q = tl.load(ids_ptr + q, mask=q < choices, other=-1) - first_expert
        found += tl.sum((local_q[:, None] == x[None, :]).to(tl.int32), 0)
        same = (local_q[:, None] == local[None, :]) & (strip[:, None] < offs[None, :])
        rank += tl.sum(same.to(tl.int32), 0)
    tl.store(
        counts_ptr + chunk * num_experts + x,
        found.to(counts_ptr.dtype.element_ty),
        mask=x < num_experts,
    )
    tl.store(rank_ptr + p, rank.to(rank_ptr.dtype.element_ty), mask=p < choices)


@triton.jit(do_not_specialize=("chunks", "num_experts"))
def _scan_kernel(before_ptr, total_ptr, counts_ptr, chunks, num_experts, CHAINED: tl.constexpr):
    """before[c, e] = choices of expert e in the chunks before c; total[e] = those of all chunks."""
    let_next_start(CHAINED)
    await_previous(CHAINED)
    x = tl.program_id(0) * SCAN_EXPERTS + tl.arange(0, SCAN_EXPERTS)
    total = tl.zeros([SCAN_EXPERTS], tl.int32)
    for c0 in range(0, chunks, SCAN_CHUNKS):
        c = c0 + tl.arange(0, SCAN_CHUNKS)
        at = c[:, None] * num_experts + x[None, :]
        mask = (c < chunks)[:, None] & (x < num_experts)[None, :]
        counts = tl.load(counts_ptr + at, mask=mask, other=0).to(tl.int32)
        through = tl.cumsum(counts, 0)
        tl.store(before_ptr + at, total[None, :] + through - counts, mask=mask)
        total += tl.sum(counts, 0)
    tl.store(total_ptr + x, total, mask=x < num_experts)


@triton.jit
def _list_blocks(
    block_expert_ptr, block_begin_ptr, block_end_ptr, block_count_ptr, begin, count, choices,
    num_experts, BY_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """The row blocks of all experts, from where each expert's choices begin and how many it has."""
    x = tl.arange(0, BLOCK_X)
    end = begin + count
    if BY_SIZE:
        # An expert's blocks share its rows evenly, in quarters of BLOCK_M, and stay together: their
        # programs run at one time and read its weights from memory once. Experts with the largest
        # blocks come first. One scan counts the blocks of all four sizes, in 16 bits each.
        quarter: tl.constexpr = BLOCK_M // 4
        quarters = (count + quarter - 1) // quarter
        blocks = (quarters + 3) // 4
        size = (quarters + blocks - 1) // tl.maximum(blocks, 1)
        field = 16 * (4 - tl.maximum(size, 1)).to(tl.int64)
        counted = blocks.to(tl.int64) << field
        before = tl.cumsum(counted, 0) - counted
        total = tl.sum(counted, 0)
        slot = ((before >> field) & 0xFFFF).to(tl.int32)
        used = 0
        for smaller in tl.static_range(4):
            slot += tl.where(size == 4 - smaller, used, 0)
            used += ((total >> 16 * smaller) & 0xFFFF).to(tl.int32)
        for j in range(0, tl.max(blocks, 0)):
            mask, row = j < blocks, begin + j * size * quarter
            tl.store(block_expert_ptr + slot + j, x, mask=mask)
            tl.store(block_begin_ptr + slot + j, row, mask=mask)
            tl.store(block_end_ptr + slot + j, tl.minimum(row + size * quarter, end), mask=mask)
        tl.store(block_count_ptr, used)
    else:
        first_slot = begin // BLOCK_M + x
        mine = tl.where(x < num_experts, end // BLOCK_M + x + 1 - first_slot, 0)
        for j in range(0, tl.max(mine, 0)):
            slot, row = first_slot + j, begin + j * BLOCK_M
            mask = j < mine
            tl.store(block_expert_ptr + slot, tl.where(row < end, x, -1), mask=mask)
            tl.store(block_begin_ptr + slot, row, mask=mask)
            tl.store(block_end_ptr + slot, end, mask=mask)
        used = tl.sum(count, 0) // BLOCK_M + num_experts
    slots = choices // BLOCK_M + num_experts
    for first in range(used, slots, BLOCK_X):
        tl.store(block_expert_ptr + first + x, -1, mask=first + x < slots)


@triton.jit(do_not_specialize=("choices", "chunks", "first_expert", "num_experts"))
def _place_kernel(
    sorted_ptr, block_expert_ptr, block_begin_ptr, block_end_ptr, block_count_ptr, place_ptr,
    counts_ptr, total_ptr, rank_ptr, ids_ptr, choices, chunks, first_expert, num_experts,
    CHAINED: tl.constexpr, BY_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_X: tl.constexpr,
):  # fmt: skip
    """A program a chunk, and one more that lists the row blocks. With totals, counts are those of
    the chunks before."""
    let_next_start(CHAINED)
    await_previous(CHAINED)
    chunk = tl.program_id(0)
    x = tl.arange(0, BLOCK_X)
    p = chunk * BLOCK_P + tl.arange(0, BLOCK_P)
    local = tl.load(ids_ptr + p, mask=p < choices, other=-1) - first_expert
    rank = tl.load(rank_ptr + p, mask=p < choices, other=0)
    if total_ptr is not None:
        known = x < num_experts
        count = tl.load(total_ptr + x, mask=known, other=0)
        row = tl.minimum(chunk, chunks - 1) * num_experts
        before = tl.load(counts_ptr + row + x, mask=known, other=0)
    else:
        count = tl.zeros([BLOCK_X], tl.int32)
        before = tl.zeros([BLOCK_X], tl.int32)
        for c0 in range(0, chunks, CHUNKS):
            c = c0 + tl.arange(0, CHUNKS)
            mask = (c < chunks)[:, None] & (x < num_experts)[None, :]
            counts = tl.load(counts_ptr + c[:, None] * num_experts + x[None, :], mask=mask, other=0)
            counts = counts.to(tl.int32)
            count += tl.sum(counts, 0)
            before += tl.sum(tl.where((c < chunk)[:, None], counts, 0), 0)
    rows = (count + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN if BY_SIZE else count
    begin = tl.cumsum(rows, 0) - rows
    if chunk == chunks:
        _list_blocks(
            block_expert_ptr, block_begin_ptr, block_end_ptr, block_count_ptr, begin, count,
            choices, num_experts, BY_SIZE, BLOCK_M, BLOCK_X,
        )  # fmt: skip
        return
    mine = (local >= 0) & (local < num_experts) & (p < choices)
    at = tl.gather(begin + before, tl.where(mine, local, 0), 0)
    tl.store(sorted_ptr + at + rank, p, mask=mine)
    if BY_SIZE:
        tl.store(place_ptr + p, at + rank, mask=mine)


@dataclass(frozen=True, kw_only=True)
class SortedChoices:
    """Choices by expert.

    Attributes:
        choice: int32 [T * K]; the first n entries are the local choices' flat indices (token * K +
        k). By size: a multiple of ROW_ALIGN long, with gaps between the experts that hold nothing.
        block_expert: int32 [blocks], local expert of a row block, -1 = empty slot.
        block_begin, block_end: int32 [blocks], its first row in `choice` and the end of its
        expert's rows; by size, of its own.
        block_m: rows a block has at most.
        block_count: int32 [1], number of blocks, by size; else None.
        place: int32 [T * K], where in `choice` each local choice stands, by size; else None.
    """

    choice: torch.Tensor
    block_expert: torch.Tensor
    block_begin: torch.Tensor
    block_end: torch.Tensor
    block_m: int
    block_count: torch.Tensor | None = None
    place: torch.Tensor | None = None


def sort_choices(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_m: int,
    first_expert: int = 0,
    by_size: bool = False,
    arch: Arch,
    row: TuningRow | None = None,
) -> SortedChoices:
    """Group the choices of local experts by expert: one launch, or two or three for many choices.

    Args: topk_ids: int32 [T, K] contiguous, T * K >= 1. num_experts, first_expert: the local range;
        other ids are dropped. block_m: most rows of a block. by_size: divide an expert's rows
        evenly among its blocks (in quarters of block_m), list the experts with the largest blocks
        first and the empty slots last, begin each expert's rows at a multiple of ROW_ALIGN and say
        where each choice stands; never in one launch.
    """
    choices = topk_ids.numel()
    # By size with few choices: the row for the most, which has more than one launch.
    row = row or SORT.select(arch.name, choices=1 << 30 if by_size else choices)
    launches = row.constexprs["LAUNCHES"]
    require("sort_choices", not by_size or launches != 1, "LAUNCHES by size", launches, "2 or 3")
    blocks = choices // block_m + num_experts
    device = topk_ids.device
    gaps, places = 0, 0
    if by_size:
        gaps, places = ROW_ALIGN.value * num_experts + -choices % ROW_ALIGN.value, choices
    choice, expert, begin, end, count, place = parts(
        device, torch.int32, (choices + gaps, blocks, blocks, blocks, 1, places)
    )
    block_p: Any = row.constexprs["BLOCK_P"]
    if launches == 1:
        _sort_kernel[(num_experts,)](
            choice, expert, begin, end, topk_ids, choices, first_expert, num_experts,
            BLOCK_M=block_m, BLOCK_P=block_p, **row.launch_options(),
        )  # fmt: skip
    else:
        chunks, block_x = triton.cdiv(choices, block_p), triton.next_power_of_2(num_experts)
        counts, rank = parts(device, torch.int16, (chunks * num_experts, choices))
        # Programs of the launches after the first may be there, waiting, when the one before ends.
        chained = bool(row.options.get("launch_pdl"))
        alone = {name: option for name, option in row.options.items() if name != "launch_pdl"}
        _rank_kernel[(chunks,)](
            counts, rank, topk_ids, choices, first_expert, num_experts,
            CHAINED=chained, BLOCK_P=block_p, BLOCK_X=block_x, **alone,
        )  # fmt: skip
        total = None
        if launches == 3:
            before, total = parts(device, torch.int32, (chunks * num_experts, num_experts))
            _scan_kernel[(triton.cdiv(num_experts, SCAN_EXPERTS.value),)](
                before, total, counts, chunks, num_experts, CHAINED=chained, **row.options
            )
            counts = before
        _place_kernel[(chunks + 1,)](
            choice, expert, begin, end, *((count, place) if by_size else (None, None)),
            counts, total, rank, topk_ids, choices, chunks, first_expert, num_experts,
            CHAINED=chained, BY_SIZE=by_size, BLOCK_M=block_m, BLOCK_P=block_p, BLOCK_X=block_x,
            **row.options,
        )  # fmt: skip
    return SortedChoices(
        choice=choice, block_expert=expert, block_begin=begin, block_end=end, block_m=block_m,
        block_count=count if by_size else None, place=place if by_size else None,
    )  # fmt: skip


def parts(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of these sizes in one allocation. Each begins at a multiple of 16 bytes: Triton
    compiles a kernel again for every pattern of aligned and unaligned arguments."""
    step = 16 // dtype.itemsize
    padded = [-(-size // step) * step for size in sizes]
    whole = torch.empty(sum(padded), dtype=dtype, device=device)
    return [part[:size] for part, size in zip(whole.split(padded), sizes, strict=True)]
