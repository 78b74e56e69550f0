"""Targets of the attention tests: kernels run on gcn_emulator for both AMD architectures, or on a
GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

from gcn_emulator.triton_driver import emulate
from kernel_base.arch import arch_of_device


class Target:
    """Where a launcher runs: `device` for its tensors, `arch` to pass it, `active()` around the
    call."""

    def __init__(self, name: str) -> None:
        self.device = torch.device("cuda" if name == "gpu" else "cpu")
        self.arch = arch_of_device("cuda").name if name == "gpu" else name
        self.emulated = name != "gpu"

    def active(self, **options):
        return emulate(self.arch, **options) if self.emulated else contextlib.nullcontext()


@pytest.fixture(params=["gfx942", "gfx950", pytest.param("gpu", marks=pytest.mark.gpu)])
def target(request):
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return Target(request.param)


@pytest.fixture
def gfx950():
    return Target("gfx950")
