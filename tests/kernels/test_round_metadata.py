"""The metadata of a round: its specification against a plain loop, and the kernels on the emulator
against the specification, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_rocm.host.round import (
    LIMIT,
    START,
    draft_metadata_reference,
    verify_metadata_reference,
)

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.kernels.round_metadata import draft_metadata, verify_metadata
from inkling_rocm.kernels.round_metadata_register import make_problem, on, outcomes, shown

CPU = torch.device("cpu")
SHAPE = {"page_size": 4, "taps": 4}
SIZES = [
    {"rows": 7, "pools": 2, "depths": 3, "drafts": 3},
    {"rows": 1, "pools": 1, "depths": 1, "drafts": 1},
    {"rows": 3, "pools": 2, "depths": 8, "drafts": 0},
    {"rows": 5, "pools": 2, "depths": 8, "drafts": 8, "page_size": 1},
]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_the_specification(arch, sizes):
    problem, tokens_BM = make_problem(**sizes, seed=sizes["rows"])
    with emulate(arch):
        page_size = sizes.get("page_size", 4)
        for found in outcomes(problem, tokens_BM, CPU, page_size=page_size, arch=arch):
            assert torch.equal(found.out, found.reference), found.name


@pytest.mark.gpu
def test_equals_the_specification_on_a_gpu():
    for sizes in (*SIZES, {"rows": 256, "pools": 2, "depths": 8, "drafts": 8, "page_size": 64}):
        problem, tokens_BM = make_problem(**sizes, seed=sizes["rows"])
        page_size = sizes.get("page_size", 4)
        for found in outcomes(problem, tokens_BM, torch.device("cuda"), page_size=page_size):
            assert torch.equal(found.out, found.reference), found.name


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_the_specification(sizes):
    """Against a plain loop over rows and tokens."""
    problem, tokens_BM = make_problem(**sizes, seed=5)
    t, N, k = on(problem, CPU), sizes["depths"], sizes["drafts"]
    verify_metadata_reference(t, **SHAPE)
    verified = on(t, CPU)
    draft_metadata_reference(t, tokens_BM, **SHAPE)
    for row in range(sizes["rows"]):
        slot, given = problem.staged[:2, row].tolist()
        start, recent = given, problem.staged[-N:, row].tolist()
        if given < 0:
            start, recent = int(problem.length[slot]), problem.recent[slot].tolist()
        drafts = problem.drafts[slot, :k].tolist()
        ids = verified.input_ids.view(-1, k + 1)[row].tolist()
        assert ids == [recent[-1], *(max(draft, 0) for draft in drafts)]
        assert verified.row_drafts[row].tolist() == drafts
        assert int(t.position[row]) == start + 1
        expect_layout(problem, verified.verify, row, start, k + 1)

        text = {start - N + 1 + i: token for i, token in enumerate(recent)}
        drawn = [token for token in tokens_BM[row].tolist() if token >= 0] or [0]
        text |= {start + 1 + i: token for i, token in enumerate(drawn)}
        following, first = start + len(drawn), max(start - N + 1, 0)
        window = [text.get(first + 1 + i, 0) for i in range(3 * N)]
        assert t.window_ids[row].tolist() == window
        assert int(t.column[row]) == following - first
        assert int(t.draft_position[row]) == following + 1
        assert int(t.tip[row]) == row * 2 * N + following - 1 - first
        expect_layout(problem, t.draft, row, first, 2 * N)
        kept = verified.hidden_to.view(-1, k + 1)[row].tolist()
        assert kept == [slot * 2 * N + (start + j) % (2 * N) for j in range(k + 1)]
        read = t.hidden_from.view(-1, 2 * N)[row].tolist()
        assert read == [
            slot * 2 * N + (first + i) % (2 * N) if first + i < following else 0
            for i in range(2 * N)
        ]
        if slot:
            assert int(t.length[slot]) == following
            assert t.recent[slot].tolist() == [text[following - N + 1 + i] for i in range(N)]
    assert torch.equal(t.recent[0], problem.recent[0])


def expect_layout(problem, layout, row, start, length):
    slot, _, limit = problem.staged[:3, row].tolist()
    positions = layout.positions.view(-1, length)[row].tolist()
    assert positions == list(range(start, start + length))
    assert int(layout.q_start[row]) == start
    assert int(layout.kv_len[row]) == start + length
    assert int(layout.history[row]) == min(start, 3)
    for index, pool in enumerate(layout.pools):
        table, first = pool.table[slot], int(problem.staged[3 + index, row])
        write = pool.write.view(-1, length)[row].tolist()
        assert write == [int(table[p // 4]) * 4 + p % 4 if p < limit else 0 for p in positions]
        for column in range(first, (start + length - 1) // 4 + 1):
            page = int(table[column]) if column * 4 < limit else 0
            assert int(pool.rows[row, column - first]) == page


@pytest.mark.parametrize(("field", "name"), [(START, "verify positions"), (LIMIT, "draft write 0")])
def test_the_comparison_can_fail(field, name):
    problem, tokens_BM = make_problem(7, pools=2, depths=3, drafts=3)
    wrong, right = on(problem, CPU), on(problem, CPU)
    wrong.staged[field, 0] -= 3
    with emulate("gfx942"):
        verify_metadata(wrong, **SHAPE, arch="gfx942")
        draft_metadata(wrong, tokens_BM, **SHAPE, arch="gfx942")
    verify_metadata_reference(right, **SHAPE)
    draft_metadata_reference(right, tokens_BM, **SHAPE)
    got = shown(replace(wrong, staged=problem.staged), 4)
    assert not torch.equal(got[name], shown(right, 4)[name])


def test_wrong_shapes_are_refused():
    problem, tokens_BM = make_problem(3, pools=1, depths=2, drafts=2)
    with pytest.raises(ValueError, match="staged"):
        verify_metadata_reference(replace(problem, staged=problem.staged[:4]), **SHAPE)
    layout = replace(problem.verify, kv_len=problem.verify.kv_len.long())
    with pytest.raises(ValueError, match=r"verify\.kv_len"):
        verify_metadata_reference(replace(problem, verify=layout), **SHAPE)
    with pytest.raises(ValueError, match="tokens are"):
        draft_metadata(problem, tokens_BM[:, :1], **SHAPE, arch="gfx942")
