"""Small index arrays on their way to the device."""

from __future__ import annotations

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_pinned(values: NDArray, device: torch.device) -> Tensor:
    """On the host, to be copied to the device without waiting. Pinned memory of torch's cache is
    not handed out again before such a copy has read it."""
    source = torch.from_numpy(values)
    if device.type == "cpu":
        return source
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)


def upload(values: NDArray, device: torch.device) -> Tensor:
    """A copy on the device, not waited for."""
    return to_pinned(values, device).to(device, non_blocking=True)
