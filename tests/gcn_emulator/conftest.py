"""Shared set-up of the emulator's tests."""

import os
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parent)
)  # harness, kernelgen and differential are modules here
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

UNIT_TESTS = {
    "test_fp8.py",
    "test_lds.py",
    "test_memory.py",
    "test_mfma.py",
    "test_scalar.py",
    "test_vector_encodings.py",
    "test_vector_float.py",
    "test_vector_integer.py",
    "test_vector_packed.py",
}
COVERAGE = "test_coverage.py"


def pytest_collection_modifyitems(items):
    """The coverage check must run after the tests that fill it."""
    items.sort(key=lambda item: item.path.name == COVERAGE)
