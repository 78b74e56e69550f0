"""The metadata kernel on the emulator gives what its specification gives, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling_rocm.host.decode import START, decode_metadata_reference

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.kernels.metadata import decode_metadata
from inkling_rocm.kernels.metadata_register import UNSET, make_problem, on, outcomes, shown

CPU = torch.device("cpu")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("rows", "pools", "page_size"), [(7, 2, 4), (1, 1, 4), (5, 2, 1)])
def test_equals_the_specification(arch, rows, pools, page_size):
    problem = make_problem(rows, pools=pools, page_size=page_size, seed=rows)
    with emulate(arch):
        for found in outcomes(problem, CPU, page_size=page_size, arch=arch):
            assert torch.equal(found.out, found.reference), found.name


@pytest.mark.gpu
def test_equals_the_specification_on_a_gpu():
    for rows, pools, page_size in ((7, 2, 4), (1, 1, 4), (65, 2, 1), (256, 2, 64)):
        problem = make_problem(rows, pools=pools, page_size=page_size, seed=rows)
        for found in outcomes(problem, torch.device("cuda"), page_size=page_size):
            assert torch.equal(found.out, found.reference), found.name


def test_the_specification():
    """Against a plain loop over rows."""
    problem = make_problem(9, pools=2)
    found = on(problem, CPU)
    decode_metadata_reference(found, page_size=4, taps=4)
    for row in range(9):
        slot, start, token = problem.staged[:3, row].tolist()
        last = int(problem.last_tokens[slot])
        assert int(found.input_ids[row]) == (token if token >= 0 else max(last, 0))
        assert int(found.kv_len[row]) == int(found.next_position[row]) == start + 1
        assert int(found.history[row]) == min(start, 3)
        for index, pool in enumerate(found.pools):
            first, page = problem.staged[3 + 2 * index : 5 + 2 * index, row].tolist()
            assert int(pool.write[row]) == page * 4 + start % 4
            if not slot:
                assert int(pool.write[row]) == 0
                continue
            table = problem.pools[index].table[slot].clone()
            table[start // 4] = page
            assert torch.equal(pool.table[slot], table)
            live = table[first : start // 4 + 1]
            assert torch.equal(pool.rows[row, : len(live)], live)


def test_the_comparison_can_fail():
    problem = make_problem(7, pools=2)
    wrong = on(problem, CPU)
    wrong.staged[START, 1] += 4
    with emulate("gfx942"):
        decode_metadata(wrong, page_size=4, taps=4, arch="gfx942")
    right = on(problem, CPU)
    decode_metadata_reference(right, page_size=4, taps=4)
    got, want = shown(replace(wrong, staged=problem.staged), 4), shown(right, 4)
    for name in ("kv_len", "next_position", "rows 0", "table 1"):
        assert not torch.equal(got[name], want[name]), name
    assert (got["rows 0"] != UNSET).any()


def test_wrong_shapes_are_refused():
    problem = make_problem(3, pools=1)
    with pytest.raises(ValueError, match="staged"):
        decode_metadata_reference(replace(problem, staged=problem.staged[:4]), page_size=4, taps=4)
    with pytest.raises(ValueError, match="kv_len"):
        decode_metadata_reference(
            replace(problem, kv_len=problem.kv_len.long()), page_size=4, taps=4
        )
