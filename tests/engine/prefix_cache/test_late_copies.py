"""Copies from a GPU arrive late; whoever touches the memory from the CPU waits for them.

Played on a CPU: after a put the memory holds rubbish until its event is waited for, and only then
what was put, over whatever has been written there meanwhile.
"""

from __future__ import annotations

import threading

import pytest

from inkling_rocm.engine.prefix_cache.disk_store import DiskStore
from inkling_rocm.engine.prefix_cache.store import HostStore
from tests.engine.prefix_cache.entries import DATA_BYTES, FINGERPRINT, held, key_of, put

RUBBISH = 0xAB


class LateEvent:
    def __init__(self, parts):
        self._late = [(part, part.clone()) for part in parts]
        self._lock = threading.Lock()
        for part in parts:
            part.fill_(RUBBISH)

    def synchronize(self):
        with self._lock:
            for part, content in self._late:
                part.copy_(content)
            self._late = []


class LateStore(HostStore):
    putting = False

    def put(self, key, tensors):
        self.putting = True
        super().put(key, tensors)

    def _copied(self, device):
        if self.putting:
            self.putting = False
            self._last_copy = LateEvent(self._blocks._parts)


def late_store(folder, entries: int) -> LateStore:
    disk = DiskStore(folder, 1 << 30, FINGERPRINT)
    return LateStore(entries * DATA_BYTES, disk, block_bytes=DATA_BYTES)


def write_behind(folder):
    store = late_store(folder, 2)
    put(store, 0)
    store.close()
    assert held(DiskStore(folder, 1 << 30, FINGERPRINT), [0]) == [0]


def get(folder):
    store = HostStore(2 * DATA_BYTES, block_bytes=DATA_BYTES)
    store.__class__ = LateStore
    put(store, 0)
    assert held(store, [0]) == [0]
    store.close()


def read_into_memory_of_an_evicted_entry(folder):
    put(DiskStore(folder, 1 << 30, FINGERPRINT), *range(3))
    store = late_store(folder, 2)
    assert held(store, [0, 1]) == [0, 1]
    put(store, 3)  # late, in the memory of 0
    store.get(key_of(2))  # from the disk, into that of 1
    store._last_copy.synchronize()
    assert store.resident(key_of(2))
    assert held(store, [2, 3]) == [2, 3]
    store.close()


USES = (write_behind, get, read_into_memory_of_an_evicted_entry)


@pytest.mark.parametrize("use", USES)
def test_the_cpu_waits(tmp_path, use):
    use(tmp_path)


@pytest.mark.parametrize("use", USES)
def test_without_waiting_each_gives_rubbish(tmp_path, monkeypatch, use):
    """So the tests above can fail."""
    monkeypatch.setattr(HostStore, "_wait_for_copies", lambda self: None)
    with pytest.raises(AssertionError):
        use(tmp_path)
