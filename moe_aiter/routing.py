"""Token sorting: choices grouped by expert, in a stable order, in one launch.

Program e finds where expert e's choices go by counting those of smaller ids, then writes them there
in
their original order: no atomics, no host synchronisation, the same result on every run.

Row blocks of expert e live at block slots lt // BLOCK_M + e .. (lt = choices of smaller local ids):
since ceil(n / b) <= (lt + n) // b - lt // b + 1 these ranges never overlap, so no program has to
know how many blocks the others need; slots left over are marked empty and a GEMM program that meets
one leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow
from moe_aiter.tuning import SORT


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
    """Group the choices of local experts by expert; one launch.

    Args: topk_ids: int32 [T, K] contiguous, T * K >= 1. num_experts, first_expert: the local range;
        other ids are dropped. block_m: rows of a block.
    """
    choices = topk_ids.numel()
    row = row or SORT.select(arch.name, choices=choices)
    blocks = choices // block_m + num_experts
    ints = torch.empty(choices + 3 * blocks, dtype=torch.int32, device=topk_ids.device)
    choice, expert, begin, end = ints.split((choices, blocks, blocks, blocks))
    _sort_kernel[(num_experts,)](
        choice, expert, begin, end, topk_ids, choices, first_expert, num_experts,
        BLOCK_M=block_m, **row.launch_kwargs(),
    )  # fmt: skip
    return SortedChoices(
        choice=choice, block_expert=expert, block_begin=begin, block_end=end, block_m=block_m
    )
