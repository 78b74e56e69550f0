"""Shared by all tests."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def small_config_path():
    """Inkling-Small's released config.json."""
    return Path(__file__).parent / "data" / "configs" / "inkling_small.json"
