"""Row blocks of few choices, found by the programs that need them: no sort before the first launch.

Block slots are those of `routing.py`: expert e's blocks begin at slot lt(e) // BLOCK_M + e, with
lt(e) the choices of smaller local ids. That grows with e, so a program finds its expert by halving
(a count over all choices a step), then its choices' places by one scan. It leaves both for the
launch after; the programs of a block's other columns leave the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_base.device import drain_stores
from moe_aiter.routing import SortedChoices, parts

# All choices are looked through at a time, and all blocks' experts.
MAX_CHOICES = MAX_EXPERTS = 1024
# Fewer are looked through as this many: a kernel for every power of two up to MAX_CHOICES.
FEWEST = 128


@triton.jit
def find_block(
    slot, choice_ptr, expert_ptr, begin_ptr, end_ptr, ids_ptr, choices, first_expert, num_experts,
    AMD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(expert or -1, first row, end of the expert's rows) of a slot; stored too, with the block's
    entries of `choice`, which this program's waves may read from here on."""
    p = tl.arange(0, BLOCK_P)
    local = tl.load(ids_ptr + p, mask=p < choices, other=-1) - first_expert
    local = tl.where((p < choices) & (local >= 0), local, num_experts)
    low = tl.maximum(slot - choices // BLOCK_M, 0)
    high = tl.minimum(slot, num_experts - 1)
    while low < high:
        middle = (low + high + 1) // 2
        below = tl.sum((local < middle).to(tl.int32), 0)
        inside = below // BLOCK_M + middle <= slot
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    begin = tl.sum((local < low).to(tl.int32), 0)
    mine = local == low
    place = begin + tl.cumsum(mine.to(tl.int32), 0) - 1
    end = begin + tl.sum(mine.to(tl.int32), 0)
    row0 = begin + (slot - begin // BLOCK_M - low) * BLOCK_M
    expert = tl.where(row0 < end, low, -1)
    tl.store(choice_ptr + place, p, mask=mine & (place >= row0) & (place < row0 + BLOCK_M))
    tl.store(expert_ptr + slot, expert)
    tl.store(begin_ptr + slot, row0)
    tl.store(end_ptr + slot, end)
    drain_stores(p, AMD)
    tl.debug_barrier()
    return expert, row0, end


def blocks_to_find(choices: int, *, num_experts: int, block_m: int, device) -> SortedChoices:
    """Room for what `find_block` leaves."""
    blocks = choices // block_m + num_experts
    choice, expert, begin, end = parts(device, torch.int32, (choices, blocks, blocks, blocks))
    return SortedChoices(
        choice=choice, block_expert=expert, block_begin=begin, block_end=end, block_m=block_m
    )
