"""Small index arrays on their way to the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


def upload(values: NDArray, device: torch.device) -> Tensor:
    """A copy on the device, not waited for. Pinned memory of torch's cache is not handed out again
    before the copy has read it."""
    if device.type == "cpu":
        return torch.from_numpy(values)
    staged = torch.empty(values.shape, dtype=_DTYPES[values.dtype], pin_memory=True)
    staged.numpy()[...] = values
    return staged.to(device, non_blocking=True)
