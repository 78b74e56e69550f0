"""Bandwidth of the prefix cache's lower tiers: host memory and disk.

    python -m bench.prefix_cache.tiers --folder DIR               prints, and appends rows
    python -m bench.prefix_cache.tiers --folder DIR --no-rows     prints only
    python -m bench.prefix_cache.tiers --folder DIR --device cuda from and to a GPU

Entries have the sizes of Inkling's at 64 tokens a page in bf16 on one device of eight. Every
entry is read back first and must be what was written. Beside each rate stands what bounds it,
measured with the same sizes: a copy of memory, a plain file written and brought to the disk, a
plain file read. "Cold" means that the kernel was asked to forget the file before.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.prefix_cache.tables import FILE
from bench.rows import append, result_row
from inkling_rocm.engine.prefix_cache.blocks import block_bytes_for
from inkling_rocm.engine.prefix_cache.disk_store import DiskStore
from inkling_rocm.engine.prefix_cache.store import READERS, HostStore

TOTAL_BYTES = 768 << 20  # of the entries of a case
PLENTY = 1 << 40
FINGERPRINT = bytes(32)
# Inkling at TP 8: 11 global layers of 1 K/V head, 55 window layers of 2, head_dim 128, pages of 64
# tokens; a snapshot holds 3 rows of the k, v (128 or 256 wide) and the two hidden (6144) rings.
CASES = {
    "global page": (11, 2, 64, 1, 128),
    "window page": (55, 2, 64, 2, 128),
    "snapshot": (3, 66 * 2 * 6144 + 2 * (11 * 128 + 55 * 256)),
}


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each call."""
    seconds = []
    for call in calls:
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def forget(folder: Path) -> None:
    """Ask the kernel to drop its copies of the folder's files."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def equal(got: dict[str, Tensor] | None, wanted: Tensor) -> bool:
    return got is not None and torch.equal(got["kv"].view(torch.int16), wanted.view(torch.int16))


class Case:
    """One kind of entry, in a folder of its own."""

    def __init__(self, name: str, shape: tuple[int, ...], folder: Path, device: torch.device):
        self.name, self.folder, self.device = name, folder, device
        self.nbytes = 2 * torch.Size(shape).numel()
        self.count = TOTAL_BYTES // self.nbytes
        bits = torch.randint(-(1 << 15), 1 << 15, (self.count, *shape), dtype=torch.int16)
        self.contents = bits.view(torch.bfloat16).to(device)
        self.rows: list[dict] = []

    def host_store(self, share: float, lower: DiskStore | None = None) -> HostStore:
        block = block_bytes_for([self.nbytes])
        blocks = -(-self.nbytes // block) * int(self.count * share)
        return HostStore(
            blocks * block, lower, block_bytes=block, pin_memory=self.device.type == "cuda"
        )

    def add(self, op: str, seconds: list[float], bound: list[float] | None, gate: bool) -> None:
        """A row of `seconds` a call, one entry each, beside those of what bounds it."""
        quantiles = statistics.quantiles(seconds, n=100)
        measured = {
            "p20_us": quantiles[19], "p50_us": quantiles[49], "p80_us": quantiles[79],
            "p99_us": quantiles[98],
        }  # fmt: skip
        rate = self.nbytes * len(seconds) / sum(seconds) / 1e9
        of_bound = (
            None
            if bound is None
            else round(sum(bound) / len(bound) * len(seconds) / sum(seconds), 3)
        )
        self.rows.append(
            result_row(
                op, self.name, device=_device(self.device), arch=_arch(self.device),
                gate="pass" if gate else "FAIL: an entry differs", evidence="measured",
                **{name: round(1e6 * value, 1) for name, value in measured.items()},
                gb_per_s=round(rate, 3), entry_bytes=self.nbytes, entries=len(seconds),
                fraction_of_bound=of_bound, file_system=_file_system(self.folder),
            )
        )  # fmt: skip
        row = self.rows[-1]
        print(f"{op:28} {self.name:12} {row['p50_us']:>10} us {row['gb_per_s']:>7} GB/s "
              f"{of_bound} {row['gate']}", flush=True)  # fmt: skip

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def host(self) -> None:
        """Put and get in memory beside a copy of the same bytes."""
        copy = self._copies()
        store = self.host_store(1)
        for number in range(self.count):  # every block once, as in a store in use
            store.put(b"old %d" % number, {"kv": self.contents[number]})
        put = timed([lambda n=n: self._put(store, n) for n in range(self.count)])
        gate = all(
            equal(store.get(key_of(n), self.device), self.contents[n]) for n in range(self.count)
        )
        get = timed([lambda n=n: self._get(store, n) for n in range(self.count)])
        store.close()
        self.add("host put", put, copy, gate)
        self.add("host get", get, copy, gate)

    def _copies(self) -> list[float]:
        targets = torch.zeros_like(self.contents, device="cpu")
        return timed([lambda n=n: targets[n].copy_(self.contents[n]) for n in range(self.count)])

    def _put(self, store: HostStore, number: int) -> None:
        store.put(key_of(number), {"kv": self.contents[number]})
        self.synchronize()

    def _get(self, store: HostStore, number: int) -> None:
        store.get(key_of(number), self.device)
        self.synchronize()

    def disk(self) -> None:
        """Write and read files beside plain ones."""
        contents = self.contents.cpu()
        plain, stored = self.folder / "plain", self.folder / "stored"
        plain.mkdir()
        write_plain = timed(
            [lambda n=n: _write_plain(plain / str(n), contents[n]) for n in range(self.count)]
        )
        forget(plain)
        read_plain = timed([lambda n=n: (plain / str(n)).read_bytes() for n in range(self.count)])
        shutil.rmtree(plain)
        store = DiskStore(stored, PLENTY, FINGERPRINT)
        write = timed(
            [lambda n=n: store.put(key_of(n), {"kv": contents[n]}) for n in range(self.count)]
        )
        gate = all(equal(store.get(key_of(n)), contents[n]) for n in range(self.count))
        warm = timed([lambda n=n: store.get(key_of(n)) for n in range(self.count)])
        forget(stored)
        cold = timed([lambda n=n: store.get(key_of(n)) for n in range(self.count)])
        self.add("disk write", write, write_plain, gate)
        self.add("disk read, cold", cold, read_plain, gate)
        self.add("disk read, warm", warm, None, gate)
        self.prefetch(stored, read_plain)

    def prefetch(self, stored: Path, read_plain: list[float]) -> None:
        """Disk to host memory in the background; time a file, of all of them together."""
        forget(stored)
        store = self.host_store(2.5, DiskStore(stored, PLENTY, FINGERPRINT))
        keys = [key_of(n) for n in range(self.count)]
        begin = time.perf_counter()
        store.prefetch(keys)
        while any(map(store.loading, keys[-READERS:])):
            time.sleep(0.001)
        seconds = (time.perf_counter() - begin) / self.count
        gate = all(map(store.resident, keys)) and all(
            equal(store.get(keys[n], self.device), self.contents[n]) for n in range(self.count)
        )
        store.close()
        self.add("prefetch, cold", [seconds] * self.count, read_plain, gate)

    def put_over_disk(self) -> None:
        """Put while the writer is busy and the memory overflows: nothing may wait for the disk."""
        folder = self.folder / "busy"
        store = self.host_store(0.25, DiskStore(folder, PLENTY, FINGERPRINT))
        put = timed([lambda n=n: self._put(store, n) for n in range(self.count)])
        store.flush()
        stats, below = store.stats(), store.lower.stats()
        gate = stats.dropped + below.entries == self.count and not below.errors
        for number in range(self.count):
            got = store.get(key_of(number), self.device)
            gate = gate and (got is None or equal(got, self.contents[number]))
        store.close()
        self.add("host put, disk busy", put, None, gate)


def _write_plain(file: Path, content: Tensor) -> None:
    with open(file, "wb") as stream:
        stream.write(content.view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _arch(device: torch.device) -> str:
    if device.type == "cuda":
        from kernel_base.arch import arch_of_device

        return arch_of_device(device).name
    return "cpu"


def _file_system(folder: Path) -> str:
    """Type of the file system a folder lies on, by the longest mount point above it."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [m for m in mounts if folder.resolve().is_relative_to(m[1])]
    return max(above, key=lambda mount: len(mount[1]))[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--device", default="cpu", help="where entries come from: cpu or cuda")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    args = parser.parse_args()
    torch.manual_seed(0)
    for name, shape in CASES.items():
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            case = Case(name, shape, Path(folder), torch.device(args.device))
            case.host()
            case.disk()
            case.put_over_disk()
        if not args.no_rows:
            append(FILE.removesuffix(".jsonl"), case.rows)


if __name__ == "__main__":
    main()
