"""Shared set-up of the emulator's tests."""

import os
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parent)
)  # harness, kernelgen and differential are modules here
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def pytest_collection_modifyitems(items):
    """The coverage check must run after the tests that fill it."""
    items.sort(key=lambda item: item.path.name == "test_coverage.py")
