"""Global memory: the address ranges a kernel may touch."""

from __future__ import annotations

from typing import Any

import numpy as np

from gcn_emulator.formats import I64, U8, U32, U64, EmuError
from gcn_emulator.storage import ByteStore


class GlobalMemory:
    """The address ranges a kernel may touch; everything else is an error."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.regions = []
        for array in arrays:
            flat = array.reshape(-1).view(U8)
            begin = flat.ctypes.data
            self.regions.append((begin, begin + flat.size, ByteStore(flat)))

    def _split(self, address: np.ndarray, size: int) -> list[tuple[ByteStore, Any, np.ndarray]]:
        """Partition lanes by region -> [(store, lane selector, offsets)]."""
        low, high = int(address.min()), int(address.max()) + size
        for begin, end, store in self.regions:
            if begin <= low and high <= end:
                return [(store, slice(None), (address - U64(begin)).astype(I64))]
        parts, covered = [], np.zeros(len(address), bool)
        for begin, end, store in self.regions:
            inside = (address >= U64(begin)) & (address + U64(size) <= U64(end)) & ~covered
            if inside.any():
                parts.append((store, inside, (address[inside] - U64(begin)).astype(I64)))
                covered |= inside
        if not covered.all():
            bad = int(address[~covered][0])
            raise EmuError(f"out-of-bounds global access of {size} bytes at {bad:#x}")
        return parts

    def load(self, address: np.ndarray, size: int) -> np.ndarray:
        """uint64 addresses -> uint32[max(size // 4, 1), lanes]."""
        out = np.zeros((max(size // 4, 1), len(address)), U32)
        if len(address):
            for store, lanes, offsets in self._split(address, size):
                out[:, lanes] = store.gather(offsets, size)
        return out

    def store(self, address: np.ndarray, size: int, data: np.ndarray) -> None:
        """Write the low `size` bytes of each lane; a later lane wins an overlap."""
        if len(address):
            for store, lanes, offsets in self._split(address, size):
                store.scatter(offsets, size, data[:, lanes])

    def contains(self, address: np.ndarray) -> bool:
        """Whether a kernel may touch all of these bytes."""
        covered = np.zeros(len(address), bool)
        for begin, end, _ in self.regions:
            covered |= (address >= U64(begin)) & (address < U64(end))
        return bool(covered.all())

    def cell(self, address: int, size: int) -> np.ndarray:
        """A writable view of one 4- or 8-byte location (for atomics)."""
        [(store, _, offsets)] = self._split(np.array([address], U64), size)
        return store.bytes[int(offsets[0]) : int(offsets[0]) + size]
