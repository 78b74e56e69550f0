"""Global stores a barrier does not order: another wave reading one of them is an error.

A store of one wave is certain to be seen by another only if its own wave waits for it (vmcnt) and a
barrier follows. At every barrier the stores still outstanding are noted together with what memory
held; a wave that then reads such a byte of another wave, and could get either value, raises.
The emulator is strict here: for waves of one workgroup LLVM's memory model leaves the wait out
(they share an L1 cache), but nothing makes such a store part of what another wave then releases to
other workgroups: a workgroup that signals with an atomic while other waves have stores outstanding
has not published them, and a later workgroup that reads them raises too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def take(self, which: np.ndarray) -> _Bytes:
        """Some of them, by mask or index."""
        return _Bytes(
            self.address[which], self.wave[which], self.value[which], self.atomic[which],
            self.label[which],
        )  # fmt: skip

    def sorted(self) -> _Bytes:
        """By address; stores to one address stay in the order they were issued."""
        return self.take(np.argsort(self.address, kind="stable"))


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


def _hits(stored: _Bytes, address: np.ndarray) -> Iterator[tuple[int, range]]:
    """(position in `address`, the stores to that byte) for all that were stored to."""
    first = np.searchsorted(stored.address, address, "left")
    last = np.searchsorted(stored.address, address, "right")
    for i in np.flatnonzero(first < last).tolist():
        yield i, range(int(first[i]), int(last[i]))


class GlobalOrder:
    """What the waves of a workgroup stored before the last barrier and had not waited for."""

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory
        self.labels: list[str] = []
        self.stored: _Bytes | None = None
        self.before = np.empty(0, U8)  # memory at the barrier, per byte of `stored`
        self.signalled: _Bytes | None = None  # outstanding in other waves at the last atomic
        self.signals_now = False  # that atomic was executed since the last barrier
        self.unpublished: _Bytes | None = None  # by earlier workgroups

    def new_workgroup(self) -> None:
        """What the previous workgroup signalled without having published stays so."""
        parts = [p for p in (self.unpublished, self.signalled) if p is not None and len(p.address)]
        self.unpublished = _Bytes.joined(parts).sorted() if parts else None
        self.stored = self.signalled = None
        self.labels, self.signals_now = [], False

    def barrier(self, batches: Sequence[Wave]) -> None:
        """All waves have arrived: note their outstanding stores; earlier ones are ordered now."""
        self.stored, self.labels, self.signals_now = None, [], False
        parts = [
            part
            for batch in batches
            for item in batch.queue or []
            if item.op.stores
            for part in [self._bytes_of(batch, item)]
        ]
        if any(len(part.address) for part in parts):
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
        if atomic:
            self._signal(w)
        stored, unpublished = self.stored, self.unpublished
        if stored is None and (unpublished is None or atomic):
            return
        address, kept = byte_addresses(where, size)
        if w.active is not None:
            kept = kept & w.active
        readers = np.broadcast_to(w.lane_wave, kept.shape)[kept]
        address = address[kept]
        if stored is not None:
            for i, stores in _hits(stored, address):
                self._check_byte(int(readers[i]), stores, atomic)
        if unpublished is not None and not atomic:
            for i, stores in _hits(unpublished, address):
                self._check_published(int(address[i]), stores)

    def _signal(self, w: Wave) -> None:
        """Waves execute an atomic: what others have outstanding is not published by it."""
        executing = w.lane_wave if w.active is None else w.lane_wave[w.active]
        known = self.signalled
        if not self.signals_now:
            known = self.stored and self.stored.take(self.stored.value != self.before)
        self.signalled, self.signals_now = None, True
        if known is not None:
            others = ~np.isin(known.wave, executing) & ~known.atomic
            self.signalled = known.take(others)

    def _check_published(self, address: int, stores: range) -> None:
        unpublished = self.unpublished
        assert unpublished is not None
        last = stores[-1]
        if self.memory.load(np.array([address], U64), 1)[0, 0] == unpublished.value[last]:
            raise EmuError(
                f"reads global memory that wave {unpublished.wave[last]} of an earlier workgroup "
                "stored and had not waited for when it signalled with an atomic"
            )

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
