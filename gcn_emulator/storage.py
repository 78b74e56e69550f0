"""Byte arrays addressed by vectors of offsets."""

from __future__ import annotations

import numpy as np

from gcn_emulator.formats import U8, U32


class ByteStore:
    """A byte array accessed by vectors of offsets; 32-bit accesses use a word view."""

    def __init__(self, data: np.ndarray) -> None:
        self.bytes = data
        self.words = data[: len(data) // 4 * 4].view(U32)

    def gather(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Read `size` bytes at each offset -> uint32[max(size // 4, 1), len(offsets)]."""
        if size == 1:
            return self.bytes[offsets].astype(U32)[None]
        if size == 2:
            low, high = self.bytes[offsets].astype(U32), self.bytes[offsets + 1].astype(U32)
            return (low | (high << U32(8)))[None]
        if not (offsets & 3).any():
            return self.words[(offsets >> 2) + np.arange(size // 4)[:, None]]
        raw = self.bytes[offsets[:, None] + np.arange(size)]
        return np.ascontiguousarray(raw.view(U32).T)

    def scatter(self, offsets: np.ndarray, size: int, data: np.ndarray) -> None:
        """Write the low `size` bytes of data (shaped as returned by gather)."""
        if size >= 4 and not (offsets & 3).any():
            self.words[(offsets >> 2) + np.arange(size // 4)[:, None]] = data
            return
        raw = np.ascontiguousarray(data.T).view(U8)
        self.bytes[offsets[:, None] + np.arange(size)] = raw[:, :size]
