"""Global stores a barrier does not order: another wave reading one of them is an error.

A store of one wave is certain to be seen by another only if its own wave waits for it (vmcnt) and a
barrier follows. At every barrier the stores still outstanding are noted together with what memory
held; a wave that then reads such a byte of another wave, and could get either value, raises.
The emulator is strict here: for waves of one workgroup LLVM's memory model leaves the wait out
(they share an L1 cache), but nothing makes such a store part of what another wave then releases to
other workgroups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gcn_emulator.formats import I32, I64, U8, U64, EmuError
from gcn_emulator.memory import GlobalMemory
from gcn_emulator.pending import Pending

if TYPE_CHECKING:
    from gcn_emulator.wave import Wave


@dataclass(slots=True)
class _Bytes:
    """The bytes of outstanding stores; arrays over bytes, later stores behind earlier ones."""

    address: np.ndarray
    wave: np.ndarray
    value: np.ndarray
    atomic: np.ndarray
    label: np.ndarray  # index into GlobalOrder.labels

    @staticmethod
    def joined(parts: Sequence[_Bytes]) -> _Bytes:
        names = ("address", "wave", "value", "atomic", "label")
        return _Bytes(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))

    def sorted(self) -> _Bytes:
        """By address; stores to one address stay in the order they were issued."""
        order = np.argsort(self.address, kind="stable")
        return _Bytes(
            self.address[order],
            self.wave[order],
            self.value[order],
            self.atomic[order],
            self.label[order],
        )


def byte_addresses(where: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(address, inside) of every byte of an access: uint64 and bool [size, lanes].

    `where` is uint64[lanes], or int64[2, lanes] with the bytes left in the buffer in the second
    row; a buffer drops the words (or smaller accesses) that are not completely inside.
    """
    step = np.arange(size, dtype=I64)[:, None]
    if where.ndim == 1:
        address = where + step.astype(U64)
        return address, np.ones(address.shape, bool)
    unit = min(size, 4)
    inside = where[1] >= (step // unit + 1) * unit
    return (where[0] + step).astype(U64), inside


class GlobalOrder:
    """What the waves of a workgroup stored before the last barrier and had not waited for."""

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory
        self.labels: list[str] = []
        self.stored: _Bytes | None = None
        self.before = np.empty(0, U8)  # memory at the barrier, per byte of `stored`

    def barrier(self, batches: Sequence[Wave]) -> None:
        """All waves have arrived: note their outstanding stores; earlier ones are ordered now."""
        self.stored, self.labels = None, []
        parts = [
            part
            for batch in batches
            for item in batch.queue or []
            if item.op.stores
            for part in [self._bytes_of(batch, item)]
        ]
        if parts:
            self.stored = _Bytes.joined(parts).sorted()
            self.before = self.memory.load(self.stored.address, 1)[0].astype(U8)

    def _bytes_of(self, batch: Wave, item: Pending) -> _Bytes:
        size = item.op.stores
        where, data = item.captured
        address, kept = byte_addresses(where, size)
        if item.active is not None:
            kept = kept & item.active
        if not self.memory.contains(address[kept]):
            kept = np.zeros_like(kept)  # completing it will report the access
        raw = np.ascontiguousarray(data.T).view(U8)[:, :size].T
        count = int(kept.sum())
        self.labels.append(item.op.label)
        return _Bytes(
            address[kept],
            np.broadcast_to(batch.lane_wave, kept.shape)[kept],
            raw[kept],
            np.full(count, item.op.atomic),
            np.full(count, len(self.labels) - 1, I32),
        )

    def check(self, w: Wave, where: np.ndarray, size: int, atomic: bool) -> None:
        """A wave is about to read `size` bytes at `where` in its active lanes.

        Raises: EmuError: another wave stored there before the barrier and has not waited.
        """
        stored = self.stored
        if stored is None:
            return
        address, kept = byte_addresses(where, size)
        if w.active is not None:
            kept = kept & w.active
        readers = np.broadcast_to(w.lane_wave, kept.shape)[kept]
        address = address[kept]
        first = np.searchsorted(stored.address, address, "left")
        last = np.searchsorted(stored.address, address, "right")
        for i in np.flatnonzero(first < last).tolist():
            self._check_byte(int(readers[i]), range(int(first[i]), int(last[i])), atomic)

    def _check_byte(self, reader: int, stores: range, atomic: bool) -> None:
        stored = self.stored
        assert stored is not None
        own = [i for i in stores if stored.wave[i] == reader and not stored.atomic[i]]
        expected = stored.value[own[-1]] if own else self.before[stores[0]]
        for i in stores:
            if stored.wave[i] == reader or (atomic and stored.atomic[i]):
                continue
            if stored.atomic[i] or stored.value[i] != expected:
                raise EmuError(
                    f"reads global memory that wave {stored.wave[i]} stored before the barrier "
                    f"without waiting, {self.labels[stored.label[i]]}"
                )
