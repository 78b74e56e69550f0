"""What the comparison of ranks says of tokens that differ."""

import json
import subprocess
import sys

import pytest

from bench.rank_tables import ranks, tokens
from bench.tensor_parallel import ModeProcess, equal_share, mode_of
from tests.engine.test_tensor_parallel import folder

__all__ = ["folder"]


def test_modes():
    assert mode_of("tp1") == (1, 1)
    assert mode_of("tp2") == (2, 1)
    assert mode_of("ep8") == (8, 8)
    with pytest.raises(ValueError, match="pp2"):
        mode_of("pp2")


def test_a_row_counts_up_to_its_first_difference():
    wanted = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert equal_share(wanted, wanted) == 1.0
    assert equal_share([[1, 9, 3, 4], [5, 6, 7, 8]], wanted) == 5 / 8
    assert equal_share([[9, 2, 3, 4], [9, 6, 7, 8]], wanted) == 0.0


def test_a_mode_is_beside_the_first_of_its_case():
    row = {"op": "tensor_parallel", "layers": 5, "dtype": "bfloat16", "device": "D", "commit": "c"}
    row |= {"evidence": "measured", "gate": "pass"}
    rows = [
        {**row, "mode": "tp1", "case": "tp1, tokens"},
        {**row, "mode": "tp1", "case": "tp1, decode, batch 8", "step_ms": 3.0, "tokens_per_s": 9},
        {**row, "mode": "tp1", "case": "tp1, prompt 64", "first_token_ms": 8.0},
        {**row, "mode": "tp2", "case": "tp2, decode, batch 8", "step_ms": 2.0, "tokens_per_s": 12},
        {**row, "mode": "tp2", "case": "tp2, prompt 64", "first_token_ms": 16.0},
    ]
    lines = ranks(rows).splitlines()[2:]
    assert [line.split(" | ")[4] for line in lines] == ["1.00x", "1.00x", "1.50x", "0.50x"]
    assert tokens(rows).count("pass") == 1


@pytest.mark.parametrize("together", [pytest.param(False, marks=pytest.mark.full), True])
def test_modes_of_processes(folder, tmp_path, together):
    """Every mode is measured in a process of its own, beside the first one's tokens."""
    rows = tmp_path / "rows.jsonl"
    command = [
        *(sys.executable, "-m", "bench.tensor_parallel", "--config", str(folder)),
        *("--layers", "3", "--dtype", "float32", "--device", "cpu", "--batches", ""),
        *("--prefill", "48", "--modes", "tp1,tp2", "--output-file", str(rows)),
        *(["--start-together"] if together else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["case"] for row in found] == [
        "tp1, tokens", "tp1, prompt 48", "tp2, tokens", "tp2, prompt 48"
    ]  # fmt: skip
    assert {row["gate"] for row in found} == {"pass"}
    assert done.stdout.splitlines() == rows.read_text().splitlines()


def test_a_mode_that_ends_while_it_waits_for_its_turn_is_named(monkeypatch):
    """With --start-together an engine waits for minutes and may be lost meanwhile."""
    start = subprocess.Popen
    program = "import sys; print('\"ready\"'); sys.exit(3)"
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **how: start([sys.executable, "-c", program], **how)
    )
    process = ModeProcess("tp2", [])
    process.wait_ready()
    process._process.wait()
    with pytest.raises(RuntimeError, match="mode tp2 ended with status 3"):
        next(process.measure(None))


@pytest.mark.full
def test_a_mode_that_fails_is_named(tmp_path):
    command = [
        *(sys.executable, "-m", "bench.tensor_parallel", "--config", str(tmp_path)),
        *("--device", "cpu", "--modes", "tp1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "mode tp1 ended with status" in done.stderr
