"""Sorting on the emulator: the order of the choices and the list of row blocks, for every way."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from kernel_base.arch import ARCHS
from kernel_base.tuning import TuningRow
from moe_aiter.combine import combine
from moe_aiter.register import sort_reference
from moe_aiter.routing import ROW_ALIGN, SortedChoices, sort_choices

BLOCK_M = 16


def way(launches: int, block_p: int) -> TuningRow:
    return TuningRow(
        arch="any", constexprs={"LAUNCHES": launches, "BLOCK_P": block_p},
        options={"num_warps": 4}, evidence="guess", source="under test",
    )  # fmt: skip


def blocks_of(order: SortedChoices) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of the slots that are not empty: the end of the expert's rows, or by
    size of the block's."""
    columns = (order.block_expert, order.block_begin, order.block_end)
    slots = zip(*(column.tolist() for column in columns), strict=True)
    return [slot for slot in slots if slot[0] >= 0]


def wanted_blocks(
    ids: torch.Tensor, experts: int, first: int, align: int
) -> list[tuple[int, int, int]]:
    counts = torch.bincount(ids.flatten(), minlength=first + experts)[first : first + experts]
    begins = ((counts + align - 1) // align * align).cumsum(0).roll(1)
    begins[0] = 0
    return [
        (expert, row, begin + count)
        for expert, (begin, count) in enumerate(zip(begins.tolist(), counts.tolist(), strict=True))
        for row in range(begin, begin + count, BLOCK_M)
    ]


CASES = pytest.mark.parametrize(
    ("tokens", "experts", "first", "known"),
    [(150, 7, 0, 7), (150, 5, 3, 12), (40, 1, 0, 1), (9, 20, 0, 20), (6, 4, 9, 9)],
    ids=["three chunks", "a range of the experts", "one expert", "few choices", "none local"],
)


def crowded_ids(tokens: int, known: int) -> torch.Tensor:
    """Ids of two choices a token, one expert with many more rows than the others."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, known, (tokens, 2), dtype=torch.int32, generator=generator)
    ids[: tokens // 4] = ids[0, 0]
    return ids


@pytest.mark.parametrize("launches", [1, 2, 3])
@CASES
def test_order_and_blocks(launches, tokens, experts, first, known):
    ids = crowded_ids(tokens, known)
    with emulate("gfx942"):
        order = sort_choices(
            ids, num_experts=experts, first_expert=first, block_m=BLOCK_M, row=way(launches, 128),
            arch=ARCHS["gfx942"],
        )  # fmt: skip
    want = sort_reference(ids, experts, first)
    assert torch.equal(order.choice[: len(want)], want)
    assert sorted(blocks_of(order)) == wanted_blocks(ids, experts, first, 1)
    assert order.block_count is None
    assert order.place is None


@pytest.mark.parametrize(("launches", "chunk"), [(2, 128), (3, 32)])
@CASES
def test_by_size(launches, chunk, tokens, experts, first, known):
    ids = crowded_ids(tokens, known)
    with emulate("gfx942"):
        order = sort_choices(
            ids, num_experts=experts, first_expert=first, block_m=64,
            row=way(launches, chunk), by_size=True, arch=ARCHS["gfx942"],
        )  # fmt: skip
    want = sort_reference(ids, experts, first)
    blocks = blocks_of(order)
    assert order.block_count.item() == len(blocks)
    assert (order.block_expert[: len(blocks)] >= 0).all()
    # An expert's blocks stand together and are of one size, but for the last; the experts with the
    # largest ones come first.
    runs = [[end - row for _, row, end in run] for _, run in groupby(blocks, lambda b: b[0])]
    assert len(runs) == len({expert for expert, _, _ in blocks})
    quarters = [-(-run[0] // 16) for run in runs]
    assert quarters == sorted(quarters, reverse=True)
    for run in runs:
        assert len(run) == -(-sum(run) // 64)
        assert 0 < run[-1] <= run[0] <= 64
        assert set(run[:-1]) <= {run[0]}
    # The experts' rows one after another, without the gaps, are the choices in order.
    rows = sorted((row, end) for _, row, end in blocks)
    assert all(row % ROW_ALIGN.value == 0 for row, _ in rows)
    listed = [order.choice[row:end] for row, end in rows]
    assert torch.equal(torch.cat(listed) if listed else want, want)
    places = torch.cat([torch.arange(row, end) for row, end in rows]) if rows else want
    assert torch.equal(order.place[want.long()], places.int())
    assert len(order.choice) % ROW_ALIGN.value == 0


def test_by_size_takes_more_than_one_launch():
    with pytest.raises(ValueError, match="LAUNCHES by size"):
        sort_choices(
            crowded_ids(9, 3), num_experts=3, block_m=64, row=way(1, 128), by_size=True,
            arch=ARCHS["gfx942"],
        )  # fmt: skip


def test_combine_where_choices_stand():
    """Rows in another order, gaps between them, shared experts further apart than tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, apart = 5, 72, 16
    ids = torch.tensor([[0, 3], [4, 1], [2, 4], [9, 0], [1, 2]], dtype=torch.int32)
    plain = torch.randn(tokens * 2 + 2 * tokens, hidden, generator=generator).bfloat16()
    fixed = {"first_expert": 1, "num_experts": 4, "shared": 2, "arch": ARCHS["gfx942"]}
    place = torch.randperm(32, generator=generator)[: tokens * 2].int()
    moved = torch.full((32 + 2 * apart, hidden), float("nan"), dtype=torch.bfloat16)
    moved[place.long()] = plain[: tokens * 2]
    for shared in range(2):
        moved[32 + shared * apart :][:tokens] = plain[tokens * (2 + shared) :][:tokens]
    with emulate("gfx942"):
        want, out = (
            combine(torch.full((tokens, hidden), float("nan")).bfloat16(), *given, **fixed, **more)
            for given, more in (
                ((plain, None, ids), {}),
                ((moved, None, ids), {"place": place, "shared_rows": apart}),
            )
        )
    assert torch.equal(out, want)
    assert out.isfinite().all()


def test_a_launch_that_does_not_wait_cannot_start_early():
    """The sort in one launch reads ids that the gate may still be writing."""
    row = replace(way(1, 16), options={"num_warps": 4, "launch_pdl": True})
    with emulate("gfx942"), pytest.raises(ValueError, match="does not wait"):
        sort_choices(
            torch.zeros(2, 2, dtype=torch.int32), first_expert=0, num_experts=4, block_m=BLOCK_M,
            arch=ARCHS["gfx942"], row=row,
        )  # fmt: skip
    assert row.launch_kwargs(waits=True)["launch_pdl"]
