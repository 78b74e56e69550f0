"""Counters between programs of one launch, on the emulator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from gcn_emulator.triton_driver import emulate
from kernel_base.device import arrive, await_arrivals, depart


@triton.jit
def _relay_kernel(
    out_ptr, seen_ptr, values_ptr, count_ptr, first, SENDERS: tl.constexpr, WAITING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs below SENDERS write a row each; those behind add the rows up."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if program < SENDERS:
        tl.store(values_ptr + program * BLOCK + lanes, program + lanes)
        arrive(count_ptr, lanes, True)
    else:
        await_arrivals(count_ptr, SENDERS)
        number = program - SENDERS
        tl.store(seen_ptr + number, tl.load(count_ptr, cache_modifier=".cg"))
        depart(count_ptr, number == first, SENDERS, WAITING)
        total = tl.zeros([BLOCK], tl.int32)
        for sender in range(SENDERS):
            total += tl.load(values_ptr + sender * BLOCK + lanes, cache_modifier=".cg")
        tl.store(out_ptr + number * BLOCK + lanes, total)


def relay(first: int, *, senders: int, waiting: int):
    """What the waiting programs wrote, the counts they saw, and the count left behind."""
    out = torch.full((waiting, 64), -1, dtype=torch.int32)
    seen = torch.full((waiting,), -99, dtype=torch.int32)
    values = torch.full((senders, 64), -(2**20), dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    with emulate("gfx942"):
        _relay_kernel[(senders + waiting,)](
            out, seen, values, count, first, SENDERS=senders, WAITING=waiting, BLOCK=64, num_warps=1
        )
    return out, seen.tolist(), count.item()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_last_to_depart_leaves_zero_whichever_is_first(first):
    senders, waiting = 5, 3
    out, seen, left = relay(first, senders=senders, waiting=waiting)
    want = senders * torch.arange(64) + sum(range(senders))
    assert torch.equal(out, want.int().expand(waiting, -1))
    assert left == 0
    # Whoever still waits may go on: enough arrived, or the first has departed.
    assert all(count >= senders or count < 0 for count in seen)
    assert seen == [5, 6, 7][: first + 1] + [-2, -1][first:]


def test_one_that_waits_is_the_first_and_the_last():
    _, seen, left = relay(0, senders=4, waiting=1)
    assert (seen, left) == ([4], 0)


def test_a_count_shows_that_nobody_was_the_first():
    assert relay(7, senders=5, waiting=3)[2] == 8
