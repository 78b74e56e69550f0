"""The second tier: entries in host memory, over an optional third tier on disk.

An entry is what the tree gave up under a key: the K/V of a page, or a snapshot of the convolution
rings, as named tensors. A key stands for its content, so an entry is never changed, and putting a
key again only makes it recently used.

Nothing the engine's thread calls waits for a write to the disk. A thread of the store's writes new
entries behind, oldest first; one that must make room before its turn is dropped and counted. `get`
reads from the disk where `prefetch` has not done so before.

From and to a GPU everything is enqueued on the caller's current stream, always the same one; who
touches the memory from the CPU waits for the last such copy first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inkling_rocm.engine.prefix_cache.blocks import DEFAULT_BLOCK_BYTES, Blocks
from inkling_rocm.engine.prefix_cache.disk_store import DiskStore
from inkling_rocm.engine.prefix_cache.layout import Layout
from inkling_rocm.engine.prefix_cache.tier_stats import TierStats

CPU = torch.device("cpu")
READERS = 4
# Prefetching stops here, or the end of a long prompt would push out its beginning.
PREFETCH_SHARE = 1 / 2


@dataclass
class _Entry:
    """`busy`: the writer reads it, so its blocks must stay."""

    layout: Layout
    blocks: list[int]
    busy: bool = False


@dataclass(frozen=True)
class _Load:
    """A prefetch under way, of so many bytes."""

    future: Future[None]
    nbytes: int


class HostStore:
    """Entries in host memory.

    Args:
        capacity_bytes: of memory, allocated at once. lower: where entries are written behind and
            misses are looked up; the store does not own it.
        block_bytes: an entry takes a whole number of blocks, see `block_bytes_for`.
        pin_memory: for entries that come from a GPU.
    """

    def __init__(
        self,
        capacity_bytes: int,
        lower: DiskStore | None = None,
        *,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        pin_memory: bool = False,
    ):
        self.lower = lower
        self._blocks = Blocks(capacity_bytes, block_bytes, pin=pin_memory)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._unwritten: OrderedDict[bytes, _Entry] = OrderedDict()  # oldest first
        self._loading: dict[bytes, _Load] = {}
        self._loading_bytes = 0
        self._last_copy: torch.cuda.Event | None = None
        self._stats = TierStats()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="prefix-cache-read")
        self._writer = threading.Thread(
            target=self._write_behind, name="prefix-cache-write", daemon=True
        )
        if lower is not None:
            self._writer.start()

    def stats(self) -> TierStats:
        with self._lock:
            return replace(self._stats)

    def put(self, key: bytes, tensors: Mapping[str, Tensor]) -> None:
        """Store a copy of these tensors, all of one device.

        From a GPU the copy is enqueued: the tensors may be overwritten by later work of the same
        stream.
        """
        layout = Layout.of(tensors)
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return
            data = layout.pack(tensors)  # before blocks are taken: it may find no memory
            blocks = self._take(layout.nbytes)
            if blocks is None:
                self._stats.dropped += 1
                return
            if data.device.type == "cpu":
                self._wait_for_copies()
            start = 0
            for piece in self._blocks.pieces(blocks, layout.nbytes):
                piece.copy_(data[start : start + piece.numel()], non_blocking=True)
                start += piece.numel()
            self._copied(data.device)
            entry = self._insert(key, layout, blocks)
            self._stats.bytes_in += layout.nbytes
            if self.lower is not None:
                self._unwritten[key] = entry
                self._changed.notify_all()

    def get(self, key: bytes, device: torch.device = CPU) -> dict[str, Tensor] | None:
        """The tensors, the caller's own, on a device; None = a miss.

        To a GPU the copy is enqueued on the current stream.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._stats.hits += 1
                return self._copy_out(key, entry, device)
            self._stats.misses += 1
            loading = self._loading.get(key)
        if self.lower is None:
            return None
        if loading is not None and not loading.future.cancel():
            loading.future.result()
        else:
            if loading is not None:  # it had not begun
                self._loaded(key)
            self._load(key)
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else self._copy_out(key, entry, device)

    def contains(self, key: bytes) -> bool:
        """Whether some tier seems to have the key; `get` may still miss."""
        return self.resident(key) or (self.lower is not None and self.lower.contains(key))

    def resident(self, key: bytes) -> bool:
        """Whether `get` would find the key without the disk."""
        with self._lock:
            return key in self._entries

    def loading(self, key: bytes) -> bool:
        """Whether a prefetch of the key has not ended yet."""
        with self._lock:
            return key in self._loading

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Begin to read these keys from the disk, the most wanted ones first.

        Those that would take more than half of the memory are left out.
        """
        if self.lower is None:
            return
        for key in keys:
            size = self.lower.size(key)
            with self._lock:
                if key in self._entries:
                    self._entries.move_to_end(key)
                elif key not in self._loading and size:
                    capacity = self._blocks.total * self._blocks.block_bytes
                    if self._loading_bytes + size > capacity * PREFETCH_SHARE:
                        return
                    self._loading_bytes += size
                    future = self._readers.submit(self._prefetch, key)
                    self._loading[key] = _Load(future, size)

    def flush(self) -> None:
        """Wait until every entry was written or given up."""
        if self.lower is None:
            return
        with self._changed:
            while self._writer.is_alive() and (
                self._unwritten or any(entry.busy for entry in self._entries.values())
            ):
                self._changed.wait(timeout=1)  # the thread may end on an error

    def close(self) -> None:
        """Write what is not written yet and end the threads; the store is not used afterwards."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self.lower is not None:
            self._writer.join()

    def _take(self, nbytes: int) -> list[int] | None:
        """Blocks for so many bytes, by evicting if need be; None = there cannot be enough."""
        count = self._blocks.count(nbytes)
        if count > self._blocks.total:
            return None
        while self._blocks.free < count:
            victim = next((key for key, entry in self._entries.items() if not entry.busy), None)
            if victim is None:
                return None
            entry = self._entries.pop(victim)
            self._blocks.give_back(entry.blocks)
            self._stats.evictions += 1
            self._stats.entries -= 1
            self._stats.bytes -= entry.layout.nbytes
            if self._unwritten.pop(victim, None):
                self._stats.dropped += 1
        return self._blocks.take(count)

    def _insert(self, key: bytes, layout: Layout, blocks: list[int]) -> _Entry:
        entry = self._entries[key] = _Entry(layout, blocks)
        self._stats.entries += 1
        self._stats.bytes += layout.nbytes
        return entry

    def _copy_out(self, key: bytes, entry: _Entry, device: torch.device) -> dict[str, Tensor]:
        self._entries.move_to_end(key)
        if device.type == "cpu":
            self._wait_for_copies()
        data = torch.empty(entry.layout.nbytes, dtype=torch.uint8, device=device)
        start = 0
        for piece in self._blocks.pieces(entry.blocks, entry.layout.nbytes):
            data[start : start + piece.numel()].copy_(piece, non_blocking=True)
            start += piece.numel()
        self._copied(device)
        self._stats.bytes_out += entry.layout.nbytes
        return entry.layout.unpack(data)

    def _copied(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._last_copy = torch.cuda.current_stream(device).record_event()

    def _wait_for_copies(self) -> None:
        last = self._last_copy
        if last is not None:
            last.synchronize()

    def _load(self, key: bytes) -> None:
        """Read an entry from the disk, if it has it and there is room."""
        assert self.lower is not None
        taken: list[int] = []

        def allocate(nbytes: int) -> list[memoryview] | None:
            with self._lock:
                blocks = self._take(nbytes)
            if blocks is None:
                return None
            taken.extend(blocks)
            self._wait_for_copies()
            return [piece.numpy().data for piece in self._blocks.pieces(blocks, nbytes)]

        layout = None
        try:
            layout = self.lower.read(key, allocate)
        finally:
            with self._lock:
                if layout is not None and key not in self._entries:
                    self._insert(key, layout, taken)
                else:
                    self._blocks.give_back(taken)

    def _prefetch(self, key: bytes) -> None:
        try:
            self._load(key)
        finally:
            self._loaded(key)

    def _loaded(self, key: bytes) -> None:
        with self._lock:
            self._loading_bytes -= self._loading.pop(key).nbytes

    def _write_behind(self) -> None:
        """The writer's thread: until the store closes and everything is written."""
        assert self.lower is not None
        while True:
            with self._changed:
                while not self._unwritten:
                    if self._closing:
                        return
                    self._changed.wait()
                key, entry = self._unwritten.popitem(last=False)
                entry.busy = True
            self._wait_for_copies()
            pieces = self._blocks.pieces(entry.blocks, entry.layout.nbytes)
            self.lower.write(key, entry.layout, [piece.numpy().data for piece in pieces])
            with self._changed:
                entry.busy = False
                self._changed.notify_all()
