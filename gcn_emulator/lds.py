"""LDS of one workgroup, with bounds checks and the race detector."""

from __future__ import annotations

from collections import Counter

import numpy as np

from gcn_emulator.counters import Traffic
from gcn_emulator.formats import I32, U8, U32, WAVE_SIZE, EmuError
from gcn_emulator.storage import ByteStore
from gcn_emulator.wave import Wave


class RaceDetector:
    """Finds LDS accesses of different waves that no barrier separates.

    Each byte remembers its last writer and reader as epoch * 64 + wave; a barrier starts a new
    epoch. Stores that do not change a byte are ignored (replicated layouts store duplicates).
    """

    SEVERAL = 63

    def __init__(self, size: int) -> None:
        size = -(-size // 4) * 4
        self.writer = np.zeros(size, I32)
        self.reader = np.zeros(size, I32)
        self.epoch = 1
        self.found: Counter[str] = Counter()

    def access(self, wave: int, index: np.ndarray, changed: np.ndarray | None, label: str) -> None:
        """Record an access of bytes `index`; `changed` is None for reads."""
        base = self.epoch * WAVE_SIZE
        mine = base + wave
        written = self.writer[index]
        foreign = (written >= base) & (written != mine)
        if changed is None:
            if foreign.any():
                self.found[f"read after write: {label}"] += 1
            previous = self.reader[index]
            several = (previous >= base) & (previous != mine)
            self.reader[index] = np.where(several, base + self.SEVERAL, mine)
            return
        if (foreign & changed).any():
            self.found[f"write after write: {label}"] += 1
        read = self.reader[index]
        if ((read >= base) & (read != mine) & changed).any():
            self.found[f"write after read: {label}"] += 1
        touched = index[changed | (written < base)]
        self.writer[touched] = mine


class LocalMemory:
    """One workgroup's LDS."""

    def __init__(self, size: int, races: bool, traffic: Traffic | None) -> None:
        self.size = size
        self.store_ = ByteStore(np.full(-(-max(size, 4) // 4) * 4, 0xA5, U8))
        self.races = RaceDetector(max(size, 4)) if races else None
        self.traffic = traffic

    def reset(self) -> None:
        """LDS contents are undefined when a workgroup starts."""
        self.store_.bytes[:] = 0xA5
        if self.races:
            self.races.epoch += 1

    def _check(self, address: np.ndarray, size: int) -> None:
        if int(address.min()) < 0 or int(address.max()) + size > self.size:
            raise EmuError(
                f"LDS access {int(address.min())}..{int(address.max())}+{size} beyond {self.size}"
            )
        if self.traffic:
            self.traffic.lds(address, size)

    def load(self, wave: Wave, address: np.ndarray, size: int, label: str) -> np.ndarray:
        """Read -> uint32[max(size // 4, 1), lanes]."""
        if not len(address):
            return np.zeros((max(size // 4, 1), 0), U32)
        self._check(address, size)
        if self.races:
            self.races.access(wave.id, address[:, None] + np.arange(size), None, label)
        return self.store_.gather(address, size)

    def store(
        self, wave: Wave, address: np.ndarray, size: int, data: np.ndarray, label: str
    ) -> None:
        """Write the low `size` bytes of each lane."""
        if not len(address):
            return
        self._check(address, size)
        if self.races:
            index = address[:, None] + np.arange(size)
            new = np.ascontiguousarray(data.T).view(U8)[:, :size]
            self.races.access(wave.id, index, self.store_.bytes[index] != new, label)
        self.store_.scatter(address, size, data)
