"""Faults in kernels and bugs in the emulator are noticed (faults.py and mutants.py say how)."""

import subprocess
import sys
from pathlib import Path

import pytest
from faults import ARCHS, FAULTS, KERNELS, inject

HERE = Path(__file__).parent
QUICK = [
    ("gemm", "delete a barrier"),
    ("gemm", "delete a wait"),
    ("softmax", "shift an LDS offset by 16 bytes"),
    ("rows", "drop an exec mask"),
    ("rows", "widen a mask by one (< to <=)"),
    ("rows", "widen a mask to all lanes"),
]


@pytest.mark.parametrize(("kernel", "fault"), QUICK)
@pytest.mark.parametrize("arch", ARCHS)
def test_faults_are_noticed(arch, kernel, fault):
    injections = inject(kernel, arch, fault, limit=4)
    assert any(x.caught for x in injections), injections
    assert not [x for x in injections if x.outcome == "not noticed"]


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", ARCHS)
def test_no_fault_changes_a_result_unnoticed(arch, kernel):
    """But for a row maximum of the online softmax of another row: it cancels but for rounding."""
    injections = [x for fault in FAULTS for x in inject(kernel, arch, fault, limit=12)]
    unnoticed = [x for x in injections if x.outcome == "not noticed"]
    assert [x for x in unnoticed if not x.text.startswith("ds_read_b32")] == []
    assert len(unnoticed) <= 1


@pytest.mark.full
def test_every_planted_bug_is_noticed():
    done = subprocess.run(
        [sys.executable, str(HERE / "mutants.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
