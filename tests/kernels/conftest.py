"""The kernels run on gcn_emulator for both AMD architectures, or on a GPU."""

import pytest
import torch

from kernel_base.arch import arch_of_device
from tests.triton_attn.conftest import target

__all__ = ["target"]


@pytest.fixture
def device():
    """Of tests marked gpu."""
    return torch.device("cuda")


@pytest.fixture
def arch(device):
    return arch_of_device(device).name
