"""The second tier's memory: blocks of one size, taken and given back in any order.

An entry is spread over as many blocks as it needs, so memory never fragments and its use is exact.
Everything is allocated at the start: pinning memory is slow and may make the device wait, which
must not happen while requests are served.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST_BLOCK_BYTES, DEFAULT_BLOCK_BYTES = 4096, 256 * 1024
# torch rounds each pinned allocation up to a power of two; parts of this size lose nothing.
PART_BYTES = 64 * 1024 * 1024
MOST_WASTE = 1 / 16


def block_bytes_for(entry_bytes: Sequence[int]) -> int:
    """The largest block, a power of two, whose rounding wastes little of every kind of entry.

    Args:
        entry_bytes: bytes of each kind of entry that will be stored, none 0.
    """
    size = DEFAULT_BLOCK_BYTES * 4
    while size > SMALLEST_BLOCK_BYTES and any(-n % size > MOST_WASTE * n for n in entry_bytes):
        size //= 2
    return size


class Blocks:
    """Args:
    capacity_bytes: rounded down to whole blocks. pin: in memory a GPU can copy from and to.
    """

    def __init__(self, capacity_bytes: int, block_bytes: int, *, pin: bool):
        self.block_bytes = block_bytes
        self.total = capacity_bytes // block_bytes
        if not self.total:
            raise ValueError(
                f"capacity_bytes {capacity_bytes} of the host tier is less than a block of "
                f"{block_bytes}"
            )
        self._per_part = max(PART_BYTES // block_bytes, 1)
        self._parts = [
            torch.empty(
                min(self._per_part, self.total - first), block_bytes, dtype=torch.uint8,
                pin_memory=pin,
            )
            for first in range(0, self.total, self._per_part)
        ]  # fmt: skip
        self._free = list(range(self.total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def count(self, nbytes: int) -> int:
        """Blocks for an entry of so many bytes."""
        return -(-nbytes // self.block_bytes)

    def take(self, count: int) -> list[int]:
        """Free blocks; the caller has checked that there are as many."""
        first = len(self._free) - count
        taken = self._free[first:]
        del self._free[first:]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        self._free.extend(blocks)

    def pieces(self, blocks: Sequence[int], nbytes: int) -> list[Tensor]:
        """The first `nbytes` bytes of these blocks in order, uint8 [at most block_bytes] each."""
        pieces = []
        for block in blocks:
            part, row = divmod(block, self._per_part)
            pieces.append(self._parts[part][row][: min(nbytes, self.block_bytes)])
            nbytes -= pieces[-1].numel()
        return pieces
