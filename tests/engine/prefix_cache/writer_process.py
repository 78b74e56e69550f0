"""Run by the tests: processes that write entries to a disk tier until they are killed.

For every line of standard input, (aside | in-place) NUMBER FOLDER, forks a process that writes the
entries from that number on; prints "pid P", then each number once it is stored, and "ended" when
the process is gone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from inkling_rocm.engine.prefix_cache.disk_store import DiskStore
from inkling_rocm.engine.prefix_cache.entry_file import write_entry
from inkling_rocm.engine.prefix_cache.layout import Layout
from tests.engine.prefix_cache.entries import FINGERPRINT, key_of, tensors_of

CONTENTS, VALUES, PLENTY = 8, 48_000, 1 << 40


def content_of(number: int):
    return tensors_of(key_of(number % CONTENTS), VALUES)


class InPlace(DiskStore):
    """What must not be done: writes under the final name."""

    def write(self, key, layout, data):
        path = self.folder / self._name(key)
        with open(path, "wb") as file:
            write_entry(
                file.fileno(), fingerprint=self.fingerprint, key=key, layout=layout, data=data
            )
        return True


def write_from(store: DiskStore, first: int, contents: list) -> None:
    layout = Layout.of(contents[0])
    packed = [layout.pack(content).numpy().data for content in contents]
    for number in range(first, first + 100_000):
        store.write(key_of(number), layout, [packed[number % CONTENTS]])
        os.write(1, b"%d\n" % number)


def main() -> None:
    contents = [content_of(number) for number in range(CONTENTS)]
    for line in sys.stdin:
        mode, first, folder = line.rstrip("\n").split(" ", 2)
        pid = os.fork()
        if not pid:
            os.write(1, b"pid %d\n" % os.getpid())
            make = InPlace if mode == "in-place" else DiskStore
            write_from(make(Path(folder), PLENTY, FINGERPRINT), int(first), contents)
        os.waitpid(pid, 0)
        os.write(1, b"ended\n")


if __name__ == "__main__":
    main()
