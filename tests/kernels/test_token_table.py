"""A decode step's metadata from tables of token slots: the specification, and the kernel on the
emulator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.host.token_table import token_table_reference
from inkling_rocm.kernels.token_table_register import (
    TAPS,
    WINDOW,
    make_problem,
    outcomes,
    outputs_of,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("rows", "page_size", "track"), [(7, 4, True), (5, 1, False)])
def test_equals_the_specification(arch, rows, page_size, track):
    problem = make_problem(rows, page_size=page_size, track=track, seed=rows)
    with emulate(arch):
        for found in outcomes(problem, CPU, page_size=page_size, arch=arch):
            assert torch.equal(found.out, found.reference), found.name


@pytest.mark.gpu
def test_equals_the_specification_on_a_gpu():
    for rows, page_size in ((7, 4), (1, 1), (65, 16), (256, 64)):
        problem = make_problem(rows, page_size=page_size, seed=rows)
        for found in outcomes(problem, torch.device("cuda"), page_size=page_size):
            assert torch.equal(found.out, found.reference), found.name


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_specification(page_size):
    """Against a plain loop over rows."""
    problem = make_problem(9, page_size=page_size)
    out = outputs_of(problem, page_size)
    token_table_reference(problem, out, page_size=page_size, window=WINDOW, taps=TAPS)
    for row in range(9):
        slot = int(problem.slots[row])
        if not slot:
            for name in ("q_start", "ring", "snapshot", "write", "window_write"):
                assert int(getattr(out, name)[row]) == 0, name
            assert int(out.pages[row, 0]) == int(out.window_pages[row, 0]) == 0
            continue
        position, request = int(problem.lengths[row]) - 1, int(problem.requests[row])
        slots = problem.token_slots[request].tolist()
        assert int(out.q_start[row]) == position
        assert int(out.kv_len[row]) == position + 1
        assert int(out.history[row]) == min(position, TAPS - 1)
        assert int(out.ring[row]) == int(problem.ring_of_request[request])
        assert int(out.write[row]) == slot == slots[position]
        assert int(out.window_write[row]) == int(problem.window_slots[slot])
        wanted = int(problem.track_slots[row]) if problem.track[row] else 0
        assert int(out.snapshot[row]) == wanted
        for p in range(position + 1):
            page = int(out.pages[row, p // page_size])
            assert page * page_size + p % page_size == slots[p]
        first = int(out.window_first[row])
        for p in range(max(position - WINDOW + 1, 0), position + 1):
            page = int(out.window_pages[row, p // page_size - first])
            assert page * page_size + p % page_size == int(problem.window_slots[slots[p]])
