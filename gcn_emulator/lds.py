"""LDS of one workgroup, with bounds checks, the race detector and tracking of unwritten bytes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from gcn_emulator.counters import Traffic
from gcn_emulator.formats import I32, U8, U32, WAVE_SIZE, EmuError
from gcn_emulator.storage import ByteStore

if TYPE_CHECKING:
    from gcn_emulator.wave import Wave

POISON_LDS = 0xA5
_STEPS = [np.arange(n)[:, None] for n in range(17)]


class RaceDetector:
    """Finds LDS accesses of different waves that no barrier separates, and reads before any write.

    Each cell remembers its last writer and reader as epoch * 64 + wave; a barrier starts a new
    epoch. Stores that do not change a cell are ignored (replicated layouts store duplicates). A
    cell is a 32-bit word until the first access that is smaller or unaligned; from then on it is a
    byte.
    """

    SEVERAL = 63

    def __init__(self, size: int) -> None:
        self.size = -(-size // 4) * 4
        self.unit = 4
        self.writer = np.zeros(self.size // 4, I32)
        self.reader = np.zeros(self.size // 4, I32)
        self.epoch = 1
        self.start = 0  # cells written before this stamp belong to an earlier workgroup
        self.found: Counter[str] = Counter()

    def new_workgroup(self) -> None:
        """Forget everything: LDS contents are undefined when a workgroup starts."""
        self.epoch += 1
        self.start = self.epoch * WAVE_SIZE

    def cells(self, address: np.ndarray, size: int) -> np.ndarray:
        """Cells an access touches: int[cells per lane, lanes]."""
        if self.unit == 4 and (size < 4 or (address & 3).any()):
            self.unit = 1
            self.writer = np.repeat(self.writer, 4)
            self.reader = np.repeat(self.reader, 4)
        if self.unit == 4:
            return (address >> 2) + _STEPS[size // 4]
        return address + _STEPS[size]

    def read(self, stamp: np.ndarray, index: np.ndarray, label: str) -> None:
        """Record a read of cells `index` by the waves `stamp` (epoch * 64 + wave per lane).

        Raises: EmuError: nothing in this workgroup has written one of the cells.
        """
        base = self.epoch * WAVE_SIZE
        written = self.writer[index]
        if written.min() < self.start:
            cell = int(index[written < self.start][0]) * self.unit
            raise EmuError(f"read of LDS byte {cell}, which nothing has written")
        if written.max() >= base and ((written >= base) & (written != stamp)).any():
            self.found[f"read after write: {label}"] += 1
        previous, mine = self.reader[index], np.broadcast_to(stamp, index.shape)
        if previous.max() >= base:
            several = (previous >= base) & (previous != stamp)
            mine = np.where(several, base + self.SEVERAL, mine)
        self.reader[index] = mine
        if stamp[0] != stamp[-1]:  # several waves in this instruction
            clash = self.reader[index] != mine
            if clash.any():
                self.reader[index[clash]] = base + self.SEVERAL

    def write(self, stamp: np.ndarray, index: np.ndarray, changed: np.ndarray, label: str) -> None:
        """Record a write of cells `index`; `changed` says which got a new value."""
        base, mine = self.epoch * WAVE_SIZE, np.broadcast_to(stamp, index.shape)
        written = self.writer[index]
        if written.max() >= base:
            if ((written >= base) & (written != stamp) & changed).any():
                self.found[f"write after write: {label}"] += 1
            touched = changed | (written < base)
            self.writer[index[touched]] = mine[touched]
        else:
            self.writer[index] = mine
        read = self.reader[index]
        if read.max() >= base and ((read >= base) & (read != stamp) & changed).any():
            self.found[f"write after read: {label}"] += 1

    def overwritten(
        self, stamp: np.ndarray, index: np.ndarray, lost: np.ndarray, label: str
    ) -> None:
        """Cells whose value was replaced by another lane of the same instruction."""
        if (lost & (self.writer[index] != stamp)).any():
            self.found[f"write after write: {label}"] += 1


class LocalMemory:
    """One workgroup's LDS."""

    def __init__(self, size: int, races: bool, traffic: Traffic | None) -> None:
        self.size = size
        self.data = ByteStore(np.full(-(-max(size, 4) // 4) * 4, POISON_LDS, U8))
        self.races = RaceDetector(max(size, 4)) if races else None
        self.traffic = traffic

    def reset(self) -> None:
        """LDS contents are undefined when a workgroup starts."""
        self.data.bytes[:] = POISON_LDS
        if self.races:
            self.races.new_workgroup()

    def _check(self, wave: Wave, address: np.ndarray, size: int, mask: np.ndarray | None) -> None:
        if int(address.min()) < 0 or int(address.max()) + size > self.size:
            raise EmuError(
                f"LDS access {int(address.min())}..{int(address.max())}+{size} beyond {self.size}"
            )
        if self.traffic:
            waves = wave.lane_wave if mask is None else wave.lane_wave[mask]
            for i in wave.ids:
                part = address[waves == i]
                if len(part):
                    self.traffic.lds(part, size)

    def _stamp(self, wave: Wave, mask: np.ndarray | None) -> np.ndarray:
        assert self.races is not None
        waves = wave.lane_wave if mask is None else wave.lane_wave[mask]
        return waves + self.races.epoch * WAVE_SIZE

    def load(
        self, wave: Wave, address: np.ndarray, size: int, mask: np.ndarray | None, label: str
    ) -> np.ndarray:
        """Read -> uint32[max(size // 4, 1), lanes]; `mask` selected the lanes of `address`."""
        if not len(address):
            return np.zeros((max(size // 4, 1), 0), U32)
        self._check(wave, address, size, mask)
        races = self.races
        if races is None:
            return self.data.gather(address, size)
        index = races.cells(address, size)
        races.read(self._stamp(wave, mask), index, label)
        if races.unit == 4:
            return self.data.words[index]
        return self.data.gather(address, size)

    def store(
        self, wave: Wave, address: np.ndarray, size: int, data: np.ndarray,
        mask: np.ndarray | None, label: str,
    ) -> None:  # fmt: skip
        """Write the low `size` bytes of each lane; a later lane wins an overlap."""
        if not len(address):
            return
        self._check(wave, address, size, mask)
        races = self.races
        if races is None:
            self.data.scatter(address, size, data)
            return
        index, stamp = races.cells(address, size), self._stamp(wave, mask)
        if races.unit == 4:
            cells, new = self.data.words, data
        else:
            cells, new = self.data.bytes, np.ascontiguousarray(data.T).view(U8)[:, :size].T
        races.write(stamp, index, cells[index] != new, label)
        cells[index] = new
        if wave.n > 1:
            lost = cells[index] != new
            if lost.any():
                races.overwritten(stamp, index, lost, label)

    def cell(self, address: int, size: int) -> np.ndarray:
        """A writable view of one location (for atomics).

        Raises: EmuError: it is outside the allocation.
        """
        if address < 0 or address + size > self.size:
            raise EmuError(f"LDS atomic at {address} beyond {self.size}")
        return self.data.bytes[address : address + size]
