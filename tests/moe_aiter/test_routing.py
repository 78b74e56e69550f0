"""Sorting on the emulator: the order of the choices and the list of row blocks, for every way."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from kernel_base.arch import ARCHS
from kernel_base.tuning import TuningRow
from moe_aiter.register import sort_reference
from moe_aiter.routing import SortedChoices, sort_choices

BLOCK_M = 16


def way(launches: int, block_p: int) -> TuningRow:
    return TuningRow(
        arch="any", constexprs={"LAUNCHES": launches, "BLOCK_P": block_p},
        options={"num_warps": 4}, evidence="guess", source="under test",
    )  # fmt: skip


def blocks_of(order: SortedChoices) -> list[tuple[int, int, int]]:
    """(expert, first row, end of the expert's rows) of the slots that are not empty."""
    columns = (order.block_expert, order.block_begin, order.block_end)
    slots = zip(*(column.tolist() for column in columns), strict=True)
    return [slot for slot in slots if slot[0] >= 0]


def wanted_blocks(ids: torch.Tensor, experts: int, first: int) -> list[tuple[int, int, int]]:
    counts = torch.bincount(ids.flatten(), minlength=first + experts)[first : first + experts]
    ends = counts.cumsum(0).tolist()
    return [
        (expert, row, ends[expert])
        for expert, count in enumerate(counts.tolist())
        for row in range(ends[expert] - count, ends[expert], BLOCK_M)
    ]


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "experts", "first", "known"),
    [(150, 7, 0, 7), (150, 5, 3, 12), (40, 1, 0, 1), (9, 20, 0, 20), (6, 4, 9, 9)],
    ids=["three chunks", "a range of the experts", "one expert", "few choices", "none local"],
)
def test_order_and_blocks(launches, tokens, experts, first, known):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, known, (tokens, 2), dtype=torch.int32, generator=generator)
    ids[: tokens // 4] = ids[0, 0]  # an expert with many more rows than the others
    row = way(launches, 128)
    fixed = {"num_experts": experts, "first_expert": first, "block_m": BLOCK_M, "row": row}
    with emulate("gfx942"):
        by_place, by_size = (
            sort_choices(ids, **fixed, by_size=flag, arch=ARCHS["gfx942"]) for flag in (False, True)
        )
    want = sort_reference(ids, experts, first)
    blocks = wanted_blocks(ids, experts, first)
    for order in (by_place, by_size):
        assert torch.equal(order.choice[: len(want)], want)
        assert sorted(blocks_of(order)) == blocks
        empty = order.block_expert < 0
        assert (order.block_end <= order.block_begin)[empty].all()
    assert by_place.block_count is None
    if launches == 1:
        assert by_size.block_count is None
        return
    assert by_size.block_count.item() == len(blocks)
    assert (by_size.block_expert[: len(blocks)] >= 0).all()
    quarters = [-(-min(end - row, BLOCK_M) // (BLOCK_M // 4)) for _, row, end in blocks_of(by_size)]
    assert quarters == sorted(quarters, reverse=True)
