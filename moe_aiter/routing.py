"""Token sorting: choices grouped by expert, in a stable order: no atomics, no host synchronisation,
the same result on every run.

Few choices, one launch: program e finds where expert e's choices go by counting those of smaller
ids, then writes them there in their original order. Every program reads all choices twice.

Many choices, two launches: the first counts each expert's choices in each chunk; in the second,
program c knows from the counts where its chunk's choices go. Every program reads its chunk once.

Row blocks of expert e live at block slots lt // BLOCK_M + e .. (lt = choices of smaller local ids):
since ceil(n / b) <= (lt + n) // b - lt // b + 1 these ranges never overlap, so no program has to
know how many blocks the others need; slots left over are marked empty and a GEMM program that meets
one leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow
from moe_aiter.tuning import SORT

# Choices compared with all experts, or with all others of a chunk, at a time.
STRIP = tl.constexpr(32)


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
def _count_kernel(
    counts_ptr, ids_ptr, choices, first_expert, num_experts,
    BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """counts[c, e] = choices of expert e in chunk c."""
    chunk = tl.program_id(0)
    x = tl.arange(0, BLOCK_X)
    found = tl.zeros([STRIP, BLOCK_X], tl.int32)
    for p0 in range(0, BLOCK_P, STRIP):
        p = chunk * BLOCK_P + p0 + tl.arange(0, STRIP)
        local = tl.load(ids_ptr + p, mask=p < choices, other=-1) - first_expert
        found += (local[:, None] == x[None, :]).to(tl.int32)
    tl.store(counts_ptr + chunk * num_experts + x, tl.sum(found, 0), mask=x < num_experts)


@triton.jit(do_not_specialize=("choices", "chunks", "first_expert", "num_experts"))
def _place_kernel(
    sorted_ptr, block_expert_ptr, block_begin_ptr, block_end_ptr, counts_ptr, ids_ptr,
    choices, chunks, first_expert, num_experts,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    x = tl.arange(0, BLOCK_X)
    rows = tl.arange(0, STRIP)
    inside = x < num_experts
    total = tl.zeros([STRIP, BLOCK_X], tl.int32)
    before = tl.zeros([STRIP, BLOCK_X], tl.int32)
    for c0 in range(0, chunks, STRIP):
        c = c0 + rows
        mask = (c < chunks)[:, None] & inside[None, :]
        counts = tl.load(counts_ptr + c[:, None] * num_experts + x[None, :], mask=mask, other=0)
        total += counts
        before += tl.where((c < chunk)[:, None], counts, 0)
    count = tl.sum(total, 0)
    begin = tl.cumsum(count, 0) - count
    at = begin + tl.sum(before, 0)
    offs = tl.arange(0, BLOCK_P)
    p = chunk * BLOCK_P + offs
    local = tl.load(ids_ptr + p, mask=p < choices, other=-1) - first_expert
    for p0 in range(0, BLOCK_P, STRIP):
        q = chunk * BLOCK_P + p0 + rows
        local_q = tl.load(ids_ptr + q, mask=q < choices, other=-1) - first_expert
        same = (local_q[:, None] == local[None, :]) & (offs[None, :] < (p0 + rows)[:, None])
        rank = tl.sum(same.to(tl.int32), 1)
        base = tl.sum(tl.where(local_q[:, None] == x[None, :], at[None, :], 0), 1)
        mine = (local_q >= 0) & (local_q < num_experts) & (q < choices)
        tl.store(sorted_ptr + base + rank, q, mask=mine)
    if chunk == 0:
        end = begin + count
        first_slot = begin // BLOCK_M + x
        last_slot = end // BLOCK_M + x + 1
        for j in range(0, tl.max(tl.where(inside, last_slot - first_slot, 0), 0)):
            slot, row = first_slot + j, begin + j * BLOCK_M
            mask = inside & (slot < last_slot)
            tl.store(block_expert_ptr + slot, tl.where(row < end, x, -1), mask=mask)
            tl.store(block_begin_ptr + slot, row, mask=mask)
            tl.store(block_end_ptr + slot, end, mask=mask)
        slots = choices // BLOCK_M + num_experts
        for first in range(tl.sum(count, 0) // BLOCK_M + num_experts, slots, BLOCK_X):
            tl.store(block_expert_ptr + first + x, -1, mask=first + x < slots)


@dataclass(frozen=True, kw_only=True)
class SortedChoices:
    """Choices by expert.

    Attributes:
        choice: int32 [T * K]; the first n entries are the local choices' flat indices (token * K +
        k).
        block_expert: int32 [blocks], local expert of a row block, -1 = empty slot.
        block_begin, block_end: int32 [blocks], its first row in `choice` and the end of its
        expert's rows.
        block_m: rows a block has at most.
    """

    choice: torch.Tensor
    block_expert: torch.Tensor
    block_begin: torch.Tensor
    block_end: torch.Tensor
    block_m: int


def sort_choices(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    block_m: int,
    first_expert: int = 0,
    arch: Arch,
    row: TuningRow | None = None,
) -> SortedChoices:
    """Group the choices of local experts by expert; one launch, or two for many choices.

    Args: topk_ids: int32 [T, K] contiguous, T * K >= 1. num_experts, first_expert: the local range;
        other ids are dropped. block_m: rows of a block.
    """
    choices = topk_ids.numel()
    row = row or SORT.select(arch.name, choices=choices)
    blocks = choices // block_m + num_experts
    ints = torch.empty(choices + 3 * blocks, dtype=torch.int32, device=topk_ids.device)
    choice, expert, begin, end = ints.split((choices, blocks, blocks, blocks))
    block_p: Any = row.constexprs["BLOCK_P"]
    if row.constexprs["LAUNCHES"] == 1:
        _sort_kernel[(num_experts,)](
            choice, expert, begin, end, topk_ids, choices, first_expert, num_experts,
            BLOCK_M=block_m, BLOCK_P=block_p, **row.options,
        )  # fmt: skip
    else:
        chunks, block_x = triton.cdiv(choices, block_p), triton.next_power_of_2(num_experts)
        counts = torch.empty(chunks, num_experts, dtype=torch.int32, device=topk_ids.device)
        _count_kernel[(chunks,)](
            counts, topk_ids, choices, first_expert, num_experts,
            BLOCK_P=block_p, BLOCK_X=block_x, **row.options,
        )  # fmt: skip
        _place_kernel[(chunks,)](
            choice, expert, begin, end, counts, topk_ids,
            choices, chunks, first_expert, num_experts,
            BLOCK_M=block_m, BLOCK_P=block_p, BLOCK_X=block_x, **row.options,
        )  # fmt: skip
    return SortedChoices(
        choice=choice, block_expert=expert, block_begin=begin, block_end=end, block_m=block_m
    )
