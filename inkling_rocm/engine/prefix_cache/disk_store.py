"""The third tier: entries as files of one folder.

Several processes (tensor-parallel ranks, engines of other models) may use the same folder. A name
holds the fingerprint and the key; a file is written aside, brought to the disk and renamed, so that
whatever has its final name is whole, or was damaged later and fails its checksum. What is damaged,
another's or unreadable is a miss and is removed.

The folder is the truth; the index in memory is only a view of it for eviction, least recently used
first by the files' modification times, which a hit sets. There are no threads here: `HostStore`
calls from its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from inkling_rocm.engine.prefix_cache.entry_file import (
    FINGERPRINT_BYTES,
    MAX_KEY_BYTES,
    BadEntry,
    Buffer,
    file_bytes,
    read_entry,
    write_entry,
)
from inkling_rocm.engine.prefix_cache.layout import Layout
from inkling_rocm.engine.prefix_cache.tier_stats import TierStats

logger = logging.getLogger(__name__)

SUFFIX, ASIDE = ".inklingkv", ".inklingkv-aside"
# The folder is looked at again after writing this share of the capacity: so far may several
# processes together exceed it, each.
RESCAN_SHARE = 1 / 32
# The process or machine is short of something; the file may be good.
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)


class DiskStore:
    """Entries on disk.

    Args:
        folder: made if it does not exist. capacity_bytes: of all files, other processes' too.
        fingerprint: `StateFingerprint.digest()`.
    Raises:
        ValueError: a capacity or fingerprint that cannot be.
        OSError: the folder cannot be made, listed or written.
    """

    def __init__(self, folder: str | Path, capacity_bytes: int, fingerprint: bytes):
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes {capacity_bytes} of the disk tier: wanted at least 1")
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(
                f"fingerprint of {len(fingerprint)} bytes: wanted {FINGERPRINT_BYTES}, what "
                "StateFingerprint.digest() gives"
            )
        self.folder = Path(folder)
        self.capacity_bytes = capacity_bytes
        self.fingerprint = fingerprint
        self._lock = threading.Lock()  # of the index and counters; never held while the disk works
        self._write_lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by name, least recently used first
        self._written = 0  # bytes since the last scan
        self._asides = 0
        self._warned: set[str] = set()
        self._stats = TierStats()
        make_folder(self.folder)
        self._scan()
        self._make_room(0)

    def stats(self) -> TierStats:
        with self._lock:
            return replace(self._stats)

    def contains(self, key: bytes) -> bool:
        """Whether a file has this key's name; `get` decides whether it is good."""
        return self.size(key) > 0

    def size(self, key: bytes) -> int:
        """Bytes of the entry's file; 0 = none."""
        name = self._name(key)
        with self._lock:
            known = self._sizes.get(name)
        if known is not None:
            return known
        try:
            return (self.folder / name).stat().st_size  # written by another process
        except OSError:
            return 0

    def put(self, key: bytes, tensors: Mapping[str, Tensor]) -> None:
        """Store CPU tensors; returns when the disk has them, or will not."""
        layout = Layout.of(tensors)
        self.write(key, layout, [layout.pack(tensors).numpy().data])

    def get(self, key: bytes) -> dict[str, Tensor] | None:
        """The tensors, on the CPU; None = a miss."""
        held: list[Tensor] = []

        def allocate(nbytes: int) -> list[memoryview]:
            held.append(torch.empty(nbytes, dtype=torch.uint8))
            return [held[0].numpy().data]

        layout = self.read(key, allocate)
        return layout.unpack(held[0]) if layout else None

    def write(self, key: bytes, layout: Layout, data: Sequence[Buffer]) -> bool:
        """Store bytes that have this layout, unless the key is stored already.

        Returns: False = they are not stored, and why was counted.
        """
        name, size = self._name(key), file_bytes(layout)
        if size > self.capacity_bytes:
            with self._lock:
                self._stats.dropped += 1
            return False
        with self._write_lock:
            try:
                if self._stored(name, size):
                    return True
                if self._written >= self.capacity_bytes * RESCAN_SHARE:
                    self._scan()
                self._make_room(size)
                with self._write_aside() as (fd, aside):
                    write_entry(
                        fd, fingerprint=self.fingerprint, key=key, layout=layout, data=data
                    )  # fmt: skip
                    _use(fd)
                    os.replace(aside, self.folder / name)
            except OSError as error:
                with self._lock:
                    self._stats.errors += 1
                self._warn(
                    f"write:{error.errno}",
                    f"prefix cache: an entry was not written to {self.folder} ({error}); serving "
                    "goes on without it. Further ones are only counted",
                )
                return False
            self._written += size
        with self._lock:
            self._remember(name, size)
            self._stats.bytes_in += size
        return True

    def read(
        self, key: bytes, allocate: Callable[[int], Sequence[memoryview] | None]
    ) -> Layout | None:
        """Read an entry into memory that `allocate` gives for so many bytes of data.

        Returns: their layout; None = a miss, or `allocate` gave None; the memory may then hold
            anything.
        """
        name = self._name(key)
        path = self.folder / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            with self._lock:
                self._forget(name)
                self._stats.misses += 1
            return None
        except OSError as error:
            self._spoiled(path, None, error)
            return None
        try:
            layout = read_entry(fd, fingerprint=self.fingerprint, key=key, allocate=allocate)
            size = os.fstat(fd).st_size
            # Only the order of eviction is lost where a file's times cannot be set.
            with contextlib.suppress(OSError):
                _use(fd)
        except (BadEntry, OSError) as error:
            self._spoiled(path, fd, error)
            return None
        finally:
            os.close(fd)
        with self._lock:
            if layout is None:
                self._stats.misses += 1
                return None
            self._remember(name, size)
            self._stats.hits += 1
            self._stats.bytes_out += size
        return layout

    def _name(self, key: bytes) -> str:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"key of {len(key)} bytes: wanted 1 to {MAX_KEY_BYTES}")
        return f"{self.fingerprint[:8].hex()}-{key.hex()}{SUFFIX}"

    @contextlib.contextmanager
    def _write_aside(self) -> Iterator[tuple[int, Path]]:
        """A new file, removed again unless it was renamed. Its lock says that its writer lives."""
        with self._lock:
            self._asides += 1
            number = self._asides
        aside = self.folder / f"{os.getpid()}-{time.time_ns():x}-{number}{ASIDE}"
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd, aside
        finally:
            os.close(fd)
            aside.unlink(missing_ok=True)

    def _scan(self) -> None:
        """Take the index from the folder, and remove what killed processes left unfinished."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(ASIDE):
                    _remove_if_abandoned(entry.path)
                elif entry.name.endswith(SUFFIX):
                    with contextlib.suppress(FileNotFoundError):  # another process evicted it
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, entry.name, status.st_size))
        found.sort()
        with self._lock:
            self._sizes = OrderedDict((name, size) for _, name, size in found)
            self._stats.entries, self._stats.bytes = len(found), sum(self._sizes.values())
        self._written = 0

    def _make_room(self, size: int) -> None:
        victims = []
        with self._lock:
            while self._sizes and self._stats.bytes + size > self.capacity_bytes:
                name = next(iter(self._sizes))
                self._forget(name)
                victims.append(self.folder / name)
            self._stats.evictions += len(victims)
        for victim in victims:
            victim.unlink(missing_ok=True)  # another process may have evicted it

    def _stored(self, name: str, size: int) -> bool:
        """Whether there is such a file; then it is the most recently used."""
        try:
            if (self.folder / name).stat().st_size != size:
                return False
            _use(self.folder / name)
        except FileNotFoundError:
            return False
        with self._lock:
            self._remember(name, size)
        return True

    def _remember(self, name: str, size: int) -> None:
        self._forget(name)
        self._sizes[name] = size
        self._stats.entries += 1
        self._stats.bytes += size

    def _forget(self, name: str) -> None:
        size = self._sizes.pop(name, None)
        if size is not None:
            self._stats.entries -= 1
            self._stats.bytes -= size

    def _spoiled(self, path: Path, fd: int | None, error: BadEntry | OSError) -> None:
        """Count and remove a file that gave no entry."""
        with self._lock:
            self._forget(path.name)
            self._stats.misses += 1
            if isinstance(error, BadEntry):
                self._stats.corrupt += 1
            else:
                self._stats.errors += 1
        self._warn(
            f"read:{type(error).__name__}",
            f"prefix cache: {path} gives no entry ({error}): a miss, and the file is removed. "
            "Further ones are only counted",
        )
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            return
        try:
            # Another process may have put a good one in its place, or removed it.
            if fd is None or os.path.samestat(os.fstat(fd), os.stat(path)):
                os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as failed:
            self._warn("remove", f"prefix cache: {path} cannot be removed ({failed})")

    def _warn(self, kind: str, message: str) -> None:
        with self._lock:
            known = kind in self._warned
            self._warned.add(kind)
        if not known:
            logger.warning(message)


def make_folder(folder: Path) -> None:
    """Raises: OSError: it cannot be made or written to; says what to do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"{folder}: {error.strerror}; name a folder this user can write to"
        raise type(error)(message) from error


def _use(file: int | Path) -> None:
    """Make a file the most recently used. The system's own times are those of its last tick."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _remove_if_abandoned(path: str) -> None:
    """Remove an unfinished file whose writer no longer holds its lock."""
    # Another process may finish or remove it meanwhile; what cannot be locked is left alone.
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(fd)
