"""The disk tier among processes: killed while they write, and writing the same keys."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inkling_rocm.engine.prefix_cache.disk_store import ASIDE, DiskStore
from tests.engine.prefix_cache.entries import FINGERPRINT, key_of, same_bits
from tests.engine.prefix_cache.writer_process import CONTENTS, PLENTY, content_of

LONGEST_LIFE_S = 0.05
ROUND = 1000  # entries of one process are numbered from a multiple of this


@contextlib.contextmanager
def writer(folder: Path, mode: str = "aside"):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.prefix_cache.writer_process", str(folder), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(timeout=60)


def life(process, first: int, seconds: float) -> list[int]:
    """Let a process write from a number on and kill it; returns what it said was stored."""
    process.stdin.write(b"%d\n" % first)
    process.stdin.flush()
    _, pid = process.stdout.readline().split()
    time.sleep(seconds)
    os.kill(int(pid), signal.SIGKILL)
    stored = []
    while (line := process.stdout.readline()) != b"ended\n":
        stored.append(int(line))
    return stored


def check(folder: Path, lives: list[list[int]]) -> None:
    """Whatever was said to be stored is there and right; the one under way is right or absent."""
    store = DiskStore(folder, PLENTY, FINGERPRINT)
    assert not list(folder.glob(f"*{ASIDE}"))
    contents = [content_of(number) for number in range(CONTENTS)]
    for turn, stored in enumerate(lives):
        assert stored == list(range(turn * ROUND, turn * ROUND + len(stored)))
        for number in stored:
            assert same_bits(store.get(key_of(number)), contents[number % CONTENTS])
        number = turn * ROUND + len(stored)
        got = store.get(key_of(number))
        assert got is None or same_bits(got, contents[number % CONTENTS])
        assert store.get(key_of(number + 1)) is None
    assert (store.stats().corrupt, store.stats().errors) == (0, 0)


def kill_often(folder: Path, kills: int) -> None:
    rng = random.Random(kills)
    lives, left_unfinished = [], set()
    with writer(folder) as process:
        for turn in range(kills):
            lives.append(life(process, turn * ROUND, rng.uniform(0, LONGEST_LIFE_S)))
            left_unfinished |= {file.name for file in folder.glob(f"*{ASIDE}")}
    check(folder, lives)
    assert sum(map(len, lives)) > kills
    assert len(left_unfinished) > kills // 10, "the kills did not meet writes"


def test_a_killed_process_loses_nothing_but_the_entry_it_was_writing(tmp_path):
    kill_often(tmp_path, 20)


@pytest.mark.full
def test_many_killed_processes_lose_nothing_but_the_entries_they_were_writing(tmp_path):
    kill_often(tmp_path, 500)


def test_writing_in_place_would_not_survive_kills(tmp_path):
    """So the test above can fail."""
    rng = random.Random(0)
    lives = []
    with writer(tmp_path, "in-place") as process:
        for turn in range(20):
            lives.append(life(process, turn * ROUND, rng.uniform(0, LONGEST_LIFE_S)))
    with pytest.raises(AssertionError):
        check(tmp_path, lives)


def test_two_processes_write_the_same_keys(tmp_path):
    count = 30
    store = DiskStore(tmp_path, PLENTY, FINGERPRINT)
    contents = [content_of(number) for number in range(CONTENTS)]
    with writer(tmp_path) as process:
        process.stdin.write(b"0\n")
        process.stdin.flush()
        _, pid = process.stdout.readline().split()
        for number in range(count):
            store.put(key_of(number), contents[number % CONTENTS])
            assert same_bits(store.get(key_of(number)), contents[number % CONTENTS])
        while int(process.stdout.readline()) < count:
            pass
        os.kill(int(pid), signal.SIGKILL)
        while process.stdout.readline() != b"ended\n":
            pass
    for number in range(count):
        assert same_bits(store.get(key_of(number)), contents[number % CONTENTS])
    assert (store.stats().corrupt, store.stats().errors) == (0, 0)
