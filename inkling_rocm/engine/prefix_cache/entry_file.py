"""One entry as a file: a prefix that says whose it is, then a safetensors file.

    magic      8 bytes
    version    uint32
    key length uint32
    payload    uint64: bytes of the safetensors header and data
    fingerprint, key (padded with zeros), checksum: 32, 64, 32 bytes

The checksum (SHA-256) covers everything else in the file. Every field of the prefix is compared
with what the reader expects, so that no flipped bit anywhere gives an entry.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from inkling_rocm.engine.prefix_cache.layout import LENGTH, Layout

MAGIC, VERSION = b"INKLKV\r\n", 1
FINGERPRINT_BYTES, MAX_KEY_BYTES, CHECKSUM_BYTES = 32, 64, 32
PREFIX = struct.Struct(f"<8sIIQ{FINGERPRINT_BYTES}s{MAX_KEY_BYTES}s")
MOST_PARTS = 1024  # Linux's IOV_MAX
Buffer: TypeAlias = bytes | memoryview


class BadEntry(ValueError):
    """The file is not the wanted entry: damaged, cut, or another's."""


def checksum(parts: Iterable[Buffer]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def file_bytes(layout: Layout) -> int:
    """Size of the file of an entry."""
    return PREFIX.size + CHECKSUM_BYTES + len(layout.header) + layout.nbytes


def write_entry(
    fd: int, *, fingerprint: bytes, key: bytes, layout: Layout, data: Sequence[Buffer]
) -> None:
    """Write the file and wait until the disk has it.

    Args:
        data: the layout's bytes, in as many pieces as the caller has them.
    Raises:
        OSError: what writing said; the file is unusable then.
    """
    header = layout.header
    prefix = PREFIX.pack(
        MAGIC, VERSION, len(key), len(header) + layout.nbytes, fingerprint, key
    )  # fmt: skip
    parts = (prefix, checksum((prefix, header, *data)), header, *data)
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        left = _after(left, os.writev(fd, left[:MOST_PARTS]))
    os.fsync(fd)


def read_entry(
    fd: int,
    *,
    fingerprint: bytes,
    key: bytes,
    allocate: Callable[[int], Sequence[memoryview] | None],
) -> Layout | None:
    """Read the file into memory that `allocate` gives for so many bytes of data.

    Returns: the layout of the data; None: `allocate` gave None.
    Raises:
        BadEntry: with the reason; the memory may hold anything.
        OSError: what reading said.
    """
    payload = os.fstat(fd).st_size - PREFIX.size - CHECKSUM_BYTES
    if payload < LENGTH.size:
        raise BadEntry(f"cut: {payload} bytes of payload")
    prefix = _read(fd, PREFIX.size)
    wanted = PREFIX.pack(MAGIC, VERSION, len(key), payload, fingerprint, key)
    if difference := _difference(prefix, wanted):
        raise BadEntry(f"another {difference}")
    stored = _read(fd, CHECKSUM_BYTES)
    length = _read(fd, LENGTH.size)
    nbytes = payload - LENGTH.size - LENGTH.unpack(length)[0]
    if nbytes < 0:
        raise BadEntry(f"header of {LENGTH.unpack(length)[0]} bytes in a payload of {payload}")
    header = length + _read(fd, payload - LENGTH.size - nbytes)
    data = allocate(nbytes)
    if data is None:
        return None
    _read_into(fd, data)
    if checksum((prefix, header, *data)) != stored:
        raise BadEntry("checksum")
    try:
        layout = Layout.parse(header)
    except (ValueError, KeyError, TypeError) as error:
        raise BadEntry(f"header that this version does not read: {error!r}") from error
    if layout.nbytes != nbytes:
        raise BadEntry(f"header describes {layout.nbytes} bytes of {nbytes}")
    return layout


def _difference(got: bytes, wanted: bytes) -> str:
    names = ("magic", "version", "key length", "payload length", "fingerprint", "key")
    pairs = zip(names, PREFIX.unpack(got), PREFIX.unpack(wanted), strict=True)
    return ", ".join(name for name, a, b in pairs if a != b)


def _read(fd: int, size: int) -> bytes:
    data = bytearray(size)
    _read_into(fd, [memoryview(data)])
    return bytes(data)


def _read_into(fd: int, parts: Sequence[memoryview]) -> None:
    left = [part for part in parts if len(part)]
    while left:
        got = os.readv(fd, left[:MOST_PARTS])
        if not got:
            raise BadEntry(f"cut: {sum(map(len, left))} bytes missing")
        left = _after(left, got)


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of parts, none empty, after their first `done` bytes."""
    for index, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[index + 1 :]]
        done -= len(part)
    return []
