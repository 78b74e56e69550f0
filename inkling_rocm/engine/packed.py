"""Many small arrays for the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inkling_rocm.engine.upload import to_pinned

Integer = type[np.int32] | type[np.int64]
ALIGNMENT = 16  # bytes: compiled kernels depend on it


class Packed:
    """Integer fields of fixed sizes in one buffer, filled on the host and sent in one copy.

    Attributes:
        tensors: by name, over the buffer on the device.
    """

    def __init__(self, sizes: Mapping[str, tuple[Integer, int]], device: torch.device):
        self._spans: dict[str, tuple[Integer, int, int]] = {}
        end = 0
        for name, (dtype, size) in sizes.items():
            self._spans[name] = (dtype, end, size)
            end += -(-size * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self._buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        dtypes: dict[Any, torch.dtype] = {np.int32: torch.int32, np.int64: torch.int64}
        self.tensors = {
            name: self._buffer[at : at + size * np.dtype(dtype).itemsize].view(dtypes[dtype])
            for name, (dtype, at, size) in self._spans.items()
        }

    def send(self, values: Mapping[str, NDArray]) -> None:
        """Fill every field's first elements, the rest with zeros."""
        staged = np.zeros(len(self._buffer), np.uint8)
        for name, given in values.items():
            dtype, at, size = self._spans[name]
            end = at + size * np.dtype(dtype).itemsize
            staged[at:end].view(dtype)[: len(given)] = given
        self._buffer.copy_(to_pinned(staged, self._buffer.device), non_blocking=True)
